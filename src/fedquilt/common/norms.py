"""The length of a vector, noted beside it by whoever computed it for many at once.

On a GPU every number that is fetched waits for all that was queued before it.  An engine that
has the updates of a whole cohort fetches their lengths together; whoever clips one of them
then finds its length here.  A note is good for the very numbers it was made of: once anything
in the tensor's memory is written again, torch's count of changes differs and the note is void.
A copy counts its own changes, so the note, which torch copies along, is void there too.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_NAME = "_fedquilt_length"


class _Note:
    """The length of one tensor object as it was at some count of changes."""

    def __init__(self, vector: torch.Tensor, length: float) -> None:
        self.length, self._version = length, vector._version
        self._vector = weakref.ref(vector)

    def is_of(self, vector: torch.Tensor) -> bool:
        """Tell whether this tensor still is what the note was made of."""
        return self._vector() is vector and self._version == vector._version

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a copy that is pickled or deep."""
        return type(None), ()


def note_length(vector: torch.Tensor, length: float) -> None:
    """Note the L2 norm of a vector, computed in float64; NaN or Inf when an entry is."""
    setattr(vector, _NAME, _Note(vector, length))


def noted_length(vector: torch.Tensor) -> float | None:
    """Return the norm that was noted; None where there is no note, or it is void."""
    note: _Note | None = getattr(vector, _NAME, None)
    return note.length if note is not None and note.is_of(vector) else None
