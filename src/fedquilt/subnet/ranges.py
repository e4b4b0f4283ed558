"""Ranges: which part of a layer a client holds, written as fractions of its full size.

    '1/4'  '0'  '1'  '0.25'  0.25  Fraction(1, 4)  1          one bound
    ('0', '1/4')                                              one interval, half open
    [('3/4', '1'), ('0', '1/4')]                              several, packed in this order

Both ends of an interval are rounded by one rule: on an axis of size F the
interval [a, b) holds the positions floor(F a) .. floor(F b) - 1.  Disjoint
intervals therefore hold disjoint positions, and adjacent intervals leave no gap.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any, TypeAlias

from fedquilt.errors import InvalidValueError

Bound: TypeAlias = str | int | float | Fraction | Decimal
Interval: TypeAlias = tuple[Bound, Bound]
Intervals: TypeAlias = Sequence[Interval]
Layer_Range: TypeAlias = Interval | Intervals

Ranges: TypeAlias = tuple[tuple[Fraction, Fraction], ...]

FULL: Ranges = ((Fraction(0), Fraction(1)),)


def parse_bound(value: object, where: str = "bound") -> Fraction:
    """Return one bound as an exact fraction; a float counts as the decimal it prints.

    >>> parse_bound("2/8"), parse_bound(0.1), parse_bound(1)
    (Fraction(1, 4), Fraction(1, 10), Fraction(1, 1))
    """
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real | Decimal):
        raise InvalidValueError(
            f"{where}={value!r} must be a number such as '1/4', '0.25', 0.25 or Fraction(1, 4)"
        )
    try:
        if isinstance(value, numbers.Rational):
            return Fraction(int(value.numerator), int(value.denominator))
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise InvalidValueError(
            f"{where}={value!r} must be a fraction or decimal such as '1/4' or 0.25"
        ) from error


def parse_ranges(value: object, where: str = "ranges") -> Ranges:
    """Return one interval, or a list of them, as disjoint intervals inside [0, 1].

    The order is kept: it is the order in which a sub-layer packs the pieces.
    """
    pairs = _as_pairs(value, where)
    ranges = tuple((parse_bound(start, where), parse_bound(end, where)) for start, end in pairs)
    for start, end in ranges:
        if start < 0 or end > 1:
            raise InvalidValueError(f"{where}={value!r} must lie inside [0, 1]")
        if start >= end:
            raise InvalidValueError(
                f"{where}={value!r} must have start < end in every interval; "
                f"one runs from {start} to {end}"
            )
    _refuse_overlap(ranges, value, where)
    return ranges


def positions(ranges: Ranges, size: int, where: str = "ranges") -> tuple[tuple[int, int], ...]:
    """Return the half-open runs of positions the ranges hold on an axis of `size`.

    >>> positions(parse_ranges(('1/4', '1/2')), 10)
    ((2, 5),)
    """
    runs = ((math.floor(size * start), math.floor(size * end)) for start, end in ranges)
    held = tuple((start, end) for start, end in runs if start < end)
    if not held:
        raise InvalidValueError(f"{where}={show(ranges)} must hold a position of the {size} there")
    return held


def show(ranges: Ranges) -> str:
    """Return the ranges as a user would write them."""
    pairs = [f"('{start}', '{end}')" for start, end in ranges]
    return pairs[0] if len(pairs) == 1 else f"[{', '.join(pairs)}]"


def _as_pairs(value: object, where: str) -> list[tuple[Any, Any]]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidValueError(
            f"{where}={value!r} must be an interval (start, end) or a list of intervals"
        )
    items = list(value)
    if len(items) == 2 and not any(_is_sequence(item) for item in items):
        return [(items[0], items[1])]
    if not items:
        raise InvalidValueError(f"{where}={value!r} must hold at least one interval")
    for item in items:
        if not _is_sequence(item) or len(item) != 2:
            raise InvalidValueError(f"{where}={value!r} must be made of intervals (start, end)")
    return [(item[0], item[1]) for item in items]


def _is_sequence(item: object) -> bool:
    return isinstance(item, Sequence) and not isinstance(item, str)


def _refuse_overlap(ranges: Ranges, value: object, where: str) -> None:
    ordered = sorted(ranges)
    for (_, end), (start, _) in pairwise(ordered):
        if start < end:
            raise InvalidValueError(
                f"{where}={value!r} must be disjoint intervals; two share "
                f"what lies between {start} and {end}"
            )
