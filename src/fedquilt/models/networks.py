"""Networks for images and texts.

Those of the QuAP-FL API document (section Models) end in log-probabilities, the others in
logits.

`ConvNet`
    Blocks of convolution, normalisation and pooling, with an embedding for matching.
`ResNet18`
    ResNet-18 for small images (He et al. 2016), with a 3 x 3 stem and no first pooling;
    11,173,962 parameters for 3 x 32 x 32 images and 10 classes.
`ExitNet`
    A small network with early exits.  Every block has a classifier of its own, so clients
    may hold only the first blocks; and every block is as wide as it is given, so clients
    may hold a part of each.  Group normalisation keeps no statistics of the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fedquilt.common import checks
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


class ConvNet(CountsParameters):
    """Blocks of convolution, instance norm, ReLU and average pooling, then a linear layer.

    The network of DC, DSA and DM (Zhao and Bilen 2021, 2023): `depth` blocks of
    `width` channels, 3 x 3 kernels, every block halves the image.  One-channel images
    are padded by three in the first block, so that 28 x 28 becomes 32 x 32.  Instance
    norm (a group a channel, with scale and shift) has no running statistics: the
    network is the same in training and in evaluation.

    320,010 parameters for 3 x 32 x 32 and 10 classes, 317,706 for 1 x 28 x 28.

    >>> net = ConvNet((3, 32, 32), 10)
    >>> net.get_num_parameters(), tuple(net.embed(torch.zeros(2, 3, 32, 32)).shape)
    (320010, (2, 2048))
    """

    def __init__(
        self,
        input_shape: Sequence[int] = (3, 32, 32),
        num_classes: int = 10,
        width: int = 128,
        depth: int = 3,
    ) -> None:
        super().__init__()
        channels, *size = _image_shape(input_shape)
        checks.integer("num_classes", num_classes, at_least=1)
        checks.integer("width", width, at_least=1)
        checks.integer("depth", depth, at_least=1)
        padding = 3 if channels == 1 else 1
        size = [(side + 2 * padding - 2) // 2 for side in size]
        blocks: list[nn.Module] = []
        for number in range(depth):
            blocks += [
                nn.Conv2d(channels, width, 3, padding=padding if number == 0 else 1),
                nn.GroupNorm(width, width),
                nn.ReLU(),
                nn.AvgPool2d(2),
            ]
            channels = width
        size = [side // 2 ** (depth - 1) for side in size]
        if min(size) < 1:
            raise InvalidValueError(
                f"depth={depth} must leave at least one pixel of images of {tuple(input_shape)}"
            )
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Linear(width * math.prod(size), num_classes)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last feature map as one row an image."""
        return cast(torch.Tensor, self.features(x)).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return cast(torch.Tensor, self.classifier(self.embed(x)))

    def embed_and_forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings and logits of one pass."""
        embedded = self.embed(x)
        return embedded, self.classifier(embedded)


def _image_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) != 3 or min(shape) < 1:
        raise InvalidValueError(f"input_shape={tuple(shape)} must be (channels, height, width)")
    return tuple(int(side) for side in shape)


STAGE_CHANNELS = (64, 128, 256, 512)
NORMS = ("group", "batch")
_LENET_SIDE = 12


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut, which is a convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = make_norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = make_norm(norm, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, make_norm(norm, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(f(x) + shortcut(x))."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(CountsParameters):
    """ResNet-18 with the stem for 32 x 32 images.

    Parameters
    ----------
    num_classes : int
        The number of outputs.
    in_channels : int
        The channels of an image.
    norm : {"group", "batch"}
        Group normalisation keeps no statistics of the data and does not mix
        examples; batch normalisation is that of He et al. 2016.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, norm: str = "group") -> None:
        super().__init__()
        checks.choice("norm", norm, NORMS)
        self.conv = nn.Conv2d(in_channels, STAGE_CHANNELS[0], 3, padding=1, bias=False)
        self.norm = make_norm(norm, STAGE_CHANNELS[0])
        inputs = STAGE_CHANNELS[0]
        stages = []
        for outputs in STAGE_CHANNELS:
            first = ResidualBlock(inputs, outputs, 1 if outputs == inputs else 2, norm)
            stages.append(nn.Sequential(first, ResidualBlock(outputs, outputs, 1, norm)))
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.stages(functional.relu(self.norm(self.conv(x))))
        x = functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return cast(torch.Tensor, self.fc(x))


def make_norm(kind: str, channels: int) -> nn.Module:
    """Return the normalisation of so many channels; groups have 8 channels."""
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(channels // 8, channels)


class LeNet(CountsParameters):
    """The LeNet of HeFlwr's examples: 8 and 16 channels, then 120 and 84 units.

    Images of 28 x 28 are padded to the 32 x 32 it was made for: 62,558 parameters.
    """

    def __init__(self, input_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10) -> None:
        super().__init__()
        channels, high, wide = _image_shape(input_shape)
        if min(high, wide) < _LENET_SIDE:
            raise InvalidValueError(
                f"input_shape={tuple(input_shape)} must be of images of {_LENET_SIDE} x "
                f"{_LENET_SIDE} pixels or more"
            )
        self.conv1 = nn.Conv2d(channels, 8, 5, padding=2)
        self.conv2 = nn.Conv2d(8, 16, 5)
        self.fc1 = nn.Linear(16 * ((high // 2 - 4) // 2) * ((wide // 2 - 4) // 2), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        for convolution in (self.conv1, self.conv2):
            x = functional.max_pool2d(functional.relu(convolution(x)), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        return cast(torch.Tensor, self.fc3(functional.relu(self.fc2(x))))


class ExitNet(CountsParameters):
    """Blocks of convolution, group normalisation and rectifier, each with an exit.

    Returns the mean of the exits' logits.

    Parameters
    ----------
    num_classes, in_channels : int
        The outputs, and the channels of an image.
    channels : sequence of int
        The channels of each block; every block after the first halves the image.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 1,
        channels: Sequence[int] = (16, 16, 32, 32),
    ) -> None:
        super().__init__()
        inputs = [in_channels, *channels]
        self.blocks = nn.ModuleList(
            make_block(inputs[i], channels[i], 1 if i == 0 else 2) for i in range(len(channels))
        )
        self.heads = nn.ModuleList(make_head(width, num_classes) for width in channels)

    def exits(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits of every exit, the first block's first."""
        outputs = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            outputs.append(head(x))
        return outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of all exits."""
        outputs = self.exits(x)
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total / len(outputs)


def make_block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Return convolution, normalisation in groups of at most four channels, rectifier."""
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(max(1, outputs // 4), outputs), nn.ReLU())


def make_head(inputs: int, num_classes: int) -> nn.Sequential:
    """Return a classifier on a 2 x 2 map of features, or smaller where the image is."""
    return nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(inputs * 4, num_classes))


class CharLSTM(CountsParameters):
    """Letters as vectors of 8, two LSTM layers of 256 units, a score for every next letter.

    LEAF's network for Shakespeare; 819,920 parameters for 80 letters.  Inputs are numbers of
    letters, whole, [samples, letters].
    """

    def __init__(self, num_letters: int = 80, width: int = 256, embedding: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_letters, embedding)
        self.lstm = nn.LSTM(embedding, width, num_layers=2, batch_first=True)
        self.fc = nn.Linear(width, num_letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        states, _ = self.lstm(self.embedding(x.long()))
        return cast(torch.Tensor, self.fc(states[:, -1]))
