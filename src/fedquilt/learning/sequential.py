"""The reference engine: one client after the other, on one working model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fedquilt.learning.engine import ClientUpdate, LocalSettings, Loss, LossOf, Task
from fedquilt.learning.flat import FlatModel
from fedquilt.learning.local import (
    client_seed,
    cross_entropy,
    find_draws,
    refuse_hidden_state,
    train_client,
)


class SequentialEngine:
    """Train clients one by one; memory is one model beside the updates."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: LocalSettings,
        loss_of: LossOf | None = None,
    ) -> None:
        self.task = task
        self.settings = settings
        self._loss_of = loss_of or self._default_loss
        public = task.public()
        self._flat = FlatModel(model, public.inputs)
        self._flat.remember()
        self._draws = find_draws(self._flat, public)
        refuse_hidden_state(self._flat, public, settings, self._draws, self._loss_of)

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
            self._loss_of(client, round_index),
            self._draws,
        )
        return ClientUpdate(client, self._flat.read() - start, len(index), loss)

    def _default_loss(self, client: int, round_index: int) -> Loss:
        """Return the cross-entropy, with the client's hidden classes where there are any."""
        mask = self.task.class_mask
        if mask is None:
            return cross_entropy
        hidden = mask.hidden[client]

        def masked(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(mask.apply(module(inputs), hidden), targets)

        return masked

    def close(self) -> None:
        """Hold nothing, give nothing back."""
