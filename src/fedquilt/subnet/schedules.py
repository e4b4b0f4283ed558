"""Which slice a client gets in a round.

| schedule | slice of a client of width w in round t | source |
|---|---|---|
| `heterofl` | the first w of every axis | Diao et al. 2021 |
| `fedrolex` | a window of w that starts at unit t step mod n | Alam et al. 2022 |
| `federated_dropout` | a random w of every axis | Caldas et al. 2018 |
| `fjord` | the first p, p drawn from the widths up to w | Horvath et al. 2021 |
| `mfl` | structure (client + t) mod p^k of fixed ones | |
| `depthfl` | the first w of the blocks, at full width | Kim et al. 2023 |
| `smallest_only` | the smallest width, for everyone | baseline |
| `largest_only` | the whole model for w = 1, nothing for the others | baseline |

Rounds count from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.subnet.depth import Blocks
from fedquilt.subnet.ranges import Bound
from fedquilt.subnet.selection import (
    FixedStructure,
    Prefix,
    RandomUnits,
    Window,
    kept_units,
    parse_width,
)


def heterofl(width: Bound) -> Prefix:
    """Return the first units of every axis."""
    return Prefix(width)


def fedrolex(width: Bound, round_number: int, step: int = 1) -> Window:
    """Return the window that moves by `step` units a round and wraps around."""
    validate.integer("round_number", round_number, at_least=0)
    validate.integer("step", step, at_least=1)
    return Window(width, round_number * step)


def federated_dropout(width: Bound, generator: np.random.Generator) -> RandomUnits:
    """Return a random choice of units; one draw of the generator fixes it."""
    return RandomUnits(width, int(generator.integers(2**62)))


def fjord(limit: Bound, widths: Iterable[Bound], generator: np.random.Generator) -> Prefix:
    """Return ordered dropout: a width drawn evenly from those up to the client's limit.

    No width is zero, and the limit itself can be drawn.
    """
    most = parse_width(limit)
    allowed = [width for width in _sorted_widths(widths) if width <= most]
    if not allowed:
        raise InvalidValueError(f"limit={limit!r} must be at least one of the widths")
    return Prefix(allowed[int(generator.integers(len(allowed)))])


def mfl(client: int, round_number: int, axes: int, pieces: int = 2) -> FixedStructure:
    """Return one of pieces^axes fixed structures; client and round take turns through them."""
    validate.integer("client", client, at_least=0)
    validate.integer("round_number", round_number, at_least=0)
    number = pieces ** validate.integer("axes", axes, at_least=1)
    return FixedStructure((client + round_number) % number, axes, pieces)


def depthfl(width: Bound, blocks: int) -> Blocks:
    """Return the first floor(width x blocks) of a model's blocks."""
    held = kept_units(validate.integer("blocks", blocks, at_least=1), parse_width(width))
    return Blocks(tuple(range(held)), blocks)


def smallest_only(widths: Sequence[Bound]) -> Prefix:
    """Return the slice that even the weakest client can hold, for everyone."""
    return Prefix(_sorted_widths(widths)[0])


def largest_only(width: Bound) -> Prefix | None:
    """Return the whole model for a client that can hold it, and None for any other."""
    return Prefix(1) if parse_width(width) == 1 else None


def _sorted_widths(widths: Iterable[Bound]) -> list[Fraction]:
    parsed = sorted({parse_width(width) for width in widths})
    if not parsed:
        raise InvalidValueError("widths=[] must hold at least one width")
    return parsed
