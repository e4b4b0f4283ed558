"""Data files on disk: where they lie, how they get there, whether they are whole, what is in them.

The IDX format is a big-endian header and then the numbers of one array:

byte 0, 1   zero
byte 2      type of the numbers: 0x08 uint8, 0x0C int32
byte 3      number of dimensions d
d times     size of a dimension, uint32
then        the numbers, the last dimension fastest

Missing files are downloaded, whole and verified, or not at all.  pooch fetches everything into a
scratch folder beside its final place; a file is moved there, in one step, only after its checksum
was found right.  `pooch.retrieve` is not used: it knows one hash for a file, and ours may come in
another packing from another mirror.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import shutil
import struct
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from fedquilt.common import checks, optional
from fedquilt.common.errors import (
    DataError,
    DataNotFoundError,
    FedquiltError,
    InvalidValueError,
    StorageError,
)
from fedquilt.common.untrusted import read_named
from fedquilt.data.specs import DATASETS, ArchiveSpec, DatasetSpec, FileSpec

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


MIRRORS_VARIABLE = "FEDQUILT_MIRRORS"
"""Environment variable `name=URL,URL;name=URL`: mirrors that replace the public ones."""


def named_mirrors(override: Mapping[str, Sequence[str]] | None = None) -> dict[str, Sequence[str]]:
    """Return the mirrors the user names, by data set: those of `override` go first.

    A data set that neither `override` nor FEDQUILT_MIRRORS names keeps its public mirrors.
    """
    environment = _from_environment()
    for source, named in ((MIRRORS_VARIABLE, environment), ("mirrors", override or {})):
        for name, urls in named.items():
            _check(source, name, urls)
    return {**environment, **(override or {})}


def address(mirror: str, name: str) -> str:
    """Return the address of file `name` in the folder `mirror`."""
    return f"{mirror.rstrip('/')}/{name}"


def _from_environment() -> dict[str, Sequence[str]]:
    result: dict[str, Sequence[str]] = {}
    for entry in os.environ.get(MIRRORS_VARIABLE, "").split(";"):
        if not entry.strip():
            continue
        name, equals, urls = entry.partition("=")
        if not equals:
            raise InvalidValueError(
                f"{MIRRORS_VARIABLE}: {entry.strip()!r} must have the form name=URL,URL"
            )
        result[name.strip()] = [url.strip() for url in urls.split(",") if url.strip()]
    return result


def _check(source: str, name: str, urls: Sequence[str]) -> None:
    checks.choice(source, name, [known for known, spec in DATASETS.items() if spec.mirrors])
    if isinstance(urls, str) or not urls:
        raise InvalidValueError(f"{source}: {name!r} must list at least one URL, got {urls!r}")
    for url in urls:
        if not str(url).startswith(("http://", "https://")):
            raise InvalidValueError(
                f"{source}: {url!r} for {name!r} must begin with http:// or https://"
            )


SILENCE_SECONDS = 30
"""A mirror that sends nothing for so long is given up."""

TIME_LIMIT_SECONDS = 3600
"""A file that is not there after so long is given up."""

# Small, because the time is looked at between two chunks.
_CHUNK = 1 << 12

_LARGEST_ARCHIVE = 1 << 30


class _RefusedError(Exception):
    """A mirror sends too much, or too slowly."""


class _Incoming:
    """The file that pooch writes to, which refuses what no right file would need."""

    def __init__(self, file: BinaryIO, limit: int, advance: Callable[[int], None]) -> None:
        self._file = file
        self._limit = self._left = limit
        self._deadline = time.monotonic() + TIME_LIMIT_SECONDS
        self._advance = advance

    def write(self, chunk: bytes) -> None:
        """Write a chunk unless the file becomes too large or takes too long."""
        self._left -= len(chunk)
        if self._left < 0:
            raise _RefusedError(f"sends more than {self._limit} bytes")
        if time.monotonic() > self._deadline:
            raise _RefusedError(f"takes more than {TIME_LIMIT_SECONDS} s")
        self._file.write(chunk)
        self._advance(len(chunk))

    def flush(self) -> None:
        """Required of a file; the real one is flushed when it is closed."""


@contextlib.contextmanager
def _progress(name: str, size: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar of one download; give what takes the bytes that have come."""
    if not enabled:
        yield lambda count: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(name, total=size)
        yield lambda count: bars.update(task, advance=count)


def download_files(
    spec: DatasetSpec,
    missing: Sequence[FileSpec],
    folders: Sequence[Path],
    mirrors: Sequence[str],
    *,
    progress: bool = False,
) -> None:
    """Put the `missing` files of `spec` into the first of `folders` that can be written."""
    try:
        with _target_folder(folders, spec.folder) as target, _scratch(target) as scratch:
            if spec.archive is None:
                for file in missing:
                    _fetch(file, mirrors, scratch, progress=progress)
            else:
                archive = _fetch(spec.archive, mirrors, scratch, progress=progress)
                _extract(archive, spec.archive, missing, scratch)
            for file in missing:
                os.replace(scratch / file.name, target / file.name)
    except OSError as error:
        if isinstance(error, DataNotFoundError | StorageError):
            raise
        raise StorageError(f"{spec.name}: the download could not be stored: {error}") from error


def download_archive(
    spec: DatasetSpec, folders: Sequence[Path], mirrors: Sequence[str], *, progress: bool = False
) -> None:
    """Put the archive of `spec` itself into the first of `folders` that can be written."""
    assert spec.archive is not None
    try:
        with _target_folder(folders, spec.folder) as target, _scratch(target) as scratch:
            fetched = _fetch(spec.archive, mirrors, scratch, progress=progress)
            os.replace(fetched, target / spec.archive.name)
    except OSError as error:
        if isinstance(error, DataNotFoundError | StorageError):
            raise
        raise StorageError(f"{spec.name}: the download could not be stored: {error}") from error


def _fetch(
    item: FileSpec | ArchiveSpec, mirrors: Sequence[str], scratch: Path, *, progress: bool
) -> Path:
    """Return the verified file, from the first mirror that serves it right."""
    path = scratch / item.name
    failures = []
    for mirror in mirrors:
        url = address(mirror, item.name)
        reason = _transfer(url, path, item, progress=progress) or _refusal(path, item)
        if reason is None:
            return path
        failures.append(f"{url}: {reason}")
        path.unlink(missing_ok=True)
    raise DataNotFoundError(
        f"{scratch.parent / item.name} could not be downloaded; "
        f"mirrors tried ({MIRRORS_VARIABLE} can name others):"
        + "".join(f"\n  {failure}" for failure in failures)
    )


def _transfer(url: str, path: Path, item: FileSpec | ArchiveSpec, *, progress: bool) -> str | None:
    """Download `url` to `path`; return why that failed, or None."""
    pooch = optional.require("pooch", "a download")
    requests = optional.require("requests", "a download")
    fetch = pooch.HTTPDownloader(
        chunk_size=_CHUNK,
        timeout=SILENCE_SECONDS,
        # The files are compressed already, and must arrive as they are.
        headers={"Accept-Encoding": "identity"},
    )
    # A mirror may pack a file in another way.
    limit = item.size if isinstance(item, ArchiveSpec) else item.size + PACKING_SLACK
    size = getattr(item, "packed_size", None) or item.size
    with _progress(path.name, size, enabled=progress) as advance, path.open("wb") as file:
        try:
            fetch(url, _Incoming(file, limit, advance), None)
        except requests.exceptions.RequestException as error:
            return f"{type(error).__name__}: {error}"
        except _RefusedError as error:
            return str(error)
    return None


def _refusal(path: Path, item: FileSpec | ArchiveSpec) -> str | None:
    """Return why the downloaded file is not `item`, or None."""
    if isinstance(item, FileSpec):
        try:
            read_verified(path, item)
        except DataError as error:
            return str(error).removeprefix(f"{path}: ")
        return None
    size, digest = path.stat().st_size, file_md5(path)
    if digest == item.md5:
        return None
    return f"has {size} bytes with md5 {digest}; expected {item.size} bytes with md5 {item.md5}"


def _extract(path: Path, archive: ArchiveSpec, wanted: Sequence[FileSpec], scratch: Path) -> None:
    """Unpack the wanted members, and nothing else, next to the archive."""
    by_member = {f"{archive.prefix}/{file.name}": file for file in wanted}
    if not path.is_file():
        raise DataError(f"{archive.name} must be a file")
    try:
        # Read as a stream: a header that points backwards cannot lead around in a circle.
        with Bounded(path) as content, tarfile.open(fileobj=content, mode="r|") as tar:
            _extract_members(tar, by_member, scratch)
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError, RecursionError) as error:
        if isinstance(error, FedquiltError):
            raise
        raise DataError(f"{archive.name} cannot be unpacked: {error}") from error
    if by_member:
        raise DataError(f"{archive.name}: holds no {', '.join(by_member)}")


def _extract_members(tar: tarfile.TarFile, by_member: dict[str, FileSpec], scratch: Path) -> None:
    """Write the members of an archive that are wanted, and take them off the list."""
    for member in tar:
        file = by_member.get(member.name)
        if file is None or not member.isreg() or member.size != file.size:
            continue
        source = tar.extractfile(member)
        if source is not None:
            with source, (scratch / file.name).open("wb") as destination:
                shutil.copyfileobj(source, destination)
            read_verified(scratch / file.name, file)
            del by_member[member.name]
        if not by_member:
            return


class Bounded(gzip.GzipFile):
    """A gzip file that is read up to more than any of our archives holds."""

    _left = _LARGEST_ARCHIVE

    def read(self, size: int | None = -1) -> bytes:
        """Return up to `size` bytes, or refuse an archive that does not end."""
        content = super().read(min(size, self._left) if size and size > 0 else self._left)
        self._left -= len(content)
        if self._left <= 0:
            raise DataError(f"an archive must hold less than {_LARGEST_ARCHIVE} bytes unpacked")
        return content


@contextlib.contextmanager
def _target_folder(folders: Sequence[Path], name: str) -> Iterator[Path]:
    """Give the first `folders[i]/name` that can be written; folders left empty go again."""
    failures = []
    for root in folders:
        made: list[Path] = []
        try:
            _make_folder(root / name, made)
            with tempfile.TemporaryFile(dir=root / name):
                pass
        except OSError as error:
            _remove_empty(made)
            failures.append(f"{root / name} ({error.strerror})")
            continue
        try:
            yield root / name
        finally:
            _remove_empty(made)
        return
    raise StorageError(f"no data folder can be written: {', '.join(failures)}")


def _make_folder(folder: Path, made: list[Path]) -> None:
    """Create `folder` and its parents, and note in `made` which did not exist."""
    for path in [*reversed(folder.parents), folder]:
        if not path.exists():
            path.mkdir(exist_ok=True)
            made.append(path)


def _remove_empty(made: Sequence[Path]) -> None:
    for path in reversed(made):
        with contextlib.suppress(OSError):
            path.rmdir()


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".fedquilt-download-", dir=target) as folder:
        yield Path(folder)
