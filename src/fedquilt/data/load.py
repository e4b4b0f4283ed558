"""From the name of a data set to its images.

`digits`, of scikit-learn, has 1,797 images of 8x8 pixels and needs no download.  Its
division into training and test part is fixed, whatever the seed of a run: within
each class, in the order of the data set, every fifth image (the 5th, 10th, ...) is a
test image.  That gives 1,442 training and 355 test images with equal shares of every
class.

CIFAR-100, binary version, a tar file packed by gzip: `train.bin` and `test.bin` are rows of
3,074 bytes, the coarse class, the fine one (which is used), and the red, green and blue plane.
Its Python version is a pickle, which runs whatever it holds; it is not read.

Tiny ImageNet, a zip file of JPEG pictures: `wnids.txt` lists the classes, training pictures lie
in `train/CLASS/images/`, and `val/val_annotations.txt` names the class of each picture in
`val/images/`.  The pictures in `test/` have no public labels, so `val` is the test part.

FEMNIST and Shakespeare, as LEAF's scripts write them (Caldas et al. 2018).

A part, `train` or `test`, is a folder of JSON files, each

    {"users": ["f0001_41", ...], "num_samples": [120, ...],
     "user_data": {"f0001_41": {"x": [...], "y": [...]}, ...}}

FEMNIST: x is a list of 784 numbers in [0, 1], 1 is paper; y is a class below 62.  Shakespeare:
x is a text of 80 letters and y the next one.  A letter is known by its place in `LETTERS`, and
one that is not there is read as a blank.

The users are the people, so the split `writer` makes each of them a client, under the name
that the file gives: whoever is drawn into another file is the same client there.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedquilt.common import checks
from fedquilt.common.errors import DataError, DataNotFoundError, FedquiltError, InvalidValueError
from fedquilt.common.schema import COUNT, TEXT, ListOf, MapOf, Object, check
from fedquilt.common.untrusted import read_json
from fedquilt.data import files
from fedquilt.data.files import (
    DATA_VARIABLE,
    LEAF_KINDS,
    Bounded,
    check_archive,
    data_folders,
    download_archive,
    download_files,
    find_archive,
    find_file,
    find_leaf,
    named_mirrors,
    read_verified,
)
from fedquilt.data.samples import ImageDataset, as_dataset
from fedquilt.data.specs import DATASETS, DatasetSpec, FileSpec

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The letters of Shakespeare in LEAF; the place of one is its number."""

SHARED_PEOPLE = (
    "the test samples were made by people who are clients: what is measured on them says "
    "something about these people, and no claim about training covers it"
)

_NUMBER_OF = {letter: number for number, letter in enumerate(LETTERS)}
_BLANK = _NUMBER_OF[" "]
_FILE = Object(
    {"users": ListOf(TEXT), "user_data": MapOf(Object({}))}, {"num_samples": ListOf(COUNT)}
)

Array = npt.NDArray[Any]
Read = Callable[[DatasetSpec, list[Any]], Array]


def load_leaf(spec: DatasetSpec, folders: Sequence[Path]) -> tuple[ImageDataset, ImageDataset]:
    """Return both parts of a data set that LEAF's scripts have written."""
    train = _part(spec, "train", folders)
    test = _part(spec, "test", folders)
    return with_people_noted(train, test), test


def with_people_noted(train: ImageDataset, test: ImageDataset) -> ImageDataset:
    """Return the training part with a note where people of a name made samples of both."""
    shared = set(train.group_names or ()) & set(test.group_names or ())
    if not shared or SHARED_PEOPLE in train.notes:
        return train
    return dataclasses.replace(train, notes=(*train.notes, SHARED_PEOPLE))


def _part(spec: DatasetSpec, part: str, folders: Sequence[Path]) -> ImageDataset:
    files = find_leaf(spec, part, folders)
    if not files:
        searched = ", ".join(str(folder / spec.folder) for folder in folders)
        raise DataNotFoundError(
            f"{spec.name}: no JSON files of its {part} part; searched {part}/ and data/{part}/ in "
            f"{searched}. LEAF's preprocess.sh makes them (github.com/TalwalkarLab/leaf)"
        )
    people: dict[str, tuple[Array, Array]] = {}
    for path in files:
        for user, x, y in _users(spec, path):
            if user in people:
                raise DataError(f"{path}: user {user!r:.60} must be in one file only")
            people[user] = (x, y)
    if not people:
        raise DataError(f"{files[0]}: nobody in it, or in the files beside it, holds a sample")
    names = tuple(sorted(people))
    held = [people.pop(name) for name in names]
    inputs = torch.from_numpy(np.concatenate([x for x, _ in held]))
    labels = torch.from_numpy(np.concatenate([y for _, y in held]))
    groups = np.repeat(np.arange(len(names)), [len(y) for _, y in held])
    return ImageDataset(inputs, labels, spec.name, spec.num_classes, groups, names)


def _users(spec: DatasetSpec, path: Path) -> Iterator[tuple[str, Array, Array]]:
    """Yield the users of a file that hold samples, with inputs and labels."""
    content = read_json(path)
    check(content, _FILE, path, DataError)
    inputs, labels = _READERS[spec.kind]
    for user in content["users"]:
        held = content["user_data"].pop(user, None)
        where = f"{path}: user {user!r:.60}"
        if held is None:
            raise DataError(f"{where} must stand once in users and in user_data")
        x, y = held.get("x"), held.get("y")
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise DataError(f"{where} must have lists x and y of one length")
        if not x:
            continue
        try:
            yield user, inputs(spec, x), labels(spec, y)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{where}: {error}") from error


def _images(spec: DatasetSpec, x: list[Any]) -> Array:
    size = int(np.prod(spec.image_shape))
    rows = np.asarray(x, dtype=np.float64)
    if rows.shape != (len(x), size) or not ((rows >= 0) & (rows <= 1)).all():
        raise ValueError(f"x must be lists of {size} numbers from 0 to 1")
    normal = (rows - spec.mean[0]) / spec.std[0]
    return normal.astype(np.float32).reshape(len(x), *spec.image_shape)


def _classes(spec: DatasetSpec, y: list[Any]) -> Array:
    if not all(type(label) is int and 0 <= label < spec.num_classes for label in y):
        raise ValueError(f"y must be classes below {spec.num_classes}")
    return np.asarray(y, dtype=np.int64)


def _texts(spec: DatasetSpec, x: list[Any]) -> Array:
    length = spec.image_shape[0]
    if not all(isinstance(text, str) and len(text) == length for text in x):
        raise ValueError(f"x must be texts of {length} letters")
    return np.asarray([[_NUMBER_OF.get(letter, _BLANK) for letter in text] for text in x])


def _next_letters(spec: DatasetSpec, y: list[Any]) -> Array:
    if not all(isinstance(letter, str) and len(letter) == 1 for letter in y):
        raise ValueError("y must be single letters")
    return np.asarray([_NUMBER_OF.get(letter, _BLANK) for letter in y])


_READERS: dict[str, tuple[Read, Read]] = {
    "leaf-images": (_images, _classes),
    "leaf-text": (_texts, _next_letters),
}


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
class FileSource:
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
    source = FileSource(data_folders(data_dir), download, named_mirrors(mirrors), progress)
    return load_spec(spec, source)


def load_spec(spec: DatasetSpec, source: FileSource) -> tuple[ImageDataset, ImageDataset]:
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
    said = [part.num_classes for part in made if isinstance(part, ImageDataset)]
    # Of labels those of the test part alone may say it: what clients hold decides no shape.
    most = max(spec.num_classes, *said, 0) or as_dataset(made[1]).num_classes
    train, test = (
        dataclasses.replace(
            as_dataset(part, name=spec.name, num_classes=most), name=spec.name, num_classes=most
        )
        for part in made
    )
    return with_people_noted(train, test), test


def _archive(spec: DatasetSpec, source: FileSource) -> Path:
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


def _read_files(spec: DatasetSpec, source: FileSource) -> list[npt.NDArray[Any]]:
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


def _not_found(
    spec: DatasetSpec, missing: Sequence[FileSpec], source: FileSource
) -> DataNotFoundError:
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


_LABEL_BYTES = 2
_PICTURE_BYTES = 1 << 20
"""The largest packed picture; those of 64 x 64 pixels have a few thousand."""
_TEXT_BYTES = 1 << 24
_MOST_MEMBERS = 1_000_000

Pixels = npt.NDArray[np.uint8]


def normalised(
    spec: DatasetSpec, pixels: Sequence[Pixels], labels: npt.NDArray[Any]
) -> ImageDataset:
    """Write all pixels into one tensor and normalise it in place."""
    images = torch.empty((len(labels), *spec.image_shape), dtype=torch.float32)
    np.concatenate([part.reshape(-1, *spec.image_shape) for part in pixels], out=images.numpy())
    shape = (1, -1, 1, 1)
    images.div_(255).sub_(torch.tensor(spec.mean).view(shape))
    images.div_(torch.tensor(spec.std).view(shape))
    return ImageDataset(
        images, torch.from_numpy(labels.astype(np.int64)), spec.name, spec.num_classes
    )


def read_archive(spec: DatasetSpec, path: Path) -> tuple[ImageDataset, ImageDataset]:
    """Return both parts of the data set in an archive; whatever is wrong names the file."""
    if not path.is_file():  # a pipe would be waited for
        raise DataError(f"{path}: is not a regular file")
    read = _cifar100 if spec.kind == "cifar100" else _tiny_imagenet
    broken = (tarfile.TarError, zipfile.BadZipFile, zlib.error)
    try:
        return read(spec, path)
    except (*broken, EOFError, OSError, ValueError, RecursionError, NotImplementedError) as error:
        if isinstance(error, FedquiltError) and str(path) in str(error):
            raise
        raise DataError(f"{path}: {error}") from error


def _cifar100(spec: DatasetSpec, path: Path) -> tuple[ImageDataset, ImageDataset]:
    assert spec.archive is not None
    wanted = [f"{spec.archive.prefix}/{name}" for name in ("train.bin", "test.bin")]
    contents: dict[str, bytes] = {}
    # Read as a stream: a header that points backwards cannot lead around in a circle.
    with Bounded(path) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            source = tar.extractfile(member) if member.name in wanted and member.isreg() else None
            if source is not None:
                contents[member.name] = source.read()
    if lacking := [name for name in wanted if name not in contents]:
        raise DataError(f"{path}: holds no {', '.join(lacking)}")
    train, test = (_rows(spec, path, name, contents.pop(name)) for name in wanted)
    return train, test


def _rows(spec: DatasetSpec, path: Path, name: str, content: bytes) -> ImageDataset:
    """Return the images in rows of two labels and the planes."""
    width = _LABEL_BYTES + int(np.prod(spec.image_shape))
    if not content or len(content) % width:
        raise DataError(f"{path}: {name} must hold rows of {width} bytes, it has {len(content)}")
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, width)
    return normalised(spec, [rows[:, _LABEL_BYTES:]], rows[:, 1])


def _tiny_imagenet(spec: DatasetSpec, path: Path) -> tuple[ImageDataset, ImageDataset]:
    assert spec.archive is not None
    root = spec.archive.prefix
    with zipfile.ZipFile(path) as packed:
        members = {item.filename: item for item in packed.infolist()}
        if len(members) > _MOST_MEMBERS:
            raise DataError(f"{path}: must hold at most {_MOST_MEMBERS} files")
        classes = _text(packed, members, f"{root}/wnids.txt").split()
        number = {name: k for k, name in enumerate(classes)}
        if len(number) > spec.num_classes:
            raise DataError(f"{path}: wnids.txt must name at most {spec.num_classes} classes")
        train = {
            name: number[name.split("/")[2]]
            for name in sorted(members)
            if name.startswith(f"{root}/train/")
            and name.endswith(".JPEG")
            and name.split("/")[2] in number
        }
        test = {}
        for line in _text(packed, members, f"{root}/val/val_annotations.txt").splitlines():
            picture, name, *_ = [*line.split("\t"), ""]
            if name not in number:
                raise DataError(f"{path}: val_annotations.txt names the class {name!r:.40}")
            test[f"{root}/val/images/{picture}"] = number[name]
        return (_pictures(spec, packed, members, train), _pictures(spec, packed, members, test))


def _text(packed: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], name: str) -> str:
    return _content(packed, members, name, _TEXT_BYTES).decode("utf-8")


def _content(
    packed: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], name: str, most: int
) -> bytes:
    """Return a member of at most so many bytes, whatever its header says."""
    if name not in members:
        raise DataError(f"holds no {name}")
    with packed.open(members[name]) as source:
        content = source.read(most + 1)
    if len(content) > most:
        raise DataError(f"{name} must have at most {most} bytes")
    return content


def _pictures(
    spec: DatasetSpec,
    packed: zipfile.ZipFile,
    members: Mapping[str, zipfile.ZipInfo],
    labels: Mapping[str, int],
) -> ImageDataset:
    """Decode pictures of one size; grey ones become colour."""
    from PIL import Image

    if not labels:
        raise DataError("holds no pictures")
    channels, height, width = spec.image_shape
    pixels = np.empty((len(labels), height, width, channels), dtype=np.uint8)
    for row, name in enumerate(labels):
        content = _content(packed, members, name, _PICTURE_BYTES)
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as picture:
            if picture.size != (width, height):  # known before anything is decoded
                raise DataError(f"{name} must have {width} x {height} pixels, not {picture.size}")
            pixels[row] = np.asarray(picture.convert("RGB"))
    planes = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    return normalised(spec, [planes], np.asarray(list(labels.values())))
