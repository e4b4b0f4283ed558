"""ResNet-18 for small images (He et al. 2016), with a 3 x 3 stem and no first pooling.

Ends in logits.  11,173,962 parameters for 3 x 32 x 32 images and 10 classes.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional

from fedquilt import validate
from fedquilt.models.images import CountsParameters

STAGE_CHANNELS = (64, 128, 256, 512)
NORMS = ("group", "batch")


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
        examples; batch normalisation is that of the paper.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, norm: str = "group") -> None:
        super().__init__()
        validate.choice("norm", norm, NORMS)
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
