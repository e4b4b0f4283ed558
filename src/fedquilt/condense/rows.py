"""How the numbers of a row travel: as they are, or as whole numbers of a few bits.

Rows are means over many samples, uncertain by a few per cent of a feature's spread; a
code of 8 bits is finer than that.  A row is cut into blocks of `BLOCK` numbers.  With the
least number l of a block and s = (largest - l) / (2^b - 1), a number v travels as

    c = round((v - l) / s),    read as l + s c,    |l + s c - v| <= s / 2

and l and s travel beside them.  As many codes as there is room for below 2^24 become one
whole number, which float32 holds exactly: three of 8 bits, two of 12.  So a coded row is
a vector like any other, whatever carries it, and what it costs is its length.  No number
is too large for it, and a row that is not finite has an l or s that is not.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from fedquilt.common.errors import InvalidValueError
from fedquilt.config.choices import ROW_BITS

BLOCK = 512
_ROOM = 24  # bits of a whole number that float32 holds exactly


def coded_width(numbers: int, bits: int) -> int:
    """Return how many float32 a row of so many numbers becomes.

    >>> coded_width(4096, 32), coded_width(4096, 12), coded_width(4096, 8)
    (4096, 2064, 1382)
    """
    _check(bits)
    if bits == 32:
        return numbers
    return 2 * _blocks(numbers) + math.ceil(numbers * bits / _ROOM)


def _check(bits: int) -> None:
    if bits not in ROW_BITS:
        raise InvalidValueError(f"row_bits={bits} must be one of {', '.join(map(str, ROW_BITS))}")


def _blocks(numbers: int) -> int:
    return math.ceil(numbers / BLOCK)


def encode(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Return rows [G, N] as they travel, [G, coded_width(N, bits)]."""
    _check(bits)
    groups, numbers = rows.shape
    if bits == 32:
        return rows
    if not rows.numel():
        return rows.new_zeros(groups, coded_width(numbers, bits))
    blocks = _blocks(numbers)
    # The last number stands in for those that the last block lacks: no range changes.
    full = torch.cat([rows, rows[:, -1:].expand(-1, blocks * BLOCK - numbers)], dim=1)
    full = full.view(groups, blocks, BLOCK)
    low, high = full.amin(dim=2), full.amax(dim=2)
    step = high / (2**bits - 1) - low / (2**bits - 1)  # apart, so that no difference overflows
    # A block of equal numbers has no step; any will do.
    codes = (full / _positive(step)[..., None] - (low / _positive(step))[..., None]).round()
    codes = codes.nan_to_num().clamp(0, 2**bits - 1).flatten(1)[:, :numbers]
    many = _ROOM // bits
    codes = functional.pad(codes, (0, -numbers % many)).view(groups, -1, many)
    places = (2.0 ** (bits * torch.arange(many))).to(codes)
    return torch.cat([low, step, (codes * places).sum(dim=2)], dim=1)


def _positive(step: torch.Tensor) -> torch.Tensor:
    return torch.where(step > 0, step, torch.ones_like(step))


def decode(coded: torch.Tensor, numbers: int, bits: int) -> torch.Tensor:
    """Return the rows [G, N] that `encode` was given, to half a step."""
    _check(bits)
    if bits == 32:
        return coded
    blocks, many = _blocks(numbers), _ROOM // bits
    low, step, whole = coded[:, :blocks], coded[:, blocks : 2 * blocks], coded[:, 2 * blocks :]
    shifts = bits * torch.arange(many, device=coded.device)
    # What a stranger sent may be no whole number, or none in range; its codes are in range.
    whole = whole.nan_to_num().clamp(0, 2**_ROOM - 1).round().to(torch.int64)
    codes = ((whole[..., None] >> shifts) & (2**bits - 1)).flatten(1)[:, :numbers].to(coded)
    block_of = torch.arange(numbers, device=coded.device) // BLOCK
    return torch.addcmul(low[:, block_of], step[:, block_of], codes)
