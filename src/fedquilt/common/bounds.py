"""Bounds in print: a figure that is promised is never shown smaller than it is."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

_DIGITS = 3


def format_bound(value: float, digits: int = _DIGITS) -> str:
    """Return an upper bound in so many digits, rounded up; "∞" when it is not finite.

    What lies below the twelfth digit is rounding of a float and is dropped first, so
    that 2.1 stays 2.1.

    >>> format_bound(4.6549), format_bound(2.1), format_bound(0.30001), format_bound(12345.6)
    ('4.66', '2.1', '0.301', '12400')
    """
    return _rounded(value, digits, ROUND_CEILING)


def format_left(value: float, digits: int = _DIGITS) -> str:
    """Return what may still be spent in so many digits, rounded down.

    >>> format_left(4.8672)
    '4.86'
    """
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return "∞"
    exact = Context(prec=12).create_decimal(Decimal(value))
    return f"{float(Context(prec=digits, rounding=rounding).plus(exact)):.12g}"
