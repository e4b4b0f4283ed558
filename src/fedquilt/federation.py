"""`Federation`: the parts that a round joins, and their state between two rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.aggregation import Accumulator, LateAverage, sensitivity_of
from fedquilt.common.errors import InvalidValueError
from fedquilt.method import Method
from fedquilt.population import Cohort, ParticipationTracker
from fedquilt.privacy.mechanism import Mechanism, RoundPlan
from fedquilt.privacy.run_account import RunAccount
from fedquilt.privacy.statement import Statement
from fedquilt.training import ClientUpdate

CLIENTS_TESTED = (
    "what is measured on the test samples, which people who are clients have made (not published: "
    "see the private file; evaluation_share pays for a noised measure)",
)
"""What a claim about training does not cover where clients have made the test samples."""

Select = Callable[[int, NDArray[np.bool_] | None], Cohort]


class _Numbered(Protocol):
    round: int


R = TypeVar("R", bound=_Numbered)
"""What is recorded of a round."""


@runtime_checkable
class SealedSum(Protocol):
    """A sum under masks, which its clients elsewhere open, or not."""

    def seal(self) -> torch.Tensor | None:
        """Let clients agree on who is in it; return it, masks and all, None where too few did."""

    def open(self) -> bool:
        """Ask clients to open it; tell whether enough did."""


@dataclass
class Federation:
    """The parts of a federation and its state between two rounds.

    `sensitivity` and `sum_kind` are those of the sums which the mechanism's noise was made for;
    `protocol` puts a sum in their place that shows nobody a single vector.
    `doubts` are reasons why nothing may be claimed, `beliefs` what a claim takes on trust of
    somebody's own parts (`setup.federation`).  What begins with one of `withheld`
    is measured on samples that clients have made, and under a claim it is the owner's alone.
    """

    select: Select
    tracker: ParticipationTracker
    method: Method
    mechanism: Mechanism
    learning_rate_at: Callable[[int], float]
    weights: torch.Tensor
    account: RunAccount | None = None
    sensitivity: float | None = 1.0
    sum_kind: type[Accumulator] | None = None
    protocol: Callable[[Accumulator, RoundPlan], Accumulator] | None = None
    doubts: tuple[str, ...] = ()
    beliefs: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    late: LateAverage | None = None

    def __post_init__(self) -> None:
        """Let the method see the released model."""
        self.method.follow(lambda: self.weights)

    def statement(self) -> Statement:
        """Say what may be claimed now: the mechanism's word, and what it takes for granted."""
        epsilons = None if self.account is None else self.account.epsilons()
        stated = self.mechanism.statement(self.tracker.participation_count, epsilons)
        return stated.believing(self.beliefs, self.doubts, CLIENTS_TESTED if self.withheld else ())

    def train(self, cohort: Cohort, round_index: int) -> Iterator[ClientUpdate]:
        """Let the engine train a cohort (step 3)."""
        learning_rate = self.learning_rate_at(round_index)
        updates = self.method.engine.train(self.weights, cohort.clients, round_index, learning_rate)
        return _once_each(updates, cohort)

    def new_sum(self, plan: RoundPlan) -> Accumulator:
        """Return an empty sum of the kind that the noise of the run was made for."""
        total = self.method.new_sum()
        kind = self.sum_kind or type(total)
        changed = type(total) is not kind or sensitivity_of(total) != self.sensitivity
        if changed and self.mechanism.is_bounded:
            raise InvalidValueError(
                f"new_sum of {type(self.method).__name__} must give sums of one kind and "
                f"sensitivity in all rounds: {type(total).__name__} has {sensitivity_of(total)}, "
                f"and the noise is made for {kind.__name__} of {self.sensitivity}"
            )
        return total if self.protocol is None else self.protocol(total, plan)

    def open_sum(
        self, plan: RoundPlan, total: Accumulator
    ) -> Callable[[torch.Tensor], object] | None:
        """Return what settles the charge of a sum's release; None where it stays closed.

        The charge of a sum under masks is settled, durable, before anybody is asked to open it.
        Before that, too few clients cost nobody anything; after it the charge stays, because
        what is late may still open the sum.  Seeded noise is settled as everywhere: a round that
        runs again must come out the same, which masks never do.
        """
        account = self.account
        settle = _settled if account is None else account.settle
        if not isinstance(total, SealedSum):
            return settle
        early = account is not None and not account.reproducible
        masked = total.seal()
        if early and masked is not None:
            settle(masked)
        if masked is not None and total.open():
            return _settled if early else settle
        if account is not None and (masked is None or not early):
            account.reserve_again(plan.round_index, plan.clients[:0], None)
        return None

    def ended(self, record: R) -> R:
        """Let the average of late models see the model after a round, released anew or not."""
        if self.late is not None:
            self.late.end_round(self.weights, record.round)
        return record

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the next round needs beside the weights, as arrays; never noise."""
        parts = {
            "tracker": self.tracker.state(),
            "mechanism": self.mechanism.state(),
            "server": self.method.server.state(),
            "late": {} if self.late is None else self.late.state(),
            "account": {} if self.account is None else {"spent": self.account.spent()},
        }
        return {f"{part}.{key}": value for part, s in parts.items() for key, value in s.items()}

    def client_state(self) -> dict[str, NDArray[Any]]:
        """Return what clients keep from round to round, as arrays: raw, for the owner alone."""
        kept = self.method.kept.items()
        return {f"{part}.{key}": value for part, s in kept for key, value in s.state().items()}

    def load_client_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Restore what `client_state` returned."""
        for part, kept in self.method.kept.items():
            found = {key: state[f"{part}.{key}"] for key in ("clients", "values")}
            kept.load_state(found, self.weights.device)

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Restore what `state` returned."""

        def part(name: str) -> dict[str, NDArray[Any]]:
            prefix = f"{name}."
            return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}

        self.tracker.load_state(part("tracker"))
        self.mechanism.load_state(part("mechanism"))
        self.method.server.load_state(part("server"), self.weights.device)
        if self.late is not None:
            self.late.load_state(part("late"), self.weights.device)
        if self.account is not None:
            self.account.rewind(part("account")["spent"])


def _settled(update: torch.Tensor) -> None:
    """Settle nothing: there is no account, or it was settled before the sum was opened."""


def _once_each(updates: Iterator[ClientUpdate], cohort: Cohort) -> Iterator[ClientUpdate]:
    """Hand on an engine's updates; refuse a second one of a client, and one of who was not asked.

    A client pays for one vector within its clip.
    """
    waiting = set(cohort.clients.tolist())
    for update in updates:
        if update.client not in waiting:
            raise InvalidValueError(
                f"an engine must yield at most one update for each client that it was asked for, "
                f"not another one for client {update.client}"
            )
        waiting.remove(update.client)
        yield update
        del update  # the next client trains when the one before it is summed and gone
