"""FEMNIST and Shakespeare, as LEAF's scripts write them (Caldas et al. 2018).

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedquilt.common.errors import DataError, DataNotFoundError
from fedquilt.common.schema import COUNT, TEXT, ListOf, MapOf, Object, check
from fedquilt.common.untrusted import read_json
from fedquilt.data.dataset import ImageDataset
from fedquilt.data.files import find_leaf
from fedquilt.data.specs import DatasetSpec

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
