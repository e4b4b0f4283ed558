"""The index algebra of one dimension.

An `Axis` is an ordered set of positions, kept as runs of neighbours, so that a
prefix or a rolling window of a million positions is one pair or two pairs of
numbers.  Everything else in this package is made from these four operations:

| operation | meaning | where it is needed |
|---|---|---|
| `spread(k)` | every position becomes k neighbours | flatten of C x H x W; heads |
| `stacked(k)` | the same choice in k copies laid end to end | packed query, key, value |
| `joined(a, b)` | axes laid end to end | concatenation of feature maps |
| `per_group(g)` | one choice that repeats in every held group | grouped convolution |
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.errors import InvalidValueError
from fedquilt.subnet.ranges import Ranges, positions


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
        pieces = np.split(listed, breaks)
        return cls(size, tuple((int(piece[0]), int(piece[-1]) + 1) for piece in pieces))

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
        return joined([self] * copies)

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


def joined(axes: Sequence[Axis]) -> Axis:
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
