"""The synthetic set: `ipc` images of each class, class after class.

Partition and expansion (Zhao et al., "Improved distribution matching for dataset
condensation", CVPR 2023): every image holds `tiles` x `tiles` smaller ones, which are
enlarged to its size wherever they are looked at.  The numbers that are stored stay the
same; what is matched and trained on are `tiles`^2 times as many images, each with less
detail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError


def expand(images: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return the smaller images [N * tiles^2, C, H, W] that images [N, C, H, W] hold.

    Image after image, row after row.  They are enlarged bilinearly; where the sides are no
    multiples of `tiles`, the last rows and columns are left out.

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
    return functional.interpolate(small, size=sides, mode="bilinear", align_corners=False)


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


@dataclass(eq=False)
class SyntheticSet:
    """Images [len(classes) * ipc, C, H, W] in class order, and their labels.

    Class labels may be any whole numbers; `classes` lists them ascending.  Each image
    holds `tiles` x `tiles` smaller ones; `expanded` returns those.
    """

    images: torch.Tensor
    classes: tuple[int, ...]
    ipc: int
    tiles: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.tiles <= min(self.images.shape[2:]):
            raise InvalidValueError(
                f"tiles={self.tiles} must be >= 1 and at most the smaller side of images of "
                f"{tuple(self.images.shape[2:])} pixels"
            )
        if list(self.classes) != sorted(set(self.classes)):
            raise InvalidValueError(f"classes={self.classes} must be ascending, each named once")
        if len(self.images) != len(self.classes) * self.ipc:
            raise InvalidValueError(
                f"{len(self.images)} images must be {self.ipc} for each of "
                f"{len(self.classes)} classes"
            )

    @classmethod
    def random(
        cls,
        classes: Sequence[int],
        ipc: int,
        shape: Sequence[int],
        source: np.random.Generator,
        device: torch.device | str = "cpu",
        tiles: int = 1,
    ) -> SyntheticSet:
        """Start from standard normal pixels, in the units of normalised images."""
        checks.integer("ipc", ipc, at_least=1)
        size = (len(classes) * ipc, *shape)
        images = torch.from_numpy(source.standard_normal(size, dtype=np.float32))
        return cls(images.to(device), tuple(sorted(classes)), ipc, tiles)

    @property
    def labels(self) -> torch.Tensor:
        """The class of each image."""
        labels = torch.tensor(self.classes, device=self.images.device)
        return labels.repeat_interleave(self.ipc)

    def of(self, classes: Sequence[int]) -> SyntheticSet:
        """Return the images of some classes."""
        chosen = tuple(label for label in self.classes if label in set(classes))
        if chosen == self.classes:
            return self
        places = [place for place, label in enumerate(self.classes) if label in chosen]
        return SyntheticSet(self.by_class()[places].flatten(0, 1), chosen, self.ipc, self.tiles)

    def by_class(self) -> torch.Tensor:
        """Return the images as [classes, ipc, C, H, W], without a copy."""
        return self.images.view(len(self.classes), self.ipc, *self.images.shape[1:])

    def expanded(self) -> SyntheticSet:
        """Return the smaller images, enlarged: what is matched and trained on."""
        return SyntheticSet(expand(self.images, self.tiles), self.classes, self.ipc * self.tiles**2)
