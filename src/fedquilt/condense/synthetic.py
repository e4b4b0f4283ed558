"""The synthetic set: `ipc` images of each class, class after class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError


@dataclass(eq=False)
class SyntheticSet:
    """Images [len(classes) * ipc, C, H, W] in class order, and their labels.

    Class labels may be any whole numbers; `classes` lists them ascending.
    """

    images: torch.Tensor
    classes: tuple[int, ...]
    ipc: int

    def __post_init__(self) -> None:
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
    ) -> SyntheticSet:
        """Start from standard normal pixels, in the units of normalised images."""
        checks.integer("ipc", ipc, at_least=1)
        size = (len(classes) * ipc, *shape)
        images = torch.from_numpy(source.standard_normal(size, dtype=np.float32))
        return cls(images.to(device), tuple(sorted(classes)), ipc)

    @property
    def labels(self) -> torch.Tensor:
        """The class of each image."""
        labels = torch.tensor(self.classes, device=self.images.device)
        return labels.repeat_interleave(self.ipc)

    def of(self, classes: Sequence[int]) -> SyntheticSet:
        """Return the images of some classes; all of them when that is none."""
        chosen = tuple(label for label in self.classes if label in set(classes))
        if chosen in ((), self.classes):
            return self
        places = [place for place, label in enumerate(self.classes) if label in chosen]
        return SyntheticSet(self.by_class()[places].flatten(0, 1), chosen, self.ipc)

    def by_class(self) -> torch.Tensor:
        """Return the images as [classes, ipc, C, H, W], without a copy."""
        return self.images.view(len(self.classes), self.ipc, *self.images.shape[1:])
