"""Long vectors a piece at a time: a step over a model then needs no second model.

What is computed element by element comes out the same, bit by bit, however the vector is
cut; the length of a piece is a multiple of every width in which processors add.
"""

from __future__ import annotations

from collections.abc import Iterator

LENGTH = 1 << 18
"""The elements of one piece; 2 MiB in float64."""


def pieces(size: int, length: int = LENGTH) -> Iterator[slice]:
    """Yield the pieces of a vector of `size` elements, in order.

    >>> [(piece.start, piece.stop) for piece in pieces(LENGTH + 1)]
    [(0, 262144), (262144, 262145)]
    """
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))
