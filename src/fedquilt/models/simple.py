"""Dense models for inputs of any shape; they end in logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from fedquilt.models.images import CountsParameters


class MLP(CountsParameters):
    """One hidden layer of rectified units."""

    def __init__(self, input_shape: Sequence[int], num_classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(input_shape), hidden)
        self.fc2 = nn.Linear(hidden, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return cast(torch.Tensor, self.fc2(functional.relu(self.fc1(x.flatten(1)))))


class Linear(CountsParameters):
    """Multinomial logistic regression."""

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(math.prod(input_shape), num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return cast(torch.Tensor, self.fc(x.flatten(1)))
