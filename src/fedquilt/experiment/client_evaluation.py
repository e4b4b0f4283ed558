"""Clients look at the model with samples that they hold back from training.

Each client's measures depend on its own samples and on the model alone: clients are
evaluated one after the other, and what the module holds is put back before each.  They
are raw, so they go into a file for the owner; where a bound is claimed nothing else of them
leaves, unless a share of the budget pays for a noised mean, charged like any release: `NoisedMean`.

At an evaluation each client that is there in the round, in its cohort or not, and can pay adds

    v_i = (x_i - 1/2, 1/2),   x_i in [0, 1] its measure (the share it gets right),

and a client that holds back no sample, or whose measure is not finite, adds (0, 0).  So
|v_i| <= S = sqrt(1/2): putting nothing in the place of a client's data moves the sum by at
most S, and putting other data there by at most 2 S.  What is released is

    (N_1, N_2) = sum_i v_i + sigma N(0, I),   and from it   1/2 + N_1 / (2 N_2).

For one client that is a Gaussian mechanism with mu^2 = S^2 / sigma^2 = e, the same for all
and fixed in advance: a run that sets aside the share q of its budget B for E evaluations has
e = q B / E.  Who adds is decided by availability and balances, which are public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.spread import LOWER_IS_BETTER, client_spread
from fedquilt.common.trees import Tree
from fedquilt.config import RunConfig
from fedquilt.federation import Federation
from fedquilt.privacy.ledger import BudgetExceededError
from fedquilt.privacy.noise import NoiseSource, noise_source
from fedquilt.privacy.run_account import RunAccount
from fedquilt.record.schema import OF_CLIENTS
from fedquilt.setup.task import FederatedTask, Parts
from fedquilt.slices.method import Slices
from fedquilt.training import FlatModel, MakeMetric, Task, evaluate, measure
from fedquilt.training.trainers import NEVER_SILENT

SENSITIVITY = math.sqrt(0.5)
"""S, the largest norm of what one client adds."""

# How often an evaluation is planned anew when another run takes what it counted on.
_ATTEMPTS = 20
# Who has so little less than the cost has it: earlier charges were rounded up.
_ROUNDING = 1e-6
# One client's worth of N_2: below it a quotient says nothing.
_ONE_CLIENT = 0.5


def contribution(measure: float | None) -> NDArray[np.float64]:
    """Return v_i of a client's measure, None when it has none."""
    if measure is None or not math.isfinite(measure):
        return np.zeros(2)
    return np.array([min(1.0, max(0.0, measure)) - 0.5, 0.5])


@dataclass(frozen=True)
class NoisedMean:
    """What an evaluation released, and about the standard deviation of its noise."""

    value: float
    noise_std: float


def release_mean(
    account: RunAccount,
    source: NoiseSource,
    round_index: int,
    present: NDArray[np.int64],
    measures: Mapping[int, float | None],
) -> NoisedMean | None:
    """Charge, noise and return the mean measure of those who are there; None if none can pay.

    The charge is settled, durable, before the mean is returned.
    """
    cost = account.evaluation_cost
    granted = _reserve(account, round_index, present, cost)
    if granted is None:
        return None
    total = np.zeros(2)
    for client, charge in granted.items():
        # At the very end of an allowance a hair less is granted than was asked.
        total += math.sqrt(min(1.0, charge / cost)) * contribution(measures.get(client))
    noise_std = SENSITIVITY / math.sqrt(cost)
    noised = total + noise_std * source.stream(round_index, 2).normal(2)
    account.settle(torch.from_numpy(noised))
    count = max(_ONE_CLIENT, float(noised[1]))
    value = min(1.0, max(0.0, 0.5 + 0.5 * float(noised[0]) / count))
    # To first order N_1 and N_2 enter the quotient with weights 1 and 2 (value - 1/2), over n.
    spread = math.hypot(1.0, 2 * value - 1)
    return NoisedMean(value, noise_std * spread / len(granted))


def _reserve(
    account: RunAccount, round_index: int, present: NDArray[np.int64], cost: float
) -> dict[int, float] | None:
    """Reserve the cost for those present who have it; return what each was granted."""
    for attempt in range(_ATTEMPTS):
        left = account.left()[present]
        able = left >= cost * (1 - _ROUNDING)
        payers, asked = present[able], np.minimum(left[able], cost)
        if payers.size == 0:
            return None
        try:
            granted = account.reserve(round_index, payers, asked)
        except BudgetExceededError:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            if granted is None:
                raise RuntimeError("a noised evaluation needs a ledger that bounds it")
            return dict(zip(payers.tolist(), granted.tolist(), strict=True))
    raise AssertionError("unreachable: the last attempt returns or raises")


@dataclass(eq=False)
class ClientEvaluation:
    """What each client measures of the model, and what of it may be said.

    Parameters
    ----------
    flat : FlatModel
        The global model.
    task : Task
        All samples.
    tests : sequence of index arrays
        The samples that each client holds back; none for some.
    names : sequence of str, optional
        Who the clients are.
    slices : Slices, optional
        Where clients hold slices: each also evaluates its own.
    account : RunAccount, optional
        Where a bound is claimed: what may be published is charged there.
    noise : NoiseSource
        Noises what is published.
    is_bounded : bool
        Whether raw measures stay private.
    present : callable
        Says who is there in a round.
    metrics : mapping
        What the run measures; of one class a sample there is an accuracy in any case.
    personal : callable, optional
        Returns a client's own model, where it has one: each also evaluates that.
    elsewhere : callable, optional
        Asks clients that are not here.

    `last` has the measures of the newest evaluation, one dictionary a client.
    """

    flat: FlatModel
    task: Task
    tests: Parts
    names: Sequence[str] | None
    slices: Slices | None
    account: RunAccount | None
    noise: NoiseSource
    is_bounded: bool
    present: Callable[[int], NDArray[np.int64]]
    metrics: Mapping[str, MakeMetric] = field(default_factory=dict)
    personal: Callable[[int, torch.Tensor, int], torch.Tensor] | None = None
    elsewhere: Callable[[torch.Tensor, int], Mapping[int, dict[str, Any]]] | None = None
    last: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, weights: torch.Tensor, round_index: int) -> dict[str, float]:
        """Evaluate every client; return what a line may say of it.

        Of a bounded run that is the noised mean of who is there, if it was paid for.
        """
        self.last = self.score(weights, round_index)
        if not self.is_bounded:
            return self._spread()
        if self.account is None or self.account.evaluation_cost == 0:
            return {}
        measures = {row["client"]: row["accuracy"] for row in self.last}
        there = self.present(round_index)
        noised = release_mean(self.account, self.noise, round_index, there, measures)
        if noised is None:
            return {}
        return {
            "noised_client_accuracy": noised.value,
            "noised_client_accuracy_std": noised.noise_std,
        }

    def _spread(self) -> dict[str, float]:
        """Return the spread over clients of every metric, of those whom it could be told of."""
        told: dict[str, float] = {}
        own = () if self.personal is None else ("own_accuracy",)
        for name in dict.fromkeys(("accuracy", *self.metrics, *own)):
            values = [row.get(name) for row in self.last]
            worse_above = name in LOWER_IS_BETTER
            told |= client_spread(values, f"{OF_CLIENTS}{name}", lower_is_better=worse_above)
        return told

    def score(self, weights: torch.Tensor, round_index: int) -> list[dict[str, Any]]:
        """Return the raw measures of every client, in the run's order."""
        rows = []
        told = None if self.elsewhere is None else self.elsewhere(weights, round_index)
        for client in range(len(self.tests)):
            row: dict[str, Any] = {"client": client}
            if self.names is not None:
                row["name"] = self.names[client]
            if told is None:
                row |= self.row(weights, client, round_index)
            else:
                row |= told[client]
            rows.append(row)
        self.flat.write(weights)
        return rows

    def row(self, weights: torch.Tensor, client: int, round_index: int) -> dict[str, Any]:
        """Return the raw measures of one client."""
        self.flat.write(weights)
        row: dict[str, Any] = {}
        try:
            row |= self._others(self.flat, client)
            row |= self._look(self.flat, client, by_class=True)
            if self.slices is not None:
                row |= self._own_slice(self.slices, weights, client, round_index)
            if self.personal is not None:
                self.flat.write(self.personal(client, weights, round_index))
                found = self._look(self.flat, client)
                row |= {f"own_{key}": found[key] for key in ("accuracy", "loss")}
        except Exception as error:
            # Where clients are protected an error would say something about one's samples.
            if not self.is_bounded or isinstance(error, NEVER_SILENT):
                raise
            row |= {"examples": len(self.tests[client]), "accuracy": None, "loss": None}
        return row

    def _own_slice(
        self, slices: Slices, weights: torch.Tensor, client: int, round_index: int
    ) -> dict[str, Any]:
        """Return what a client's own sub-model gets right, and its width."""
        found = self._look(slices.own_model(client, weights, round_index), client)
        own = {f"own_{key}": found[key] for key in ("accuracy", "loss")}
        return {"width": str(slices.slicing.widths[client]), **own}

    def _look(self, flat: FlatModel, client: int, *, by_class: bool = False) -> dict[str, Any]:
        """Evaluate a model on a client's held-back samples."""
        if not self._has_labels:
            return self._measure(flat, client)
        index = torch.as_tensor(self.tests[client], device=self.task.device)
        targets = self.task.targets[index]
        groups = {"": index}
        if by_class and targets.dim() == 1 and not targets.is_floating_point():
            groups = {str(int(k)): index[targets == k] for k in torch.unique(targets)}
        parts = {
            name: (*evaluate(flat.module, self.task.inputs[part], self.task.targets[part]), part)
            for name, part in groups.items()
            if len(part)
        }
        count = len(index)
        means = [
            sum(found[k] * len(found[2]) for found in parts.values()) / count if count else None
            for k in (0, 1)
        ]
        row: dict[str, Any] = {"examples": count, "accuracy": means[0], "loss": means[1]}
        if by_class:
            row["classes"] = {
                name: {"examples": len(part), "accuracy": accuracy}
                for name, (accuracy, _, part) in parts.items()
            }
        return row

    @property
    def _has_labels(self) -> bool:
        """Whether targets are one class a sample, so that there is an accuracy by class."""
        targets = self.task.targets
        one = isinstance(targets, torch.Tensor) and targets.dim() == 1
        return one and self.task.objective.has_classes

    def _measure(self, flat: FlatModel, client: int) -> dict[str, Any]:
        """Evaluate another task than one label a sample: the run's metrics, and the loss."""
        index = torch.as_tensor(self.tests[client], device=self.task.device)
        row: dict[str, Any] = {"examples": len(index), "accuracy": None, "loss": None}
        if not len(index):
            return row
        inputs, targets = trees.take(self.task.inputs, index), trees.take(self.task.targets, index)
        return row | self._measured(flat, self.metrics, inputs, targets)

    def _others(self, flat: FlatModel, client: int) -> dict[str, Any]:
        """Return the run's metrics beside accuracy, where targets are one class a sample.

        One that a client's samples cannot tell, such as the AUROC of a single class, is None.
        """
        others = {name: make for name, make in self.metrics.items() if name != "accuracy"}
        if not others or not self._has_labels:
            return {}
        index = torch.as_tensor(self.tests[client], device=self.task.device)
        if not len(index):
            return dict.fromkeys(others)
        inputs, targets = trees.take(self.task.inputs, index), trees.take(self.task.targets, index)
        found = self._measured(flat, others, inputs, targets)
        return {name: found[name] for name in others}

    def _measured(
        self, flat: FlatModel, metrics: Mapping[str, MakeMetric], inputs: Tree, targets: Tree
    ) -> dict[str, float | None]:
        """Return metrics and loss, None for what is no number."""
        found = measure(flat.module, self.task.objective, metrics, inputs, targets)
        return {name: value if math.isfinite(value) else None for name, value in found.items()}


def make_client_evaluation(
    config: RunConfig, problem: FederatedTask, federation: Federation
) -> ClientEvaluation | None:
    """Return the evaluation by clients of a run, None where they hold nothing back."""
    if problem.client_tests is None:
        return None
    method, remote = federation.method, problem.own.remote
    made = ClientEvaluation(
        problem.flat,
        problem.task,
        problem.client_tests,
        problem.roster.ids,
        method if isinstance(method, Slices) else None,
        federation.account,
        noise_source(config.noise_seed),
        federation.mechanism.is_bounded,
        problem.selector.available,
        problem.metrics,
        method.personal_model,
        None if remote is None else remote.evaluate,
    )
    if config.evaluation_share and not made._has_labels:
        raise InvalidValueError(
            f"evaluation_share={config.evaluation_share:g} must be 0 for this task: what is "
            "published is a mean accuracy, and targets are not one class a sample"
        )
    return made
