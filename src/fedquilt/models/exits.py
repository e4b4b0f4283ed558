"""A small convolutional network that can stop after any of its blocks.

Every block has a classifier of its own, so clients may hold only the first blocks; and
every block is as wide as it is given, so clients may hold a part of each.  Group
normalisation keeps no statistics of the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedquilt.models.images import CountsParameters


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
