"""The index algebra of one dimension: ranges as written, axes as computed.

A range is the part of a layer that a client holds, in fractions of its full size:

    '1/4'  '0'  '1'  '0.25'  0.25  Fraction(1, 4)  1          one bound
    ('0', '1/4')                                              one interval, half open
    [('3/4', '1'), ('0', '1/4')]                              several, packed in this order

Both ends of an interval are rounded by one rule: on an axis of size F the
interval [a, b) holds the positions floor(F a) .. floor(F b) - 1.  Disjoint
intervals therefore hold disjoint positions, and adjacent intervals leave no gap.

An `Axis` is an ordered set of positions, kept as runs of neighbours, so that a
prefix or a rolling window of a million positions is one pair or two pairs of
numbers.  Everything else in this package is made from these four operations:

| operation | meaning | where it is needed |
|---|---|---|
| `spread(k)` | every position becomes k neighbours | flatten of C x H x W; heads |
| `stacked(k)` | the same choice in k copies laid end to end | packed query, key, value |
| `end_to_end(a, b)` | axes laid end to end | concatenation of feature maps |
| `per_group(g)` | one choice that repeats in every held group | grouped convolution |
"""

from __future__ import annotations

import math
import numbers
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.errors import InvalidValueError

Bound: TypeAlias = str | int | float | Fraction | Decimal
Interval: TypeAlias = tuple[Bound, Bound]
Intervals: TypeAlias = Sequence[Interval]
Layer_Range: TypeAlias = Interval | Intervals

Ranges: TypeAlias = tuple[tuple[Fraction, Fraction], ...]

FULL: Ranges = ((Fraction(0), Fraction(1)),)


_LONGEST = 400
_LARGE_EXPONENT = re.compile(r"[eE][-+]?[0-9_]{4,}")


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
        text = str(value)
        if len(text) > _LONGEST or _LARGE_EXPONENT.search(text):
            raise ValueError("too many digits")  # 1e999999999 would take for ever to write out
        return Fraction(text)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise InvalidValueError(
            f"{where}={value!r} must be a fraction or decimal such as '1/4' or 0.25"
        ) from error


def parse_ranges(value: object, where: str = "ranges") -> Ranges:
    """Return one interval, or a list of them, as disjoint intervals inside [0, 1].

    The order is kept: it is the order in which a sub-layer packs the intervals.
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
        raise InvalidValueError(
            f"{where}={format_ranges(ranges)} must hold a position of the {size} there"
        )
    return held


def format_ranges(ranges: Ranges) -> str:
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


@dataclass(frozen=True)
class Axis:
    """Positions held on a dimension of `size`, in packed order.

    `runs` are half-open and disjoint; neighbours that continue one another are
    one run, so equal choices are equal objects.
    """

    size: int
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def full(cls, size: int) -> Axis:
        """Return the axis that holds everything."""
        return cls(size, ((0, size),))

    @classmethod
    def from_runs(cls, size: int, runs: Iterable[tuple[int, int]]) -> Axis:
        """Return the axis of disjoint half-open runs, in the order given."""
        joined: list[tuple[int, int]] = []
        for start, stop in runs:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        return cls(size, tuple(joined))

    @classmethod
    def from_ranges(cls, size: int, ranges: Ranges, where: str = "ranges") -> Axis:
        """Return the positions that fractions hold, both ends rounded down."""
        return cls.from_runs(size, positions(ranges, size, where))

    @classmethod
    def from_index(cls, size: int, index: Sequence[int] | NDArray[np.int64]) -> Axis:
        """Return the axis of listed positions, in the order given."""
        listed = np.asarray(index, dtype=np.int64)
        if listed.size == 0 or listed.min() < 0 or listed.max() >= size:
            raise InvalidValueError(f"index={index!r} must list positions of 0..{size - 1}")
        if np.unique(listed).size != listed.size:
            raise InvalidValueError(f"index={index!r} must not list a position twice")
        breaks = np.flatnonzero(np.diff(listed) != 1) + 1
        runs = np.split(listed, breaks)
        return cls(size, tuple((int(run[0]), int(run[-1]) + 1) for run in runs))

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    @cached_property
    def is_full(self) -> bool:
        """Whether everything is held, in its own order."""
        return self.runs == ((0, self.size),)

    def contains(self, other: Axis) -> bool:
        """Tell whether all positions of another choice on this dimension are held here too."""
        if self.is_full or self.runs == other.runs:
            return True
        mine = sorted(self.runs)
        starts = [start for start, _ in mine]
        for start, stop in other.runs:
            place = bisect_right(starts, start) - 1
            if place < 0 or stop > mine[place][1]:
                return False
        return True

    @cached_property
    def index(self) -> torch.Tensor:
        """The positions as int64, in packed order."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.runs])

    def spread(self, width: int) -> Axis:
        """Return the axis on which every position has become `width` neighbours."""
        runs = tuple((start * width, stop * width) for start, stop in self.runs)
        return Axis(self.size * width, runs)

    def stacked(self, copies: int) -> Axis:
        """Return the same choice in `copies` copies of the axis laid end to end."""
        return end_to_end([self] * copies)

    def per_group(self, groups: int) -> tuple[tuple[int, ...], Axis] | None:
        """Split into held groups and the choice that repeats inside each of them.

        Returns None when the groups do not all hold the same choice.
        """
        if groups == 1:
            return (0,), self
        width = self.size // groups
        index = self.index.numpy()
        held = list(dict.fromkeys((index // width).tolist()))
        if len(index) % len(held):
            return None
        inside = index.reshape(len(held), -1)
        same_group = (inside // width == np.asarray(held)[:, None]).all()
        same_choice = (inside % width == inside[:1] % width).all()
        if not (same_group and same_choice):
            return None
        return tuple(held), Axis.from_index(width, inside[0] % width)


def end_to_end(axes: Sequence[Axis]) -> Axis:
    """Return axes laid end to end as one."""
    starts = [0]
    for axis in axes:
        starts.append(starts[-1] + axis.size)
    runs = [
        (offset + start, offset + stop)
        for axis, (offset, _) in zip(axes, pairwise(starts), strict=True)
        for start, stop in axis.runs
    ]
    return Axis.from_runs(starts[-1], runs)
