"""Images with labels in memory, and checks of labels and indices."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeGuard

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
        float32 [N, C, H, W] and normalised; other data may have any shape [N, ...].
    targets
        int64 [N], each at least 0 and below `num_classes`.
    name
        The name under which the data set was loaded.
    num_classes
        Number of classes, also of those that no sample has.
    groups
        Who made each sample (the writer of a digit), or None where that is not known.
    """

    images: torch.Tensor
    targets: torch.Tensor
    name: str
    num_classes: int
    groups: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        images, targets = self.images, self.targets
        if images.dtype != torch.float32 or images.ndim < 1:
            raise InvalidValueError(
                f"images of {self.name!r} must be float32 [N, ...], "
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


def as_dataset(
    data: object, *, name: str = "custom", num_classes: int | None = None, finite: bool = True
) -> ImageDataset:
    """Return `data` as an `ImageDataset`.

    Parameters
    ----------
    data
        One of: an `ImageDataset`, returned as it is; a pair (x, y) of tensors or NumPy
        arrays; any object with a length and `[i] -> (tensor or array, integer)`, such as
        a torchvision data set or a `TensorDataset`, which is read once from end to end.
        Features may have any shape; numbers keep their value and become float32, so
        pixels 0..255 are not scaled.  The label of a sample is the one that `[i]` gives.
    name
        Name of the result.
    num_classes
        Number of classes; the largest label plus one when None.
    finite
        Refuse samples with NaN or infinity, naming the first.  Off where a refusal would
        say something about a client whose data are protected.
    """
    if isinstance(data, ImageDataset):
        return data
    if _is_pair(data):
        images, targets = _features(data[0], "x"), torch.from_numpy(as_labels(data[1], "y"))
    elif isinstance(data, Sized) and hasattr(data, "__getitem__"):
        images, targets = _materialise(data)
    else:
        raise InvalidValueError(
            f"data of type {type(data).__name__} must be an ImageDataset, a pair (x, y) of "
            "tensors or arrays, or have a length and [i] -> (tensor, int)"
        )
    if images.ndim == 0 or len(images) != len(targets):
        raise InvalidValueError(
            f"x and y must have the same length, "
            f"got shapes {list(images.shape)} and {list(targets.shape)}"
        )
    if len(targets) == 0:
        raise InvalidValueError("data must hold at least one sample")
    if finite:
        _check_finite(images)
    classes = int(targets.max()) + 1 if num_classes is None else num_classes
    return ImageDataset(images, targets, name, classes)


def _is_pair(data: object) -> TypeGuard[tuple[object, object]]:
    """Whether `data` is (x, y), and not a sequence that happens to hold two samples."""
    return (
        isinstance(data, tuple | list)
        and len(data) == 2
        and isinstance(data[0], torch.Tensor | np.ndarray)
    )


def _features(x: object, what: str) -> torch.Tensor:
    if isinstance(x, np.ndarray):
        if x.dtype.kind not in "fiub":
            raise InvalidValueError(f"{what} must hold real numbers, got dtype {x.dtype}")
        # A copy where the array is read-only or has negative strides, which torch refuses.
        with np.errstate(over="ignore"):
            x = torch.from_numpy(np.require(x, np.float32, requirements=("C", "W")))
    if not isinstance(x, torch.Tensor):
        raise InvalidValueError(f"{what} must be a tensor or array, got {type(x).__name__}")
    if x.is_complex():
        raise InvalidValueError(f"{what} must hold real numbers, got dtype {x.dtype}")
    return x.detach().to(device="cpu", dtype=torch.float32).contiguous()


def _materialise(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Read every sample of `data` once into one tensor."""
    count = len(data)
    if count == 0:
        raise InvalidValueError("data must hold at least one sample")
    images = torch.empty(0)
    labels = np.empty(count, dtype=np.int64)
    for i in range(count):
        x, labels[i] = _sample(data, i)
        if i == 0:
            images = torch.empty((count, *x.shape), dtype=torch.float32)
        elif x.shape != images.shape[1:]:
            raise InvalidValueError(
                f"data[{i}] has shape {list(x.shape)}, data[0] has {list(images.shape[1:])}: "
                "all samples must have one shape"
            )
        images[i] = x
    return images, torch.from_numpy(labels)


def _sample(data: Any, index: int) -> tuple[torch.Tensor, int]:
    try:
        x, y = data[index]
    except (IndexError, KeyError) as error:
        raise InvalidValueError(
            f"data[{index}] is missing although data has length {len(data)}"
        ) from error
    except (TypeError, ValueError) as error:
        raise InvalidValueError(f"data[{index}] must be a pair (tensor, int): {error}") from error
    try:
        label = operator.index(y)
    except TypeError:
        label = -1
    if label < 0:
        raise InvalidValueError(f"the label of data[{index}] must be an integer >= 0, got {y!r}")
    return _features(x, f"data[{index}][0]"), label


def _check_finite(images: torch.Tensor) -> None:
    finite = torch.isfinite(images.flatten(1) if images.ndim > 1 else images[:, None]).all(dim=1)
    if not bool(finite.all()):
        first = int(torch.nonzero(~finite)[0])
        raise InvalidValueError(f"sample {first} holds a value that is not a finite float32")


def _check_range(targets: torch.Tensor, num_classes: int) -> None:
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= num_classes:
        raise InvalidValueError(
            f"labels must be >= 0 and < num_classes={num_classes}, got {low} to {high}"
        )
