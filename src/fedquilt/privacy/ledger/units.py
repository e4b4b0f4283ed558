"""The unit of account: squared GDP units, kept exactly in float64.

A release with noise of standard deviation s, in which client i is bounded by
c_i, costs that client μ² = (c_i/s)² and costs nobody else anything (zero-out
adjacency).  Releases compose as μ_i² = Σ (c_i/s)², exactly and in any order,
also when later ones are chosen from earlier results (Dong, Roth & Su 2022;
Smith & Thakurta 2022 for the filter).  An allowance (ε, δ) is therefore one
number, μ_L² with μ_L = gaussian_mu(ε, δ), and keeping every client's sum at or
below it keeps every client at (ε, δ).

Epsilons do not add up and cannot be subtracted.  What a client has left is
μ_L² − μ_i², and the largest epsilon a new run may still ask for is

    gaussian_epsilon(√(μ_L² − μ_i²), δ).

After one run at ε = 3 of an allowance of ε = 6, δ = 1e-5, that is 4.86, not 3.

Sums are exact, not merely accurate.  Every charge is rounded up to a multiple of
the allowance's last binary place; multiples of one power of two that stay below
2^53 of it add and subtract in float64 without any rounding.  So the order of
charges cannot matter, a balance computed again is the same bit for bit, and what
stands in the ledger is never less than what was released.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedquilt.common.errors import InvalidValueError
from fedquilt.privacy.accounting.gaussian import (
    gaussian_epsilon,
    gaussian_epsilon_many,
    gaussian_mu,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MARGIN = 1e-12
"""An allowance is lowered by this share, so that a sum at the limit is below it."""

TOLERANCE = 1e-11
"""A charge above what is left by at most this share of the allowance (and at most
a millionth of itself) is lowered to what is left: K charges of 1/K pass."""

_SHARP_VALUES = 512  # up to so many different values, epsilon is computed one by one


LEAST_MU2 = 1e-290
"""A smaller allowance is refused: below it float64 keeps fewer digits, then none."""


def allowance_mu2(epsilon: float, delta: float) -> float:
    """Return the squared GDP units that (epsilon, delta) allows, on the safe side."""
    try:
        allowed = gaussian_mu(epsilon, delta) ** 2 * (1.0 - MARGIN)
    except OverflowError:
        allowed = math.inf
    if not LEAST_MU2 <= allowed < math.inf:
        raise InvalidValueError(
            f"epsilon={epsilon!r} at delta={delta!r} must be an amount that can be counted: it "
            f"allows mu²={allowed:g}, which must be >= {LEAST_MU2:g} and finite"
        )
    return allowed


def grid_unit(limit_mu2: float) -> float:
    """Return the power of two of which every amount under `limit_mu2` is a multiple."""
    return math.ulp(limit_mu2)


def round_up(mu2: FloatArray, unit: float) -> FloatArray:
    """Return the smallest multiples of `unit`, a power of two, that are >= `mu2`."""
    with np.errstate(over="ignore"):
        return np.asarray(np.ceil(mu2 / unit) * unit, dtype=np.float64)


def round_down(mu2: float, unit: float) -> float:
    """Return the largest multiple of `unit`, a power of two, that is <= `mu2`."""
    return math.floor(mu2 / unit) * unit


def granted(asked: FloatArray, left: FloatArray, limit_mu2: float) -> FloatArray:
    """Return the charges to record: `asked` on the grid, never above `left`.

    A charge that does not fit is NaN.  One that misses by rounding only (see
    `TOLERANCE`) is lowered to what is left; a client with nothing left gets
    nothing, however small the charge.
    """
    charges = round_up(asked, grid_unit(limit_mu2))
    excess = charges - left
    rounding = (excess <= TOLERANCE * limit_mu2) & (excess <= 1e-6 * asked)
    return np.where(excess <= 0, charges, np.where(rounding, left, np.nan))


def falls_short(asked: float, left: FloatArray, limit_mu2: float) -> npt.NDArray[np.bool_]:
    """Return where `left` is less than `asked` by more than rounding."""
    return np.asarray(left < asked - TOLERANCE * limit_mu2, dtype=np.bool_)


def epsilon_spent(mu2: FloatArray, delta: float) -> FloatArray:
    """Return the epsilon of every amount, never below the exact one; inf stays inf."""
    joined = np.flatnonzero(mu2)  # of a million clients most were never in a release
    values, places = np.unique(mu2[joined], return_inverse=True)
    if values.size + (joined.size < mu2.size) > _SHARP_VALUES:
        return gaussian_epsilon_many(mu2, delta)
    sharp = [gaussian_epsilon(math.sqrt(v), delta) if v < math.inf else v for v in values]
    epsilons = np.zeros(mu2.shape)
    epsilons[joined] = np.array(sharp, dtype=np.float64)[places]
    return epsilons


def epsilon_left(mu2: FloatArray, delta: float) -> FloatArray:
    """Return the largest epsilon that every amount pays for, never above the exact one.

    `gaussian_epsilon_many` promises at most 0.1 % plus 1e-9 above the exact
    value; taking that off again gives a bound from below.
    """
    values, places = np.unique(mu2, return_inverse=True)
    if values.size > _SHARP_VALUES:
        many = gaussian_epsilon_many(mu2, delta)
        return np.maximum(many / 1.001 - 1e-9, 0.0)
    sharp = np.array([_payable_epsilon(float(v), delta) for v in values], dtype=np.float64)
    return sharp[places]


def _payable_epsilon(mu2: float, delta: float) -> float:
    """Return an epsilon with allowance_mu2(epsilon, delta) <= mu2, as large as can be told."""
    if mu2 < LEAST_MU2:
        return 0.0
    epsilon = gaussian_epsilon(math.sqrt(mu2), delta)
    while epsilon > 0 and gaussian_mu(epsilon, delta) ** 2 * (1.0 - MARGIN) > mu2:
        epsilon *= 1.0 - 1e-9
    return epsilon
