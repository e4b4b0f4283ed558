"""Long vectors a piece at a time: a step over a model then needs no second model.

What is computed element by element comes out the same, bit by bit, however the vector is
cut; the length of a piece is a multiple of every width in which processors add.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LENGTH = 1 << 18
"""The elements of one piece; 2 MiB in float64."""

LENGTH_ON_GPU = 1 << 24
"""The same on a GPU, where every piece costs a few launches; 128 MiB in float64."""


def pieces(size: int, length: int = LENGTH) -> Iterator[slice]:
    """Yield the pieces of a vector of `size` elements, in order.

    >>> [(piece.start, piece.stop) for piece in pieces(LENGTH + 1)]
    [(0, 262144), (262144, 262145)]
    """
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))


def pieces_of(vector: torch.Tensor) -> Iterator[slice]:
    """Yield the pieces of a tensor's first dimension, as long as its device likes them."""
    return pieces(len(vector), LENGTH if vector.device.type == "cpu" else LENGTH_ON_GPU)
