"""scikit-learn's digits: 1,797 images of 8x8 pixels that need no download.

The division into training and test part is fixed, whatever the seed of a run: within
each class, in the order of the data set, every fifth image (the 5th, 10th, ...) is a
test image.  That gives 1,442 training and 355 test images with equal shares of every
class.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from fedquilt.data.dataset import ImageDataset
from fedquilt.data.specs import DatasetSpec

_TEST_EVERY = 5
_GREY_LEVELS = 16


def load_digits(spec: DatasetSpec) -> tuple[ImageDataset, ImageDataset]:
    """Return the training and the test part, normalised as `spec` says."""
    from sklearn import datasets

    bunch = datasets.load_digits()
    labels = np.asarray(bunch.target, dtype=np.int64)
    pixels = np.asarray(bunch.images, dtype=np.float32)[:, None] / _GREY_LEVELS
    images = (pixels - np.float32(spec.mean[0])) / np.float32(spec.std[0])
    is_test = rank_in_class(labels) % _TEST_EVERY == _TEST_EVERY - 1

    def part(mask: npt.NDArray[np.bool_]) -> ImageDataset:
        x, y = torch.from_numpy(images[mask]), torch.from_numpy(labels[mask])
        return ImageDataset(x, y, spec.name, spec.num_classes)

    return part(~is_test), part(is_test)


def rank_in_class(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each sample how many samples of its class come before it."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    ranks = np.empty(len(labels), dtype=np.int64)
    ranks[order] = np.arange(len(labels)) - starts
    return ranks
