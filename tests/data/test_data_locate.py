"""Files are found in order, read as written, and refused unless they are exactly right."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedquilt.data import DATASETS, data_folders, dataset_status, files, load_dataset
from fedquilt.errors import DataError, DataNotFoundError, InvalidValueError

IMAGES = "train-images-x.gz"


def test_folders_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_folders() == [Path("data")]
    monkeypatch.setenv("FEDQUILT_DATA", os.pathsep.join(("/a", "", "/b")))
    assert data_folders() == [Path("/a"), Path("/b"), Path("data")]
    joined = os.pathsep.join(("/c", "/b"))
    assert data_folders(joined) == [Path("/c"), Path("/b"), Path("/a")]
    assert data_folders(Path("/d")) == [Path("/d"), Path("/a"), Path("/b")]


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValueError, match="must be a folder, it is a file"):
        data_folders(tmp_path / "file")
    with pytest.raises(InvalidValueError, match="must name a folder"):
        data_folders(os.pathsep)


def test_images_are_normalised_and_labels_kept(tiny, tmp_path: Path) -> None:
    tiny.write(tmp_path)
    for part, dataset in enumerate(load_dataset("tiny", tmp_path, download=False)):
        expected = (tiny.images[part][:, None] / 255 - 0.25) / 0.5
        np.testing.assert_allclose(dataset.images.numpy(), expected, atol=1e-6)
        assert dataset.images.dtype == torch.float32
        assert dataset.targets.tolist() == tiny.labels[part].tolist()
        assert (dataset.name, dataset.num_classes) == ("tiny", 3)


def test_plain_and_repacked_files_are_accepted(tiny, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path)
    content = gzip.decompress(tiny.packed[IMAGES])
    (folder / IMAGES).unlink()
    (folder / IMAGES.removesuffix(".gz")).write_bytes(content)
    labels = gzip.decompress(tiny.packed["t10k-labels-x.gz"])
    # Two gzip members after one another are a valid file too.
    repacked = gzip.compress(labels[:5], 1) + gzip.compress(labels[5:], 9)
    (folder / "t10k-labels-x.gz").write_bytes(repacked)
    train, test = load_dataset("tiny", tmp_path, download=False)
    assert len(train) == 12
    assert test.targets.tolist() == tiny.labels[1].tolist()


def test_files_may_lie_in_several_folders(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write(tmp_path / "a", skip=(IMAGES,))
    tiny.write(tmp_path / "b")
    monkeypatch.setenv("FEDQUILT_DATA", str(tmp_path / "b"))
    assert len(load_dataset("tiny", tmp_path / "a", download=False)[0]) == 12
    status = dataset_status("tiny", tmp_path / "a")
    assert status.ready
    assert status.summary() == f"ready in {tmp_path / 'b/tiny-files'}, {tmp_path / 'a/tiny-files'}"


def broken(kind: str, packed: bytes) -> bytes:
    content = gzip.decompress(packed)
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    return {
        "torn": packed[: len(packed) // 2],
        "empty": b"",
        "html": b"<html>404</html>",
        "damaged": packed[:30] + bytes([packed[30] ^ 255]) + packed[31:],
        "other pixels": gzip.compress(flipped),
        "other array": gzip.compress(content[:3] + b"\x01" + content[4:]),
        "short": gzip.compress(content[:-3]),
        "bomb": gzip.compress(bytes(10_000_000)),
        "large": bytes(2_000_000),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("torn", "torn or no gzip file"),
        ("empty", "begins with 0x, expected IDX magic"),
        ("html", "no gzip file"),
        ("damaged", "torn or no gzip file"),
        ("other pixels", "other content"),
        ("other array", "expected IDX magic 0x00000803"),
        ("short", r"has 205 bytes, expected 208"),
        ("bomb", "expected IDX magic"),
        ("large", "2000000 bytes, more than its content"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tiny, tmp_path: Path, kind: str, reason: str) -> None:
    path = tiny.write(tmp_path) / IMAGES
    path.write_bytes(broken(kind, tiny.packed[IMAGES]))
    with pytest.raises(DataError, match=reason) as caught:
        load_dataset("tiny", tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert tiny.spec.files[0].sha256 in str(caught.value)
    assert tiny.spec.files[0].packed_md5 in str(caught.value)
    assert not isinstance(caught.value, DataNotFoundError)
    status = dataset_status("tiny", tmp_path)
    assert not status.ready
    assert [(file.name, file.path) for file in status.refused] == [(f"tiny-files/{IMAGES}", path)]
    assert status.summary() == f"refused: {caught.value}"


@pytest.mark.parametrize("change", [b"", b"\x00"])
def test_a_wrong_plain_file_is_refused(tiny, tmp_path: Path, change: bytes) -> None:
    folder = tiny.write(tmp_path, skip=(IMAGES,))
    content = gzip.decompress(tiny.packed[IMAGES])
    (folder / "train-images-x").write_bytes(content + change if change else content[:100])
    with pytest.raises(DataError, match=r"train-images-x: has (100|209) bytes; expected"):
        load_dataset("tiny", tmp_path)


def test_a_folder_in_place_of_a_file_is_refused(tiny, tmp_path: Path) -> None:
    (tiny.write(tmp_path, skip=(IMAGES,)) / IMAGES).mkdir()
    with pytest.raises(DataError, match=f"{IMAGES}: is not a regular file"):
        load_dataset("tiny", tmp_path)


def test_missing_files_without_download(tiny, tmp_path: Path) -> None:
    tiny.write(tmp_path / "a", skip=(IMAGES, "t10k-labels-x.gz"))
    folders = os.pathsep.join((str(tmp_path / "a"), str(tmp_path / "b")))
    with pytest.raises(DataNotFoundError) as caught:
        load_dataset("tiny", folders, download=False)
    message = str(caught.value)
    assert f"2 of 4 files not found: {IMAGES}, t10k-labels-x.gz;" in message
    assert f"searched {tmp_path / 'a/tiny-files'}, {tmp_path / 'b/tiny-files'}" in message
    assert "--data-dir or FEDQUILT_DATA" in message
    assert tiny.spec.mirrors[0] in message
    assert isinstance(caught.value, FileNotFoundError)
    assert not (tmp_path / "b").exists()
    status = dataset_status("tiny", folders)
    assert status.missing == (f"tiny-files/{IMAGES}", "tiny-files/t10k-labels-x.gz")
    assert status.summary() == "2 of 4 files missing"


def test_status_of_the_built_in_and_of_a_derived_data_set(tmp_path: Path) -> None:
    assert dataset_status("digits", tmp_path).summary() == "ready (built in)"
    status = dataset_status("mnist-writers", tmp_path)
    assert status.searched == (tmp_path,)
    assert [name.split("/")[0] for name in status.missing] == ["mnist"] * 4 + ["qmnist-writers"] * 2


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidValueError, match=r"dataset='minst' .*did you mean 'mnist'"):
        load_dataset("minst")
    with pytest.raises(InvalidValueError, match="dataset="):
        dataset_status("imagenet")


def test_specifications_agree_with_themselves() -> None:
    assert list(DATASETS) == [
        *("digits", "mnist", "fashion-mnist", "cifar10", "mnist-writers"),
        *("cifar100", "tiny-imagenet", "femnist", "shakespeare"),
    ]
    for spec in DATASETS.values():
        channels = 0 if spec.kind == "leaf-text" else spec.image_shape[0]
        assert len(spec.mean) == len(spec.std) == channels
        for file in spec.files:
            header = 4 + 4 * len(file.shape) if file.packed_md5 else 0
            itemsize = {"uint8": 1, "int32": 4}[file.dtype]
            assert file.size == header + itemsize * int(np.prod(file.shape))
            assert len(bytes.fromhex(file.sha256)) == 32
            assert file.packed_md5 is None or len(bytes.fromhex(file.packed_md5)) == 16


# Two images of 1x3 bytes, written out from the description of the format.
IDX_IMAGES = bytes.fromhex("00000803 00000002 00000001 00000003 0102ff 040506")
# A 2x2 array of int32: 1, 256, -1, 65536.
IDX_INTEGERS = bytes.fromhex("00000c02 00000002 00000002 00000001 00000100 ffffffff 00010000")


def test_bytes_are_read_as_written() -> None:
    assert files.parse(IDX_IMAGES, "uint8", (2, 1, 3)).tolist() == [[[1, 2, 255]], [[4, 5, 6]]]


def test_integers_are_big_endian() -> None:
    array = files.parse(IDX_INTEGERS, "int32", (2, 2))
    assert array.astype(np.int64).tolist() == [[1, 256], [-1, 65536]]


def test_header_is_that_of_mnist() -> None:
    assert files.header("uint8", (60_000, 28, 28)).hex() == "000008030000ea600000001c0000001c"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x1f\x8b" + IDX_IMAGES[2:], "begins with 0x1f8b0803, expected IDX magic 0x00000803"),
        (IDX_INTEGERS, "begins with 0x00000c02, expected IDX magic 0x00000803"),
        (IDX_IMAGES.replace(b"\x00\x02", b"\x00\x03", 1), r"dimensions \[3, 1, 3\].*\[2, 1, 3\]"),
        (IDX_IMAGES[:10], r"has dimensions \[2\], expected \[2, 1, 3\]"),
        (b"", "begins with 0x, expected"),
        (IDX_IMAGES[:-1], "has 21 bytes, expected 22"),
        (IDX_IMAGES + b"\x00", "has 23 bytes, expected 22"),
    ],
)
def test_wrong_content_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        files.parse(content, "uint8", (2, 1, 3))
