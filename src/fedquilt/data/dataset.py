"""Images with labels in memory, and checks of labels and indices."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError

IndexArray = npt.NDArray[np.int64]


def as_labels(labels: object, what: str = "labels") -> IndexArray:
    """Return `labels` (tensor, array or list) as int64 [N], or raise."""
    if isinstance(labels, torch.Tensor):
        labels = labels.detach().cpu()
        # NumPy has no name for some of torch's floating types.
        labels = labels.double().numpy() if labels.is_floating_point() else labels.numpy()
    try:
        array = np.asarray(labels)
    except ValueError as error:
        raise InvalidValueError(f"{what} must be integer labels of shape [N]: {error}") from error
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise InvalidValueError(
            f"{what} must be integer labels of shape [N], "
            f"got dtype {array.dtype} of shape {list(array.shape)}"
        )
    result: IndexArray = array.astype(np.int64)
    if len(result) and result.min() < 0:
        first = int(np.argmax(result < 0))
        raise InvalidValueError(f"{what}[{first}]={result[first]} must be >= 0")
    return result


def check_num_clients(num_clients: object, num_samples: int) -> int:
    """Return `num_clients` when each client can have a sample, or raise."""
    count = checks.integer("num_clients", num_clients, at_least=1)
    if count > num_samples:
        raise InvalidValueError(
            f"num_clients={count} must be at most the number of samples, {num_samples}"
        )
    return count


def group_by_owner(
    owner: IndexArray, num_clients: int, rng: np.random.Generator
) -> list[IndexArray]:
    """Return each client's samples, in random order, where sample i belongs to `owner[i]`.

    The arrays are views of one array.
    """
    shuffled = rng.permutation(len(owner)).astype(np.int64, copy=False)
    order = shuffled[np.argsort(owner[shuffled], kind="stable")]
    sizes = np.bincount(owner, minlength=num_clients)
    return np.split(order, np.cumsum(sizes)[:-1])


def samples_by_class(
    labels: IndexArray, rng: np.random.Generator
) -> Sequence[tuple[int, IndexArray]]:
    """Return each class that occurs with its samples in random order, smallest class first."""
    classes, counts = np.unique(labels, return_counts=True)
    order = np.argsort(labels, kind="stable").astype(np.int64, copy=False)
    members = np.split(order, np.cumsum(counts)[:-1])
    return [(int(k), rng.permutation(part)) for k, part in zip(classes, members, strict=True)]


@dataclass(frozen=True, eq=False, repr=False)
class ImageDataset(Dataset[tuple[torch.Tensor, int]]):
    """Samples and labels as two tensors that all clients share; a client is an index array.

    Parameters
    ----------
    images
        float32 [N, C, H, W] and normalised; other data may have any shape [N, ...], and texts
        are int64: the number of each letter.
    targets
        int64 [N], each at least 0 and below `num_classes`.
    name
        The name under which the data set was loaded.
    num_classes
        Number of classes, also of those that no sample has.
    groups
        Who made each sample (the writer of a digit), or None where that is not known.
    group_names
        What these people are called, by their number; None: by the number itself.
    notes
        What the record of a run should say of the data, whatever is in them.
    """

    images: torch.Tensor
    targets: torch.Tensor
    name: str
    num_classes: int
    groups: npt.NDArray[np.int64] | None = None
    group_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        images, targets = self.images, self.targets
        if images.dtype not in (torch.float32, torch.int64) or images.ndim < 1:
            raise InvalidValueError(
                f"images of {self.name!r} must be float32 [N, ...], or int64 where they are texts, "
                f"got {images.dtype} {list(images.shape)}"
            )
        if targets.dtype != torch.int64 or targets.shape != images.shape[:1]:
            raise InvalidValueError(
                f"targets of {self.name!r} must be int64 [{len(images)}], "
                f"got {targets.dtype} {list(targets.shape)}"
            )
        if len(targets) == 0:
            raise InvalidValueError(f"data set {self.name!r} must hold at least one sample")
        _check_range(targets, checks.integer("num_classes", self.num_classes, at_least=1))
        if self.groups is not None and self.groups.shape != (len(images),):
            raise InvalidValueError(
                f"groups of {self.name!r} must have shape [{len(images)}], "
                f"got {list(self.groups.shape)}"
            )
        object.__setattr__(self, "images", images.contiguous())

    def person(self, number: int) -> str:
        """Return what the maker of a sample is called, given the number in `groups`."""
        return str(number) if self.group_names is None else self.group_names[number]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: SupportsIndex) -> tuple[torch.Tensor, int]:
        """Return sample `index` (a view, not a copy) and its label."""
        i = operator.index(index)
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {self.name!r} is out of range, it has {len(self)}")
        return self.images[i], int(self.targets[i])

    def __repr__(self) -> str:
        shape = "x".join(str(size) for size in self.images.shape[1:])
        return (
            f"ImageDataset({self.name!r}, {len(self)} samples {shape}, {self.num_classes} classes)"
        )


def _check_range(targets: torch.Tensor, num_classes: int) -> None:
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= num_classes:
        raise InvalidValueError(
            f"labels must be >= 0 and < num_classes={num_classes}, got {low} to {high}"
        )
