"""Which coordinates of the flat vector a mechanism clips and noises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Coverage:
    """A union of index ranges of a vector of `size`, with the names on each side."""

    size: int
    ranges: tuple[tuple[int, int], ...]
    covered: tuple[str, ...]
    uncovered: tuple[str, ...]

    @classmethod
    def make(
        cls, size: int, tensors: Iterable[tuple[str, int, int]], chosen: Iterable[str]
    ) -> Coverage:
        """Cover the chosen ones of `(name, start, stop)` tensors, joining neighbours."""
        wanted = set(chosen)
        ranges: list[tuple[int, int]] = []
        covered, uncovered = [], []
        for name, start, stop in tensors:
            if name not in wanted:
                uncovered.append(name)
                continue
            covered.append(name)
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return cls(size, tuple(ranges), tuple(covered), tuple(uncovered))

    @property
    def is_whole(self) -> bool:
        """Whether every coordinate is covered."""
        return not self.uncovered

    @property
    def num_covered(self) -> int:
        """The number of covered coordinates."""
        return sum(stop - start for start, stop in self.ranges)

    def take(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the covered coordinates: a view for one range, else a copy."""
        parts = [vector[start:stop] for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, vector: torch.Tensor, part: torch.Tensor) -> None:
        """Write the covered coordinates back into the vector."""
        offset = 0
        for start, stop in self.ranges:
            vector[start:stop] = part[offset : offset + stop - start]
            offset += stop - start
