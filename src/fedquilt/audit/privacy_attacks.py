"""Attacks on one's own run: inversion of what a client gave, membership from a release.

**Inversion**: which pictures can be seen in what a client gave away in a first round?

The first round of a run is run once more from its configuration, with new noise where the run has
noise, and its ledger is left alone.  What the attacker holds of one client, the victim:

    no noise   the victim's update, as the server receives it
    noise      c(u) + z: its clipped update with the noise z of the release, and all that is
               subtracted from it: the attacker knows the updates of everybody else

The second is the attacker that a bound is about.  It looks for images x and labels y whose
gradient g(x, y) at the model that everybody began with is the one it holds, g*:

| name | it minimises | labels |
|---|---|---|
| `dlg` | sum (g - g*)^2 by L-BFGS (Zhu et al. 2019) | looked for beside the images |
| `idlg` | the same (Zhao et al. 2020) | read off the gradient of the last layer's bias |
| `tv` | 1 - cos(g, g*) + weight TV(x) by signed Adam (Geiping et al. 2020) | as `idlg` |

A clip hides how long an update was, so under one the first two fit the length.  Clients who take
more than one step have their mean gradient attacked, which FedNova's send by themselves.  Where
the last layer stays with clients (`fedper`, `fedrep`) no label can be read off: `dlg` looks for
them beside the images, in the gradient of what is shared.  Images are compared with the
truth in the order that suits the attacker best, on pixels between 0 and 1.

**Membership**: can anybody tell from the released model which samples trained it?

Members are the samples that clients hold, the others those of the test data.  The attacker has a
sample with its class and the model that the run released, and gives it a score:

| name | score |
|---|---|
| `loss` | minus the loss of the sample (Yeom et al. 2018) |
| `lira` | log N(f; m_in, s_in) - log N(f; m_out, s_out) (Carlini et al. 2022) |

f = log(p / (1 - p)) of the probability that the model gives the class; m_in and m_out are means of
f over models that were trained with the sample and without it.  These shadow models are runs of
the same configuration on samples that the attacker knows: all samples are cut into as many folds as
make one as large as the test data, and each shadow leaves one fold out.  Few shadows tell no
deviation of a sample by itself, so s_in and s_out are shared by all samples, as the paper advises.

Measured: the area under the curve of right against false alarms (0.5: nothing is learned), and
right alarms where false ones are rare.  A bound limits both.  A release that is mu-Gaussian for a
client allows no test more than Phi(Phi^-1(false) + mu) right alarms and an area of
Phi(mu / sqrt 2).  With and without one of a client's samples is two steps where neighbours are a
client's data and nothing (`zero_out`), so mu counts twice there.  Of a run under a secret coin only
(epsilon, delta) is known, not how Gaussian it is: right <= e^epsilon false + delta, and missed
alarms >= (1 - delta - false) / e^epsilon; two steps are (2 epsilon, delta + e^epsilon delta).
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call

from fedquilt.audit.findings import scratch_folder
from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.config import RunConfig
from fedquilt.config.modes import MODE_TABLE
from fedquilt.experiment.api import start_run
from fedquilt.federation import Federation
from fedquilt.method import WholeModel
from fedquilt.privacy.accounting import gaussian_mu
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.mechanism import Contribution, RoundPlan, RoundTally, Summed
from fedquilt.privacy.quap_mechanisms import LayerNoise
from fedquilt.privacy.statement import Statement
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import CUSTOM, load
from fedquilt.round import begin_round, finish_round
from fedquilt.setup.account import needs_account, open_account
from fedquilt.setup.build_task import build_task
from fedquilt.setup.federation import build_federation, build_method
from fedquilt.setup.task import FederatedTask
from fedquilt.training.task import learning_rate_at, one_thread

INVERSIONS = ("dlg", "idlg", "tv")
_TV_WEIGHT = 1e-3
_ADAM_RATE = 0.1
MOST_IMAGES = 64


@dataclass(frozen=True, eq=False)
class Held:
    """What an attacker holds of one client in the first round: `vector`, and public things.

    It is the sum of so many `steps`, in the tensors that are `released`.
    """

    client: int
    vector: torch.Tensor
    scale_known: bool
    steps: int
    released: Collection[str]


@dataclass(frozen=True, eq=False)
class Inversion:
    """Pictures that were found, in the order of the truth, and how near they are to it.

    `psnr` is the mean over the images of 10 log10(1 / mean squared error); `blank` is that of the
    mean test image in every place, which needs no update at all.
    """

    client: int
    truth: NDArray[np.float64]
    found: dict[str, NDArray[np.float64]]
    psnr: dict[str, float]
    blank: float

    def as_json(self) -> dict[str, Any]:
        """Return the figures; no pictures."""
        return {"client": self.client, "images": len(self.truth), "psnr": self.psnr} | {
            "blank": self.blank
        }


def own_problem(path: str | Path) -> tuple[RunConfig, FederatedTask]:
    """Return the configuration and the problem of a run folder, built anew on this machine."""
    config = RunFolder.open(path).read_config()
    if CUSTOM in (config.model, config.dataset) or config.method == "condense":
        raise InvalidValueError(
            f"run folder {str(path)!r} must be of a named data set and model, and train it: what "
            "it was made from is not in the folder"
        )
    config = config.replace(ledger=None, engine="sequential", device="cpu", no_download=True)
    config, problem = build_task(config)
    if not problem.task.is_classification:
        raise InvalidValueError("an attack needs samples of one class each, which these are not")
    return config, problem


def invert(
    path: str | Path,
    client: int | None = None,
    attacks: Sequence[str] = INVERSIONS,
    *,
    iterations: int = 300,
    restarts: int = 2,
    seed: int = 0,
    step: Callable[[], None] = lambda: None,
) -> Inversion:
    """Look for one client's images in what a run's first round gave away; change nothing.

    Parameters
    ----------
    path
        The folder of the run.
    client
        Whose; by default who holds the fewest samples of those who join.
    attacks
        Names of `INVERSIONS`.
    iterations, restarts
        Steps of an attack, and how often it begins anew; the nearest gradient counts.
    step
        Called after each restart.
    """
    attacks = [checks.choice("attack", name, INVERSIONS) for name in attacks]
    checks.integer("iterations", iterations, at_least=1)
    checks.integer("restarts", restarts, at_least=1)
    config, problem = own_problem(path)
    inputs, labels = problem.task.inputs, problem.task.targets
    if problem.front is not None or inputs.dim() != 4:
        raise InvalidValueError(
            f"model={config.model!r} of {config.dataset!r} must be trained on images themselves: "
            "what clients train on here are features or texts"
        )
    with one_thread():
        held = held_of_first_round(config, problem, client)
        samples = problem.task.index(held.client)
        victim = _Victim(problem, held, labels[samples], learning_rate_at(config, 0))
        truth, found = inputs[samples], {}
        for name in attacks:
            tries = []
            for attempt in range(restarts):
                tries.append(victim.attack(name, iterations, torch_seed(seed, name, attempt)))
                step()
            found[name] = min(tries, key=lambda one: one[0])[1]
    test, _ = problem.test_data
    low, high = float(test.min()), float(test.max())
    pixels = {name: _pixels(images, low, high) for name, images in found.items()}
    true, blank = (_pixels(one, low, high) for one in (truth, test.mean(0).expand_as(truth)))
    pixels = {name: images[nearest(true, images)] for name, images in pixels.items()}
    scores = {name: psnr(true, images) for name, images in pixels.items()}
    return Inversion(held.client, true, pixels, scores, psnr(true, blank))


def held_of_first_round(config: RunConfig, problem: FederatedTask, client: int | None) -> Held:
    """Run the first round once more, on a ledger of its own; return what is known of a client."""
    method = build_method(config, problem)
    if type(method) is not WholeModel:
        raise InvalidValueError(
            f"method={config.method!r} must be 'full' here: inversion is of whole models"
        )
    with tempfile.TemporaryDirectory(dir=scratch_folder()) as folder:
        account = None
        if needs_account(config, problem):
            account = open_account(config, problem, Path(folder) / "ledger.sqlite", "attack")
        try:
            federation = build_federation(config, problem, account, method)
            pending = begin_round(federation, 0)
            client = _victim_of(problem, pending.cohort.clients, client)
            vector = _watched(federation, client)
            finish_round(federation, pending)
        finally:
            method.close()
            if account is not None:
                account.close()
    if not vector:
        raise InvalidValueError(f"client={client} sent nothing in the first round")
    batches = math.ceil(len(problem.task.clients[client]) / config.batch_size)
    steps = 1 if config.correction == "fednova" else config.local_epochs * batches
    return Held(client, vector[0], not MODE_TABLE[config.mode].noised, steps, method.released)


def _victim_of(problem: FederatedTask, cohort: NDArray[np.int64], client: int | None) -> int:
    sizes = {one: len(problem.task.clients[one]) for one in cohort.tolist()}
    sizes = {one: size for one, size in sizes.items() if 0 < size <= MOST_IMAGES}
    if client is None and sizes:
        return int(min(sizes, key=lambda one: sizes[one]))
    if client is None or client not in sizes:
        some = ", ".join(map(str, sorted(sizes)[:10])) or "nobody"
        raise InvalidValueError(
            f"client={client} must join the first round with 1 to {MOST_IMAGES} samples, as do "
            f"{some}{', ...' if len(sizes) > 10 else ''}"
        )
    return client


def _watched(federation: Federation, victim: int) -> list[torch.Tensor]:
    """Return a list that will hold what a round gives away of the victim, in units of weights."""
    mechanism, given = federation.mechanism, list[torch.Tensor]()
    noise_client, release = mechanism.noise_client, mechanism.release
    own: list[Contribution] = []

    def watch_client(plan: RoundPlan, contribution: Contribution, tally: RoundTally) -> Any:
        noised = noise_client(plan, contribution, tally)
        if noised.client == victim and noised.weight:
            own.append(Contribution(victim, noised.vector.double().clone(), noised.weight))
        return noised

    def watch_release(plan: RoundPlan, summed: Summed, tally: RoundTally) -> Any:
        total = summed.total.double().clone()
        is_certified = isinstance(mechanism, Certified)
        divisor = mechanism.settings.divisor if isinstance(mechanism, Certified) else summed.weight
        unit = plan.learning_rate if isinstance(mechanism, LayerNoise) else 1.0
        released, report = release(plan, summed, tally)
        if own:
            mine = own[0].vector
            if is_certified or isinstance(mechanism, LayerNoise):  # noise is on the sum
                applied = unit * (report.agg_scale or 1.0)
                mine = mine + released.double() / applied * divisor - total
            given.append(unit * mine)
        return released, report

    # The parts of one round, which nobody else has.
    mechanism.noise_client = watch_client  # type: ignore[method-assign]
    mechanism.release = watch_release  # type: ignore[method-assign]
    return given


class _Victim:
    """One client's gradient, and the model at which it was taken."""

    def __init__(
        self, problem: FederatedTask, held: Held, labels: torch.Tensor, rate: float
    ) -> None:
        flat = problem.flat
        self._module = flat.module.eval()
        segments = [segment for segment in flat.segments if not segment.is_buffer]
        self._weights = {
            s.name: flat.vector[s.start : s.stop].view(s.shape).clone().requires_grad_()
            for s in segments
        }
        self._segments = [segment for segment in segments if segment.name in held.released]
        self._last = segments[-1]
        sent = -held.vector.float() / (rate * held.steps)
        self._target = torch.cat([sent[s.start : s.stop] for s in self._segments])
        self._scale_known, self._classes = held.scale_known, problem.num_classes
        self._shape = (len(labels), *problem.input_shape)
        test, _ = problem.test_data
        self._low, self._high = float(test.min()), float(test.max())
        self._middle, self._spread = float(test.mean()), float(test.std())

    def attack(self, name: str, iterations: int, seed: int) -> tuple[float, torch.Tensor]:
        """Return how far the gradient of what was found is from the one that is held, and it."""
        draws = torch.Generator().manual_seed(seed)
        images = torch.randn(self._shape, generator=draws) * self._spread + self._middle
        images.requires_grad_()
        if name == "tv":
            return self._by_direction(images, iterations)
        scores = torch.randn((len(images), self._classes), generator=draws)
        if name == "idlg":
            scores = 1e4 * torch.nn.functional.one_hot(self._labels(), self._classes).float()
        moved = [images] if name == "idlg" else [images, scores.requires_grad_()]
        return self._by_difference(images, scores, moved, iterations)

    def _by_difference(
        self, images: torch.Tensor, scores: torch.Tensor, moved: list[torch.Tensor], iterations: int
    ) -> tuple[float, torch.Tensor]:
        search = torch.optim.LBFGS(moved, max_iter=iterations, line_search_fn="strong_wolfe")

        def distance() -> torch.Tensor:
            search.zero_grad()
            found = self._gradient(images, scores.softmax(dim=1))
            target = self._target
            if not self._scale_known:
                target = target * (found @ target / (target @ target)).detach()
            lost = ((found - target) ** 2).sum()
            lost.backward(inputs=moved)  # type: ignore[no-untyped-call]
            return lost

        last = float(search.step(distance).detach())  # type: ignore[no-untyped-call]
        last = float(distance().detach()) if math.isfinite(last) else math.inf
        return last if math.isfinite(last) else math.inf, self._inside(images)

    def _by_direction(self, images: torch.Tensor, iterations: int) -> tuple[float, torch.Tensor]:
        chosen = torch.nn.functional.one_hot(self._labels(), self._classes).float()
        search = torch.optim.Adam([images], lr=_ADAM_RATE * self._spread)
        marks = [round(share * iterations) for share in (3 / 8, 5 / 8, 7 / 8)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(search, marks, gamma=0.1)
        away = math.inf
        for _ in range(iterations):
            found = self._gradient(images, chosen)
            apart = 1 - torch.cosine_similarity(found, self._target, dim=0, eps=1e-12)
            (slope,) = torch.autograd.grad(apart + _TV_WEIGHT * variation(images), images)
            images.grad, away = slope.sign(), float(apart.detach())
            search.step()
            schedule.step()
            with torch.no_grad():
                images.clamp_(self._low, self._high)
        return away, self._inside(images)

    def _inside(self, images: torch.Tensor) -> torch.Tensor:
        return images.detach().nan_to_num(self._middle).clamp(self._low, self._high)

    def _gradient(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs = functional_call(self._module, self._weights, images)
        loss = -(labels * outputs.log_softmax(dim=1)).sum(dim=1).mean()
        shared = [self._weights[segment.name] for segment in self._segments]
        found = torch.autograd.grad(loss, shared, create_graph=True)
        return torch.cat([one.flatten() for one in found])

    def _labels(self) -> torch.Tensor:
        """Return labels that give the gradient of the last bias, mean(p) - share of the class.

        p are what the model says of images of noise: before any training nearly what it says of
        all images.
        """
        last = self._last
        if last.shape != (self._classes,) or last not in self._segments:
            raise InvalidValueError(
                f"idlg and tv read labels off the bias of the scores: {last.name} must be one, and "
                "be sent; dlg needs none"
            )
        count = self._shape[0]
        with torch.no_grad():
            noise = torch.randn((64, *self._shape[1:]), generator=torch.Generator().manual_seed(0))
            noise = noise * self._spread + self._middle
            said = functional_call(self._module, self._weights, noise).softmax(dim=1).mean(dim=0)
        bias = self._target[-self._classes :]
        if not self._scale_known:  # sum over classes of max(0, -g) <= 1, and near it
            bias = bias / (bias.clamp(max=0).sum().abs() + 1e-12)
        shares = count * (said - bias).clamp(min=0)
        labels: list[int] = []
        for _ in range(count):
            labels.append(int(shares.argmax()))
            shares[labels[-1]] -= 1.0
        return torch.tensor(labels)


def variation(images: torch.Tensor) -> torch.Tensor:
    """Return the total variation: the mean difference of neighbouring pixels."""
    down, right = images.diff(dim=-2).abs().mean(), images.diff(dim=-1).abs().mean()
    return down + right


def _pixels(images: torch.Tensor, low: float, high: float) -> NDArray[np.float64]:
    shown: NDArray[np.float64] = ((images.double() - low) / (high - low)).clamp(0, 1).numpy()
    return shown


def nearest(truth: NDArray[np.float64], found: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the order of what was found in which it is nearest to the truth."""
    from scipy.optimize import linear_sum_assignment

    apart = ((truth[:, None] - found[None]) ** 2).mean(axis=(2, 3, 4))
    return np.asarray(linear_sum_assignment(apart)[1])


def psnr(truth: NDArray[np.float64], found: NDArray[np.float64]) -> float:
    """Return the mean peak signal-to-noise ratio in decibels, of pixels between 0 and 1."""
    errors = ((truth - found) ** 2).mean(axis=(1, 2, 3))
    return float(np.mean(-10 * np.log10(np.maximum(errors, 1e-10))))


FALSE_ALARMS = (0.001, 0.01, 0.1)
_BATCH = 1024


@dataclass(frozen=True)
class Membership:
    """How well members are told from others by one score, beside the most a bound allows."""

    attack: str
    auc: float
    right_alarms: dict[float, float]
    allowed_auc: float
    allowed_alarms: dict[float, float]
    members: int
    others: int

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data; rates are texts, as the names of a JSON object are."""
        fields = dataclasses.asdict(self)
        for key in ("right_alarms", "allowed_alarms"):
            fields[key] = {f"{rate:g}": value for rate, value in fields[key].items()}
        return fields


def membership(
    path: str | Path, *, shadows: int = 10, seed: int = 0, step: Callable[[], None] = lambda: None
) -> list[Membership]:
    """Look for the members of a finished run in the model that it released; change nothing.

    Parameters
    ----------
    path
        The folder of the run.
    shadows
        Runs that LiRA trains, at least 2 for each fold of the samples; 0: no LiRA.
    step
        Called after each shadow.
    """
    checks.integer("shadows", shadows, at_least=0)
    done = load(path)
    config, problem = own_problem(path)
    if done.model is None or problem.test is None:
        raise InvalidValueError(f"run folder {str(path)!r} must have a model and test data")
    config = config.replace(
        engine="auto", eval_every=config.num_rounds, early_stopping=False, evaluation_share=0.0
    )
    inputs, targets = _pool(problem)
    is_member = np.arange(len(targets)) < len(targets) - len(problem.test_data[1])
    with one_thread():
        start = problem.flat.read().clone()
        problem.flat.write(_weights(problem, done.state_dict))
        confidence = _confidence(problem.flat.module, inputs, targets)
        scores = {"loss": np.minimum(0.0, confidence) - np.log1p(np.exp(-np.abs(confidence)))}
        problem.flat.write(start)
        if shadows:
            scores["lira"] = _lira(config, problem, confidence, shadows, seed, step)
    most = _most(done.statement, config)
    return [_judged(name, values, is_member, *most) for name, values in scores.items()]


def _pool(problem: FederatedTask) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of all clients, and behind them those of the test data."""
    held = torch.as_tensor(np.unique(np.concatenate([*problem.task.clients])))
    held_pair = (problem.task.inputs[held], problem.task.targets[held])
    parts = zip(held_pair, problem.test_data, strict=True)
    inputs, targets = (torch.cat(pair) for pair in parts)
    return inputs, targets


def _weights(problem: FederatedTask, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[s.name].flatten().float() for s in problem.flat.segments])


@torch.no_grad()
def _confidence(
    module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> NDArray[np.float64]:
    """Return log(p / (1 - p)) of each sample's own class."""
    outputs = torch.cat([module.eval()(batch) for batch in torch.split(inputs, _BATCH)]).double()
    own = outputs.gather(1, targets[:, None])
    others = outputs.scatter(1, targets[:, None], -torch.inf).logsumexp(dim=1)
    found: NDArray[np.float64] = (own[:, 0] - others).numpy()
    return found


def _lira(
    config: RunConfig,
    problem: FederatedTask,
    confidence: NDArray[np.float64],
    shadows: int,
    seed: int,
    step: Callable[[], None],
) -> NDArray[np.float64]:
    inputs, targets = _pool(problem)
    count, others = len(targets), len(problem.test_data[1])
    folds = max(2, round(count / others))
    if shadows < 2 * folds:
        raise InvalidValueError(f"shadows={shadows} must be at least {2 * folds}, 2 a fold, or 0")
    draws = generator(seed, "shadows")
    seen: NDArray[np.float64] = np.zeros((shadows, count))
    was_in = np.ones((shadows, count), dtype=bool)
    sizes = [len(part) for part in problem.task.clients]
    start = problem.flat.read().clone()
    for shadow in range(shadows):
        if shadow % folds == 0:
            order = draws.permutation(count)
        was_in[shadow, np.array_split(order, folds)[shadow % folds]] = False
        known = draws.permutation(np.flatnonzero(was_in[shadow]))
        # As many clients as in the run, in proportion of the same sizes.
        ends = np.round(np.cumsum(sizes) * len(known) / sum(sizes)).astype(int)[:-1]
        clients = [np.sort(part) for part in np.split(known, ends)]
        task = dataclasses.replace(problem.task, inputs=inputs, targets=targets, clients=clients)
        model = start_run(
            config.replace(seed=int(draws.integers(2**31))),
            dataclasses.replace(problem, task=task),
            *(None, None, None),
        )
        problem.flat.write(_weights(problem, model.state_dict))
        seen[shadow] = _confidence(problem.flat.module, inputs, targets)
        problem.flat.write(start)
        step()
    return likelihood_ratio(confidence, seen, was_in)


def likelihood_ratio(
    confidence: NDArray[np.float64], seen: NDArray[np.float64], was_in: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return LiRA's score of each sample; `seen` [shadows, samples] are those of the shadows."""
    score = np.zeros(len(confidence))
    for sign, inside in ((1.0, was_in), (-1.0, ~was_in)):
        mean = np.where(inside, seen, 0.0).sum(axis=0) / inside.sum(axis=0)
        spread = max(float(np.std((seen - mean)[inside])), 1e-6)
        score -= sign * (((confidence - mean) / spread) ** 2 / 2 + np.log(spread))
    return score


def _most(statement: Statement, config: RunConfig) -> tuple[Callable[[float], float], float]:
    """Return the most right alarms that a run's claim allows at a rate of false ones, and area."""
    epsilon, delta = statement.epsilon_max, statement.delta
    steps = 1 if config.adjacency == "replace_one" else 2
    if not statement.is_bounded:
        return lambda rate: 1.0, 1.0
    if not config.amplification:
        normal, mu = NormalDist(), steps * gaussian_mu(epsilon, delta)
        return lambda rate: normal.cdf(normal.inv_cdf(rate) + mu), normal.cdf(mu / np.sqrt(2))
    one = float(np.exp(min(epsilon, 300.0)))
    ratio, delta = one**steps, min(1.0, delta * sum(one**step for step in range(steps)))

    def allowed(rate: float) -> float:
        return min(1.0, ratio * rate + delta, 1 - max(0.0, 1 - delta - rate) / ratio)

    return allowed, 1 - (1 - delta) ** 2 / (1 + ratio)


def _judged(
    name: str,
    scores: NDArray[np.float64],
    is_member: NDArray[np.bool_],
    most: Callable[[float], float],
    area: float,
) -> Membership:
    members, others = scores[is_member], np.sort(scores[~is_member])
    below = np.searchsorted(others, members, "left") + np.searchsorted(others, members, "right")
    right = {}
    for rate in FALSE_ALARMS:
        # The lowest threshold that at most this share of the others is above.
        level = others[len(others) - 1 - int(rate * len(others))]
        right[rate] = float(np.mean(members > level))
    auc, allowed = float(np.mean(below / (2 * len(others)))), {x: most(x) for x in FALSE_ALARMS}
    return Membership(name, auc, right, area, allowed, len(members), len(others))
