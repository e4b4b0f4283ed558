"""A condensed data set on disk: one safetensors file that holds all there is to know.

>>> import tempfile, torch
>>> from pathlib import Path
>>> from fedquilt.data import ImageDataset, condensed_info, load_condensed, save_condensed
>>> made = ImageDataset(torch.zeros(6, 1, 8, 8), torch.tensor([0, 0, 4, 4, 7, 7]), "digits", 10)
>>> folder = tempfile.TemporaryDirectory()
>>> path = save_condensed(
...     Path(folder.name) / "digits.safetensors", made, mean=[0.3051], std=[0.3762],
...     about={"ipc": 2, "method": "statistics"},
... )
>>> load_condensed(path)
ImageDataset('digits', 6 samples 1x8x8, 10 classes)
>>> condensed_info(path)["about"]
{'ipc': 2, 'method': 'statistics'}
>>> folder.cleanup()

Partition and expansion (Zhao et al., "Improved distribution matching for dataset
condensation", CVPR 2023): every image of a condensed set holds `tiles` x `tiles` smaller
ones, which are enlarged to its size wherever they are looked at.  The numbers that are
stored stay the same; what is trained on are `tiles`^2 times as many images, each with
less detail.
"""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional

from fedquilt.common import checks
from fedquilt.common.errors import DataError, DataNotFoundError, InvalidValueError
from fedquilt.common.formatting import printable, shortened
from fedquilt.common.storage import as_safetensors, write_file
from fedquilt.common.untrusted import TensorFile, opened_tensors, parse_json
from fedquilt.data.samples import ImageDataset

SCHEMA_VERSION = 1
KIND = "fedquilt condensed data set"
_DTYPES = {"images": "F32", "labels": "I64"}
_MOST_CLASSES = 2**31 - 1

About = Mapping[str, str | int | float]


def save_condensed(
    path: str | os.PathLike[str],
    dataset: ImageDataset,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    tiles: int = 1,
    about: About = MappingProxyType({}),
) -> Path:
    """Write a condensed set as one file, whole or not at all, and return its path.

    Parameters
    ----------
    path
        The file, replaced when it is there; folders are made.
    dataset
        Normalised images [N, C, H, W] and their labels.  `groups` are not kept:
        nobody wrote a synthetic image.
    mean, std
        What the images are normalised with, one value a channel: pixel = x * std + mean.
    tiles
        Each image holds `tiles` x `tiles` smaller ones (`fedquilt.data.condensed`).
    about
        Anything else worth knowing of how the set was made.
    """
    images = dataset.images.detach().cpu().clone(memory_format=torch.contiguous_format)
    if images.ndim != 4 or 0 in images.shape:
        raise InvalidValueError(
            f"images of {dataset.name!r} must have shape [N, C, H, W], got {list(images.shape)}"
        )
    _check_finite(images, f"images of {dataset.name!r}", InvalidValueError)
    metadata = {
        "kind": KIND,
        "schema_version": str(SCHEMA_VERSION),
        "name": dataset.name,
        "num_classes": str(dataset.num_classes),
        "mean": json.dumps(_channels("mean", mean, images.shape[1])),
        "std": json.dumps(_channels("std", std, images.shape[1], above=0)),
        "about": json.dumps(_checked_about(about)),
    }
    if tiles != 1:  # files without it, of earlier versions too, hold plain images
        most = most_tiles(images.shape)
        metadata["tiles"] = str(checks.integer("tiles", tiles, at_least=1, at_most=most))
    tensors = {"images": images, "labels": dataset.targets.detach().cpu().clone()}
    return _write(Path(path), as_safetensors(tensors, metadata))


def load_condensed(path: str | os.PathLike[str], *, whole: bool = False) -> ImageDataset:
    """Return the condensed set in the file, or raise `DataError` when it is none.

    Where images hold smaller ones, those are returned, enlarged, ready to train on; with
    `whole` the images as they are stored.
    """
    with _opened(Path(path)) as stream:
        info = _info(stream, Path(path))
        images, labels = (stream.get(name).clone() for name in _DTYPES)
    _check_finite(images, f"images of {path}", DataError)
    if info["tiles"] > 1 and not whole:
        images, labels = (
            expand_tiles(images, info["tiles"]),
            labels.repeat_interleave(info["tiles"] ** 2),
        )
    try:
        return ImageDataset(images, labels, info["name"], info["num_classes"])
    except InvalidValueError as error:
        raise DataError(f"{path} does not hold what a condensed set must: {error}") from error


def condensed_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the file says of itself, without reading the images.

    The keys are schema_version, name, num_classes, mean and std (a list each), tiles, about
    (a dictionary) and shape (N, C, H, W).
    """
    with _opened(Path(path)) as stream:
        return _info(stream, Path(path))


@contextmanager
def _opened(path: Path) -> Iterator[TensorFile]:
    """Open a safetensors file; whatever is wrong with it becomes a `DataError`."""
    if not path.exists():
        raise DataNotFoundError(f"there is no condensed data set {str(path)!r}")
    wrong = "must be a whole safetensors file; it is torn or of another kind"
    with opened_tensors(path, wrong) as opened:
        yield opened


def _info(opened: TensorFile, path: Path) -> dict[str, Any]:
    metadata = opened.metadata
    if metadata.get("kind") != KIND:
        raise DataError(
            f"{path} must be a file of save_condensed, its kind {KIND!r}; "
            f"its kind is {shortened(metadata.get('kind'))}"
        )
    if metadata.get("schema_version") != str(SCHEMA_VERSION):
        raise DataError(
            f"{path}: schema_version={shortened(metadata.get('schema_version'))} must be "
            f"{str(SCHEMA_VERSION)!r}; it was written by another version of fedquilt"
        )
    shape = _shape(opened, path)
    most = most_tiles(shape)
    try:
        stated = {key: parse_json(metadata[key], key) for key in ("mean", "std", "about")}
        classes = parse_json(metadata["num_classes"], "num_classes")
        return {
            "schema_version": SCHEMA_VERSION,
            "name": metadata["name"],
            "num_classes": checks.integer(
                "num_classes", classes, at_least=1, at_most=_MOST_CLASSES
            ),
            "mean": _channels("mean", stated["mean"], shape[1]),
            "std": _channels("std", stated["std"], shape[1], above=0),
            "about": _checked_about(stated["about"]),
            "tiles": checks.integer(
                "tiles", parse_json(metadata.get("tiles", "1"), "tiles"), at_least=1, at_most=most
            ),
            "shape": shape,
        }
    except KeyError as error:
        raise DataError(f"{path} must state {error} in its metadata and does not") from error
    except ValueError as error:
        raise DataError(f"the metadata of {path} cannot be used: {error}") from error


def _shape(opened: TensorFile, path: Path) -> tuple[int, int, int, int]:
    """Return the shape of the images after comparing both tensors with what they must be."""
    found = opened.specs
    dtypes = {name: spec.dtype for name, spec in found.items()}
    shape = found["images"].shape if "images" in found else ()
    whole = dtypes == _DTYPES and len(shape) == 4 and 0 not in shape
    if not whole or found["labels"].shape != shape[:1]:
        held = (f"{printable(n)} {s.dtype} {list(s.shape)}" for n, s in sorted(found.items())[:9])
        raise DataError(
            f"{path} must hold images F32 [N, C, H, W] and labels I64 [N]; it holds "
            + (", ".join(held) or "nothing")
        )
    count, channels, height, width = shape
    return count, channels, height, width


def _channels(name: str, values: object, channels: int, above: float | None = None) -> list[float]:
    """Return one finite number a channel, as plain floats."""
    given = list(values) if hasattr(values, "__iter__") else []
    if isinstance(values, str) or len(given) != channels:
        raise InvalidValueError(f"{name}={values!r} must have {channels} numbers, one a channel")
    return [checks.number(name, value, above=above) for value in given]


def _checked_about(about: object) -> dict[str, str | int | float]:
    if not isinstance(about, Mapping):
        raise InvalidValueError(f"about={about!r} must be a mapping of names to values")
    return {_name(key): _plain(key, value) for key, value in about.items()}


def _name(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidValueError(f"about has the key {key!r}, keys must be text")
    return key


def _plain(key: str, value: object) -> str | int | float:
    """Return a value that JSON keeps as it is."""
    if isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise InvalidValueError(f"about[{key!r}]={value!r} must be text or a finite number")


def _check_finite(images: torch.Tensor, what: str, error: type[ValueError]) -> None:
    finite = torch.isfinite(images).flatten(1).all(dim=1)
    if not bool(finite.all()):
        first = int(torch.nonzero(~finite)[0])
        raise error(f"{what} must be finite; image {first} is not")


def _write(path: Path, content: Iterable[bytes | memoryview]) -> Path:
    if not path.name:
        raise InvalidValueError(f"path={str(path)!r} must name a file")
    write_file(path, content, parents=True)
    return path


_EXPANDED_VALUES = 1 << 26
"""So many numbers may come out of any set, and sixteen times its own out of a large one."""


def most_tiles(shape: Sequence[int]) -> int:
    """Return the most tiles that images [N, C, H, W] may hold beside each other.

    What comes out has tiles^2 times as many numbers as the file that it is read from.
    """
    affordable = max(4, math.isqrt(_EXPANDED_VALUES // math.prod(shape)))
    return min(*shape[2:], affordable)


def expand_tiles(images: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return the smaller images [N * tiles^2, C, H, W] that images [N, C, H, W] hold.

    Image after image, row after row.  They are enlarged bilinearly; where the sides are no
    multiples of `tiles`, the last rows and columns are left out.

    >>> from fedquilt.data.condensed import expand_tiles
    >>> expand_tiles(torch.arange(16.0).view(1, 1, 4, 4), 2).shape
    torch.Size([4, 1, 4, 4])
    """
    if tiles == 1:
        return images
    count, channels, *sides = images.shape
    height, width = (side // tiles for side in sides)
    cut = images[..., : height * tiles, : width * tiles]
    cut = cut.reshape(count, channels, tiles, height, tiles, width)
    small = cut.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels, height, width)
    rows, columns = (_enlarger(*pair, images) for pair in zip((height, width), sides, strict=True))
    return rows @ small @ columns.mT


def _enlarger(small: int, large: int, like: torch.Tensor) -> torch.Tensor:
    """Return the matrix [large, small] that enlarges a line bilinearly.

    A product on either side is what `interpolate` computes, in less time for many small
    images: its kernels take one after the other.
    """
    lines = torch.eye(small, dtype=like.dtype, device=like.device)[None]
    return functional.interpolate(lines, size=large, mode="linear", align_corners=False)[0].T


def shrink_to_tiles(images: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return images [N, C, H, W] that each hold `tiles`^2 of the images [N * tiles^2, C, H, W].

    The opposite of `expand_tiles`, but for the detail that is lost: a smaller image is made of
    means over the pixels of a larger one.
    """
    if tiles == 1:
        return images
    channels, *sides = images.shape[1:]
    height, width = (side // tiles for side in sides)
    small = functional.adaptive_avg_pool2d(images, (height, width))
    rows = small.view(-1, tiles, tiles, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    joined = rows.reshape(-1, channels, tiles * height, tiles * width)
    return functional.pad(joined, (0, sides[1] - tiles * width, 0, sides[0] - tiles * height))
