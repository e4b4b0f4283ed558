"""Membership of oneself: can anybody tell from the released model which samples trained it?

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.audit.inversion import own_problem
from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator
from fedquilt.config import RunConfig
from fedquilt.experiment.start import start_run
from fedquilt.privacy.accounting import gaussian_mu
from fedquilt.privacy.statement import Statement
from fedquilt.record.result import load
from fedquilt.setup.task import FederatedTask
from fedquilt.training.task import one_thread

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
