"""Data sets that are read from the published archive itself.

CIFAR-100, binary version, a tar file packed by gzip: `train.bin` and `test.bin` are rows of
3,074 bytes, the coarse class, the fine one (which is used), and the red, green and blue plane.
Its Python version is a pickle, which runs whatever it holds; it is not read.

Tiny ImageNet, a zip file of JPEG pictures: `wnids.txt` lists the classes, training pictures lie
in `train/CLASS/images/`, and `val/val_annotations.txt` names the class of each picture in
`val/images/`.  The pictures in `test/` have no public labels, so `val` is the test part.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedquilt.common.errors import DataError, FedquiltError
from fedquilt.data.dataset import ImageDataset
from fedquilt.data.download import Bounded
from fedquilt.data.specs import DatasetSpec

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
        return (
            _pictures(spec, packed, members, train),
            _pictures(spec, packed, members, test),
        )


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
