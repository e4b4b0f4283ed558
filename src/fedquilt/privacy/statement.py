"""The statement at the end of a run: what may be claimed, for whom, and what not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Statement:
    """An (epsilon, delta) claim about every client, or the word that there is none.

    Zero-out adjacency: two runs are neighbours when one client's data are
    replaced by nothing, while roster, participation and cohort sizes stay as
    they are and are public (Kairouz et al. 2021, Definition 1.1).

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
        )

    @property
    def is_bounded(self) -> bool:
        """Whether every client has a finite epsilon."""
        return math.isfinite(self.epsilon_max)

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

    def as_text(self) -> str:
        """Return the statement in words, one fact a line."""
        if self.is_bounded:
            claim = (
                f"every client: epsilon <= {self.epsilon_max:.3g} "
                f"(median {self.epsilon_median:.3g}) at delta {self.delta:g}"
            )
        else:
            claim = "epsilon: inf, no guarantee for the released model"
        lines = [
            f"claim      {claim}",
            f"unit       {self.unit}, adjacency {self.adjacency}",
            f"covered    {', '.join(self.covered) or 'nothing'}",
            f"uncovered  {', '.join(self.uncovered) or 'nothing'}",
            f"noise      {self.noise_source}",
        ]
        return "\n".join(lines + [f"note       {note}" for note in self.notes])


def _json_epsilon(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"
