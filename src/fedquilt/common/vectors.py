"""Long vectors: chunks of them, and norms that were computed for many vectors at once.

A step over a model that goes a chunk at a time needs no second model.  What is computed
element by element comes out the same, bit by bit, however the vector is cut; the length of a
chunk is a multiple of every width in which processors add.

On a GPU every number that is fetched waits for all that was queued before it.  An engine that
has the updates of a whole cohort fetches their norms together (`cache_norm`), and clipping one
of them finds its norm here.  A cached norm holds for the very numbers it was computed from: once
anything in the tensor's memory is written again, torch's count of changes differs and the entry
is void.  A copy counts its own changes, so the entry, which torch copies along, is void there too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

CHUNK = 1 << 18
"""The elements of one chunk; 2 MiB in float64."""

CHUNK_ON_GPU = 1 << 24
"""The same on a GPU, where every chunk costs a few launches; 128 MiB in float64."""


def chunks(size: int, length: int = CHUNK) -> Iterator[slice]:
    """Yield the chunks of a vector of `size` elements, in order.

    >>> [(chunk.start, chunk.stop) for chunk in chunks(CHUNK + 1)]
    [(0, 262144), (262144, 262145)]
    """
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))


def chunks_of(vector: torch.Tensor) -> Iterator[slice]:
    """Yield the chunks of a tensor's first dimension, as long as its device likes them."""
    return chunks(len(vector), CHUNK if vector.device.type == "cpu" else CHUNK_ON_GPU)


_NAME = "_fedquilt_norm"


class _CachedNorm:
    """The norm of one tensor object as it was at some count of changes."""

    def __init__(self, vector: torch.Tensor, norm: float) -> None:
        self.norm, self._version = norm, vector._version
        self._vector = weakref.ref(vector)

    def is_of(self, vector: torch.Tensor) -> bool:
        """Tell whether this tensor still is what the norm was computed from."""
        return self._vector() is vector and self._version == vector._version

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a copy that is pickled or deep."""
        return type(None), ()


def cache_norm(vector: torch.Tensor, norm: float) -> None:
    """Keep the L2 norm of a vector, computed in float64, with it; NaN or Inf when an entry is."""
    setattr(vector, _NAME, _CachedNorm(vector, norm))


def cached_norm(vector: torch.Tensor) -> float | None:
    """Return the norm that was kept; None where there is none, or the vector has changed."""
    cached: _CachedNorm | None = getattr(vector, _NAME, None)
    return cached.norm if cached is not None and cached.is_of(vector) else None
