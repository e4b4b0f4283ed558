"""One training, many canaries: what the final model alone gives away.

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
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.audit.bounds import epsilon_of_normals, one_run_epsilon
from fedquilt.audit.canary import EPSILONS, ERROR, CanaryFinding, clip_taken_away, distance
from fedquilt.audit.findings import scratch_folder
from fedquilt.common import checks
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.config import RunConfig, plain_config
from fedquilt.observe.progress import StepsProgress
from fedquilt.privacy.accounting import gaussian_mu
from fedquilt.round import run_round
from fedquilt.setup.account import open_account
from fedquilt.setup.build_task import task_from
from fedquilt.setup.federation import build_federation, build_method
from fedquilt.setup.task import FederatedTask
from fedquilt.training import ClientUpdate, Engine

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
            config, problem = _problem(epsilon, delta, canaries, rounds, seed, device)
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


class CanaryEngine(Engine):
    """Lets canaries send their directions, and everybody else train."""

    def __init__(
        self, engine: Engine, directions: torch.Tensor, inside: NDArray[np.bool_], length: float
    ) -> None:
        self._engine = engine
        self._directions = directions
        self._inside = inside
        self._length = length

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Yield canaries first; one that is out sends nothing."""
        for client in (int(c) for c in cohort if c < len(self._inside)):
            factor = self._length if self._inside[client] else 0.0
            yield ClientUpdate(client, factor * self._directions[client].to(start), 1, math.nan)
        others = [int(c) for c in cohort if c >= len(self._inside)]
        yield from self._engine.train(start, others, round_index, learning_rate)

    def close(self) -> None:
        """Close the engine of the others."""
        self._engine.close()


def _problem(
    epsilon: float, delta: float, canaries: int, rounds: int, seed: int, device: str
) -> tuple[RunConfig, FederatedTask]:
    clients = canaries + _ORDINARY
    random = generator(seed, "canary data")
    inputs = torch.from_numpy(random.standard_normal((clients, 1, _SIDE, _SIDE))).float()
    labels = torch.arange(clients) % _CLASSES
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed(seed, "canary model"))
        model = nn.Sequential(nn.Flatten(), nn.Linear(_SIDE**2, _CLASSES))
    config = plain_config(
        {
            "mode": "certified",
            "dataset": "custom",
            "model": "custom",
            "policy": "worst_case",
            "num_rounds": rounds,
            "clients_per_round": clients,
            "availability": "always",
            "epsilon": epsilon,
            "delta": delta,
            "seed": seed,
            "device": device,
            "local_epochs": 1,
        }
    )
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
