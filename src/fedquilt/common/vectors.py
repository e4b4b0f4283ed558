"""Long vectors: chunks of them, their norms, and norms that were computed for many at once.

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

import math
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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


# Longer vectors are not copied to float64 as a whole.
_LONG = 1 << 22
_LANES = 4


def norm(vector: NDArray[Any] | torch.Tensor) -> float:
    """Return the L2 norm in float64; NaN or Inf when an entry is."""
    if isinstance(vector, torch.Tensor):
        known = cached_norm(vector)
        if known is not None:
            return known
        values = vector.detach()
        values = values if values.is_floating_point() else values.to(torch.float64)
        if values.numel() <= _LONG or values.device.type != "cpu" or values.ndim != 1:
            return float(torch.linalg.vector_norm(values, dtype=torch.float64))
        whole = StreamingNorm()
        for chunk in chunks(values.numel()):
            whole.add(values[chunk])
        return whole.value()
    return float(np.linalg.norm(np.asarray(vector, dtype=np.float64)))


class StreamingNorm:
    """The L2 norm, in float64, of a vector that comes a chunk at a time (`chunks`).

    Four sums of squares, of every fourth element, are carried from chunk to chunk and
    added at the end: the order in which torch adds up a whole vector on one thread.
    """

    def __init__(self) -> None:
        self._only: torch.Tensor | None = None
        self._lanes: NDArray[np.float64] = np.zeros(_LANES)
        self._rest: NDArray[np.float64] = np.zeros(0)
        self._far: float | torch.Tensor = 0.0
        self._count = 0

    def add(self, chunk: torch.Tensor) -> None:
        """Add the next chunk; all but the last have the same length."""
        self._count += 1
        self._only = chunk if self._count == 1 else None
        if chunk.device.type != "cpu":  # it adds in an order of its own, and fetching it waits
            self._only = None
            self._far = self._far + torch.sum(chunk.to(torch.float64) ** 2)
            return
        values = chunk.to(torch.float64).cpu().numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            squares = values * values
        whole = len(squares) // _LANES * _LANES
        if whole:
            rows = squares[:whole].reshape(-1, _LANES)
            rows[0] += self._lanes
            self._lanes = np.add.reduce(rows, axis=0)
        self._rest = squares[whole:]

    def value(self) -> float:
        """Return the norm of all chunks; NaN or Inf when an entry is."""
        if isinstance(self._far, torch.Tensor):
            return math.sqrt(float(self._far))
        if self._only is not None:
            return norm(self._only)
        # One after the other: newer Pythons' `sum` adds more exactly than torch.
        return math.sqrt(np.add.accumulate(np.concatenate([self._lanes, self._rest]))[-1])


def is_finite(vector: torch.Tensor) -> bool:
    """Tell whether every entry is finite, by the sum, which any NaN or Inf spoils.

    The norm says it too, where it is known: squares of float32 do not overflow in float64.
    """
    known = cached_norm(vector) if vector.dtype == torch.float32 else None
    if known is not None:
        return math.isfinite(known)
    return bool(torch.isfinite(vector.sum()))
