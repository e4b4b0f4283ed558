"""One federated round, top to bottom.

The nine steps of the QuAP-FL architecture document (section QuAPFLServer), in their order;
the order is part of the contract.  Every way of running fedquilt - the command line,
`fedquilt.run`, `QuAPFLServer`, `FedNumServer` - goes through `run_round`.  The parts it
joins do not import one another:

    population   who takes part and how often they did
    method       what a client does with its data, and what the server makes of the release
    privacy      what happens to an update before anybody else sees it, and the ledger
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.aggregation import Accumulator, Place, RunningMean, sensitivity_of
from fedquilt.common.errors import InvalidValueError
from fedquilt.method import Method
from fedquilt.population import Cohort, ParticipationTracker
from fedquilt.privacy.ledger import BudgetExceededError
from fedquilt.privacy.mechanism import Contribution, Mechanism, NoiseReport, RoundFacts
from fedquilt.privacy.run_account import RunAccount
from fedquilt.privacy.statement import Statement
from fedquilt.training import ClientUpdate

CLIENTS_TESTED = (
    "what is measured on the test samples, which people who are clients have made (not published: "
    "see the private file; evaluation_share pays for a noised measure)",
)
"""What a claim about training does not cover where clients have made the test samples."""

Select = Callable[[int, NDArray[np.bool_] | None], Cohort]
# How often a round is planned anew when another run takes what it counted on.
_ATTEMPTS = 20


@dataclass
class Federation:
    """The parts of a federation and its state between two rounds.

    `sensitivity` and `sum_kind` are those of the sums which the mechanism's noise was made for.
    `doubts` are reasons why nothing may be claimed, `beliefs` what a claim takes on trust of
    somebody's own parts (`assemble.build_federation`).  What begins with one of `withheld`
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
    doubts: tuple[str, ...] = ()
    beliefs: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()

    def statement(self) -> Statement:
        """Say what may be claimed now: the mechanism's word, and what it takes for granted."""
        epsilons = None if self.account is None else self.account.epsilons()
        stated = self.mechanism.statement(self.tracker.participation_count, epsilons)
        return stated.believing(self.beliefs, self.doubts, CLIENTS_TESTED if self.withheld else ())

    def new_sum(self) -> Accumulator:
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
        return total

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the next round needs beside the weights, as arrays; never noise."""
        parts = {
            "tracker": self.tracker.state(),
            "mechanism": self.mechanism.state(),
            "server": self.method.server.state(),
            "account": {} if self.account is None else {"spent": self.account.spent()},
        }
        return {f"{part}.{key}": value for part, s in parts.items() for key, value in s.items()}

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Restore what `state` returned."""

        def part(name: str) -> dict[str, NDArray[Any]]:
            prefix = f"{name}."
            return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}

        self.tracker.load_state(part("tracker"))
        self.mechanism.load_state(part("mechanism"))
        self.method.server.load_state(part("server"), self.weights.device)
        if self.account is not None:
            self.account.rewind(part("account")["spent"])


@dataclass
class RoundRecord:
    """What happened in a round."""

    round: int
    cohort: list[int]
    train_loss: float | None = None
    clip_value: float | None = None
    noise: NoiseReport = field(default_factory=NoiseReport)
    non_finite: list[int] = field(default_factory=list)
    without_allowance: int = 0
    absent: list[int] = field(default_factory=list)
    server: dict[str, float] = field(default_factory=dict)


def run_round(
    federation: Federation,
    round_index: int,
    meanwhile: Callable[[], None] | None = None,
    *,
    settles_later: bool = False,
) -> RoundRecord:
    """Run steps 1 to 8 and move `federation` on; the caller evaluates (step 9).

    Where the engine works on a device (`starts_early`), the host need not look on: `meanwhile`
    is called while this round's clients train, and nothing of the round has moved `federation`
    yet.  With `settles_later` the charge of this round's release is left to the `meanwhile` of
    the next one (`RunAccount.settle_held`).  What keeps the order safe is that all of it stays
    in this process: a round's charges are reserved on disk before its release is computed, and
    settled before anything that follows from the release is reserved, kept or shown.
    """
    # 1 select: who is there, who has allowance left; the spend is reserved
    record = RoundRecord(round_index, [])
    cohort, granted, updates = _select_and_reserve(federation, record, meanwhile)
    record.cohort = [int(client) for client in cohort.exposed]

    # 2 participation: the history counts the cohort before any noise depends on it
    federation.tracker.update(cohort.exposed)
    if len(cohort.exposed) == 0:
        return record  # nobody was there: nothing is released, the model stays as it is

    learning_rate = federation.learning_rate_at(round_index)
    mechanism, method = federation.mechanism, federation.method
    rates = federation.tracker.rates(cohort.exposed)
    coverage = method.coverage(cohort.exposed, round_index)
    mechanism.open_round(RoundFacts(round_index, learning_rate, cohort.exposed, rates, coverage))

    # 3 local training, one client at a time unless the clip bound needs them all
    losses: list[float] = []
    if updates is None:
        updates = _train(federation, cohort, round_index)
    # `map` keeps no update: the next client trains when the one before it is summed and gone
    received: Iterable[Contribution] = map(partial(_receive, mechanism, losses), updates)
    if mechanism.needs_whole_cohort:
        received = list(received)

    # 4 clip bound
    record.clip_value = mechanism.clip_bound(received)

    # 5 clip, 6 noise (where a mode noises each client), 7 sum
    total = federation.new_sum()
    came: list[int] = []
    for contribution in received:
        came.append(contribution.client)
        if not contribution.finite:
            record.non_finite.append(contribution.client)
        noised = mechanism.noise_client(mechanism.clip(contribution))
        if noised.weight:
            _add(total, noised, method.place(noised.client, round_index))
        del contribution, noised

    if not _charge_who_came(federation, record, cohort, came, granted):
        return record  # nobody sent anything: nothing is released

    # 6, 7 noise on the sum, division by the number of clients, or of those who hold a coordinate
    update, record.noise = mechanism.release(total.total, total.weight, total.held)

    # 8 update: the charge is on disk before the release is used
    if federation.account is not None and settles_later:
        federation.account.hold(update.clone())  # the server's step may change it
    elif federation.account is not None:
        federation.account.settle(update)
    federation.weights = method.server.step(federation.weights, update)
    record.server = method.server.report()
    finite_losses = [loss for loss in losses if math.isfinite(loss)]
    record.train_loss = float(np.mean(finite_losses)) if finite_losses else None
    return record


def _train(federation: Federation, cohort: Cohort, round_index: int) -> Iterator[ClientUpdate]:
    learning_rate = federation.learning_rate_at(round_index)
    engine = federation.method.engine
    updates = engine.train(federation.weights, cohort.clients, round_index, learning_rate)
    return _once_each(updates, cohort)


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


def _select_and_reserve(
    federation: Federation, record: RoundRecord, meanwhile: Callable[[], None] | None
) -> tuple[Cohort, NDArray[np.float64] | None, Iterator[ClientUpdate] | None]:
    """Pick the cohort among those who are there and can pay, and reserve what it will cost.

    Another run may spend a client's allowance after it was read and before the
    reservation; the ledger then refuses as a whole, and the round is planned anew.

    Returns the cohort, what the ledger granted each of those exposed, and the updates of
    clients that have begun to train: on a device of this process, from which nothing leaves
    before the reservation.
    """
    account, mechanism, tracker = federation.account, federation.mechanism, federation.tracker
    present = federation.method.present()
    updates: Iterator[ClientUpdate] | None = None

    def begin(cohort: Cohort) -> Iterator[ClientUpdate] | None:
        if meanwhile is None:
            return None
        started = _train(federation, cohort, record.round) if len(cohort.exposed) else None
        meanwhile()
        return started

    if account is None:
        cohort = federation.select(record.round, present)
        return cohort, None, begin(cohort)
    for attempt in range(_ATTEMPTS):
        remaining = account.remaining(record.round)
        allowed = mechanism.eligible(record.round, remaining)
        if allowed is not None:
            record.without_allowance = int(np.sum(~mechanism.has_allowance(remaining)))
        if present is not None:
            allowed = present if allowed is None else allowed & present
        cohort = federation.select(record.round, allowed)
        who = cohort.exposed
        updates, meanwhile = begin(cohort), None
        if len(who) == 0:
            return cohort, None, None
        joins = tracker.participation_count[who]
        charges = mechanism.plan_round(
            record.round, who, remaining[who], joins, tracker.total_rounds
        )
        try:
            granted = account.reserve(record.round, who, charges)
        except BudgetExceededError:
            if allowed is None or attempt == _ATTEMPTS - 1:
                raise
        else:
            mechanism.shrink_to(who, granted)
            return cohort, granted, updates
    raise AssertionError("unreachable: the last attempt returns or raises")


def _charge_who_came(
    federation: Federation,
    record: RoundRecord,
    cohort: Cohort,
    came: list[int],
    granted: NDArray[np.float64] | None,
) -> bool:
    """Take back the charge of those of whom nothing arrived; tell whether to release.

    Their part of the sum is zero whatever they hold.  That they did not answer is
    participation, which is public; of a secret coin nothing may tell whom it asked, so
    there everybody exposed pays, and the round is released whoever came.
    """
    if cohort.is_secret or len(came) == len(cohort.clients):
        return True
    here = np.isin(cohort.clients, came)
    record.absent = [int(client) for client in cohort.clients[~here]]
    account = federation.account
    if account is not None:
        charges = None if granted is None else granted[here]
        account.reserve_again(record.round, cohort.clients[here], charges)
    return bool(here.any())


def _receive(mechanism: Mechanism, losses: list[float], update: ClientUpdate) -> Contribution:
    """Hand an update to the mechanism as it arrives, and record its training loss."""
    losses.append(update.loss)
    return mechanism.receive(update.client, update.delta, update.num_examples)


def _add(total: Accumulator, noised: Contribution, place: Place | None) -> None:
    """Add a contribution to the sum; one that is yet to be scaled is, while it is added."""
    if noised.scale is not None and place is None and type(total) is RunningMean:
        total.add_scaled(noised.sent, noised.scale, noised.weight)
    else:
        total.add(noised.vector, noised.weight, place)
