"""CIFAR-100, Tiny ImageNet, FEMNIST and Shakespeare, in small files of their published forms."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from watched_runs import differing, folder_values

import fedquilt
from fedquilt.audit.cases import known_entropy
from fedquilt.config import plain_config
from fedquilt.data import DATASETS, DatasetSpec, ImageDataset, dataset_status, load_dataset, specs
from fedquilt.data.load import LETTERS, SHARED_PEOPLE
from fedquilt.errors import DataError, DataNotFoundError, InvalidValueError
from fedquilt.experiment.api import run_config, run_in_memory
from fedquilt.setup.build_task import build_task

RANDOM = np.random.default_rng(5)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, DatasetSpec]]:
    """The table of data sets, as it was before when the test ends."""
    for name, spec in list(specs._KNOWN.items()):
        monkeypatch.setitem(specs._KNOWN, name, spec)
    before = set(specs._KNOWN)
    yield specs._KNOWN
    for name in set(specs._KNOWN) - before:
        del specs._KNOWN[name]


def described(known: dict[str, DatasetSpec], name: str, path: Path, content: bytes) -> None:
    """Put an archive in its place and its size and checksum into the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    archive = known[name].archive
    assert archive is not None
    md5 = hashlib.md5(content).hexdigest()
    known[name] = dataclasses.replace(
        known[name], archive=dataclasses.replace(archive, size=len(content), md5=md5)
    )


# CIFAR-100: a tar of rows


def cifar100_tar(parts: dict[str, np.ndarray]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, rows in parts.items():
            item = tarfile.TarInfo(f"cifar-100-binary/{name}")
            item.size = rows.nbytes
            tar.addfile(item, io.BytesIO(rows.tobytes()))
    return packed.getvalue()


def cifar100_rows(count: int) -> np.ndarray:
    rows = RANDOM.integers(0, 256, (count, 3_074), dtype=np.uint8)
    rows[:, 0], rows[:, 1] = rows[:, 0] % 20, rows[:, 1] % 100
    return rows


def test_cifar100(known: dict[str, DatasetSpec], tmp_path: Path) -> None:
    train_rows, test_rows = cifar100_rows(7), cifar100_rows(3)
    content = cifar100_tar({"train.bin": train_rows, "test.bin": test_rows})
    described(known, "cifar100", tmp_path / "cifar-100-binary.tar.gz", content)
    assert dataset_status("cifar100", tmp_path).ready
    train, test = load_dataset("cifar100", tmp_path, download=False)
    assert (len(train), len(test), train.num_classes) == (7, 3, 100)
    assert train.targets.tolist() == train_rows[:, 1].tolist()
    mean, std = (np.array(v)[:, None, None] for v in (train_spec().mean, train_spec().std))
    pixels = train_rows[4, 2:].reshape(3, 32, 32) / 255
    assert np.allclose(train.images[4].numpy(), (pixels - mean) / std, atol=1e-5)


def train_spec() -> DatasetSpec:
    return DATASETS["cifar100"]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"train.bin": cifar100_rows(1)}, "holds no cifar-100-binary/test.bin"),
        ({"train.bin": cifar100_rows(1)[:, 1:], "test.bin": cifar100_rows(1)}, "rows of 3074"),
    ],
)
def test_cifar100_that_is_not_whole(
    known: dict[str, DatasetSpec], tmp_path: Path, parts: dict[str, np.ndarray], words: str
) -> None:
    path = tmp_path / "cifar-100" / "cifar-100-binary.tar.gz"
    described(known, "cifar100", path, cifar100_tar(parts))
    with pytest.raises(DataError, match=words):
        load_dataset("cifar100", tmp_path, download=False)


def test_another_archive_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "cifar-100-binary.tar.gz"
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match="has 14 bytes; expected 168513733 bytes with md5 03b5dce0"):
        load_dataset("cifar100", tmp_path, download=False)
    assert "has 14 bytes" in dataset_status("cifar100", tmp_path).summary()


@pytest.mark.parametrize("name", ["cifar100", "tiny-imagenet", "femnist", "shakespeare"])
def test_what_is_not_there_is_said_with_a_way_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"searched .*(https?://|preprocess\.sh)"):
        load_dataset(name, tmp_path, download=False)
    assert not dataset_status(name, tmp_path).ready


# Tiny ImageNet: a zip of pictures

CLASSES = ("n01443537", "n01629819")


def jpeg(shade: int, size: tuple[int, int] = (64, 64), mode: str = "RGB") -> bytes:
    packed = io.BytesIO()
    Image.new(mode, size, shade if mode == "L" else (shade, 0, 255 - shade)).save(packed, "JPEG")
    return packed.getvalue()


def tiny_zip(**changes: bytes) -> bytes:
    files = {
        "wnids.txt": "\n".join(CLASSES).encode(),
        "train/n01443537/images/n01443537_0.JPEG": jpeg(10),
        "train/n01443537/images/n01443537_1.JPEG": jpeg(20, mode="L"),
        "train/n01629819/images/n01629819_0.JPEG": jpeg(200),
        "val/images/val_0.JPEG": jpeg(90),
        "val/val_annotations.txt": b"val_0.JPEG\tn01629819\t0\t32\t44\t62\n",
        "test/images/test_0.JPEG": jpeg(1),
        **changes,
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as stream:
        for name, content in files.items():
            stream.writestr(f"tiny-imagenet-200/{name}", content)
    return packed.getvalue()


def test_tiny_imagenet(known: dict[str, DatasetSpec], tmp_path: Path) -> None:
    path = tmp_path / "tiny-imagenet" / "tiny-imagenet-200.zip"
    described(known, "tiny-imagenet", path, tiny_zip())
    train, test = load_dataset("tiny-imagenet", tmp_path, download=False)
    assert tuple(train.images.shape) == (3, 3, 64, 64)
    assert (train.targets.tolist(), test.targets.tolist()) == ([0, 0, 1], [1])
    spec = DATASETS["tiny-imagenet"]
    red, blue = ((train.images[2, c] * spec.std[c] + spec.mean[c]) * 255 for c in (0, 2))
    assert torch.allclose(red, torch.tensor(200.0), atol=3)
    assert torch.allclose(blue, torch.tensor(55.0), atol=3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train/n01443537/images/n01443537_0.JPEG": jpeg(1, (65, 64))}, "64 x 64 pixels"),
        ({"train/n01443537/images/n01443537_0.JPEG": b"GIF89a"}, "cannot identify"),
        ({"train/n01443537/images/n01443537_0.JPEG": bytes(2 << 20)}, "at most 1048576 bytes"),
        ({"val/val_annotations.txt": b"val_0.JPEG\tn99999999\t0\n"}, "names the class 'n99999999'"),
        ({"val/val_annotations.txt": b"val_7.JPEG\tn01629819\t0\n"}, "holds no .*val_7.JPEG"),
    ],
)
def test_tiny_imagenet_that_is_not_right(
    known: dict[str, DatasetSpec], tmp_path: Path, changes: dict[str, bytes], words: str
) -> None:
    path = tmp_path / "tiny-imagenet-200.zip"
    described(known, "tiny-imagenet", path, tiny_zip(**changes))
    with pytest.raises(DataError, match=words) as caught:
        load_dataset("tiny-imagenet", tmp_path, download=False)
    assert str(path) in str(caught.value)


# LEAF: JSON by user


def leaf_file(path: Path, users: dict[str, tuple[list[Any], list[Any]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(content))


def written(count: int, label: int) -> tuple[list[Any], list[Any]]:
    return [[(label % 10) / 10] * 784] * count, [label] * count


def write_femnist(root: Path) -> None:
    place = root / "femnist" / "data"
    leaf_file(
        place / "train" / "all_0.json", {"f0002_05": written(3, 61), "f0001_41": written(2, 0)}
    )
    leaf_file(place / "train" / "all_1.json", {"f0100_00": written(4, 7), "f0003_11": ([], [])})
    leaf_file(place / "test" / "all_0.json", {"f0001_41": written(1, 0), "f9999_99": written(1, 3)})


def test_femnist_by_writer(tmp_path: Path) -> None:
    write_femnist(tmp_path)
    train, test = load_dataset("femnist", tmp_path, download=False)
    assert (tuple(train.images.shape), len(test), train.num_classes) == ((9, 1, 28, 28), 2, 62)
    assert train.group_names == ("f0001_41", "f0002_05", "f0100_00")
    assert train.targets.tolist() == [0, 0, 61, 61, 61, 7, 7, 7, 7]
    assert train.images[2, 0, 3, 3].item() == pytest.approx((0.1 - 0.9637) / 0.1597, rel=1e-5)
    assert train.notes == (SHARED_PEOPLE,)
    config = plain_config(
        {"dataset": "femnist", "data_dir": str(tmp_path), "partition": "writer", "model": "linear"}
    )
    settled, problem = build_task(config)
    assert settled.num_clients == 3
    assert problem.roster.ids == ("writer:f0001_41", "writer:f0002_05", "writer:f0100_00")
    assert problem.roster.name == "femnist-writers"
    assert [part.tolist() for part in problem.task.clients] == [[0, 1], [2, 3, 4], [5, 6, 7, 8]]
    assert SHARED_PEOPLE in problem.metadata()["data_notes"]


def test_a_writer_keeps_the_name_in_another_file(tmp_path: Path) -> None:
    """A number by place would be another person's where other people are in the file."""
    rosters = []
    for names in (("a_1", "b_2"), ("b_2", "c_3")):
        root = tmp_path / names[0]
        for part in ("train", "test"):
            users = {name: written(1, k) for k, name in enumerate(names)}
            leaf_file(root / "femnist" / part / "x.json", users)
        settings = {"dataset": "femnist", "data_dir": str(root), "partition": "writer"}
        _, problem = build_task(plain_config({**settings, "model": "linear"}))
        rosters.append(problem.roster)
    assert rosters[0].name == rosters[1].name
    assert rosters[0].ids == ("writer:a_1", "writer:b_2")
    assert rosters[1].ids == ("writer:b_2", "writer:c_3")


def femnist_run(root: Path, name: str, **changes: Any) -> Any:
    """Run on femnist by writer, in which the people of the test samples are clients."""
    config = {
        "dataset": "femnist",
        "data_dir": str(root / name),
        "partition": "writer",
        "mode": "certified",
        "model": "linear",
        "num_rounds": 2,
        "eval_every": 1,
        "local_epochs": 1,
        "output_dir": str(root / "runs"),
        "availability": "always",
    }
    with known_entropy(3):
        return run_config(plain_config({**config, **changes}))


def test_what_clients_own_test_samples_show_is_the_owners_alone(tmp_path: Path) -> None:
    """Two worlds that differ in one person's test labels: nothing public may."""
    write_femnist(tmp_path / "one")
    worlds = []
    for label in (0, 5):
        tests = {"f0001_41": (written(6, 0)[0], [label] * 6), "f0100_00": written(4, 7)}
        leaf_file(tmp_path / "one" / "femnist" / "data" / "test" / "all_0.json", tests)
        worlds.append(femnist_run(tmp_path, "one"))
    one, other = worlds
    assert differing(*(folder_values(done.folder)[0] for done in worlds)) == []
    hidden = [
        [json.loads(line)["test_loss"] for line in (done.folder / "private.jsonl").open()]
        for done in (one, other)
    ]
    assert len(hidden[0]) == 2
    assert hidden[0] != hidden[1]
    assert stat.S_IMODE((one.folder / "private.jsonl").stat().st_mode) == 0o600
    assert one.final_accuracy is None
    assert one.statement.is_bounded
    assert any("which people who are clients have made" in what for what in one.statement.uncovered)
    assert "uncovered  nothing" not in one.statement.as_text()


def test_test_samples_of_nobody_among_the_clients_stay_public(tmp_path: Path) -> None:
    write_femnist(tmp_path / "one")
    dealt = femnist_run(tmp_path, "one", partition="iid", num_clients=3)
    assert dealt.final_accuracy is not None
    assert dealt.statement.uncovered == ()
    unclaimed = femnist_run(tmp_path, "one", mode="fedavg")
    assert unclaimed.final_accuracy is not None


def test_samples_of_clients_are_not_held_out_under_a_claim(tmp_path: Path) -> None:
    write_femnist(tmp_path / "one")
    stops = {"early_stopping": True, "target_accuracy": 0.9, "validation_fraction": 0.3}
    with pytest.raises(InvalidValueError, match="must be left out with partition='writer'"):
        femnist_run(tmp_path, "one", **stops)


def spoken(text: str) -> tuple[list[Any], list[Any]]:
    return [text[k : k + 80] for k in range(len(text) - 80)], list(text[80:])


def test_shakespeare_by_speaker(tmp_path: Path) -> None:
    lines = "To be, or not to be: that is the question.\n" * 3
    for part in ("train", "test"):
        users = {"HAMLET_HAMLET": spoken(lines), "HAMLET_GHOST": spoken("Mark me\u2014" * 12)}
        leaf_file(tmp_path / "shakespeare" / part / "all.json", users)
    train, _ = load_dataset("shakespeare", tmp_path, download=False)
    assert (train.images.dtype, train.num_classes) == (torch.int64, 80)
    assert train.group_names == ("HAMLET_GHOST", "HAMLET_HAMLET")
    first = train.images[int(np.argmax(train.groups == 1))]
    assert "".join(LETTERS[k] for k in first) == lines[:80]
    ghost = "".join(LETTERS[k] for k in train.images[0])
    assert ghost == ("Mark me " * 10)
    config = {
        "dataset": "shakespeare",
        "data_dir": str(tmp_path),
        "partition": "writer",
        "mode": "fedavg",
        "num_rounds": 1,
        "local_epochs": 1,
        "availability": "always",
        "clients_per_round": 1.0,
        "model": "auto",
    }
    done = run_in_memory(plain_config(config))
    assert type(done.model).__name__ == "CharLSTM"
    assert done.final_accuracy is not None


@pytest.mark.parametrize(
    ("users", "words"),
    [
        ({"a": ([[0.0] * 783], [1])}, "lists of 784 numbers"),
        ({"a": ([[0.0] * 784], [62])}, "classes below 62"),
        ({"a": ([[0.0] * 784], [True])}, "classes below 62"),
        ({"a": ([[0.0] * 784], [1, 2])}, "lists x and y of one length"),
        ({"a": ([["x"] * 784], [1])}, "user 'a'"),
        ({"a": ([[1e300] * 784], [1])}, "lists of 784 numbers"),
        ({"a": ([], [])}, "nobody in it"),
        ({}, "nobody in it"),
    ],
)
def test_leaf_files_that_are_not_right(tmp_path: Path, users: dict[str, Any], words: str) -> None:
    leaf_file(tmp_path / "femnist" / "train" / "x.json", users)
    with pytest.raises(DataError, match=words):
        load_dataset("femnist", tmp_path, download=False)


@pytest.mark.parametrize(
    "content",
    ['{"users": ["a"], "user_data": {}}', '{"users": "a", "user_data": {}}', "[1]", "[" * 99_999],
)
def test_hostile_leaf_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "femnist" / "train" / "x.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(DataError, match=r"x\.json"):
        load_dataset("femnist", tmp_path, download=False)


# Names of one's own


@pytest.fixture
def register(known: dict[str, DatasetSpec]) -> Callable[..., None]:
    return fedquilt.register_dataset


def test_a_data_set_is_registered_at_run_time(register: Callable[..., None]) -> None:
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    register("my-own", lambda: ((x[:40], y[:40]), (x[40:], y[40:])), num_classes=3)
    train, test = load_dataset("my-own")
    assert (len(train), len(test), train.num_classes, test.name) == (40, 20, 3, "my-own")
    assert dataset_status("my-own").ready
    settings = {"dataset": "my-own", "mode": "fedavg", "num_clients": 4, "num_rounds": 5}
    done = run_in_memory(plain_config({**settings, "model": "linear", "learning_rate": 0.5}))
    assert done.final_accuracy is not None
    assert done.final_accuracy > 0.6
    with pytest.raises(InvalidValueError, match="name='my-own' must be new"):
        register("my-own", lambda: None)


def test_no_label_that_a_client_holds_decides_how_many_classes_there_are(
    register: Callable[..., None],
) -> None:
    x, y = torch.zeros(8, 3), torch.arange(8) % 2
    register("as-tested", lambda: ((x, 0 * y), (x, y)))
    assert [part.num_classes for part in load_dataset("as-tested")] == [2, 2]
    register("one-more", lambda: ((x, 7 * y), (x, y)))
    with pytest.raises(InvalidValueError, match="num_classes=2, got 0 to 7"):
        load_dataset("one-more")
    register("said", lambda: (ImageDataset(x, 7 * y, "any", 9), (x, y)))
    assert [part.num_classes for part in load_dataset("said")] == [9, 9]


def test_a_registered_set_may_say_who_made_what(register: Callable[..., None]) -> None:
    x, y = torch.zeros(6, 2), torch.zeros(6, dtype=torch.long)
    people = np.array([1, 0, 1, 0, 1, 1])
    own = ImageDataset(x, y, "any", 2, people, ("ann", "bob"))
    register("with-people", lambda: (own, own))
    config = {"dataset": "with-people", "partition": "writer", "model": "linear", "mode": "fedavg"}
    _, problem = build_task(plain_config(config))
    assert problem.roster.ids == ("writer:ann", "writer:bob")


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("mnist", lambda: None, "name='mnist' must be new"),
        ("a b", lambda: None, "letters, digits"),
        ("", lambda: None, "name"),
        ("fine", "mnist", "must be a function"),
    ],
)
def test_names_and_sources_that_will_not_do(
    register: Callable[..., None], name: str, source: Any, words: str
) -> None:
    with pytest.raises(InvalidValueError, match=words):
        register(name, source)


def test_a_function_must_return_two_parts(register: Callable[..., None]) -> None:
    register("half", lambda: (torch.zeros(2, 2),))
    with pytest.raises(InvalidValueError, match=r"must return \(train, test\)"):
        load_dataset("half")
