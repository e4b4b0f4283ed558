"""The GPU kernel of `noise.DeviceNoise`: ChaCha20 (RFC 8439) and the numbers made of it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normal_kernel(key, scales, out, size, BLOCK: tl.constexpr):
    """Eight standard normal numbers of each of BLOCK blocks of key stream, nonce 0.

    Words 2 j and 2 j + 1 of a block are the low and high half of its 64-bit number j, of
    which the upper 53 bits count; numbers 0 to 3 are the radii of numbers 4 to 7.
    """
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counter = number.to(tl.uint32)
    zero = counter * 0
    a0, a1, a2, a3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    b0, b1 = zero + tl.load(key).to(tl.uint32), zero + tl.load(key + 1).to(tl.uint32)
    b2, b3 = zero + tl.load(key + 2).to(tl.uint32), zero + tl.load(key + 3).to(tl.uint32)
    c0, c1 = zero + tl.load(key + 4).to(tl.uint32), zero + tl.load(key + 5).to(tl.uint32)
    c2, c3 = zero + tl.load(key + 6).to(tl.uint32), zero + tl.load(key + 7).to(tl.uint32)
    x0, x1, x2, x3, x4, x5, x6, x7 = a0, a1, a2, a3, b0, b1, b2, b3
    x8, x9, x10, x11, x12, x13, x14, x15 = c0, c1, c2, c3, counter, zero, zero, zero
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    to = number * 8
    unit, turn = tl.load(scales), tl.load(scales + 1)
    _store_pair(out, to, size, x0 + a0, x1 + a1, x8 + c0, x9 + c1, unit, turn)
    _store_pair(out, to + 2, size, x2 + a2, x3 + a3, x10 + c2, x11 + c3, unit, turn)
    _store_pair(out, to + 4, size, x4 + b0, x5 + b1, x12 + counter, x13, unit, turn)
    _store_pair(out, to + 6, size, x6 + b2, x7 + b3, x14, x15, unit, turn)


@triton.jit
def _quarter(a, b, c, d):
    """The quarter round of RFC 8439, section 2.1."""
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _rotated(x, by: tl.constexpr):
    return (x << by) | (x >> (32 - by))


@triton.jit
def _store_pair(out, to, size, low, high, other_low, other_high, unit, turn):
    """Box and Muller 1958: two numbers of two uniform ones, on a grid of 2^-53."""
    first = _upper_bits(low, high)
    second = _upper_bits(other_low, other_high)
    radius = tl.sqrt(-2 * tl.log((first + 1) * unit))
    angle = second * turn
    tl.store(out + to, radius * tl.cos(angle), mask=to < size)
    tl.store(out + to + 1, radius * tl.sin(angle), mask=to + 1 < size)


@triton.jit
def _upper_bits(low, high):
    """The upper 53 of 64 bits, as a whole number in float64."""
    return (((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11).to(tl.float64)
