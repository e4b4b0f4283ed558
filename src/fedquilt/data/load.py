"""From the name of a data set to its images.

`digits`, of scikit-learn, has 1,797 images of 8x8 pixels and needs no download.  Its
division into training and test part is fixed, whatever the seed of a run: within
each class, in the order of the data set, every fifth image (the 5th, 10th, ...) is a
test image.  That gives 1,442 training and 355 test images with equal shares of every
class.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedquilt.common import checks
from fedquilt.common.errors import DataError, DataNotFoundError, InvalidValueError
from fedquilt.data import files
from fedquilt.data.archives import normalised, read_archive
from fedquilt.data.dataset import ImageDataset
from fedquilt.data.download import download_archive, download_files, named_mirrors
from fedquilt.data.files import (
    DATA_VARIABLE,
    LEAF_KINDS,
    check_archive,
    data_folders,
    find_archive,
    find_file,
    read_verified,
)
from fedquilt.data.leaf import load_leaf, with_people_noted
from fedquilt.data.samples import as_dataset
from fedquilt.data.specs import DATASETS, DatasetSpec, FileSpec

_TEST_EVERY = 5
_GREY_LEVELS = 16


def load_digits(spec: DatasetSpec) -> tuple[ImageDataset, ImageDataset]:
    """Return the training and the test part, normalised as `spec` says."""
    table = _digits_table()
    labels = table[:, -1].astype(np.int64)
    pixels = table[:, :-1].astype(np.float32).reshape(-1, 1, 8, 8) / _GREY_LEVELS
    images = (pixels - np.float32(spec.mean[0])) / np.float32(spec.std[0])
    is_test = rank_in_class(labels) % _TEST_EVERY == _TEST_EVERY - 1

    def part(mask: npt.NDArray[np.bool_]) -> ImageDataset:
        x, y = torch.from_numpy(images[mask]), torch.from_numpy(labels[mask])
        return ImageDataset(x, y, spec.name, spec.num_classes)

    return part(~is_test), part(is_test)


def _digits_table() -> npt.NDArray[np.float64]:
    """Return the digits, a row of 64 pixels and its label each.

    From the file in scikit-learn's folder: to import scikit-learn takes most of a second.
    """
    package = importlib.util.find_spec("sklearn")
    if package is not None and package.origin is not None:
        path = Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn import datasets

    data, target = datasets.load_digits(return_X_y=True)
    return np.column_stack([data, target])


def rank_in_class(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each sample how many samples of its class come before it."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    ranks = np.empty(len(labels), dtype=np.int64)
    ranks[order] = np.arange(len(labels)) - starts
    return ranks


_CLASS_COLUMN, _WRITER_COLUMN = 0, 2


@dataclasses.dataclass(frozen=True)
class Source:
    """Where files may come from, the same for every file of one call."""

    folders: Sequence[Path]
    download: bool
    mirrors: Mapping[str, Sequence[str]]
    progress: bool

    def mirrors_of(self, spec: DatasetSpec) -> Sequence[str]:
        return self.mirrors.get(spec.name, spec.mirrors)


def load_dataset(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    mirrors: Mapping[str, Sequence[str]] | None = None,
    progress: bool = False,
) -> tuple[ImageDataset, ImageDataset]:
    """Return the training and the test part of a data set.

    Parameters
    ----------
    name
        A name in `DATASETS`.
    data_dir
        A folder, or several joined with `os.pathsep`; FEDQUILT_DATA is searched after
        them, and instead of them when None (then `./data`).
    download
        Whether missing files may be fetched, into the first of these folders that can
        be written.
    mirrors
        Addresses that replace the public mirrors, by data set name.  The environment
        variable FEDQUILT_MIRRORS (`name=URL,URL;name=URL`) does the same.
    progress
        Whether a download shows a progress bar on standard error.

    Raises
    ------
    DataNotFoundError
        A file is nowhere and may not, or cannot, be downloaded.
    DataError
        A file is there but torn, or is not what it should be.
    """
    spec = DATASETS[checks.choice("dataset", name, DATASETS)]
    source = Source(data_folders(data_dir), download, named_mirrors(mirrors), progress)
    return load_spec(spec, source)


def load_spec(spec: DatasetSpec, source: Source) -> tuple[ImageDataset, ImageDataset]:
    """Return both parts of the data set that `spec` describes."""
    if spec.kind == "digits":
        return load_digits(spec)
    if spec.kind == "own":
        return _registered(spec)
    if spec.kind in LEAF_KINDS:
        return load_leaf(spec, source.folders)
    if spec.archive is not None and not spec.files:
        return read_archive(spec, _archive(spec, source))
    if spec.kind == "cifar":
        return _cifar_parts(spec, _read_files(spec, source))
    if spec.kind == "idx":
        return _idx_parts(spec, _read_files(spec, source))
    train, test = load_spec(DATASETS[spec.base or ""], source)
    rows = _read_files(spec, source)
    return _with_writers(spec, 0, train, rows[0]), _with_writers(spec, 1, test, rows[1])


def _registered(spec: DatasetSpec) -> tuple[ImageDataset, ImageDataset]:
    """Return what the function of a registered data set returns."""
    assert spec.load is not None
    made = spec.load()
    if not isinstance(made, tuple) or len(made) != 2:
        raise InvalidValueError(
            f"the function of data set {spec.name!r} must return (train, test), not {made!r:.60}"
        )
    classes = spec.num_classes or None
    train, test = (as_dataset(part, name=spec.name, num_classes=classes) for part in made)
    most = max(train.num_classes, test.num_classes)
    train, test = (
        dataclasses.replace(part, name=spec.name, num_classes=most) for part in (train, test)
    )
    return with_people_noted(train, test), test


def _archive(spec: DatasetSpec, source: Source) -> Path:
    """Return the verified archive of a data set, fetching it where it is missing."""
    assert spec.archive is not None
    path = find_archive(spec, source.folders)
    if path is None and source.download:
        mirrors = source.mirrors_of(spec)
        download_archive(spec, source.folders, mirrors, progress=source.progress)
        path = find_archive(spec, source.folders)
    if path is None:
        searched = ", ".join(str(folder) for folder in source.folders)
        raise DataNotFoundError(
            f"{spec.name}: {spec.archive.name} not found; searched {searched}. Allow the download, "
            f"or put it, packed as it is, from {source.mirrors_of(spec)[0]} into one of them"
        )
    check_archive(path, spec)
    return path


def _read_files(spec: DatasetSpec, source: Source) -> list[npt.NDArray[Any]]:
    """Return the array in each file of `spec`, fetching those that are missing.

    What is there is verified before anything is downloaded: a wrong file is refused
    at once and never overwritten.
    """
    contents = {}
    for file in spec.files:
        path = find_file(spec.folder, file, source.folders)
        if path is not None:
            contents[file] = read_verified(path, file)
    missing = [file for file in spec.files if file not in contents]
    if missing:
        if not source.download:
            raise _not_found(spec, missing, source)
        mirrors = source.mirrors_of(spec)
        download_files(spec, missing, source.folders, mirrors, progress=source.progress)
    for file in missing:
        path = find_file(spec.folder, file, source.folders)
        if path is None:
            raise _not_found(spec, [file], source)
        contents[file] = read_verified(path, file)
    return [_array(contents.pop(file), file) for file in spec.files]


def _not_found(spec: DatasetSpec, missing: Sequence[FileSpec], source: Source) -> DataNotFoundError:
    searched = ", ".join(str(folder / spec.folder) for folder in source.folders)
    how = f"unpack {spec.archive.name}" if spec.archive else "put them"
    return DataNotFoundError(
        f"{spec.name}: {len(missing)} of {len(spec.files)} files not found: "
        f"{', '.join(file.name for file in missing)}; searched {searched}. "
        f"Allow the download, name the folder that holds {spec.folder}/ with --data-dir or "
        f"{DATA_VARIABLE}, or {how} from {source.mirrors_of(spec)[0]} there"
    )


def _array(content: bytes, file: FileSpec) -> npt.NDArray[Any]:
    if file.packed_md5 is not None:
        return files.parse(content, file.dtype, file.shape)
    return np.frombuffer(content, dtype=file.dtype).reshape(file.shape)


def _idx_parts(
    spec: DatasetSpec, arrays: Sequence[npt.NDArray[Any]]
) -> tuple[ImageDataset, ImageDataset]:
    train_x, train_y, test_x, test_y = arrays
    return normalised(spec, [train_x], train_y), normalised(spec, [test_x], test_y)


def _cifar_parts(
    spec: DatasetSpec, batches: Sequence[npt.NDArray[Any]]
) -> tuple[ImageDataset, ImageDataset]:
    """Split the rows of each batch: one byte of label, then the red, green, blue planes."""
    train, test = batches[:-1], batches[-1]
    train_y = np.concatenate([batch[:, 0] for batch in train])
    return (
        normalised(spec, [batch[:, 1:] for batch in train], train_y),
        normalised(spec, [test[:, 1:]], test[:, 0]),
    )


def _with_writers(
    spec: DatasetSpec, part: int, dataset: ImageDataset, rows: npt.NDArray[np.int32]
) -> ImageDataset:
    """Return `dataset` with the writer of each sample; row i of `rows` describes sample i."""
    rows = rows[: len(dataset)]
    classes = rows[:, _CLASS_COLUMN]
    labels = dataset.targets.numpy()
    if len(rows) < len(dataset) or not np.array_equal(classes, labels):
        shared = min(len(rows), len(dataset))
        first = int(np.argmax(np.append(classes[:shared] != labels[:shared], True)))
        raise DataError(
            f"{spec.folder}/{spec.files[part].name}: its classes must equal the labels of the "
            f"{len(dataset)} samples of {dataset.name}, they differ first at row {first}"
        )
    writers = rows[:, _WRITER_COLUMN].astype(np.int64)
    return dataclasses.replace(dataset, name=spec.name, groups=writers)
