"""The network of the data-set condensation literature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.models.images import CountsParameters


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
        validate.integer("num_classes", num_classes, at_least=1)
        validate.integer("width", width, at_least=1)
        validate.integer("depth", depth, at_least=1)
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
