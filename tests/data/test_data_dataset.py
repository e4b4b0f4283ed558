from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedquilt.data import ImageDataset, as_dataset
from fedquilt.errors import FedquiltError, InvalidValueError


def made(n: int = 4, **fields: object) -> ImageDataset:
    values: dict[str, object] = {
        "images": torch.arange(n * 6, dtype=torch.float32).view(n, 1, 2, 3),
        "targets": torch.arange(n) % 3,
        "name": "made",
        "num_classes": 3,
    }
    return ImageDataset(**{**values, **fields})  # type: ignore[arg-type]


def test_samples_by_index() -> None:
    data = made()
    image, label = data[2]
    assert image.tolist() == [[[12.0, 13.0, 14.0], [15.0, 16.0, 17.0]]]
    assert label == 2
    assert type(label) is int
    assert data[-1][1] == data[np.int64(3)][1] == 0
    assert len(data) == 4
    assert "4 samples 1x2x3, 3 classes" in repr(data)
    with pytest.raises(IndexError, match="sample 4 of 'made' is out of range, it has 4"):
        data[4]
    with pytest.raises(IndexError):
        data[-5]


def test_iteration_ends_and_a_loader_reads_it() -> None:
    data = made()
    assert [label for _, label in data] == [0, 1, 2, 0]
    x, y = next(iter(DataLoader(data, batch_size=4)))
    assert torch.equal(x, data.images)
    assert torch.equal(y, data.targets)


def test_it_survives_pickling_and_cannot_be_changed() -> None:
    data = pickle.loads(pickle.dumps(made()))
    assert torch.equal(data.images, made().images)
    with pytest.raises(AttributeError):
        data.name = "other"


def test_images_become_contiguous() -> None:
    flipped = torch.rand(3, 2, 4).permute(1, 0, 2)
    data = ImageDataset(flipped, torch.zeros(2, dtype=torch.int64), "p", 1)
    assert data.images.is_contiguous()
    assert torch.equal(data.images, flipped)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"images": torch.zeros(4, 1, dtype=torch.float64)}, "must be float32"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"must be int64 \[4\]"),
        ({"targets": torch.zeros(4)}, "must be int64"),
        ({"num_classes": 2}, r"< num_classes=2, got 0 to 2"),
        ({"num_classes": 0}, "num_classes=0 must be >= 1"),
        ({"groups": np.zeros(3, dtype=np.int64)}, r"groups of 'made' must have shape \[4\]"),
    ],
)
def test_inconsistent_parts_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        made(**fields)


def test_a_dataset_is_returned_as_it_is() -> None:
    data = made()
    assert as_dataset(data) is data


@pytest.mark.parametrize("kind", ["tensor", "array", "read-only", "reversed", "list"])
def test_pairs(kind: str) -> None:
    x = np.arange(12, dtype=np.float64).reshape(4, 3)
    y = np.array([0, 4, 1, 1], dtype=np.int32)
    features: object = x
    if kind == "tensor":
        features = torch.from_numpy(x).requires_grad_()
    elif kind == "read-only":
        features = x.astype(np.float32)
        features.setflags(write=False)  # type: ignore[attr-defined]
    elif kind == "reversed":
        features = np.ascontiguousarray(x[::-1])[::-1]
    labels: object = y.tolist() if kind == "list" else y
    data = as_dataset((features, labels), name="pair")
    assert data.images.dtype == torch.float32
    assert not data.images.requires_grad
    assert data.images.tolist() == x.tolist()
    assert data.targets.tolist() == [0, 4, 1, 1]
    assert (data.num_classes, data.name) == (5, "pair")


def test_a_float32_array_is_shared_not_copied() -> None:
    x = np.zeros((2, 3), dtype=np.float32)
    data = as_dataset((x, np.array([0, 1])))
    x[1, 2] = 7
    assert data.images[1, 2] == 7


class Custom:
    """The least that a data set must have; counts how often it is read."""

    def __init__(self, samples: list[tuple[object, object]]) -> None:
        self.samples = samples
        self.reads = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple[object, object]:
        self.reads += 1
        return self.samples[i]


def test_any_object_with_length_and_items() -> None:
    source = Custom([(np.full((2, 2), i, dtype=np.int16), np.int64(i)) for i in range(3)])
    data = as_dataset(source, num_classes=7)
    assert source.reads == 3
    assert data.images[:, 0, 0].tolist() == [0, 1, 2]
    assert data.targets.tolist() == [0, 1, 2]
    assert data.num_classes == 7


def test_tensor_datasets_and_lists_of_two_samples() -> None:
    x, y = torch.rand(5, 3), torch.tensor([0, 1, 2, 1, 0])
    data = as_dataset(TensorDataset(x, y))
    assert torch.equal(data.images, x)
    assert torch.equal(data.targets, y)
    two = as_dataset([(x[0], 1), (x[1], 0)])
    assert torch.equal(two.images, x[:2])
    assert two.targets.tolist() == [1, 0]


X = np.zeros((2, 3), dtype=np.float32)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "data of type int must be a pair"),
        ((X, np.array([0.0, 1.0])), "y must be integer labels of shape .* got dtype float"),
        ((X, torch.zeros(2, dtype=torch.bfloat16)), "y must be integer labels"),
        ((X, np.array([True, False])), "y must be integer labels .* got dtype bool"),
        ((X, [[0], [1, 2]]), "data targets must be numbers of one shape"),
        ((X, np.array([[0], [1]])), r"of shape \[2, 1\]"),
        ((X, np.array([0, -1])), r"y\[1\]=-1 must be >= 0"),
        ((X, np.array([0, 1, 1])), r"same length, got shapes inputs \[2, 3\], targets \[3\]"),
        ((X[:0], np.array([], dtype=np.int64)), "at least one sample"),
        (
            (X.astype(complex), np.array([0, 1])),
            "data inputs must hold real numbers, got dtype complex",
        ),
        ((X.astype(str), np.array([0, 1])), "inputs must hold real numbers"),
        ((np.array([[0.0], [np.nan]]), np.array([0, 1])), "sample 1 holds a value"),
        ((np.array([1.0, 1e300]), np.array([0, 1])), "sample 1 holds a value"),
        (Custom([]), "at least one sample"),
        (
            Custom([(X[0], 0), (X, 1)]),
            r"data\[1\] has inputs of shape \[2, 3\], data\[0\] has \[3\]",
        ),
        (Custom([(X[0], 0.5)]), "y must be integer labels of shape"),
        (Custom([(X[0], -3)]), r"y\[0\]=-3 must be >= 0"),
        (Custom([("cat", 0)]), r"data\[0\] inputs must be a tensor or numbers, got 'cat'"),
        (Custom([(X[0], 0, 0)]), r"data\[0\] must be a pair"),  # type: ignore[list-item]
        ({"x": X}, "must have its targets under 'labels'"),
        ({"x": "X"}, r"data\[0\] is missing although the data have length 1"),
    ],
)
def test_other_data_is_refused(data: object, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        as_dataset(data)


def test_labels_must_fit_the_stated_number_of_classes() -> None:
    with pytest.raises(FedquiltError, match="num_classes=2, got 0 to 2"):
        as_dataset((X, np.array([0, 2])), num_classes=2)
