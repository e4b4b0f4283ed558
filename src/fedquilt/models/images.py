"""The networks of the QuAP-FL API document (section Models), and smaller ones.

All end in log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fedquilt.common.errors import InvalidValueError


class CountsParameters(nn.Module):
    """A module that can tell its size."""

    def get_num_parameters(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


class QuapModel(CountsParameters):
    """The methods that both models of the QuAP-FL API document have."""

    def get_gradients_as_vector(self) -> NDArray[Any] | None:
        """Return all gradients as one flat array; None when no parameter has one.

        A parameter without a gradient counts as zero.
        """
        gradients = [parameter.grad for parameter in self.parameters()]
        if all(gradient is None for gradient in gradients):
            return None
        filled = (
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self.parameters(), gradients, strict=True)
        )
        return torch.cat([gradient.detach().flatten().cpu() for gradient in filled]).numpy()

    def set_gradients_from_vector(self, grad_vector: NDArray[Any] | torch.Tensor) -> None:
        """Give every parameter its part of a flat vector as its gradient."""
        vector = torch.as_tensor(grad_vector)
        size = self.get_num_parameters()
        if vector.shape != (size,):
            raise InvalidValueError(
                f"grad_vector of shape {tuple(vector.shape)} must have the shape ({size},)"
            )
        start = 0
        for parameter in self.parameters():
            part = vector[start : start + parameter.numel()].view_as(parameter)
            parameter.grad = part.detach().clone().to(parameter)
            start += parameter.numel()


class MNISTModel(QuapModel):
    """Two convolutions and two dense layers for 1 x 28 x 28 images; 1,199,882 parameters."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.fc1 = nn.Linear(9216, 128)
        self.dropout2 = nn.Dropout(0.5)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities."""
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = self.dropout1(functional.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)


class CIFAR10Model(QuapModel):
    """Three convolutions and three dense layers for 3 x 32 x 32 images; 1,453,834 parameters."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1)
        self.conv2 = nn.Conv2d(64, 128, 3, padding=1)
        self.conv3 = nn.Conv2d(128, 256, 3, padding=1)
        self.fc1 = nn.Linear(256 * 4 * 4, 256)
        self.dropout = nn.Dropout(0.5)
        self.fc2 = nn.Linear(256, 128)
        self.fc3 = nn.Linear(128, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities."""
        for convolution in (self.conv1, self.conv2, self.conv3):
            x = functional.max_pool2d(functional.relu(convolution(x)), 2, 2)
        x = self.dropout(functional.relu(self.fc1(x.flatten(1))))
        x = functional.relu(self.fc2(x))
        return functional.log_softmax(self.fc3(x), dim=1)


class DigitsModel(CountsParameters):
    """One convolution and two dense layers for 1 x 8 x 8 digits; 8,714 parameters."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        return functional.log_softmax(self.fc2(x), dim=1)


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
