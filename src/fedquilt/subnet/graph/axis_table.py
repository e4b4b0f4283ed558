"""Which dimensions of a model must be cut alike.

Each layer that makes features opens an axis of units.  An addition ties the
axes of its operands, a grouped convolution or an attention layer makes the
units of an axis coarser, the model's output pins an axis whole.  A union-find
over units keeps track: when an axis of 64 channels is tied to one of 4 heads of
16 features, the 64 become 4 units of 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedquilt.errors import InvalidValueError


@dataclass(frozen=True)
class Part:
    """An axis of the table in which every unit stands for `factor` neighbours."""

    axis: int
    factor: int = 1


class AxisTable:
    """The axes of a model under construction."""

    def __init__(self) -> None:
        self._units: list[int] = []
        self._parent: list[Part | None] = []
        self._pinned: list[bool] = []
        self._origin: list[str] = []

    def open(self, units: int, origin: str) -> Part:
        """Open an axis; `origin` is the layer that makes its features."""
        self._units.append(units)
        self._parent.append(None)
        self._pinned.append(False)
        self._origin.append(origin)
        return Part(len(self._units) - 1)

    def root(self, part: Part) -> Part:
        """Return the same features in terms of the axis they have been tied to."""
        parent = self._parent[part.axis]
        while parent is not None:
            part = Part(parent.axis, parent.factor * part.factor)
            parent = self._parent[part.axis]
        return part

    def size(self, part: Part) -> int:
        """Return the number of features."""
        return self._units[part.axis] * part.factor

    def units(self, axis: int) -> int:
        """Return the number of units of an axis."""
        return self._units[axis]

    def origin(self, part: Part) -> str:
        """Return the layer that first made the features."""
        return self._origin[part.axis]

    def is_pinned(self, axis: int) -> bool:
        """Whether an axis, given by its root, must stay whole."""
        return self._pinned[axis]

    def pin(self, part: Part) -> None:
        """Keep an axis whole."""
        self._pinned[self.root(part).axis] = True

    def tie(self, one: Part, other: Part, where: str) -> None:
        """Let two dimensions be cut alike."""
        left, right = self.root(one), self.root(other)
        if left == right:
            return
        if self.size(left) != self.size(right):
            raise InvalidValueError(
                f"{where}: features of {self.origin(one)} ({self.size(one)}) and of "
                f"{self.origin(other)} ({self.size(other)}) must be equally many to be combined"
            )
        common = math.gcd(self._units[left.axis], self._units[right.axis])
        pinned = self._pinned[left.axis] or self._pinned[right.axis]
        first = min(left.axis, right.axis)
        joint = self.open(common, self._origin[first])
        for side in (left, right):
            self._parent[side.axis] = Part(joint.axis, self._units[side.axis] // common)
        self._pinned[joint.axis] = pinned
