"""How much a run may take of a client, and what it is granted."""

from __future__ import annotations

import numpy as np

from fedquilt.privacy.ledger.account import Account
from fedquilt.privacy.ledger.errors import BudgetExceededError
from fedquilt.privacy.ledger.records import RunInfo
from fedquilt.privacy.ledger.units import FloatArray, IntArray, granted


def remaining(account: Account, run: RunInfo, in_run: FloatArray, ids: IntArray) -> FloatArray:
    """Return min(budget − spent in the run, allowance − spent − reserved by other runs).

    `in_run` is what each client of the population has spent in this run.
    """
    own = account.held(ids, lambda r: r.run == run.key)
    return _left(account, run, in_run, ids, uncounted=own, counted=np.zeros(ids.size))


def grant(
    account: Account,
    run: RunInfo,
    in_run: FloatArray,
    round_index: int,
    ids: IntArray,
    asked: FloatArray,
) -> FloatArray:
    """Return the charges to reserve for a round, or refuse all of them.

    The run's reservation of the same round is about to be replaced and does not
    count; its reservations of other rounds do.
    """
    same = account.held(ids, lambda r: r.run == run.key and r.round_index == round_index)
    other = account.held(ids, lambda r: r.run == run.key and r.round_index != round_index)
    left = _left(account, run, in_run, ids, uncounted=same, counted=other)
    charges = granted(asked, left, account.info.allowance_mu2)
    short = np.isnan(charges)
    if np.any(short):
        raise _refusal(run, round_index, ids[short], asked[short], left[short])
    return charges


def _left(
    account: Account,
    run: RunInfo,
    in_run: FloatArray,
    ids: IntArray,
    *,
    uncounted: FloatArray,
    counted: FloatArray,
) -> FloatArray:
    """Return what the run may take of `ids`, never below zero.

    Of the run's own reservations, `uncounted` are not held against the lifetime
    allowance and `counted` are held against the run's budget.
    """
    reserved = account.reserved[ids] - uncounted
    lifetime = account.info.allowance_mu2 - account.spent[ids] - reserved
    left = np.maximum(np.minimum(run.budget_mu2 - in_run[ids] - counted, lifetime), 0.0)
    if run.sits_out.size:
        left[np.isin(ids, run.sits_out)] = 0.0
    return left


def _refusal(
    run: RunInfo, round_index: int, ids: IntArray, asked: FloatArray, left: FloatArray
) -> BudgetExceededError:
    worst = int(np.argmax(asked - left))
    have = "1 client has" if ids.size == 1 else f"{ids.size} clients have"
    return BudgetExceededError(
        f"round {round_index} of run {run.name!r}: {have} less left than charged; client "
        f"{ids[worst]} is charged mu²={asked[worst]:.6g} and has {left[worst]:.6g} left. "
        "Leave them out or lower their bound (see run.remaining)",
        *(ids, asked, left),
    )
