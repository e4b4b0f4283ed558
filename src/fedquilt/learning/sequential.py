"""The reference engine: one client after the other, on one working model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.learning.engine import ClientUpdate, LocalSettings, Task
from fedquilt.learning.flat import FlatModel
from fedquilt.learning.local import client_seed, train_client


class SequentialEngine:
    """Train clients one by one; memory is one model beside the updates."""

    def __init__(self, model: nn.Module, task: Task, settings: LocalSettings) -> None:
        self.task = task
        self.settings = settings
        self._flat = FlatModel(model, task.inputs[:2])

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the cohort, in its order."""
        for client in cohort:
            yield self.train_one(start, int(client), round_index, learning_rate)

    def train_one(
        self, start: torch.Tensor, client: int, round_index: int, learning_rate: float
    ) -> ClientUpdate:
        """Train one client and return its update."""
        index = self.task.index(client)
        loss = train_client(
            self._flat,
            start,
            self.task.inputs,
            self.task.targets,
            index,
            learning_rate,
            self.settings,
            client_seed(self.settings, round_index, client),
        )
        return ClientUpdate(client, self._flat.read() - start, len(index), loss)

    def close(self) -> None:
        """Hold nothing, give nothing back."""
