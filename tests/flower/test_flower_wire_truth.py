"""What travels, bit by bit, against numpy's own arithmetic; and what no honest node sends."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedquilt.common.errors import InvalidValueError
from fedquilt.flower import wire

BLOCK = 2048
SIZES = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)


def numbers(size: int, seed: int = 3) -> NDArray[np.float32]:
    """Numbers of very different sizes, some of them zero, negative zero or subnormal."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=size) * 10.0 ** rng.integers(-12, 4, size)
    drawn[rng.random(size) < 0.05] = 0.0
    drawn[rng.random(size) < 0.02] = -0.0
    drawn[rng.random(size) < 0.02] = 1e-41
    return drawn.astype(np.float32)


def nearest_even(x: NDArray[np.float32]) -> NDArray[np.int16]:
    """The upper half of float32, rounded to nearest, ties to even, on the bits themselves."""
    bits = x.view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return upper.astype(np.uint16).view(np.int16)


@pytest.mark.parametrize("size", SIZES)
def test_bf16_is_the_upper_half_rounded_to_nearest_even(size: int) -> None:
    x = numbers(size)
    arrays, read = wire.compress("bf16", torch.from_numpy(x), 0)
    assert list(arrays) == ["bf16"]
    np.testing.assert_array_equal(arrays["bf16"], nearest_even(x))
    widened = (nearest_even(x).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(read.numpy().view(np.uint32), widened.view(np.uint32))


def test_bf16_at_ties_and_at_the_ends() -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000],
        np.uint32,
    )
    arrays, read = wire.compress("bf16", torch.from_numpy(bits.view(np.float32)), 0)
    expected = np.array([0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0x7F80, 0xFF80], np.uint16)
    np.testing.assert_array_equal(arrays["bf16"].view(np.uint16), expected)
    assert math.isinf(float(read[4])), "the largest number is rounded up, as hardware does"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_int8_is_a_neighbouring_level_of_its_block(size: int, seed: int) -> None:
    x = numbers(size)
    arrays, read = wire.compress("int8", torch.from_numpy(x), seed)
    levels, scale = arrays["int8"], arrays["scale"]
    blocks = [x[at : at + BLOCK] for at in range(0, size, BLOCK)]
    np.testing.assert_array_equal(scale, [np.abs(block).max() for block in blocks])
    wide = np.repeat(scale, BLOCK)[:size].astype(np.float64)
    exact = np.divide(127 * x.astype(np.float64), wide, out=np.zeros(size), where=wide > 0)
    assert np.abs(levels - exact).max() < 1 + 1e-4, "the level above or below, no other"
    assert np.abs(levels.astype(int)).max() <= 127
    np.testing.assert_allclose(read.numpy(), levels * wide / 127, rtol=1e-6, atol=0)
    again, _ = wire.compress("int8", torch.from_numpy(x), seed)
    np.testing.assert_array_equal(again["int8"], levels)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [1e-9, 0.1, 0.5, 1.0])
def test_topk_are_the_largest_by_a_full_sort(size: int, share: float) -> None:
    x = np.random.default_rng(5).permutation(np.arange(1, size + 1)).astype(np.float32)
    x[::2] *= -1
    arrays, read = wire.compress("topk", torch.from_numpy(x), 0, share)
    count = max(1, round(share * size))
    largest = np.sort(np.argsort(-np.abs(x))[:count])
    np.testing.assert_array_equal(arrays["index"], largest)
    np.testing.assert_array_equal(arrays["value"], x[largest])
    dense = np.zeros(size, np.float32)
    dense[largest] = x[largest]
    np.testing.assert_array_equal(read.numpy(), dense)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_plain_numbers_travel_as_they_are(kind: str) -> None:
    x = numbers(777).astype(kind)
    arrays, read = wire.compress("none", torch.from_numpy(x), 0)
    sent = wire.as_array(arrays["vector"])
    assert sent.data == x.astype(np.dtype(kind).newbyteorder("<")).tobytes()
    got = wire.read_arrays(ArrayRecord({"vector": sent}), x.nbytes)["vector"]
    np.testing.assert_array_equal(got.view(np.uint8), x.view(np.uint8))
    assert torch.equal(read, torch.from_numpy(x))


def test_an_array_of_another_byte_order_is_sent_little_endian() -> None:
    x = numbers(50)
    sent = wire.as_array(x.astype(">f4"))
    assert sent.data == x.astype("<f4").tobytes()


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "topk"])
@pytest.mark.parametrize("size", SIZES)
def test_a_reply_is_read_as_it_was_packed(name: str, size: int) -> None:
    x = torch.from_numpy(numbers(size))
    arrays, expected = wire.compress(name, x, 9, 0.3)
    packed = wire.pack_reply("t", arrays, num_examples=7, loss=0.5, monitor={"seconds": 2})
    most = sum(array.nbytes for array in arrays.values())
    reply = wire.unpack_reply(packed, most)
    assert (reply.token, reply.failed, reply.num_examples, reply.loss) == ("t", False, 7, 0.5)
    assert reply.monitor == {"seconds": 2.0}
    assert torch.equal(wire.decompress(name, reply.arrays, size, torch.float32), expected)
    with pytest.raises(wire.UnreadableError, match=f"{most} bytes must be at most {most - 1}"):
        wire.unpack_reply(packed, most - 1)


def array_of(data: bytes, shape: tuple[int, ...], kind: str = "float32", how: str = "") -> Array:
    return Array(kind, shape, how or wire._RAW, data)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (array_of(b"\0" * 8, (3,)), "as many bytes"),
        (array_of(b"\0" * 8, (1,)), "as many bytes"),
        (array_of(b"\0" * 7, (2,)), "as many bytes"),
        (array_of(b"", (2**60,)), "as many bytes"),
        (array_of(b"\0" * 4, (2**62 + 1,)), "as many bytes"),
        (array_of(b"", (-1,)), "as many bytes"),
        (array_of(b"\0" * 4, ()), "must be a vector"),
        (array_of(b"\0" * 16, (2, 2)), "must be a vector"),
        (array_of(b"\0" * 16, (2,), "object"), "must be a vector"),
        (array_of(b"\0" * 4, (2,), "float16"), "must be a vector"),
        (array_of(b"\0" * 16, (1,), "complex128"), "must be a vector"),
        (array_of(b"\0" * 8, (1,), "int64"), "must be a vector"),
        (array_of(b"\0" * 8, (2,), "<f4"), "must be a vector"),
        (array_of(b"\x93NUMPY", (1,), how="numpy.ndarray"), "must be a vector"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, str) else "array",
)
def test_an_array_whose_size_or_kind_is_wrong_is_refused(array: Array, words: str) -> None:
    with pytest.raises(wire.UnreadableError, match=words):
        wire.read_arrays(ArrayRecord({"vector": array}), 1 << 20)


def test_too_many_arrays_and_too_many_bytes_are_refused_before_they_are_read() -> None:
    small = array_of(b"\0" * 4, (1,))
    five = ArrayRecord({f"a{i}": small for i in range(5)})
    with pytest.raises(wire.UnreadableError, match="5 arrays must be at most 4"):
        wire.read_arrays(five, 1 << 20)
    wrong = array_of(b"\0" * 100, (7, 7, 7), "object")
    with pytest.raises(wire.UnreadableError, match="100 bytes must be at most 99"):
        wire.read_arrays(ArrayRecord({"vector": wrong}), 99)


@pytest.mark.parametrize(
    ("name", "arrays"),
    [
        ("none", {"vector": np.zeros(11, np.float32)}),
        ("none", {"vector": np.zeros(10, np.int32)}),
        ("none", {}),
        ("bf16", {"bf16": np.zeros(11, np.int16)}),
        ("bf16", {"bf16": np.zeros(10, np.int32)}),
        ("int8", {"int8": np.zeros(10, np.int8), "scale": np.zeros(0, np.float32)}),
        ("int8", {"int8": np.zeros(10, np.int8), "scale": np.zeros(1, np.float64)}),
        ("int8", {"int8": np.zeros(BLOCK + 1, np.int8), "scale": np.zeros(2, np.float32)}),
        ("topk", {"index": np.arange(11, dtype=np.int32), "value": np.zeros(11, np.float32)}),
        ("topk", {"index": np.array([3, 1], np.int32), "value": np.zeros(2, np.float32)}),
        ("topk", {"index": np.array([2**31 - 1], np.int32), "value": np.zeros(1, np.float32)}),
        ("topk", {"index": np.array([1], np.int16), "value": np.zeros(1, np.float32)}),
        ("topk", {"index": np.array([1], np.int32)}),
    ],
)
def test_what_does_not_fit_the_vector_is_refused(
    name: str, arrays: dict[str, NDArray[Any]]
) -> None:
    with pytest.raises(wire.UnreadableError):
        wire.decompress(name, arrays, 10, torch.float32)


def test_a_vector_of_unknown_size_is_what_came_and_no_more_than_a_vector() -> None:
    x = numbers(5)
    got = wire.decompress("none", {"vector": x}, None, torch.float32)
    np.testing.assert_array_equal(got.numpy(), x)
    assert wire.decompress("none", {}, None, torch.float32).numel() == 0
    with pytest.raises(wire.UnreadableError):
        wire.decompress("none", {"vector": np.zeros(3, np.int8)}, None, torch.float32)
    with pytest.raises(InvalidValueError, match="must be one of 'none', 'bf16', 'int8', 'topk'"):
        wire.decompress("gzip", {}, 3, torch.float32)


@pytest.mark.parametrize("count", [-1, 2**31, 2.5, 1e300, math.nan])
def test_a_number_of_examples_that_is_none_is_refused(count: float) -> None:
    content = wire.pack_reply("t", {})
    content["metrics"] = MetricRecord({"num-examples": count})
    with pytest.raises(wire.UnreadableError, match="num-examples="):
        wire.unpack_reply(content, 10)


def test_what_a_reply_may_say_beside_its_arrays_is_little() -> None:
    content = wire.pack_reply("t", {}, loss=math.nan)
    assert wire.unpack_reply(content, 0).loss is None
    content["metrics"] = MetricRecord({"num-examples": 2**31 - 1, "loss": 3, "more": 1.0})
    content["monitor"] = MetricRecord(
        {**{f"{'k' * 60}{i}": float(i) for i in range(40)}, "z": math.inf}
    )
    content["config"] = ConfigRecord({"token": "t", "failed": 1, "more": "text"})
    reply = wire.unpack_reply(content, 0)
    assert (reply.num_examples, reply.loss, reply.failed) == (2**31 - 1, None, False)
    assert len(reply.monitor) <= 16
    assert all(len(name) <= 40 and math.isfinite(x) for name, x in reply.monitor.items())
    empty = wire.unpack_reply(RecordDict(), 0)
    assert (empty.token, empty.failed, empty.arrays, empty.monitor) == ("", False, {}, {})


def test_an_order_is_read_as_it_was_packed_and_only_by_the_same_version() -> None:
    x = torch.from_numpy(numbers(33))
    order = wire.Order("t", 3, 1, 5, 0.25, "{}", "f" * 32, "int8", 0.1, True, size=33)
    content = wire.pack_order(order, wire.as_array(x.numpy()))
    got, sent = wire.unpack_order(content)
    assert got == order
    assert torch.equal(sent, x)
    _, nothing = wire.unpack_order(wire.pack_order(order, None))
    assert nothing.numel() == 0
    for other in ("", "0.0.1"):
        older = wire.pack_order(dataclasses.replace(order, version=other), None)
        with pytest.raises(InvalidValueError, match="fedquilt of the server is"):
            wire.unpack_order(older)
