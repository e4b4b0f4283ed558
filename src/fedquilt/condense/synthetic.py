"""The synthetic set: `ipc` images of each class, class after class.

Every image may hold `tiles` x `tiles` smaller ones (`fedquilt.data.condensed`), which are what
is matched and trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.data.condensed import expand_tiles, most_tiles, shrink_to_tiles
from fedquilt.models.features import draw

__all__ = ["SyntheticSet", "expand_tiles", "shrink_to_tiles"]


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
        if not 1 <= self.tiles <= (most := most_tiles(self.images.shape)):
            raise InvalidValueError(
                f"tiles={self.tiles} must be >= 1 and at most {most} for {len(self.images)} images "
                f"of {tuple(self.images.shape[2:])} pixels"
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

    def smoothed(self) -> SyntheticSet:
        """Return a start of smooth noise: means over 3 x 3 pixels, of standard deviation 1/2.

        What matching does not decide stays as it began; less of that is sharp noise, which
        a network trained on the images would learn.
        """
        smooth = functional.avg_pool2d(self.images, 3, 1, 1)
        smooth = 0.5 * smooth / smooth.std()
        return SyntheticSet(smooth, self.classes, self.ipc, self.tiles)

    def drawn(self, seed: int) -> SyntheticSet:
        """Return a start of public drawings: shapes that cover one another, as in photographs.

        Every smaller image is a drawing of its own ("leaves" in
        `fedquilt.models.features.draw`), with mean 0 and standard deviation 1/2 in each
        channel before it is made smaller.  What matching does not decide then looks like the
        edges of things.
        """
        count = len(self.images) * self.tiles**2
        drawings = draw("leaves", tuple(self.images.shape[1:]), count, seed)
        std, mean = torch.std_mean(drawings, dim=(0, 2, 3), keepdim=True)
        begin = shrink_to_tiles(0.5 * (drawings - mean) / std.clamp(min=1e-6), self.tiles)
        return SyntheticSet(begin.to(self.images), self.classes, self.ipc, self.tiles)

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
        return SyntheticSet(
            expand_tiles(self.images, self.tiles), self.classes, self.ipc * self.tiles**2
        )
