"""Data of any form become trees of tensors; types are kept, errors say train or test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fedquilt.common import trees
from fedquilt.data import ImageDataset, as_samples, clients_data
from fedquilt.errors import InvalidValueError

X = torch.arange(24, dtype=torch.float32).view(6, 4)
Y = torch.tensor([0, 2, 1, 1, 0, 2])
IDS = torch.arange(18).view(6, 3)


class Dictionaries(Dataset[dict[str, Any]]):
    """Samples as Hugging Face has them."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": IDS[i].tolist(), "attention_mask": [1, 1, i % 2], "label": int(Y[i])}


def padded(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """A collate function of its own."""
    xs, ys = zip(*samples, strict=True)
    return {"x": torch.stack(xs) * 2, "labels": torch.tensor(ys)}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(list(zip(X, Y, strict=True)))


FORMS: dict[str, Any] = {
    "pair": (X, Y),
    "arrays": (X.numpy(), Y.numpy()),
    "labels in a list": (X, Y.tolist()),
    "tensor data set": TensorDataset(X, Y),
    "list of samples": [(x, int(y)) for x, y in zip(X, Y, strict=True)],
    "loader": DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
    "stream": DataLoader(Stream(), batch_size=4),
    "image data set": ImageDataset(X, Y, "x", 3),
    "dictionary of one": {"x": X, "labels": Y},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    read = as_samples(FORMS[form], "train")
    inputs = read.inputs["x"] if form == "dictionary of one" else read.inputs
    assert torch.equal(inputs, X), "in the order of the data set, whatever a loader does"
    assert torch.equal(read.targets, Y)
    assert read.targets.dtype == torch.int64
    assert len(read) == 6
    assert read.notes == ()
    assert read.num_classes == (3 if form == "image data set" else None)


def test_a_subset_keeps_its_order() -> None:
    read = as_samples(Subset(TensorDataset(X, Y), [4, 1]), "train")
    assert torch.equal(read.inputs, X[[4, 1]])


def test_dictionaries_part_into_inputs_and_labels() -> None:
    for data in (Dictionaries(), DataLoader(Dictionaries(), batch_size=2)):
        read = as_samples(data, "train")
        assert list(read.inputs) == ["input_ids", "attention_mask"]
        assert torch.equal(read.inputs["input_ids"], IDS)
        assert read.inputs["input_ids"].dtype == torch.int64
        assert torch.equal(read.targets, Y)


def test_a_loader_with_its_own_collate_function_is_read_through_it() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, collate_fn=padded, shuffle=True)
    read = as_samples(loader, "train")
    assert torch.equal(read.inputs["x"], X * 2)
    assert torch.equal(read.targets, Y)


def test_trees_of_inputs_and_targets() -> None:
    read = as_samples(((X, IDS), {"a": Y, "b": X}), "test")
    assert isinstance(read.inputs, tuple)
    assert read.targets["b"].dtype == torch.float32
    one = as_samples([((X[0], IDS[0]), {"a": 1}), ((X[1], IDS[1]), {"a": 2})], "test")
    assert torch.equal(one.inputs[1], IDS[:2])
    assert one.targets["a"].tolist() == [1, 2]
    assert trees.described(one.inputs) == "0 (4,), 1 (3,)"


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        (torch.float64, torch.float32),
        (torch.float16, torch.float32),
        (torch.int64, torch.int64),
        (torch.int32, torch.int32),
        (torch.bool, torch.bool),
        (torch.uint8, torch.float32),
    ],
)
def test_types_are_kept_where_they_mean_something(kind: torch.dtype, kept: torch.dtype) -> None:
    inputs = torch.tensor([[0, 1], [1, 0]]).to(kind)
    for form in (inputs, inputs.numpy()):
        read = as_samples((form, torch.tensor([0, 1])), "train")
        assert read.inputs.dtype == kept
    each = as_samples([(inputs[0], 0), (inputs[1], 1)], "train")
    assert each.inputs.dtype == kept


def test_bytes_are_pixels_and_it_is_said() -> None:
    pixels = torch.tensor([[0, 51], [255, 102]], dtype=torch.uint8)
    read = as_samples((pixels, torch.tensor([0, 1])), "train")
    torch.testing.assert_close(read.inputs, torch.tensor([[0.0, 0.2], [1.0, 0.4]]))
    (note,) = read.notes
    assert "scaled from 0..255 to 0..1" in note
    labels = as_samples((X[:2], torch.tensor([3, 200], dtype=torch.uint8)), "train")
    assert labels.targets.tolist() == [3, 200], "targets are never scaled"
    assert labels.notes == ()


def test_float_targets_and_multi_labels_stay() -> None:
    read = as_samples((X, X[:, :2].double()), "train")
    assert read.targets.dtype == torch.float32
    assert read.targets.shape == (6, 2)
    assert as_samples([(X[0], 0.5), (X[1], 1.5)], "train").targets.tolist() == [0.5, 1.5]


NAN = X.clone()
NAN[3, 1] = float("nan")


@pytest.mark.parametrize("what", ["train", "test"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "{} data of type int must be a pair"),
        ("text", "{} data of type str must be a pair"),
        (
            (X, Y[:5]),
            r"{} inputs and targets must have the same length, got shapes inputs \[6, 4\]",
        ),
        ((X[:0], Y[:0]), "{} data must hold at least one sample"),
        ([], "{} data must hold at least one sample"),
        ((NAN, Y), r"{} sample 3 holds a value that is not a finite float32 \(in inputs\)"),
        ((X, NAN), r"{} sample 3 holds a value .*in targets"),
        ((X.to(torch.complex64), Y), "{} inputs must hold real numbers"),
        ((X.numpy().astype(str), Y), "{} inputs must hold real numbers, got dtype <U"),
        (((X, X[:5]), Y), r"{} inputs and targets must have the same length.*inputs.1 \[5, 4\]"),
        ({"x": X}, "{}: a dictionary with the keys 'x' must have its targets under 'labels'"),
        ([(X[0], 1, 2)], r"{}\[0\] must be a pair .* got tuple of 3 parts"),
        ([(X[0], 1), (X[1][:2], 1)], r"{}\[1\] has inputs of shape \[2\], {}\[0\] has \[4\]"),
        ([(X[0], 1), (X[1], 0.5)], r"{}\[1\] has targets of type .*float64"),
        ([("cat", 0)], r"{}\[0\] inputs must be a tensor or numbers, got 'cat'"),
    ],
)
def test_errors_say_where(data: Any, message: str, what: str) -> None:
    with pytest.raises(InvalidValueError, match=message.replace("{}", what)):
        as_samples(data, what)


def test_protected_clients_may_hold_anything_finite_or_not() -> None:
    assert bool(as_samples((NAN, Y), "train", finite=False).inputs.isnan().any())


def test_one_data_set_a_client() -> None:
    own = {
        "anna": TensorDataset(X[:2], Y[:2]),
        "ben": (X[:0], Y[:0]),
        "cleo": DataLoader(TensorDataset(X[2:5], Y[2:5]), batch_size=2, shuffle=True),
        "dora": [(X[5], int(Y[5]))],
        "emil": [],
    }
    for data in (own, list(own.values())):
        read, parts = clients_data(data)
        assert torch.equal(read.inputs, X)
        assert torch.equal(read.targets, Y)
        assert parts == [[0, 1], [], [2, 3, 4], [5], []]
    with pytest.raises(InvalidValueError, match="at least one client with samples"):
        clients_data([[], []])
    with pytest.raises(InvalidValueError, match=r"inputs of train\['b'\] are float32 \(3,\)"):
        clients_data({"a": (X, Y), "b": (X[:, :3], Y)})


def test_arrays_are_not_copied_without_need() -> None:
    x = np.zeros((2, 3), dtype=np.float32)
    read = as_samples((x, np.array([0, 1])), "train")
    x[1, 2] = 7
    assert read.inputs[1, 2] == 7
