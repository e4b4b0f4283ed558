"""Condensed sets on disk: what comes back, and which files are refused."""

from __future__ import annotations

import doctest
import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch.utils.data import DataLoader

import fedquilt
from fedquilt.data import (
    ImageDataset,
    as_dataset,
    condensed,
    condensed_info,
    load_condensed,
    save_condensed,
)
from fedquilt.data.condensed import most_tiles
from fedquilt.errors import DataError, DataNotFoundError, InvalidValueError, StorageError

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]


def made(**fields: Any) -> ImageDataset:
    values: dict[str, Any] = {
        "images": torch.randn(6, 3, 4, 5, generator=torch.Generator().manual_seed(0)),
        "targets": torch.tensor([0, 0, 7, 7, 3, 3]),
        "name": "cifar10",
        "num_classes": 10,
    }
    return ImageDataset(**{**values, **fields})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_condensed(
        tmp_path / "set.safetensors", made(), mean=MEAN, std=STD, about={"ipc": 2}
    )


def test_what_was_saved_comes_back(path: Path) -> None:
    data = load_condensed(str(path))
    assert data.images.dtype == torch.float32
    assert torch.equal(data.images, made().images)
    assert torch.equal(data.targets, made().targets)
    assert (data.name, data.num_classes, data.groups) == ("cifar10", 10, None)
    assert as_dataset(data) is data
    x, y = next(iter(DataLoader(data, batch_size=6)))
    assert torch.equal(x, made().images)
    assert y.tolist() == [0, 0, 7, 7, 3, 3]


def test_the_same_set_is_the_same_bytes(path: Path) -> None:
    first = path.read_bytes()
    for _ in range(3):
        save_condensed(path, made(), mean=MEAN, std=STD, about={"ipc": 2})
        assert path.read_bytes() == first


def test_a_loaded_set_is_ready_for_a_run(tmp_path: Path) -> None:
    labels = torch.arange(40) % 4
    images = torch.eye(4)[labels].view(40, 1, 2, 2)
    data = ImageDataset(images, labels, "easy", 4)
    path = save_condensed(tmp_path / "easy", data, mean=[0.0], std=[1.0])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 4))
    clients = np.arange(40).reshape(2, 20).tolist()
    options: dict[str, Any] = {"mode": "fedavg", "num_rounds": 5, "clients_per_round": 2}
    options |= {"learning_rate": 1.0, "availability": "always", "output_dir": None}
    result = fedquilt.run(model, load_condensed(path), data, clients, **options)
    assert result.final_accuracy == 1.0


def test_a_loaded_set_does_not_hang_on_its_file(path: Path) -> None:
    data = load_condensed(path)
    path.write_bytes(b"")
    data.images.add_(1)
    assert torch.equal(data.images, made().images + 1)


def test_the_file_tells_what_it_is(tmp_path: Path) -> None:
    about: dict[str, Any] = {
        "method": "statistics",
        "ipc": np.int64(2),
        "loss": np.float32(0.5),
        "warm": True,
    }
    path = save_condensed(tmp_path / "a", made(), mean=np.array(MEAN), std=tuple(STD), about=about)
    assert condensed_info(path) == {
        "schema_version": 1,
        "name": "cifar10",
        "num_classes": 10,
        "mean": MEAN,
        "std": STD,
        "about": {"method": "statistics", "ipc": 2, "loss": 0.5, "warm": True},
        "tiles": 1,
        "shape": (6, 3, 4, 5),
    }


def test_any_reader_of_safetensors_can_use_the_file(path: Path) -> None:
    with safetensors.safe_open(path, framework="numpy") as stream:
        assert sorted(stream.keys()) == ["images", "labels"]
        assert stream.get_tensor("labels").dtype == np.int64
        assert np.array_equal(stream.get_tensor("images"), made().images.numpy())
        metadata = stream.metadata()
    assert json.loads(metadata["mean"]) == MEAN
    assert metadata["schema_version"] == "1"


def test_views_and_trained_images_are_saved(tmp_path: Path) -> None:
    grown = torch.zeros(2, 3, 4, 5, requires_grad=True)
    data = ImageDataset(grown, torch.tensor([1, 0]), "grown", 2)
    loaded = load_condensed(save_condensed(tmp_path / "a", data, mean=MEAN, std=STD))
    assert not loaded.images.requires_grad
    shared = torch.arange(240.0).view(4, 3, 4, 5)[::2]
    data = ImageDataset(shared, torch.tensor([1, 0]), "shared", 2)
    loaded = load_condensed(save_condensed(tmp_path / "b", data, mean=MEAN, std=STD))
    assert torch.equal(loaded.images, shared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": made(images=torch.zeros(6, 4))}, r"\[N, C, H, W\], got \[6, 4\]"),
        ({"dataset": made(images=torch.zeros(6, 3, 0, 5))}, r"got \[6, 3, 0, 5\]"),
        (
            {
                "dataset": made(
                    images=torch.zeros(6, 3, 1, 1).index_fill(0, torch.tensor(4), np.inf)
                )
            },
            "images of 'cifar10' must be finite; image 4 is not",
        ),
        ({"mean": [0.1]}, r"mean=\[0.1\] must have 3 numbers, one a channel"),
        ({"mean": 0.1}, "mean=0.1 must have 3 numbers"),
        ({"mean": "abc"}, "mean='abc' must have 3 numbers"),
        ({"mean": [0, 0, None]}, "mean=None must be a number"),
        ({"std": [1, 1, 0]}, "std=0 must be > 0"),
        ({"std": [1, 1, float("inf")]}, "std=inf must be finite"),
        ({"about": {"loss": float("nan")}}, r"about\['loss'\]=nan must be text or a finite number"),
        ({"about": {"list": [1]}}, r"about\['list'\]=\[1\] must be"),
        ({"about": {1: "a"}}, "about has the key 1, keys must be text"),
        ({"about": "words"}, "about='words' must be a mapping"),
    ],
)
def test_wrong_arguments_change_nothing(path: Path, changes: dict[str, Any], message: str) -> None:
    before = path.read_bytes()
    arguments = {"dataset": made(), "mean": MEAN, "std": STD, **changes}
    with pytest.raises(InvalidValueError, match=message):
        save_condensed(path, arguments.pop("dataset"), **arguments)
    assert path.read_bytes() == before
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_a_path_must_name_a_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="must name a file"):
        save_condensed("", made(), mean=MEAN, std=STD)
    with pytest.raises(StorageError, match="cannot write"):
        save_condensed(tmp_path, made(), mean=MEAN, std=STD)
    assert not list(tmp_path.iterdir())
    assert not list(tmp_path.parent.glob(".*.tmp"))


def test_a_full_disk_leaves_the_old_set_and_no_rest(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write '.*set\.safetensors': the disk is full"):
        save_condensed(path, made(name="new"), mean=MEAN, std=STD)
    assert load_condensed(path).name == "cifar10"
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_a_reader_of_the_old_set_never_sees_half_of_the_new_one(path: Path) -> None:
    old = path.read_bytes()
    with path.open("rb") as reader:
        save_condensed(path, made(name="new"), mean=MEAN, std=STD)
        assert reader.read() == old
    assert load_condensed(path).name == "new"


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    for read in (load_condensed, condensed_info):
        with pytest.raises(DataNotFoundError, match=r"no condensed data set '.*none'"):
            read(tmp_path / "none")


@pytest.mark.parametrize("keep", [0, 4, 100, 1000, -1])
def test_a_torn_file_is_refused(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    for read in (load_condensed, condensed_info):
        with pytest.raises(DataError, match=r"set\.safetensors must be a whole safetensors file"):
            read(path)


def test_other_files_and_folders_are_refused(path: Path, tmp_path: Path) -> None:
    path.write_text("not tensors, but a text that is long enough to have a header")
    for place in (path, tmp_path):
        with pytest.raises(DataError, match="must be a whole safetensors file"):
            load_condensed(place)


TENSORS = {"images": made().images, "labels": made().targets}
METADATA = {
    "kind": condensed.KIND,
    "schema_version": "1",
    "name": "cifar10",
    "num_classes": "10",
    "mean": json.dumps(MEAN),
    "std": json.dumps(STD),
    "about": "{}",
}


def forge(path: Path, tensors: dict[str, Any], metadata: dict[str, str | None]) -> Path:
    """Write a file by hand; a None drops what a good file has."""
    kept = {key: value for key, value in {**METADATA, **metadata}.items() if value is not None}
    held = {key: value for key, value in {**TENSORS, **tensors}.items() if value is not None}
    path.write_bytes(safetensors.torch.save(held, kept))
    return path


def test_a_good_file_made_by_hand_is_read(tmp_path: Path) -> None:
    assert torch.equal(load_condensed(forge(tmp_path / "a", {}, {})).images, made().images)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"kind": None}, "must be a file of save_condensed.*its kind is None"),
        ({"kind": "checkpoint"}, "its kind is 'checkpoint'"),
        ({"schema_version": "2"}, "schema_version='2' must be '1'"),
        ({"schema_version": None}, "schema_version=None must be '1'"),
        ({"name": None}, "must state 'name' in its metadata"),
        ({"num_classes": "ten"}, "metadata of .* cannot be used: num_classes must be"),
        ({"num_classes": "0"}, "num_classes=0 must be >= 1"),
        ({"mean": "[0.5"}, "metadata of .* cannot be used"),
        ({"mean": "[0.5]"}, r"mean=\[0.5\] must have 3 numbers"),
        ({"std": "[1, 1, -1]"}, "std=-1 must be > 0"),
        ({"about": "[]"}, r"about=\[\] must be a mapping"),
        ({"about": '{"a": NaN}'}, "about must be a JSON value: NaN"),
    ],
)
def test_wrong_metadata_is_refused(
    tmp_path: Path, metadata: dict[str, str | None], message: str
) -> None:
    path = forge(tmp_path / "forged", {}, metadata)
    for read in (load_condensed, condensed_info):
        with pytest.raises(DataError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"labels": None}, r"it holds images F32 \[6, 3, 4, 5\]$"),
        ({"images": None, "labels": None}, "it holds nothing"),
        ({"images": torch.zeros(6, 60)}, r"images F32 \[6, 60\]"),
        ({"images": torch.zeros(6, 3, 4, 5, dtype=torch.float64)}, r"images F64 \[6, 3, 4, 5\]"),
        ({"images": torch.zeros(0, 3, 4, 5), "labels": TENSORS["labels"][:0]}, r"labels I64 \[0\]"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, r"labels I64 \[5\]"),
        ({"labels": torch.zeros(6, dtype=torch.int32)}, r"labels I32 \[6\]"),
        ({"extra": torch.zeros(1)}, r"it holds extra F32 \[1\]"),
        ({"labels": torch.tensor([0, 1, 2, 3, 4, 10])}, "num_classes=10, got 0 to 10"),
        ({"labels": torch.tensor([0, 1, 2, 3, 4, -1])}, "got -1 to 4"),
        ({"images": torch.full((6, 3, 4, 5), float("nan"))}, "must be finite; image 0 is not"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    path = forge(tmp_path / "forged", tensors, {})
    with pytest.raises(DataError, match=message) as caught:
        load_condensed(path)
    assert str(path) in str(caught.value)


def test_the_example_in_the_documentation_runs() -> None:
    result = doctest.testmod(condensed)
    assert result.attempted > 5
    assert result.failed == 0


def test_tiles_are_counted_before_they_are_made(tmp_path: Path) -> None:
    """656 kB of 40 images of 64 x 64, each said to hold 64 x 64 smaller ones: 2.7 GB of them."""
    path = tmp_path / "set.safetensors"
    data = made(images=torch.zeros(40, 1, 64, 64), targets=torch.zeros(40, dtype=torch.int64))
    with pytest.raises(InvalidValueError, match="tiles=64 must be"):
        save_condensed(path, data, mean=[0.0], std=[1.0], tiles=64)
    save_condensed(path, data, mean=[0.0], std=[1.0], tiles=2)
    with safetensors.safe_open(path, framework="pt") as stream:
        stated = {**stream.metadata(), "tiles": "64"}
    path.write_bytes(safetensors.torch.save({**safetensors.torch.load_file(path)}, stated))
    for read in (load_condensed, condensed_info):
        with pytest.raises(DataError, match=r"cannot be used: tiles=64 must be .*20"):
            read(path)


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [((1000, 3, 32, 32), 4), ((5000, 3, 32, 32), 4), ((10, 1, 28, 28), 28), ((10**6, 3, 9, 9), 4)],
)
def test_ordinary_sets_may_have_the_tiles_that_are_of_use(
    shape: tuple[int, ...], tiles: int
) -> None:
    assert most_tiles(shape) >= tiles
    assert most_tiles(shape) ** 2 * np.prod(shape) <= max(2**26, 16 * np.prod(shape))
