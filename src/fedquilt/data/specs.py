"""What each data set consists of: files, checksums, mirrors, normalisation (`specs.toml`).

A file is known by its content.  The copy a mirror serves has a known MD5; a copy
that somebody unpacked, or packed again, is accepted when its content has the known
SHA-256.  Of CIFAR-100 and Tiny ImageNet the archive itself is read, by its published MD5.  For
what LEAF's scripts write (FEMNIST, Shakespeare) there is no checksum: they draw at random, and
only the form is checked.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError

Kind = Literal[
    "digits",
    "idx",
    "cifar",
    "writers",
    "cifar100",
    "tiny-imagenet",
    "leaf-images",
    "leaf-text",
    "own",
]


@dataclass(frozen=True)
class FileSpec:
    """One file of a data set.

    `shape`, `dtype`, `size` and `sha256` describe the content, unpacked.  `packed_size`
    and `packed_md5` describe the original gzip file, and are None for a file that is
    distributed unpacked.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["uint8", "int32"]
    size: int
    sha256: str
    packed_size: int | None = None
    packed_md5: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The file names under which the content is sought, the distributed one first."""
        return (self.name, self.name.removesuffix(".gz")) if self.packed_md5 else (self.name,)

    @property
    def expected(self) -> str:
        """What the file should be, for error messages."""
        content = f"content of {self.size} bytes with sha256 {self.sha256}"
        if self.packed_md5 is None:
            return content
        return f"gzip of {self.packed_size} bytes with md5 {self.packed_md5}, or {content}"


@dataclass(frozen=True)
class ArchiveSpec:
    """A tar file that mirrors serve in place of the files; members are `prefix/name`."""

    name: str
    size: int
    md5: str
    prefix: str


@dataclass(frozen=True)
class DatasetSpec:
    """One data set: where its files lie, what they must hold, how images are normalised.

    A pixel x in [0, 1] of channel c becomes (x - mean[c]) / std[c].  `base` names the
    data set whose images this one shares; its own files then add to them.  A mirror is
    the address of a folder: file and archive names are appended to it.

    Kinds without `files` read `archive` itself, or the JSON files below `folder`, or what
    `load` returns (`fedquilt.register_dataset`).
    """

    name: str
    title: str
    kind: Kind
    image_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int = 10
    folder: str = ""
    files: tuple[FileSpec, ...] = ()
    mirrors: tuple[str, ...] = ()
    archive: ArchiveSpec | None = None
    base: str | None = None
    load: Callable[[], tuple[Any, Any]] | None = None


def _read_specs(content: bytes) -> dict[str, DatasetSpec]:
    """Return the data sets of `specs.toml`, in its order."""
    found = {}
    for name, entry in tomllib.loads(content.decode()).items():
        files = tuple(FileSpec(row[0], tuple(row[1]), *row[2:]) for row in entry.pop("files", ()))
        archive = ArchiveSpec(**entry.pop("archive")) if "archive" in entry else None
        plain: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()
        }
        found[name] = DatasetSpec(name=name, files=files, archive=archive, **plain)
    return found


_KNOWN = _read_specs(Path(__file__).with_suffix(".toml").read_bytes())

DATASETS: Final[Mapping[str, DatasetSpec]] = MappingProxyType(_KNOWN)
"""Every known data set by name."""

WITH_PEOPLE = ("mnist-writers", "femnist", "shakespeare")
"""Data sets that say who made each sample."""


def add_spec(spec: DatasetSpec) -> None:
    """Make a data set known in this process, under a name that no other has."""
    if not re.fullmatch(r"[\w][\w.+-]*", spec.name):
        raise InvalidValueError(
            f"name={spec.name!r} must be letters, digits, '.', '_', '+' and '-': it names a folder"
        )
    if spec.name in _KNOWN:
        raise InvalidValueError(
            f"name={spec.name!r} must be new: a data set has it already ({_KNOWN[spec.name].title})"
        )
    _KNOWN[spec.name] = spec


def register_dataset(
    name: str,
    source: Callable[[], tuple[Any, Any]] | DatasetSpec,
    *,
    num_classes: int | None = None,
    title: str = "",
) -> None:
    """Make a data set known by name in this process, wherever one is named.

    Parameters
    ----------
    name : str
        Letters, digits, '.', '_', '+' and '-'; no other data set may have it.  A ledger knows
        clients by this name and their sample numbers: the same name must always mean the same
        data.
    source : callable or DatasetSpec
        A function that returns (train, test), each an `ImageDataset` or a pair
        `(inputs, labels)`, or the description of files in a form that is known.
    num_classes : int, optional
        Of what a function returns; the largest label of its test part and one more by default,
        as what clients hold decides nothing that is public.
    title : str
        What the list of data sets says of it.

    Examples
    --------
    >>> import torch
    >>> x, y = torch.zeros(8, 3), torch.arange(8) % 2
    >>> register_dataset("eight-zeros", lambda: ((x, y), (x, y)))
    >>> from fedquilt.data import load_dataset
    >>> load_dataset("eight-zeros")[0]
    ImageDataset('eight-zeros', 8 samples 3, 2 classes)
    """
    checks.text("name", name)
    if isinstance(source, DatasetSpec):
        if num_classes is not None:
            raise InvalidValueError("num_classes must be left out beside a DatasetSpec: it has one")
        add_spec(dataclasses.replace(source, name=name, title=title or source.title))
        return
    if not callable(source):
        raise InvalidValueError(
            f"source={source!r:.60} must be a function that returns (train, test), or a DatasetSpec"
        )
    classes = 0 if num_classes is None else checks.integer("num_classes", num_classes, at_least=1)
    add_spec(
        DatasetSpec(
            name=name,
            title=title or "registered at run time",
            kind="own",
            image_shape=(),
            mean=(),
            std=(),
            num_classes=classes,
            load=source,
        )
    )
