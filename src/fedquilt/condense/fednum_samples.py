"""Reading the samples that a `FedNumClient` is given."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt import validate
from fedquilt.condense.fednum_info import ImageInfo
from fedquilt.errors import InvalidValueError


def checked_classes(classes: object, num_classes: int) -> list[int]:
    """Return labels ascending, each once, or raise where they are none."""
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise InvalidValueError(f"classes={classes!r} must be a list of labels")
    labels = {
        validate.integer("classes", label, at_least=0, at_most=num_classes - 1) for label in classes
    }
    return sorted(labels)


def read_samples(train_set: object, info: ImageInfo) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Return all images as one float32 tensor, and their labels; none at all is allowed."""
    images, labels = _images_and_labels(train_set, info)
    if len(images) != len(labels) or (len(images) and images.shape[1:] != info.shape):
        raise InvalidValueError(
            f"train_set with images of shape {tuple(images.shape)} and {len(labels)} labels must "
            f"have one label an image, and images of shape {info.shape} as dataset_info says"
        )
    if not bool(torch.isfinite(images).all()):
        raise InvalidValueError("train_set must hold finite numbers; it holds NaN or infinity")
    return images.reshape(-1, *info.shape), labels


def _images_and_labels(train_set: Any, info: ImageInfo) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Take what a train set holds, in whichever of its forms it comes."""
    if isinstance(train_set, tuple | list) and len(train_set) == 2 and _is_array(train_set[0]):
        return _as_images(train_set[0]), _as_labels(train_set[1])
    if _is_array(getattr(train_set, "images", None)) and hasattr(train_set, "targets"):
        return _as_images(train_set.images), _as_labels(train_set.targets)
    if isinstance(train_set, Sized) and hasattr(train_set, "__getitem__"):
        return _one_by_one(train_set, info.shape)
    raise InvalidValueError(
        f"train_set of type {type(train_set).__name__} must be a pair (images, labels), have "
        "images and targets, or have a length and [i] -> (tensor, int)"
    )


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _as_images(images: Any) -> torch.Tensor:
    tensor = torch.as_tensor(images).detach()
    if tensor.is_complex():
        raise InvalidValueError(f"train_set of type {tensor.dtype} must hold real numbers")
    return tensor.to("cpu", torch.float32)


def _as_labels(labels: Any) -> NDArray[np.int64]:
    array = np.asarray(labels.cpu() if isinstance(labels, torch.Tensor) else labels)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidValueError(
            f"train_set labels of shape {array.shape} and type {array.dtype} must be one whole "
            "number an image"
        )
    return array.astype(np.int64)


def _one_by_one(samples: Any, shape: tuple[int, ...]) -> tuple[torch.Tensor, NDArray[np.int64]]:
    images = torch.empty(len(samples), *shape)
    labels = np.empty(len(samples), dtype=np.int64)
    for i in range(len(samples)):
        try:
            image, label = samples[i]
            labels[i] = operator.index(label)
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise InvalidValueError(
                f"train_set[{i}] must be a pair (tensor, int): {error}"
            ) from error
        images[i] = _image_of_sample(image, i, shape)
    return images, labels


def _image_of_sample(image: object, i: int, shape: tuple[int, ...]) -> torch.Tensor:
    read = _as_images(image) if _is_array(image) else None
    if read is None or read.shape != shape:
        found = type(image).__name__ if read is None else f"shape {tuple(read.shape)}"
        raise InvalidValueError(
            f"train_set[{i}] of {found} must be a tensor of shape {shape}, as dataset_info says"
        )
    return read
