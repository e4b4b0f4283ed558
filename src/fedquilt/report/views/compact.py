"""Long lists made short: rosters as bits, numbers with the digits that a screen can show."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

_DIGITS = 5


def short(value: Any, digits: int = _DIGITS) -> Any:
    """Return a number with so many digits; None for what is no finite number.

    >>> short(0.123456789), short(3), short(float("nan")), short(None)
    (0.12346, 3, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    number = float(value)
    if not math.isfinite(number):
        return None
    return (
        int(number) if number.is_integer() and abs(number) < 1e15 else float(f"{number:.{digits}g}")
    )


def shorts(values: Iterable[Any], digits: int = _DIGITS) -> list[Any]:
    """Return every number with so many digits."""
    return [short(value, digits) for value in values]


def upward(value: float, digits: int = _DIGITS) -> float | str:
    """Return a bound with so many digits, never below what it is; "inf" when there is none.

    >>> upward(2.000001), upward(float("inf"))
    (2.0001, 'inf')
    """
    if not math.isfinite(value):
        return "inf"
    rounded = float(f"{value:.{digits}g}")
    if rounded < value * (1 - 1e-12):
        exponent = math.floor(math.log10(abs(value)))
        rounded = float(f"{rounded + 10.0 ** (exponent - digits + 1):.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded


def encode_roster(cohort: Sequence[int], num_clients: int) -> str | list[int]:
    """Return who was there: a list, or one bit a client in base64 where that is shorter."""
    members = sorted(int(client) for client in cohort)
    digits = len(str(max(1, num_clients - 1))) + 1
    if len(members) * digits <= 4 * math.ceil(num_clients / 24):
        return members
    bits = np.zeros(num_clients, dtype=np.uint8)
    bits[[client for client in members if 0 <= client < num_clients]] = 1
    return base64.b64encode(np.packbits(bits).tobytes()).decode("ascii")
