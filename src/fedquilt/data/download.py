"""Downloading data files: mirrors, transfer, progress.

Download missing files: whole and verified, or not at all.

Everything is fetched into a scratch folder beside its final place and moved there, in
one step, only after its checksum was found right.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedquilt.common import checks
from fedquilt.common.errors import DataError, DataNotFoundError, InvalidValueError, StorageError
from fedquilt.data.files import file_md5, read_verified
from fedquilt.data.specs import DATASETS, ArchiveSpec, DatasetSpec, FileSpec

if TYPE_CHECKING:
    from rich.progress import Progress

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


class DownloadBar:
    """The small interface that pooch asks of a progress bar, drawn by rich."""

    def __init__(self, bars: Progress, description: str) -> None:
        self._bars = bars
        self._task = bars.add_task(description, total=None)

    @property
    def total(self) -> float | None:
        """Bytes to come, None while unknown."""
        return self._bars.tasks[0].total

    @total.setter
    def total(self, value: int) -> None:
        self._bars.update(self._task, total=value or None)

    def update(self, count: int) -> None:
        """Count `count` more bytes."""
        self._bars.update(self._task, advance=count)

    def reset(self) -> None:
        """Go back to the start; pooch does so before it fills the bar."""
        self._bars.update(self._task, completed=0)

    def close(self) -> None:
        """Do nothing: the bar closes with its context."""


@contextlib.contextmanager
def progress_bar(description: str, *, enabled: bool) -> Iterator[DownloadBar | Literal[False]]:
    """Give a bar for one download, or False where none is wanted."""
    if not enabled:
        yield False
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield DownloadBar(bars, description)


_TIMEOUT_S = 30
_CHUNK = 1 << 16


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


def _fetch(
    item: FileSpec | ArchiveSpec, mirrors: Sequence[str], scratch: Path, *, progress: bool
) -> Path:
    """Return the verified file, from the first mirror that serves it right."""
    path = scratch / item.name
    failures = []
    for mirror in mirrors:
        url = address(mirror, item.name)
        reason = _transfer(url, path, progress=progress) or _refusal(path, item)
        if reason is None:
            return path
        failures.append(f"{url}: {reason}")
        path.unlink(missing_ok=True)
    raise DataNotFoundError(
        f"{scratch.parent / item.name} could not be downloaded; "
        f"mirrors tried ({MIRRORS_VARIABLE} can name others):"
        + "".join(f"\n  {failure}" for failure in failures)
    )


def _transfer(url: str, path: Path, *, progress: bool) -> str | None:
    """Download `url` to `path`; return why that failed, or None."""
    import pooch
    import requests

    with progress_bar(path.name, enabled=progress) as bar:
        fetch = pooch.HTTPDownloader(
            progressbar=bar,
            chunk_size=_CHUNK,
            timeout=_TIMEOUT_S,
            # The files are compressed already, and must arrive as they are.
            headers={"Accept-Encoding": "identity"},
        )
        try:
            fetch(url, str(path), None)
        except requests.exceptions.RequestException as error:
            return f"{type(error).__name__}: {error}"
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
    with tarfile.open(path, "r:gz") as tar:
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
    if by_member:
        raise DataError(f"{archive.name}: holds no {', '.join(by_member)}")


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
