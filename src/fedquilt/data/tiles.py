"""Images that hold smaller images.

Partition and expansion (Zhao et al., "Improved distribution matching for dataset
condensation", CVPR 2023): every image of a condensed set holds `tiles` x `tiles` smaller
ones, which are enlarged to its size wherever they are looked at.  The numbers that are
stored stay the same; what is trained on are `tiles`^2 times as many images, each with
less detail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

_EXPANDED_VALUES = 1 << 26
"""So many numbers may come out of any set, and sixteen times its own out of a large one."""


def most_tiles(shape: Sequence[int]) -> int:
    """Return the most tiles that images [N, C, H, W] may hold beside each other.

    What comes out has tiles^2 times as many numbers as the file that it is read from.
    """
    affordable = max(4, math.isqrt(_EXPANDED_VALUES // math.prod(shape)))
    return min(*shape[2:], affordable)


def expand(images: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return the smaller images [N * tiles^2, C, H, W] that images [N, C, H, W] hold.

    Image after image, row after row.  They are enlarged bilinearly; where the sides are no
    multiples of `tiles`, the last rows and columns are left out.

    >>> from fedquilt.data.tiles import expand
    >>> expand(torch.arange(16.0).view(1, 1, 4, 4), 2).shape
    torch.Size([4, 1, 4, 4])
    """
    if tiles == 1:
        return images
    count, channels, *sides = images.shape
    height, width = (side // tiles for side in sides)
    cut = images[..., : height * tiles, : width * tiles]
    cut = cut.reshape(count, channels, tiles, height, tiles, width)
    small = cut.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels, height, width)
    rows, columns = (_enlarger(*pair, images) for pair in zip((height, width), sides, strict=True))
    return rows @ small @ columns.mT


def _enlarger(small: int, large: int, like: torch.Tensor) -> torch.Tensor:
    """Return the matrix [large, small] that enlarges a line bilinearly.

    A product on either side is what `interpolate` computes, in less time for many small
    images: its kernels take one after the other.
    """
    lines = torch.eye(small, dtype=like.dtype, device=like.device)[None]
    return functional.interpolate(lines, size=large, mode="linear", align_corners=False)[0].T


def shrink(images: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return images [N, C, H, W] that each hold `tiles`^2 of the images [N * tiles^2, C, H, W].

    The opposite of `expand`, but for the detail that is lost: a smaller image is made of
    means over the pixels of a larger one.
    """
    if tiles == 1:
        return images
    channels, *sides = images.shape[1:]
    height, width = (side // tiles for side in sides)
    small = functional.adaptive_avg_pool2d(images, (height, width))
    rows = small.view(-1, tiles, tiles, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    joined = rows.reshape(-1, channels, tiles * height, tiles * width)
    return functional.pad(joined, (0, sides[1] - tiles * width, 0, sides[0] - tiles * height))
