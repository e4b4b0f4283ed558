"""Download missing files: whole and verified, or not at all.

pooch fetches everything into a scratch folder beside its final place; a file is moved there,
in one step, only after its checksum was found right.  `pooch.retrieve` is not used: it
knows one hash for a file, and ours may come in another packing from another mirror.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from fedquilt.common import checks, optional
from fedquilt.common.errors import (
    DataError,
    DataNotFoundError,
    FedquiltError,
    InvalidValueError,
    StorageError,
)
from fedquilt.data.files import PACKING_SLACK, file_md5, read_verified
from fedquilt.data.specs import DATASETS, ArchiveSpec, DatasetSpec, FileSpec

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
