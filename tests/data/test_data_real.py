"""The real data sets, where their files are found."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from fedquilt.data import DATASETS, FileStatus, dataset_status, split_clients
from fedquilt.data.load import _with_writers
from fedquilt.errors import DataError

MNIST_TRAIN_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def raw_pixels(file: FileStatus) -> np.ndarray:
    """Read the images of an IDX file with nothing of the package."""
    assert file.path is not None
    data = file.path.read_bytes()
    content = gzip.decompress(data) if file.path.suffix == ".gz" else data
    return np.frombuffer(content, np.uint8)[16:].reshape(-1, 28, 28)


@pytest.mark.parametrize(
    ("name", "mean", "std", "first"),
    [("mnist", 0.1307, 0.3081, 5), ("fashion-mnist", 0.2860, 0.3530, 9)],
)
def test_idx_data_sets(real_dataset, name: str, mean: float, std: float, first: int) -> None:
    train, test = real_dataset(name)
    assert (train.images.shape, test.images.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert train[0][1] == first
    expected = MNIST_TRAIN_COUNTS if name == "mnist" else [6000] * 10
    assert torch.bincount(train.targets).tolist() == expected
    assert abs(float(train.images.mean())) < 1e-3
    assert abs(float(train.images.std()) - 1) < 1e-3
    files = dataset_status(name).files
    for dataset, file in ((train, files[0]), (test, files[2])):
        raw = (raw_pixels(file)[::997].astype(np.float64) / 255 - mean) / std
        np.testing.assert_allclose(dataset.images[::997, 0].numpy(), raw, atol=1e-6)


def test_cifar10(real_dataset) -> None:
    train, test = real_dataset("cifar10")
    assert (train.images.shape, test.images.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert train.targets[:5].tolist() == [6, 9, 9, 4, 1]
    assert torch.bincount(train.targets).tolist() == [5000] * 10
    assert torch.bincount(test.targets).tolist() == [1000] * 10
    assert train.images.mean(dim=(0, 2, 3)).abs().max() < 1e-3
    file = dataset_status("cifar10").files[3]
    assert file.path is not None
    row = np.frombuffer(file.path.read_bytes(), np.uint8, count=3073, offset=3073 * 70)
    assert row[0] == train[30_070][1]
    planes = row[1:].reshape(3, 32, 32) / 255
    mean, std = (
        np.array(v)[:, None, None] for v in (DATASETS["cifar10"].mean, (0.2023, 0.1994, 0.2010))
    )
    np.testing.assert_allclose(train.images[30_070].numpy(), (planes - mean) / std, atol=1e-5)


def test_mnist_by_writer(real_dataset) -> None:
    train, test = real_dataset("mnist-writers")
    assert train.groups is not None
    assert test.groups is not None
    clients = split_clients(
        "writer", train.targets, None, np.random.default_rng(0), groups=train.groups
    )
    sizes = np.array([len(c) for c in clients])
    assert (len(clients), sizes.min(), sizes.max(), np.median(sizes)) == (539, 19, 131, 116)
    assert sizes.sum() == len(train) == 60_000
    assert len(np.unique(test.groups)) == 297
    assert not set(train.groups.tolist()) & set(test.groups.tolist())
    assert torch.bincount(train.targets).tolist() == MNIST_TRAIN_COUNTS
    assert (
        len(
            split_clients(
                "writer", train.targets, 50, np.random.default_rng(0), groups=train.groups
            )
        )
        == 50
    )


def test_writers_of_other_digits_are_refused(tiny, tmp_path: Path) -> None:
    from fedquilt.data import load_dataset

    tiny.write(tmp_path)
    train, _ = load_dataset("tiny", tmp_path, download=False)
    spec = DATASETS["mnist-writers"]
    rows = np.zeros((15, 8), dtype=np.int32)
    rows[:12, 0] = tiny.labels[0]
    rows[:, 2] = np.arange(100, 115)
    labelled = _with_writers(spec, 0, train, rows)
    assert labelled.groups is not None
    assert labelled.groups.tolist() == list(range(100, 112))
    assert labelled.name == "mnist-writers"
    assert labelled.images is train.images
    with pytest.raises(
        DataError, match=r"qmnist-train.*12 samples of tiny, they differ first at row 11"
    ):
        _with_writers(spec, 0, train, rows[:11])
    rows[4, 0] = 9
    with pytest.raises(DataError, match=r"qmnist-test-labels-idx2-int\.gz.*first at row 4"):
        _with_writers(spec, 1, dataclasses.replace(train, name="other"), rows)
