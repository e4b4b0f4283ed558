"""What the synthetic images of a round are matched to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt import validate
from fedquilt.condense.table import StatisticsTable


@dataclass(frozen=True, eq=False)
class Drawn:
    """Groups drawn for each class: means [P, S, .] and weights [P, S] that sum to 1."""

    features: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor

    def averaged(self) -> Drawn:
        """Return the weighted means as one group a class."""
        weights = self.weights[..., None]
        return Drawn(
            (weights * self.features).sum(dim=1, keepdim=True),
            (weights * self.logits).sum(dim=1, keepdim=True),
            self.weights.new_ones(len(self.weights), 1),
        )


class ClassTargets:
    """The groups of one feature model, by class.

    Parameters
    ----------
    table
        Rows of one feature model, from all clients of the round.
    per_step
        Groups of a class that one step sees, drawn without replacement; None: all of
        them.
    average
        Whether the groups of a draw may be merged into their weighted mean, which is
        all that `avg-loss` looks at.
    """

    def __init__(
        self, table: StatisticsTable, per_step: int | None = None, average: bool = True
    ) -> None:
        if per_step is not None:
            validate.integer("per_step", per_step, at_least=1)
        self.classes: list[int] = torch.unique(table.classes).tolist()
        self._features, self._logits = table.features, table.logits
        self._counts = table.counts.to(table.features)
        groups = table.classes.cpu().numpy()
        self._rows = [np.flatnonzero(groups == label) for label in self.classes]
        self._per_step = per_step
        self._average = average
        largest = max((len(rows) for rows in self._rows), default=0)
        self._fixed = None
        if per_step is None or per_step >= largest:
            self._fixed = self._gather(self._rows)

    def draw(self, source: np.random.Generator) -> Drawn:
        """Return what one step is matched to."""
        if self._fixed is not None:
            return self._fixed
        return self._gather([self._some(rows, source) for rows in self._rows])

    def _some(self, rows: NDArray[np.int64], source: np.random.Generator) -> NDArray[np.int64]:
        if self._per_step is None or len(rows) <= self._per_step:
            return rows
        return source.choice(rows, self._per_step, replace=False)

    def _gather(self, chosen: list[NDArray[np.int64]]) -> Drawn:
        """Lay the chosen groups side by side, short classes filled up with weight 0."""
        device = self._features.device
        most = max((len(rows) for rows in chosen), default=0)
        index = np.zeros((len(chosen), most), dtype=np.int64)
        filled = np.zeros((len(chosen), most), dtype=np.float32)
        for place, rows in enumerate(chosen):
            # A class is filled up with its own row: 0 times another's NaN would be NaN.
            index[place] = rows[0]
            index[place, : len(rows)] = rows
            filled[place, : len(rows)] = 1
        at = torch.from_numpy(index).to(device)
        weights = self._counts[at] * torch.from_numpy(filled).to(self._counts)
        weights = weights / weights.sum(dim=1, keepdim=True)
        drawn = Drawn(self._features[at], self._logits[at], weights)
        return drawn.averaged() if self._average else drawn
