"""What a run may claim, and which tensors it covers."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedquilt.common.formatting import format_bound, printable

if TYPE_CHECKING:
    import torch

ADJACENCIES = {
    "zero-out": "its data against nothing in their place",
    "replace-one": "its data against any others, or nothing",
}
"""Which worlds a claim about a client compares, in words."""

NOT_COVERED = "not covered: the private file of the run, and what is tuned by looking at results"

_WEAK_EPSILON = 10.0
_LARGE_DELTA = 1e-3


@dataclass(frozen=True, kw_only=True)
class Statement:
    """An (epsilon, delta) claim about every client, or the word that there is none.

    Adjacency zero-out: two worlds are neighbours when in one of them there is
    nothing in the place of one client's data (Kairouz et al. 2021, Definition
    1.1).  Adjacency replace-one: when one client's data differ in any way.  In
    both, roster, participation and cohort sizes are the same and are public.

    An epsilon of `math.inf` is written as the text "inf".
    """

    delta: float
    epsilon_max: float
    epsilon_median: float
    covered: tuple[str, ...]
    uncovered: tuple[str, ...]
    noise_source: str
    notes: tuple[str, ...] = field(default=())
    unit: str = "client"
    adjacency: str = "zero-out"

    @classmethod
    def without_bound(
        cls,
        *,
        delta: float,
        covered: Sequence[str],
        uncovered: Sequence[str],
        noise_source: str,
        notes: Sequence[str],
        adjacency: str = "zero-out",
    ) -> Statement:
        """Say that no finite epsilon may be claimed."""
        return cls(
            delta=delta,
            epsilon_max=math.inf,
            epsilon_median=math.inf,
            covered=tuple(covered),
            uncovered=tuple(uncovered),
            noise_source=noise_source,
            notes=tuple(notes),
            adjacency=adjacency,
        )

    @property
    def is_bounded(self) -> bool:
        """Whether every client has a finite epsilon."""
        return math.isfinite(self.epsilon_max)

    def believing(
        self, beliefs: Sequence[str], doubts: Sequence[str] = (), uncovered: Sequence[str] = ()
    ) -> Statement:
        """Say what else a claim rests on, and what it leaves out; with doubts there is none."""
        if not self.is_bounded:
            return self
        if not doubts:
            return dataclasses.replace(
                self,
                notes=(*self.notes, *beliefs),
                uncovered=(*self.uncovered, *uncovered),
            )
        return Statement.without_bound(
            delta=self.delta,
            covered=self.covered,
            uncovered=self.uncovered,
            noise_source=self.noise_source,
            notes=doubts,
            adjacency=self.adjacency,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the statement for a JSON record."""
        return {
            "unit": self.unit,
            "adjacency": self.adjacency,
            "delta": self.delta,
            "epsilon_max": _json_epsilon(self.epsilon_max),
            "epsilon_median": _json_epsilon(self.epsilon_median),
            "covered": list(self.covered),
            "uncovered": list(self.uncovered),
            "noise_source": self.noise_source,
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Statement:
        """Read what `as_json` wrote."""
        return cls(
            unit=record["unit"],
            adjacency=record["adjacency"],
            delta=record["delta"],
            epsilon_max=float(record["epsilon_max"]),
            epsilon_median=float(record["epsilon_median"]),
            covered=tuple(record["covered"]),
            uncovered=tuple(record["uncovered"]),
            noise_source=record["noise_source"],
            notes=tuple(record["notes"]),
        )

    @property
    def claim(self) -> str:
        """The promise in one line."""
        if not self.is_bounded:
            return "epsilon: inf, no guarantee for the released model"
        return (
            f"every client: epsilon <= {format_bound(self.epsilon_max)} "
            f"(median {format_bound(self.epsilon_median)}) "
            f"at delta {format_bound(self.delta, 6)}"
        )

    def __str__(self) -> str:
        return self.as_text()

    def as_text(self, width: int | None = None) -> str:
        """Return the statement in words, one fact a line, or in lines of at most `width`."""
        lines = [
            f"claim      {self.claim}",
            f"unit       {self.unit}, adjacency {self._adjacency_in_words()}",
            f"covered    {', '.join(self.covered) or 'nothing'}",
            f"uncovered  {', '.join(self.uncovered) or 'nothing'}",
            f"noise      {self.noise_source}",
            *(f"note       {note}" for note in self.notes),
        ]
        lines = [printable(line) for line in lines]  # a name must not forge a line of its own
        if width is not None:
            indent = " " * 11
            lines = [
                textwrap.fill(
                    line,
                    max(40, width),
                    subsequent_indent=indent,
                    break_on_hyphens=False,
                    break_long_words=False,
                )
                for line in lines
            ]
        return "\n".join(lines)

    def _adjacency_in_words(self) -> str:
        """Name the adjacency and, where something is claimed, say what it compares."""
        meaning = ADJACENCIES.get(self.adjacency) if self.is_bounded else None
        return self.adjacency if meaning is None else f"{self.adjacency} ({meaning})"


def cautions(epsilon: float, delta: float, num_clients: int) -> tuple[str, ...]:
    """Say in plain words where a finite claim protects little.

    Showing the data of one of N clients, picked at random, is (0, 1/N)-private:
    a delta above that permits it.
    """
    notes = []
    if delta > 1.0 / num_clients:
        notes.append(
            f"caution: delta {format_bound(delta, 6)} is above 1/{num_clients}, one over the "
            "number of clients; so large a delta would permit showing one client's data outright"
        )
    elif delta > _LARGE_DELTA:
        notes.append(
            f"caution: delta {format_bound(delta, 6)} is the probability with which the claim may "
            "fail altogether"
        )
    return *notes, *weak_epsilon(epsilon)


def weak_epsilon(epsilon: float, what: str = "epsilon") -> tuple[str, ...]:
    """Say that an epsilon protects little, where it does; `what` is how it is called."""
    if epsilon <= _WEAK_EPSILON:
        return ()
    return (
        f"caution: {what} {format_bound(epsilon)} is above 10; what is released may then be "
        "more than 20,000 times as likely with a client's data as without: hardly a protection",
    )


def _json_epsilon(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


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
    def num_covered(self) -> int:
        """The number of covered coordinates."""
        return sum(stop - start for start, stop in self.ranges)

    def take(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the covered coordinates: a view for one range, else a copy."""
        import torch

        parts = [vector[start:stop] for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, vector: torch.Tensor, part: torch.Tensor) -> None:
        """Write the covered coordinates back into the vector."""
        offset = 0
        for start, stop in self.ranges:
            vector[start:stop] = part[offset : offset + stop - start]
            offset += stop - start
