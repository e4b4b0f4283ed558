"""Where data files lie: the folders that are searched and what is found in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedquilt import validate
from fedquilt.data.specs import DATASETS, DatasetSpec, FileSpec
from fedquilt.data.verify import read_verified
from fedquilt.errors import DataError, InvalidValueError

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


def find_file(folder: str, spec: FileSpec, folders: Sequence[Path]) -> Path | None:
    """Return the first `folders[i]/folder/name` that exists, or None."""
    for root in folders:
        for name in spec.names:
            path = root / folder / name
            if os.path.exists(path):
                return path
    return None


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
    spec = DATASETS[validate.choice("dataset", name, DATASETS)]
    folders = data_folders(data_dir)
    parts = [DATASETS[spec.base], spec] if spec.base else [spec]
    files = tuple(_file_status(part, file, folders) for part in parts for file in part.files)
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


def _split(joined: str) -> list[Path]:
    return [Path(part).expanduser() for part in joined.split(os.pathsep) if part.strip()]


def _unique(folders: list[Path]) -> list[Path]:
    return list(dict.fromkeys(folders))
