"""Check labels, client counts and index lists that come from outside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fedquilt import validate
from fedquilt.errors import InvalidValueError

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
    count = validate.integer("num_clients", num_clients, at_least=1)
    if count > num_samples:
        raise InvalidValueError(
            f"num_clients={count} must be at most the number of samples, {num_samples}"
        )
    return count


def as_indices(indices: object, num_samples: int, what: str) -> IndexArray:
    """Return a client's index list as int64 [n] inside the data set, or raise."""
    array = np.asarray(indices)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise InvalidValueError(f"{what} must be a list of integers, got dtype {array.dtype}")
    if array.min() < 0 or array.max() >= num_samples:
        raise InvalidValueError(
            f"{what} must hold indices from 0 to {num_samples - 1}, "
            f"got {array.min()} to {array.max()}"
        )
    return array.astype(np.int64)


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
