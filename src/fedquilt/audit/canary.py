"""Canaries: is a client as hard to find in a release as the statement says?

The replay compares worlds with the same noise.  Here noise is secret and real, as in any
run, and somebody tries to tell from the release whether one client, the canary, had data.
The adversary knows everything but the noise, the direction in which the canary moves the
release included, so the best test is the projection on that direction (Neyman and Pearson).

Two hypotheses: the canary trains on its data, or has nothing (zero-out).  Over many
rounds, real to the last step, each with a ledger of its own:

* measured mu is the distance of the two means in standard deviations.  For a Gaussian
  release it must be the mu of the claim, sqrt(charge), not more, and not much less.
* a threshold is chosen on one half of the trials; on the other half the rates of right
  and of false alarms give, by exact intervals, an epsilon that is exceeded at most once
  in twenty audits of an honest mechanism (`epsilon_lower_bound`).

`one_run` is one training with many canaries: what the final model alone gives away.
Repeating a training thousands of times is more than anybody does.  With many canaries in
one training, each in or out by a coin of its own, a single run holds as many trials.
Each canary sends the same direction in every round, as long as its clip allows; directions
are random, and so nearly orthogonal that one canary is hardly in another's way.  The
adversary sees the first and the last model, and scores a canary by the inner product of
their difference with its direction.

`guessed` is Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846): call the highest scores
in and the lowest out, abstain in between, and bound epsilon by the number of right
guesses.  `fitted_epsilon` is Andrew et al. 2024 (arXiv:2302.03098): the cosine of an
absent canary is N(0, 1/d); fit a normal law to those of the present ones and read epsilon
off the two.  The first is a bound, the second an estimate.

The bounds themselves are numbers only: tails of the binomial law are summed term by term
from logarithms of factorials, so that torch and numpy are all that is needed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fedquilt.audit.cases import WatchedServer, World, known_entropy
from fedquilt.audit.findings import released_sum, scratch_folder
from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import text_table
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.config import RunConfig, plain_config
from fedquilt.method import Method
from fedquilt.observe.progress import StepsProgress
from fedquilt.privacy.accounting import gaussian_mu
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.mechanism import Contribution
from fedquilt.round import run_round
from fedquilt.setup.account import open_account
from fedquilt.setup.build_task import task_from
from fedquilt.setup.federation import build_federation, build_method
from fedquilt.setup.task import FederatedTask
from fedquilt.training import ClientIds, ClientUpdate, Engine, WrappedEngine
from fedquilt.training.task import one_thread

_STEPS = 60  # of a bisection: more than float64 can tell apart


def binomial_terms(trials: int, chance: float) -> NDArray[np.float64]:
    """Return P[Binomial(n, q) = k] for k = 0 .. n."""
    if chance in (0.0, 1.0):
        terms = np.zeros(trials + 1)
        terms[trials if chance else 0] = 1.0
        return terms
    k = np.arange(trials + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    ways = factorials[-1] - factorials - factorials[::-1]
    return np.asarray(np.exp(ways + k * math.log(chance) + (trials - k) * math.log1p(-chance)))


@functools.cache
def clopper_pearson(successes: int, trials: int, error: float) -> tuple[float, float]:
    """Return an interval for a chance, each end of which is wrong with at most `error`.

    Clopper and Pearson 1934: the lower end is the p at which so many successes or more
    have probability `error`, the upper one that at which so many or fewer have.
    """
    _check_count("successes", successes, trials)

    def at_least(chance: float) -> float:
        return float(binomial_terms(trials, chance)[successes:].sum())

    def at_most(chance: float) -> float:
        return float(binomial_terms(trials, chance)[: successes + 1].sum())

    low = 0.0 if successes == 0 else _last_below(at_least, error, 0.0, 1.0)
    high = 1.0
    if successes < trials:
        high = 1.0 - _last_below(lambda away: at_most(1.0 - away), error, 0.0, 1.0)
    return low, high


def epsilon_of_rates(true_positive: float, false_positive: float, delta: float) -> float:
    """Return the smallest epsilon that allows a test these two rates.

    (epsilon, delta) allows TPR <= e^eps FPR + delta, and the same of the test that
    answers the other way (Kairouz, Oh and Viswanath 2015).
    """
    ratios = [0.0]
    for hit, false in ((true_positive, false_positive), (1 - false_positive, 1 - true_positive)):
        if hit - delta > false:
            ratios.append(math.log((hit - delta) / false) if false > 0 else math.inf)
    return max(ratios)


def epsilon_lower_bound(
    hits: int, positives: int, false: int, negatives: int, delta: float, error: float = 0.05
) -> float:
    """Return an epsilon that the truth lies below with probability at most `error`.

    `hits` of `positives` runs with the canary and `false` of `negatives` runs without it
    were called positive, by a rule fixed beforehand.  Each of the two rates gets half of
    the error: the true positive rate its lower Clopper-Pearson end, the other its upper
    (the standard reading: Jagielski et al. 2020, arXiv:2006.07709).
    """
    error = checks.number("error", error, above=0, below=1)
    rate, _ = clopper_pearson(hits, positives, error / 2)
    _, alarm = clopper_pearson(false, negatives, error / 2)
    return epsilon_of_rates(rate, alarm, delta)


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return how likely so many correct guesses are under (epsilon, delta), at most.

    Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), theorem 5.2 and appendix D: m
    canaries are in or out of one run by independent fair coins, r guesses are made and v
    are right.  With q = e^eps / (1 + e^eps),

        p <= P[B >= v] + 2 m delta max_i P[v > B >= v - i] / i,   B ~ Binomial(r, q).
    """
    _check_count("guesses", guesses, canaries)
    _check_count("correct", correct, guesses)
    terms = binomial_terms(guesses, 1.0 / (1.0 + math.exp(-epsilon)))
    below = np.cumsum(terms[:correct][::-1])
    worst = float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(1.0, float(terms[correct:].sum()) + 2 * canaries * delta * worst)


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, error: float = 0.05
) -> float:
    """Return the largest epsilon that `correct` guesses rule out at confidence 1 - error."""
    error = checks.number("error", error, above=0, below=1)

    def p_value(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta)

    if p_value(0.0) >= error:
        return 0.0
    high = 1.0
    while p_value(high) < error:
        high *= 2
        if high > 700:
            return math.inf  # delta 0 and no guess wrong out of none at all
    return _last_below(p_value, error, 0.0, high)


def epsilon_of_normals(
    first: tuple[float, float], second: tuple[float, float], delta: float
) -> float:
    """Return the epsilon at `delta` between two normal laws (mean, standard deviation).

    The larger of the two directions of

        delta(eps) = P[L > eps] - e^eps Q[L > eps],   L = log p/q,

    where L is a quadratic of the observation, so that L > eps on an interval, outside one,
    or on a half line.
    """
    for _, std in (first, second):
        checks.number("standard deviation", std, above=0)
    delta = checks.number("delta", delta, above=0, below=1)

    def largest(epsilon: float) -> float:
        return max(_hockey_stick(first, second, epsilon), _hockey_stick(second, first, epsilon))

    if largest(0.0) <= delta:
        return 0.0
    high = 1.0
    while largest(high) > delta:
        high *= 2
        if high > 1e6:
            return math.inf
    return high - _last_below(lambda lower: largest(high - lower), delta, 0.0, high)


def _hockey_stick(p: tuple[float, float], q: tuple[float, float], epsilon: float) -> float:
    """Return sup_A P(A) - e^eps Q(A): the set where log p/q > eps."""
    (mean, std), (other, width) = p, q
    square = 0.5 / width**2 - 0.5 / std**2
    slope = mean / std**2 - other / width**2
    level = math.log(width / std) - mean**2 / (2 * std**2) + other**2 / (2 * width**2) - epsilon
    if abs(square) < 1e-12 / std**2:
        if slope == 0:
            return max(0.0, 1 - math.exp(epsilon)) if level > 0 else 0.0
        end = -level / slope
        part = (end, math.inf) if slope > 0 else (-math.inf, end)
        return _gain(p, q, epsilon, [part])
    inside = slope**2 - 4 * square * level
    if inside <= 0:
        return _gain(p, q, epsilon, [(-math.inf, math.inf)]) if square > 0 else 0.0
    ends = sorted((-slope + sign * math.sqrt(inside)) / (2 * square) for sign in (-1.0, 1.0))
    if square < 0:
        return _gain(p, q, epsilon, [(ends[0], ends[1])])
    return _gain(p, q, epsilon, [(-math.inf, ends[0]), (ends[1], math.inf)])


def _gain(
    p: tuple[float, float], q: tuple[float, float], epsilon: float, parts: list[tuple[float, float]]
) -> float:
    ours = sum(_mass(*p, *part) for part in parts)
    theirs = sum(_mass(*q, *part) for part in parts)
    if theirs <= 0:
        return ours
    return max(0.0, ours - math.exp(min(700.0, epsilon + math.log(theirs))))


def _mass(mean: float, std: float, low: float, high: float) -> float:
    """Return the probability of an interval, from the tail in which it lies."""
    a, b = (low - mean) / std / math.sqrt(2), (high - mean) / std / math.sqrt(2)
    if a > 0:
        return 0.5 * (math.erfc(a) - math.erfc(b))
    if b < 0:
        return 0.5 * (math.erfc(-b) - math.erfc(-a))
    return 0.5 * (math.erf(b) - math.erf(a))


def _last_below(rising: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Return the largest argument at which an increasing function is below `level`."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if rising(middle) < level:
            low = middle
        else:
            high = middle
    return low


def _check_count(name: str, value: int, largest: int) -> None:
    if not 0 <= value <= largest:
        raise InvalidValueError(f"{name}={value} must be >= 0 and <= {largest}")


EPSILONS = (1.0, 6.0)
ERROR = 0.05  # how often the bound of an honest mechanism may lie above its epsilon
_ERRORS = 4.0  # standard errors that a measured mu may lie above the claim's
_CANARY = 0
CLASSES = 3
SIDE = 4  # of an image of one channel
HIDDEN = 8  # values between the layers
_SIZES = (4, 2, 5, 3, 6, 4)  # samples of each client
_LEVELS = np.linspace(0.02, 0.98, 33)  # quantiles of the scores that may be the threshold


@dataclass(frozen=True)
class CanaryFinding:
    """A claim beside what an adversary has measured of it.

    `estimate` is an epsilon that was fitted and bounds nothing; None where there is none.
    """

    test: str
    epsilon: float
    delta: float
    theory_mu: float
    measured_mu: float
    standard_error: float
    lower_bound: float
    trials: int
    estimate: float | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing measured lies above the claim, errors of measurement aside."""
        above = self.measured_mu - _ERRORS * self.standard_error
        return self.lower_bound <= self.epsilon and above <= self.theory_mu


def canary(
    epsilons: Sequence[float] = EPSILONS,
    trials: int = 400,
    *,
    delta: float = 1e-5,
    seed: int = 0,
    engine: str = "sequential",
    device: str = "cpu",
    without_clip: bool = False,
    progress: bool = False,
    window: int = 1,
) -> list[CanaryFinding]:
    """Test one release with secret noise, `trials` times with the canary and as often without.

    Parameters
    ----------
    epsilons : sequence of float
        The claims to test.
    trials : int
        Rounds under each hypothesis, at least 8.
    engine, device : str
        What trains, and where.
    without_clip : bool
        Take the clip away, to see that it is missed.
    progress : bool
        Show on the error stream how many trials are done, and the time left.
    window : int
        The rounds of the release, in each of which everybody is there.
    """
    trials = checks.integer("trials", trials, at_least=8)
    found = []
    total = 2 * trials * len(epsilons)
    with StepsProgress("audit: trial", total, shown=progress) as steps:
        for epsilon in epsilons:
            settings = {"epsilon": epsilon, "delta": delta, "seed": seed, "engine": engine}
            settings |= {"num_rounds": window, "rounds_per_release": window}
            config, problem = _problem({**settings, "device": device}, seed)
            with one_thread(), clip_taken_away(without_clip):
                outside, inside = _scores(config, problem, trials, steps)
            name = "two hypotheses" if window == 1 else f"windows of {window} rounds"
            found.append(judge(name, epsilon, delta, outside, inside))
    return found


def judge(
    test: str,
    epsilon: float,
    delta: float,
    outside: NDArray[np.float64],
    inside: NDArray[np.float64],
) -> CanaryFinding:
    """Measure how well scores without and with the canary are told apart.

    The standard error of d = (m1 - m0) / s is sqrt(1/n1 + 1/n0 + d^2 / (2 (n1 + n0 - 2))).
    """
    measured, error = distance(outside, inside)
    return CanaryFinding(
        test=test,
        epsilon=epsilon,
        delta=delta,
        theory_mu=gaussian_mu(epsilon, delta),
        measured_mu=measured,
        standard_error=error,
        lower_bound=held_out_bound(outside, inside, delta),
        trials=len(outside) + len(inside),
    )


def distance(outside: NDArray[np.float64], inside: NDArray[np.float64]) -> tuple[float, float]:
    """Return the distance of two means in pooled standard deviations, and its error."""
    counts = len(inside), len(outside)
    pooled = (inside.var(ddof=1) * (counts[0] - 1) + outside.var(ddof=1) * (counts[1] - 1)) / (
        sum(counts) - 2
    )
    measured = float((inside.mean() - outside.mean()) / math.sqrt(pooled))
    error = math.sqrt(1 / counts[0] + 1 / counts[1] + measured**2 / (2 * (sum(counts) - 2)))
    return measured, error


def held_out_bound(
    outside: NDArray[np.float64], inside: NDArray[np.float64], delta: float, error: float = ERROR
) -> float:
    """Return the lower bound on epsilon of a threshold that other scores have chosen."""

    def bound(without: NDArray[np.float64], with_it: NDArray[np.float64], level: float) -> float:
        hits, false = int((with_it > level).sum()), int((without > level).sum())
        return epsilon_lower_bound(hits, len(with_it), false, len(without), delta, error)

    half = len(outside) // 2, len(inside) // 2
    candidates = np.quantile(np.concatenate([outside[: half[0]], inside[: half[1]]]), _LEVELS)
    chosen = max(candidates, key=lambda c: bound(outside[: half[0]], inside[: half[1]], float(c)))
    return bound(outside[half[0] :], inside[half[1] :], float(chosen))


def canary_table(findings: Sequence[CanaryFinding]) -> str:
    """Return the verdict and the findings as a table."""
    head = ("test", "claimed", "delta", "theory mu", "measured mu", "bound", "fitted", "")
    rows = []
    for f in findings:
        fitted = "-" if f.estimate is None else f"{f.estimate:.2f}"
        measured = f"{f.measured_mu:.3f} +- {f.standard_error:.3f}"
        verdict = "ok" if f.ok else "FAILED"
        numbers = (f"{f.epsilon:g}", f"{f.delta:g}", f"{f.theory_mu:.3f}", measured)
        rows.append((f.test, *numbers, f"{f.lower_bound:.2f}", fitted, verdict))
    failed = sum(not f.ok for f in findings)
    verdict = f"{failed} of {len(findings)} claims broken" if failed else "no claim was broken"
    return f"{verdict}\n\n{text_table(head, rows)}"


_RUN: dict[str, Any] = {
    "mode": "certified",
    "policy": "worst_case",
    "availability": "always",
    "local_epochs": 1,
    "dataset": "custom",
    "model": "custom",
}


def _problem(settings: dict[str, Any], seed: int) -> tuple[RunConfig, FederatedTask]:
    shared = {
        **_RUN,
        "num_rounds": 1,
        "clients_per_round": len(_SIZES),
        "learning_rate": 1.0,
        "batch_size": 8,
        "clip_norm": 0.01,  # far below a real update
    }
    inputs, labels, clients = audit_samples(seed)
    train = (inputs, labels)
    config = plain_config({**shared, **settings})
    return task_from(config, drawn_model(Net, seed), train, train, clients)


class Net(nn.Module):
    """Two layers, with nothing between them but what a subclass puts there."""

    def __init__(self, scores: int = CLASSES) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE**2, HIDDEN)
        self.last = nn.Linear(HIDDEN, scores)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        out: torch.Tensor = self.last(self.between(functional.relu(self.first(x.flatten(1)))))
        return out

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden values as they are."""
        return hidden


def drawn_model(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a model with weights drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed(seed, "audit model"))
        return make()


def audit_samples(
    seed: int, side: int = SIDE
) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Return images, labels and who holds which; all clients together have every class."""
    random = generator(seed, "audit data")
    total = sum(_SIZES)
    inputs = torch.from_numpy(random.standard_normal((total, 1, side, side))).float()
    ends = np.cumsum(_SIZES).tolist()
    clients = [list(range(end - size, end)) for end, size in zip(ends, _SIZES, strict=True)]
    return inputs, torch.arange(total) % CLASSES, clients


def _without(problem: FederatedTask, client: int) -> FederatedTask:
    """Return the problem in which a client holds nothing."""
    task = problem.task
    nothing = np.zeros(0, dtype=np.int64)
    held = [nothing if i == client else part for i, part in enumerate(task.clients)]
    return dataclasses.replace(problem, task=dataclasses.replace(task, clients=held))


def _scores(
    config: RunConfig, problem: FederatedTask, trials: int, steps: StepsProgress
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return where releases lie along the canary's direction, without it and with it."""
    empty = _without(problem, _CANARY)
    with tempfile.TemporaryDirectory(dir=scratch_folder()) as folder:
        place = Path(folder)
        methods = [build_method(config, world) for world in (empty, problem)]
        worlds = list(zip((empty, problem), methods, strict=True))
        known = []
        for world, method in worlds:
            with known_entropy(config.seed):
                known.append(_release(config, world, method, place))
        direction = (known[1] - known[0]) / (known[1] - known[0]).norm()
        scores: list[list[float]] = [[], []]
        for (world, method), own in zip(worlds, scores, strict=True):
            for _ in range(trials):
                own.append(float(_release(config, world, method, place) @ direction))
                steps.end()
        for method in methods:
            method.close()
    return np.array(scores[0]), np.array(scores[1])


def _release(
    config: RunConfig, problem: FederatedTask, method: Method, place: Path
) -> torch.Tensor:
    """Run one real round on a new ledger and return the sum it released."""
    path = place / "ledger.sqlite"
    path.unlink(missing_ok=True)
    account = open_account(config, problem, path, "canary")
    try:
        own = copy.copy(method)
        own.server = server = WatchedServer(method.server)
        federation = build_federation(config, problem, account, own)
        world = World(federation, server, account, None, 1.0)
        world.run(0)
        released = released_sum(world)
    finally:
        account.close()
    if released is None:
        raise RuntimeError("a round of everybody released nothing")
    return released.cpu()


def clip_taken_away(missing: bool) -> contextlib.AbstractContextManager[object]:
    """Take the clip of every client away, if asked to."""
    return patch.object(Certified, "clip", _left_alone) if missing else contextlib.nullcontext()


def _left_alone(
    mechanism: Certified, plan: object, contribution: Contribution, tally: object
) -> Contribution:
    return contribution


_SIDE, _CLASSES = 16, 40  # 10280 parameters
_ORDINARY = 4  # clients who really train
_LENGTH = 10.0  # of a canary's update, in clips


def one_run(
    epsilons: Sequence[float] = EPSILONS,
    canaries: int = 600,
    rounds: int = 6,
    *,
    delta: float = 1e-5,
    seed: int = 0,
    device: str = "cpu",
    without_clip: bool = False,
    progress: bool = False,
) -> list[CanaryFinding]:
    """Train once for each claim with canaries and secret noise, and judge the final model.

    With `progress` the error stream shows how many rounds are done, and the time left.
    """
    canaries = checks.integer("canaries", canaries, at_least=8)
    found = []
    total = rounds * len(epsilons)
    with StepsProgress("audit: round", total, shown=progress) as steps:
        for epsilon in epsilons:
            config, problem = _canary_problem(epsilon, delta, canaries, rounds, seed, device)
            directions = random_directions(canaries, problem.flat.vector.numel(), seed)
            inside = generator(seed, "canary coins").random(canaries) < 0.5
            with clip_taken_away(without_clip):
                moved = _trained(config, problem, directions, inside, steps)
            scores = (directions @ moved).numpy()
            measured, error = distance(scores[~inside], scores[inside])
            cosines = scores[inside] / float(moved.norm())
            found.append(
                CanaryFinding(
                    test=f"one run of {rounds} rounds",
                    epsilon=epsilon,
                    delta=delta,
                    theory_mu=gaussian_mu(epsilon, delta),
                    measured_mu=measured,
                    standard_error=error,
                    lower_bound=guessed(scores, inside, delta),
                    trials=canaries,
                    estimate=fitted_epsilon(cosines, moved.numel(), delta),
                )
            )
    return found


def guessed(
    scores: NDArray[np.float64],
    inside: NDArray[np.bool_],
    delta: float,
    *,
    share: float = 0.4,
    error: float = ERROR,
) -> float:
    """Return the lower bound on epsilon that guesses by score give.

    The highest `share / 2` of the scores are called in, the lowest out; how many are
    guessed is fixed beforehand, since choosing it by the outcome would need a correction.
    """
    each = max(1, int(share * len(scores) / 2))
    order = np.argsort(scores)
    correct = int(inside[order[-each:]].sum() + (~inside[order[:each]]).sum())
    return one_run_epsilon(len(scores), 2 * each, correct, delta, error)


def fitted_epsilon(cosines: NDArray[np.float64], dimension: int, delta: float) -> float:
    """Return the epsilon between N(0, 1/d) and the normal law fitted to the cosines."""
    fitted = float(cosines.mean()), float(cosines.std(ddof=1))
    return epsilon_of_normals((0.0, 1.0 / math.sqrt(dimension)), fitted, delta)


def random_directions(count: int, dimension: int, seed: int) -> torch.Tensor:
    """Return `count` vectors of length 1, uniform on the sphere."""
    drawn = generator(seed, "canary directions").standard_normal((count, dimension))
    return torch.from_numpy(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))


class CanaryEngine(WrappedEngine):
    """Lets canaries send their directions, and everybody else train."""

    is_small = False

    def __init__(
        self, engine: Engine, directions: torch.Tensor, inside: NDArray[np.bool_], length: float
    ) -> None:
        self._engine = engine
        self._directions = directions
        self._inside = inside
        self._length = length

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield canaries first; one that is out sends nothing."""
        for client in (int(c) for c in cohort if c < len(self._inside)):
            factor = self._length if self._inside[client] else 0.0
            yield ClientUpdate(client, factor * self._directions[client].to(start), 1, math.nan)
        others = [int(c) for c in cohort if c >= len(self._inside)]
        yield from self._engine.train(start, others, round_index, learning_rate)


def _canary_problem(
    epsilon: float, delta: float, canaries: int, rounds: int, seed: int, device: str
) -> tuple[RunConfig, FederatedTask]:
    clients = canaries + _ORDINARY
    random = generator(seed, "canary data")
    inputs = torch.from_numpy(random.standard_normal((clients, 1, _SIDE, _SIDE))).float()
    labels = torch.arange(clients) % _CLASSES
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed(seed, "canary model"))
        model = nn.Sequential(nn.Flatten(), nn.Linear(_SIDE**2, _CLASSES))
    claimed = {"epsilon": epsilon, "delta": delta, "seed": seed, "device": device}
    size = {"num_rounds": rounds, "clients_per_round": clients}
    config = plain_config({**_RUN, **size, **claimed})
    train = (inputs, labels)
    return task_from(config, model, train, train, [[i] for i in range(clients)])


def _trained(
    config: RunConfig,
    problem: FederatedTask,
    directions: torch.Tensor,
    inside: NDArray[np.bool_],
    steps: StepsProgress,
) -> torch.Tensor:
    """Train to the end and return the last model minus the first."""
    with tempfile.TemporaryDirectory(dir=scratch_folder()) as folder:
        account = open_account(config, problem, Path(folder) / "ledger.sqlite", "canaries")
        try:
            length = _LENGTH * config.clip_norm
            method = build_method(config, problem)
            engine = CanaryEngine(method.engine, directions, inside, length)
            method.engine = engine
            federation = build_federation(config, problem, account, method)
            first = federation.weights.clone()
            for index in range(config.num_rounds):
                run_round(federation, index)
                steps.end()
            engine.close()
        finally:
            account.close()
    return (federation.weights - first).to("cpu", torch.float64)
