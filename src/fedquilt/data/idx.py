"""The IDX format: a big-endian header, then the numbers of one array.

byte 0, 1   zero
byte 2      type of the numbers: 0x08 uint8, 0x0C int32
byte 3      number of dimensions d
d times     size of a dimension, uint32
then        the numbers, the last dimension fastest
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from fedquilt.errors import DataError

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
