"""One federated round, top to bottom.

The nine steps of the QuAP-FL architecture document (section QuAPFLServer), in their order;
the order is part of the contract.  Every way of running fedquilt - the command line,
`fedquilt.run`, `QuAPFLServer`, `FedNumServer` - goes through `begin_round` and `finish_round`.
The parts they join (`Federation`) do not import one another:

    population   who takes part and how often they did
    method       what a client does with its data, and what the server makes of the release
    privacy      what happens to an update before anybody else sees it, and the ledger

A round's charges are reserved on disk before its release is computed, and settled before
anything that follows from the release is reserved, kept or shown (`RunAccount`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedquilt.aggregation import add
from fedquilt.federation import Federation
from fedquilt.population import Cohort
from fedquilt.privacy.ledger import BudgetExceededError
from fedquilt.privacy.mechanism import Contribution, Mechanism, NoiseReport, RoundPlan, RoundTally
from fedquilt.training import ClientUpdate

# How often a round is planned anew when another run takes what it counted on.
_ATTEMPTS = 20


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


@dataclass(eq=False)
class PendingRound:
    """A round whose cohort is selected; nothing of it is reserved, counted or released yet.

    `remaining` is what each client of the federation may still be charged, `limited` whether
    somebody was left out for that or for being absent; `updates` are those of clients that train
    already.
    """

    record: RoundRecord
    cohort: Cohort
    remaining: NDArray[np.float64]
    limited: bool = False
    updates: Iterator[ClientUpdate] | None = None


def run_round(federation: Federation, round_index: int) -> RoundRecord:
    """Run steps 1 to 8 and move `federation` on; the caller evaluates (step 9)."""
    return finish_round(federation, begin_round(federation, round_index))


def begin_round(federation: Federation, round_index: int) -> PendingRound:
    """Select the cohort; nothing has moved `federation` yet.

    Where the engine starts early, its clients begin to train: in this process, from which
    nothing leaves before `finish_round` has reserved what the round costs.
    """
    pending = _select(federation, round_index)
    if federation.method.engine.starts_early and len(pending.cohort.exposed):
        pending.updates = federation.train(pending.cohort, round_index)
    return pending


def finish_round(federation: Federation, pending: PendingRound) -> RoundRecord:
    """Reserve, train, clip, noise, settle, and move `federation` on."""
    # 1 select: who is there, who has allowance left; the spend is reserved
    pending, plan = _reserve(federation, pending)
    record, cohort, round_index = pending.record, pending.cohort, pending.record.round
    record.cohort = [int(client) for client in cohort.exposed]

    # 2 participation: the history counts the cohort before any noise depends on it
    federation.tracker.update(cohort.exposed)
    if plan is None:
        return federation.ended(record)  # nobody was there: the model stays as it is

    mechanism, method = federation.mechanism, federation.method
    plan = method.plan = replace(
        plan,
        learning_rate=federation.learning_rate_at(round_index),
        rates=federation.tracker.rates(cohort.exposed),
        coverage=method.coverage(cohort.exposed, round_index),
    )
    mechanism.open_round(plan)

    # 3 local training, one client at a time unless the clip bound needs them all
    losses: list[float] = []
    updates = pending.updates
    if updates is None:
        updates = federation.train(cohort, round_index)
    # `map` keeps no update: the next client trains when the one before it is summed and gone
    received: Iterable[Contribution] = map(partial(_receive, mechanism, plan, losses), updates)
    if mechanism.needs_whole_cohort:
        received = list(received)

    # 4 clip bound
    record.clip_value = mechanism.clip_bound(plan, received)
    plan = replace(plan, clip_value=record.clip_value)

    # 5 clip, 6 noise (where a mode noises each client), 7 sum
    total, tally = federation.new_sum(plan), RoundTally()
    came: list[int] = []
    for contribution in received:
        came.append(contribution.client)
        if not contribution.finite:
            record.non_finite.append(contribution.client)
        noised = mechanism.noise_client(plan, mechanism.clip(plan, contribution, tally), tally)
        if noised.weight:
            place = method.place(noised.client, round_index)
            add(total, noised.sent, noised.scale, noised.weight, place)
        del contribution, noised

    if not _charge_who_came(federation, record, cohort, came, plan):
        return federation.ended(record)  # nobody sent anything: nothing is released
    # 6, 7 noise on the sum, division by the number of clients, or of those who hold a coordinate
    settle = federation.open_sum(plan, total)
    if settle is None:
        return federation.ended(record)  # a sum under masks that too few have opened
    update, record.noise = mechanism.release(plan, total, tally)
    # 8 update: the charge is settled before anything that follows from the release is seen
    settle(update)
    federation.weights = method.server.step(federation.weights, update)
    record.server = method.server.report() | method.traffic()
    finite_losses = [loss for loss in losses if math.isfinite(loss)]
    record.train_loss = float(np.mean(finite_losses)) if finite_losses else None
    return federation.ended(record)


def _select(federation: Federation, round_index: int) -> PendingRound:
    """Pick the cohort among those who are there and can pay."""
    record = RoundRecord(round_index, [])
    account, mechanism = federation.account, federation.mechanism
    present, allowed = federation.method.present(), None
    remaining = np.full(federation.tracker.num_clients, np.inf)
    if account is not None:
        remaining = account.remaining(round_index)
        allowed = mechanism.eligible(round_index, remaining)
        if allowed is not None:
            record.without_allowance = int(np.sum(~mechanism.has_allowance(remaining)))
    if present is not None:
        allowed = present if allowed is None else allowed & present
    cohort = federation.select(round_index, allowed)
    return PendingRound(record, cohort, remaining, limited=allowed is not None)


def _reserve(
    federation: Federation, pending: PendingRound
) -> tuple[PendingRound, RoundPlan | None]:
    """Plan the round and reserve what it will cost; without a cohort there is no plan.

    Another run may spend a client's allowance after it was read and before the
    reservation; the ledger then refuses as a whole, and the round is begun anew.
    """
    account, mechanism, tracker = federation.account, federation.mechanism, federation.tracker
    index = pending.record.round
    for attempt in range(_ATTEMPTS):
        who = pending.cohort.exposed
        if len(who) == 0:
            return pending, None
        left, joins = pending.remaining[who], tracker.participation_count[who]
        plan = mechanism.plan_round(index, who, left, joins, tracker.total_rounds)
        if account is None:
            return pending, plan if plan.charges is None else mechanism.shrink_to(plan, None)
        try:
            granted = account.reserve(index, who, plan.charges)
        except BudgetExceededError:
            if not pending.limited or attempt == _ATTEMPTS - 1:
                raise
            pending = _select(federation, index)
        else:
            return pending, replace(mechanism.shrink_to(plan, granted), charges=granted)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _charge_who_came(
    federation: Federation, record: RoundRecord, cohort: Cohort, came: list[int], plan: RoundPlan
) -> bool:
    """Take back the charge of those of whom nothing arrived; tell whether to release.

    Their part of the sum is zero whatever they hold.  That they did not answer is participation,
    which is public; of a secret coin nothing may tell whom it asked, so there everybody exposed
    pays, and the round is released whoever came.  Fewer than `plan.least` are never summed.
    """
    whole = len(came) == len(cohort.clients) >= plan.least
    if cohort.is_secret or (whole and plan.settled_share is None):
        return True
    record.absent = cohort.clients[~np.isin(cohort.clients, came)].tolist()
    here = np.isin(cohort.clients, came if len(came) >= plan.least else [])
    if federation.account is not None:
        charges = plan.charges_of(here)
        federation.account.reserve_again(record.round, cohort.clients[here], charges)
    return bool(here.any())


def _receive(
    mechanism: Mechanism, plan: RoundPlan, losses: list[float], update: ClientUpdate
) -> Contribution:
    """Hand an update to the mechanism as it arrives, and record its training loss."""
    losses.append(update.loss)
    return mechanism.receive(plan, update.client, update.delta, update.num_examples)
