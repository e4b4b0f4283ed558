"""Find the smallest noise that meets a target, with few evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedquilt.errors import InvalidValueError

_TINY = 1e-12
_LEAST = 1e-6


def smallest_with(
    spent: Callable[[float], float], target: float, *, start: float, step: float, precision: float
) -> float:
    """Return an x > 0 with spent(x) <= target that is the smallest to a relative `precision`.

    `spent` must not increase.  In logarithms it is nearly a straight line, so
    false position (with the Illinois rule, which halves the weight of an end that
    stays twice) ends after a few evaluations; each aims a little above the root, where
    the answer must lie.  The search also ends when `spent` is within `precision`
    of the target.
    """

    def excess(log_x: float) -> float:
        return math.log(max(spent(math.exp(log_x)), _TINY) / target)

    low, low_weight, high, high_weight = _bracket(excess, math.log(start), math.log(step))
    missing, side = -high_weight, 0
    while high - low > precision and missing > precision:
        aim = low + (high - low) * low_weight / (low_weight - high_weight) + 0.5 * precision
        middle = min(max(aim, low + 0.2 * precision), high - 0.2 * precision)
        value = excess(middle)
        if value <= 0:
            low_weight *= 0.5 if side == -1 else 1.0
            high, high_weight, missing, side = middle, value, -value, -1
        else:
            high_weight *= 0.5 if side == 1 else 1.0
            low, low_weight, side = middle, value, 1
    return math.exp(high)


def _bracket(
    excess: Callable[[float], float], start: float, step: float
) -> tuple[float, float, float, float]:
    """Walk from `start` until the root lies between two neighbouring points."""
    high, high_excess = start, excess(start)
    if high_excess > 0:
        while high_excess > 0:
            low, low_excess = high, high_excess
            high += step
            high_excess = excess(high)
        return low, low_excess, high, high_excess
    while True:
        low = high - step
        if low < math.log(_LEAST):
            raise InvalidValueError(
                f"target_epsilon must be lower: it is met without noise (below {_LEAST:g})"
            )
        low_excess = excess(low)
        if low_excess > 0:
            return low, low_excess, high, high_excess
        high, high_excess = low, low_excess
