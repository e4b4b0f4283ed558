"""One client after the other with gradients by hand, by autograd where there are none."""

from __future__ import annotations

import logging

import torch
from torch import nn

from fedquilt.training.flat import FlatModel
from fedquilt.training.task import ClientUpdate, LocalSettings, Task
from fedquilt.training.trainers.autograd import LARGE, SequentialEngine
from fedquilt.training.trainers.manual import CpuTraining, hand_training

_log = logging.getLogger(__name__)


class HandEngine(SequentialEngine):
    """Train clients one by one on a CPU, the fastest way that the model and the loss allow.

    Updates agree with those of the sequential engine up to rounding.
    """

    def __init__(self, model: nn.Module | FlatModel, task: Task, settings: LocalSettings) -> None:
        super().__init__(model, task, settings)
        self.by_hand: CpuTraining | None = None
        size = self._flat.vector.numel()
        if size > LARGE:
            _log.info("the model trains by autograd: %d parameters are more than %d", size, LARGE)
        else:
            self.by_hand = hand_training(self._flat, task, settings, self._draws)

    def train_one(
        self, start: torch.Tensor, client: int, round_index: int, learning_rate: float
    ) -> ClientUpdate:
        """Train one client and return its update."""
        if self.by_hand is None:
            return super().train_one(start, client, round_index, learning_rate)
        return self.by_hand.update_of(start, client, round_index, learning_rate)
