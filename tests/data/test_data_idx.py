from __future__ import annotations

import numpy as np
import pytest

from fedquilt.data import files
from fedquilt.errors import DataError

# Two images of 1x3 bytes, written out from the description of the format.
IMAGES = bytes.fromhex("00000803 00000002 00000001 00000003 0102ff 040506")
# A 2x2 array of int32: 1, 256, -1, 65536.
INTEGERS = bytes.fromhex("00000c02 00000002 00000002 00000001 00000100 ffffffff 00010000")


def test_bytes_are_read_as_written() -> None:
    assert files.parse(IMAGES, "uint8", (2, 1, 3)).tolist() == [[[1, 2, 255]], [[4, 5, 6]]]


def test_integers_are_big_endian() -> None:
    array = files.parse(INTEGERS, "int32", (2, 2))
    assert array.astype(np.int64).tolist() == [[1, 256], [-1, 65536]]


def test_header_is_that_of_mnist() -> None:
    assert files.header("uint8", (60_000, 28, 28)).hex() == "000008030000ea600000001c0000001c"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x1f\x8b" + IMAGES[2:], "begins with 0x1f8b0803, expected IDX magic 0x00000803"),
        (INTEGERS, "begins with 0x00000c02, expected IDX magic 0x00000803"),
        (IMAGES.replace(b"\x00\x02", b"\x00\x03", 1), r"dimensions \[3, 1, 3\].*\[2, 1, 3\]"),
        (IMAGES[:10], r"has dimensions \[2\], expected \[2, 1, 3\]"),
        (b"", "begins with 0x, expected"),
        (IMAGES[:-1], "has 21 bytes, expected 22"),
        (IMAGES + b"\x00", "has 23 bytes, expected 22"),
    ],
)
def test_wrong_content_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        files.parse(content, "uint8", (2, 1, 3))
