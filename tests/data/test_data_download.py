"""Downloads, against a server on this machine."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import os
import sys
import tarfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from fedquilt.data import ArchiveSpec, DatasetSpec, FileSpec, load_dataset
from fedquilt.data.specs import DATASETS
from fedquilt.errors import (
    DataError,
    DataNotFoundError,
    InvalidValueError,
    MissingPackageError,
    StorageError,
)

IMAGES = "train-images-x.gz"


def everything_under(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.fixture
def served(tiny, mirror):
    mirror.files = {f"/sub/{name}": data for name, data in tiny.packed.items()}
    return mirror


def load(mirror, root: Path, **options):
    return load_dataset("tiny", root, mirrors={"tiny": [f"{mirror.url}/sub"]}, **options)


def test_missing_files_are_fetched_once(tiny, served, tmp_path: Path) -> None:
    root = tmp_path / "new" / "data"
    tiny.write(root, skip=(IMAGES, "t10k-labels-x.gz"))
    train, test = load(served, root)
    assert (len(train), test.targets.tolist()) == (12, tiny.labels[1].tolist())
    assert served.requests == [f"/sub/{IMAGES}", "/sub/t10k-labels-x.gz"]
    load(served, root)
    assert len(served.requests) == 2


def test_a_download_creates_its_folder_and_leaves_only_the_files(
    tiny, served, tmp_path: Path
) -> None:
    root = tmp_path / "new" / "data"
    load(served, root)
    assert everything_under(root) == [
        "tiny-files",
        *sorted(f"tiny-files/{name}" for name in tiny.packed),
    ]
    for name, data in tiny.packed.items():
        assert (root / "tiny-files" / name).read_bytes() == data


def test_a_mirror_may_serve_another_packing(tiny, served, tmp_path: Path) -> None:
    content = gzip.decompress(tiny.packed[IMAGES])
    served.files[f"/sub/{IMAGES}"] = gzip.compress(content, compresslevel=1, mtime=7)
    assert len(load(served, tmp_path)[0]) == 12


def test_the_next_mirror_is_tried(tiny, served, tmp_path: Path) -> None:
    served.files[f"/bad/{IMAGES}"] = b"not the file"
    served.files[f"/torn/{IMAGES}"] = tiny.packed[IMAGES]
    served.torn.add(f"/torn/{IMAGES}")
    mirrors = [f"{served.url}/{part}/" for part in ("nowhere", "bad", "torn", "sub")]
    assert len(load_dataset("tiny", tmp_path, mirrors={"tiny": mirrors})[0]) == 12
    assert served.requests[:4] == [
        f"/{part}/{IMAGES}" for part in ("nowhere", "bad", "torn", "sub")
    ]


@pytest.mark.parametrize("fault", ["checksum", "torn", "absent", "last file torn"])
def test_a_failed_download_leaves_nothing(tiny, served, tmp_path: Path, fault: str) -> None:
    name = "t10k-labels-x.gz" if fault == "last file torn" else IMAGES
    path = f"/sub/{name}"
    if fault == "checksum":
        served.files[path] = tiny.packed["train-labels-x.gz"]
    elif fault == "absent":
        del served.files[path]
    else:
        served.torn.add(path)
    with pytest.raises(DataNotFoundError) as caught:
        load(served, tmp_path / "new" / "data")
    message = str(caught.value)
    assert f"{name} could not be downloaded" in message
    assert f"{served.url}{path}: " in message
    reason = {"checksum": "expected IDX magic", "absent": "404"}.get(fault, "IncompleteRead")
    assert reason in message
    assert everything_under(tmp_path) == []


def test_a_mirror_that_sends_too_much_is_given_up(tiny, served, tmp_path: Path) -> None:
    served.files[f"/sub/{IMAGES}"] = tiny.packed[IMAGES] + bytes(3 << 20)
    with pytest.raises(DataNotFoundError, match=r"train-images-x\.gz: sends more than \d+ bytes"):
        load(served, tmp_path / "data")
    assert everything_under(tmp_path) == []


def test_an_archive_may_not_be_larger_than_it_is(colour, mirror, tmp_path: Path) -> None:
    mirror.files["/c.tar.gz"] = colour[1] + b"x"
    with pytest.raises(DataNotFoundError, match=f"sends more than {len(colour[1])} bytes"):
        load_dataset("colour", tmp_path / "d", mirrors={"colour": [mirror.url]})


def test_a_mirror_that_takes_too_long_is_given_up(
    tiny, served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedquilt.data.files.TIME_LIMIT_SECONDS", 0)
    with pytest.raises(DataNotFoundError, match="takes more than 0 s"):
        load(served, tmp_path / "data")
    assert everything_under(tmp_path) == []


@pytest.mark.parametrize("spec", DATASETS.values(), ids=lambda spec: spec.name)
def test_encrypted_mirrors_come_first(spec: DatasetSpec) -> None:
    encrypted = [mirror.startswith("https://") for mirror in spec.mirrors]
    assert encrypted == sorted(encrypted, reverse=True)


def test_without_pooch_the_error_says_what_to_install(
    tiny, served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(MissingPackageError, match="a download needs the package pooch"):
        load(served, tmp_path / "data")
    assert everything_under(tmp_path) == []


def test_no_server(tiny, tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"127\.0\.0\.1:9/train-images-x\.gz: Connection"):
        load_dataset("tiny", tmp_path)
    assert everything_under(tmp_path) == []


def test_refused_download_asks_nobody(tiny, served, tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="4 of 4 files not found"):
        load(served, tmp_path, download=False)
    assert served.requests == []


def test_a_wrong_file_is_never_overwritten(tiny, served, tmp_path: Path) -> None:
    path = tiny.write(tmp_path, skip=("train-labels-x.gz",)) / IMAGES
    path.write_bytes(b"mine")
    with pytest.raises(DataError, match=IMAGES):
        load(served, tmp_path)
    assert path.read_bytes() == b"mine"
    assert served.requests == []


def test_an_interrupt_leaves_nothing(
    tiny, served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pooch

    def interrupted(self, url: str, output: BinaryIO, _: object) -> None:
        output.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(served, tmp_path / "data")
    assert everything_under(tmp_path) == []


def test_the_first_folder_that_can_be_written_is_used(tiny, served, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    closed, open_ = tmp_path / "file" / "data", tmp_path / "open"
    load(served, os.pathsep.join((str(closed), str(open_))))
    assert (open_ / "tiny-files" / IMAGES).exists()
    with pytest.raises(StorageError, match=f"no data folder can be written: {closed}"):
        load(served, closed)


def test_a_full_disk_is_told_apart_from_a_bad_mirror(
    tiny, served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pooch

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", full)
    with pytest.raises(StorageError, match=r"tiny: .*No space left on device"):
        load(served, tmp_path)


def test_progress_names_the_file_on_standard_error(tiny, served, tmp_path: Path, capsys) -> None:
    load(served, tmp_path, progress=True)
    output = capsys.readouterr()
    assert output.out == ""
    assert all(name in output.err for name in tiny.packed)


def test_quiet_without_progress(tiny, served, tmp_path: Path, capsys) -> None:
    load(served, tmp_path)
    assert capsys.readouterr().err == ""


def test_mirrors_from_the_environment(
    tiny, served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = f"mnist=https://example.org ; tiny={served.url}/nowhere, {served.url}/sub;"
    monkeypatch.setenv("FEDQUILT_MIRRORS", entry)
    assert len(load_dataset("tiny", tmp_path / "a")[0]) == 12
    assert served.requests[:2] == [f"/nowhere/{IMAGES}", f"/sub/{IMAGES}"]
    with pytest.raises(DataNotFoundError):  # the argument goes before the environment
        load_dataset("tiny", tmp_path / "b", mirrors={"tiny": [f"{served.url}/nowhere"]})


@pytest.mark.parametrize(
    ("mirrors", "message"),
    [
        ({"minst": ["https://a"]}, r"mirrors='minst' .*did you mean 'mnist'"),
        ({"digits": ["https://a"]}, "mirrors='digits' must be one of"),
        ({"mnist": []}, "must list at least one URL"),
        ({"mnist": "https://a"}, "must list at least one URL, got 'https://a'"),
        ({"mnist": ["/local/folder"]}, "'/local/folder' for 'mnist' must begin with http"),
    ],
)
def test_bad_mirrors_are_refused(mirrors, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        load_dataset("digits", mirrors=mirrors)


def test_a_bad_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDQUILT_MIRRORS", "https://example.org")
    with pytest.raises(InvalidValueError, match="must have the form name=URL,URL"):
        load_dataset("digits")


def colour_batches() -> dict[str, bytes]:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (3, 5, 1 + 12)).astype(np.uint8)
    rows[:, :, 0] %= 4
    names = ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin")
    return {name: batch.tobytes() for name, batch in zip(names, rows, strict=True)}


def tar(members: dict[str, bytes], link_name: str = "colour/link.bin") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo(link_name)
        link.type, link.linkname = tarfile.SYMTYPE, "data_batch_1.bin"
        archive.addfile(link)
    return buffer.getvalue()


@pytest.fixture
def colour(register_spec):
    """The data set 'colour' of 10 + 5 images 3x2x2, served as an archive with strangers in it."""
    batches = colour_batches()
    archive = tar(
        {
            "../evil.bin": b"evil",
            "/tmp/fedquilt-evil.bin": b"evil",
            "colour/readme.html": b"<html>",
            **{f"colour/{name}": data for name, data in batches.items()},
        }
    )
    spec = DatasetSpec(
        name="colour",
        title="made up",
        kind="cifar",
        image_shape=(3, 2, 2),
        mean=(0.5, 0.25, 0.0),
        std=(1.0, 0.5, 0.25),
        num_classes=4,
        folder="colour",
        files=tuple(
            FileSpec(name, (5, 13), "uint8", 65, hashlib.sha256(data).hexdigest())
            for name, data in batches.items()
        ),
        mirrors=("http://127.0.0.1:9",),
        archive=ArchiveSpec("c.tar.gz", len(archive), hashlib.md5(archive).hexdigest(), "colour"),
    )
    register_spec(spec)
    return spec, archive


def test_an_archive_gives_only_the_expected_files(colour, mirror, tmp_path: Path) -> None:
    mirror.files["/c.tar.gz"] = colour[1]
    train, test = load_dataset("colour", tmp_path / "d", mirrors={"colour": [mirror.url]})
    batches = colour_batches()
    assert everything_under(tmp_path) == ["d", "d/colour", *(f"d/colour/{n}" for n in batches)]
    rows = [np.frombuffer(data, np.uint8).reshape(5, 13) for data in batches.values()]
    assert train.targets.tolist() == [*rows[0][:, 0], *rows[1][:, 0]]
    # Byte 1 + 4 is the first pixel of the green plane; mean 0.25, deviation 0.5.
    assert train.images[7, 1, 0, 0] == pytest.approx((rows[1][2, 5] / 255 - 0.25) / 0.5, abs=1e-6)
    assert test.images[4, 2, 1, 1] == pytest.approx(rows[2][4, 12] / 255 / 0.25, abs=1e-6)
    assert mirror.requests == ["/c.tar.gz"]


def test_files_already_there_are_kept(colour, mirror, tmp_path: Path) -> None:
    mirror.files["/c.tar.gz"] = colour[1]
    (tmp_path / "colour").mkdir()
    kept = tmp_path / "colour" / "test_batch.bin"
    kept.write_bytes(colour_batches()["test_batch.bin"])
    before = kept.stat().st_ino
    load_dataset("colour", tmp_path, mirrors={"colour": [mirror.url]})
    assert kept.stat().st_ino == before
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"test_batch\.bin: has 64 bytes; expected content of 65"):
        load_dataset("colour", tmp_path)


@pytest.mark.parametrize("fault", ["torn", "other bytes"])
def test_a_wrong_archive_leaves_nothing(colour, mirror, tmp_path: Path, fault: str) -> None:
    mirror.files["/c.tar.gz"] = colour[1] if fault == "torn" else colour[1][:-9] + bytes(9)
    mirror.torn = {"/c.tar.gz"} if fault == "torn" else set()
    with pytest.raises(DataNotFoundError, match=r"c\.tar\.gz") as caught:
        load_dataset("colour", tmp_path, mirrors={"colour": [mirror.url]})
    assert ("IncompleteRead" if fault == "torn" else colour[0].archive.md5) in str(caught.value)
    assert everything_under(tmp_path) == []


@pytest.mark.parametrize("instead", ["nothing", "link", "short file"])
def test_an_archive_without_a_member_is_refused(
    colour, register_spec, mirror, tmp_path: Path, instead: str
) -> None:
    members = {f"colour/{name}": data for name, data in colour_batches().items()}
    last = "colour/test_batch.bin"
    members[last] = members[last][:-1]
    if instead != "short file":
        del members[last]
    archive = tar(members, link_name=last if instead == "link" else "colour/link.bin")
    described = ArchiveSpec("c.tar.gz", len(archive), hashlib.md5(archive).hexdigest(), "colour")
    register_spec(dataclasses.replace(colour[0], archive=described))
    mirror.files["/c.tar.gz"] = archive
    with pytest.raises(DataError, match=r"c\.tar\.gz: holds no colour/test_batch\.bin"):
        load_dataset("colour", tmp_path, mirrors={"colour": [mirror.url]})
    assert everything_under(tmp_path) == []


def test_the_message_says_how_to_get_an_archive(colour, tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"unpack c\.tar\.gz from http://127\.0\.0\.1:9"):
        load_dataset("colour", tmp_path, download=False)
