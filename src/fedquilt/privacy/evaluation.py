"""A noised mean of what clients measure on their own samples, charged like any release.

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
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.privacy.ledger import BudgetExceededError
from fedquilt.privacy.noise import NoiseSource
from fedquilt.privacy.run_account import RunAccount

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
