"""Data files on disk: where they lie, whether they are whole, what is in them.

The IDX format is a big-endian header and then the numbers of one array:

byte 0, 1   zero
byte 2      type of the numbers: 0x08 uint8, 0x0C int32
byte 3      number of dimensions d
d times     size of a dimension, uint32
then        the numbers, the last dimension fastest
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedquilt.common import checks
from fedquilt.common.errors import DataError, InvalidValueError
from fedquilt.common.untrusted import read_named
from fedquilt.data.specs import DATASETS, DatasetSpec, FileSpec

_TYPES: dict[str, tuple[int, np.dtype[Any]]] = {
    "uint8": (0x08, np.dtype(np.uint8)),
    "int32": (0x0C, np.dtype(">i4")),
}


def header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of an IDX file that holds `shape` numbers of type `dtype`."""
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, _TYPES[dtype][0], len(shape), *shape)


def parse(content: bytes, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return the array in `content`, which must have exactly this type and shape.

    The array shares the memory of `content` and is read-only.
    """
    wanted = header(dtype, shape)
    found = content[: len(wanted)]
    if found[:4] != wanted[:4]:
        raise DataError(f"begins with 0x{found[:4].hex()}, expected IDX magic 0x{wanted[:4].hex()}")
    if found != wanted:
        raise DataError(f"has dimensions {_dimensions(found[4:])}, expected {list(shape)}")
    number = _TYPES[dtype][1]
    size = len(wanted) + number.itemsize * int(np.prod(shape, dtype=np.int64))
    if len(content) != size:
        raise DataError(f"has {len(content)} bytes, expected {size} for dimensions {list(shape)}")
    return np.frombuffer(content, dtype=number, offset=len(wanted)).reshape(shape)


def _dimensions(raw: bytes) -> list[int]:
    return [size for (size,) in struct.iter_unpack(">I", raw[: len(raw) // 4 * 4])]


PACKING_SLACK = 1 << 20
"""How much larger than its content a packed file may be; no packing needs as much."""


def read_verified(path: Path, spec: FileSpec) -> bytes:
    """Return the unpacked content of the file at `path`, or raise with its name.

    Nothing is read from a file whose size shows that it cannot be the right one.
    """
    try:
        if not path.is_file():
            raise DataError("is not a regular file")
        _check_size(path, spec)
        raw = read_named(path, spec.size + PACKING_SLACK)
        return _unpacked(raw, spec) if path.suffix == ".gz" else _checked(raw, spec)
    except (ValueError, OSError) as error:  # DataError is one
        raise DataError(f"{path}: {error}; expected {spec.expected}") from error


def file_md5(path: Path) -> str:
    """Return the MD5 of a file that may not fit in memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _check_size(path: Path, spec: FileSpec) -> None:
    size = path.stat().st_size
    if path.suffix != ".gz":
        if size != spec.size:
            raise DataError(f"has {size} bytes")
    elif size > spec.size + PACKING_SLACK:
        raise DataError(f"has {size} bytes, more than its content would have unpacked")


def _unpacked(raw: bytes, spec: FileSpec) -> bytes:
    """Unpack at most one byte more than expected, so that no bomb fills the memory."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            content = file.read(spec.size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"is torn or no gzip file ({len(raw)} bytes, {error})") from error
    # The original packing is known to hold the right content.
    if hashlib.md5(raw, usedforsecurity=False).hexdigest() == spec.packed_md5:
        return content
    return _checked(content, spec)


def _checked(content: bytes, spec: FileSpec) -> bytes:
    if spec.packed_md5 is not None:
        parse(content, spec.dtype, spec.shape)
    if len(content) != spec.size:
        raise DataError(f"has content of {len(content)} bytes")
    found = hashlib.sha256(content).hexdigest()
    if found != spec.sha256:
        raise DataError(f"has other content (sha256 {found})")
    return content


DATA_VARIABLE = "FEDQUILT_DATA"
"""Environment variable with data folders, joined as in PATH."""

DEFAULT_FOLDER = "./data"


def data_folders(data_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """Return the folders to search, in order.

    Those of `data_dir` come first (a string may join several with `os.pathsep`), then
    those of FEDQUILT_DATA; `./data` is the last resort when no `data_dir` is given.
    """
    environment = _split(os.environ.get(DATA_VARIABLE, ""))
    if data_dir is None:
        return _unique([*environment, Path(DEFAULT_FOLDER)])
    named = _split(data_dir) if isinstance(data_dir, str) else [Path(data_dir)]
    if not named:
        raise InvalidValueError(f"data_dir={data_dir!r} must name a folder")
    for folder in named:
        if os.path.isfile(folder):
            raise InvalidValueError(f"data_dir={str(folder)!r} must be a folder, it is a file")
    return _unique([*named, *environment])


def check_data_dir(data_dir: str | None) -> None:
    """Refuse a named data folder that is not there: a typing error must not load other data."""
    for folder in _split(data_dir or ""):
        if not os.path.exists(folder):
            raise InvalidValueError(
                f"data_dir={str(folder)!r} must be a folder that exists; "
                "make it first to download into it"
            )


def find_file(folder: str, spec: FileSpec, folders: Sequence[Path]) -> Path | None:
    """Return the first `folders[i]/folder/name` that exists, or None."""
    for root in folders:
        for name in spec.names:
            path = root / folder / name
            if os.path.exists(path):
                return path
    return None


def find_archive(spec: DatasetSpec, folders: Sequence[Path]) -> Path | None:
    """Return the first place where the archive of a data set lies, or None."""
    assert spec.archive is not None
    for root in folders:
        for path in (root / spec.folder / spec.archive.name, root / spec.archive.name):
            if os.path.exists(path):
                return path
    return None


def check_archive(path: Path, spec: DatasetSpec) -> None:
    """Raise unless the file at `path` is the published archive."""
    assert spec.archive is not None
    expected = f"{spec.archive.size} bytes with md5 {spec.archive.md5}"
    if not path.is_file():
        raise DataError(f"{path}: is not a regular file; expected {expected}")
    if path.stat().st_size != spec.archive.size:
        raise DataError(f"{path}: has {path.stat().st_size} bytes; expected {expected}")
    found = file_md5(path)
    if found != spec.archive.md5:
        raise DataError(f"{path}: has md5 {found}; expected {expected}")


def find_leaf(spec: DatasetSpec, part: str, folders: Sequence[Path]) -> list[Path]:
    """Return the JSON files of a part, `train` or `test`, of the first folder that has some.

    LEAF's scripts write them to `data/femnist/data/train/`; `femnist/train/` will do.
    """
    for root in folders:
        for place in (root / spec.folder / part, root / spec.folder / "data" / part):
            found = sorted(place.glob("*.json"))
            if found:
                return found
    return []


@dataclass(frozen=True)
class FileStatus:
    """What is known of one file: `detail` says why a file that was found is refused."""

    name: str
    state: Literal["verified", "missing", "refused"]
    path: Path | None = None
    detail: str = ""


@dataclass(frozen=True)
class DatasetStatus:
    """Whether a data set can be loaded without a download, file by file.

    A data set that comes with a package (`digits`) has no files and is always ready.
    """

    name: str
    title: str
    searched: tuple[Path, ...]
    files: tuple[FileStatus, ...]

    @property
    def ready(self) -> bool:
        """Whether every file is there and verified."""
        return all(file.state == "verified" for file in self.files)

    @property
    def missing(self) -> tuple[str, ...]:
        """The files that are in none of the folders."""
        return tuple(file.name for file in self.files if file.state == "missing")

    @property
    def refused(self) -> tuple[FileStatus, ...]:
        """The files that are there and are not what they should be."""
        return tuple(file for file in self.files if file.state == "refused")

    def summary(self) -> str:
        """Return one line: ready and where, or what is wrong."""
        if not self.files:
            return "ready (built in)"
        if self.refused:
            return f"refused: {'; '.join(file.detail for file in self.refused)}"
        if self.missing:
            return f"{len(self.missing)} of {len(self.files)} files missing"
        places = dict.fromkeys(str(file.path.parent) for file in self.files if file.path)
        return f"ready in {', '.join(places)}"


def dataset_status(name: str, data_dir: str | os.PathLike[str] | None = None) -> DatasetStatus:
    """Return which files of data set `name` are found, where, and whether they are right.

    Every file found is read and verified; nothing is downloaded.
    """
    spec = DATASETS[checks.choice("dataset", name, DATASETS)]
    folders = data_folders(data_dir)
    parts = [DATASETS[spec.base], spec] if spec.base else [spec]
    files = tuple(_file_status(part, file, folders) for part in parts for file in part.files)
    if spec.archive is not None and not spec.files:
        files = (_archive_status(spec, folders),)
    if spec.kind in LEAF_KINDS:
        files = tuple(_leaf_status(spec, part, folders) for part in ("train", "test"))
    return DatasetStatus(spec.name, spec.title, tuple(folders), files)


def _file_status(spec: DatasetSpec, file: FileSpec, folders: Sequence[Path]) -> FileStatus:
    label = f"{spec.folder}/{file.name}"
    path = find_file(spec.folder, file, folders)
    if path is None:
        return FileStatus(label, "missing")
    try:
        read_verified(path, file)
    except DataError as error:
        return FileStatus(label, "refused", path, str(error))
    return FileStatus(label, "verified", path)


LEAF_KINDS = ("leaf-images", "leaf-text")


def _archive_status(spec: DatasetSpec, folders: Sequence[Path]) -> FileStatus:
    assert spec.archive is not None
    path = find_archive(spec, folders)
    if path is None:
        return FileStatus(f"{spec.folder}/{spec.archive.name}", "missing")
    try:
        check_archive(path, spec)
    except DataError as error:
        return FileStatus(spec.archive.name, "refused", path, str(error))
    return FileStatus(spec.archive.name, "verified", path)


def _leaf_status(spec: DatasetSpec, part: str, folders: Sequence[Path]) -> FileStatus:
    """No checksum is published for these; their form is checked when they are read."""
    found = find_leaf(spec, part, folders)
    label = f"{spec.folder}/{part}/*.json"
    return FileStatus(label, "verified", found[0]) if found else FileStatus(label, "missing")


def _split(joined: str) -> list[Path]:
    return [Path(part).expanduser() for part in joined.split(os.pathsep) if part.strip()]


def _unique(folders: list[Path]) -> list[Path]:
    return list(dict.fromkeys(folders))
