"""The length of a vector, noted beside it by whoever computed it for many at once.

On a GPU every number that is fetched waits for all that was queued before it.  An engine that
has the updates of a whole cohort fetches their lengths together; whoever clips one of them
then finds its length here.  A note is good for the very numbers it was made of: once anything
in the tensor's memory is written again, torch's count of changes differs and the note is void.
"""

from __future__ import annotations

from typing import Any

import torch

_NAME = "_fedquilt_length"


def note_length(vector: torch.Tensor, length: float) -> None:
    """Note the L2 norm of a vector, computed in float64; NaN or Inf when an entry is."""
    tensor: Any = vector
    setattr(tensor, _NAME, (length, vector._version))


def noted_length(vector: torch.Tensor) -> float | None:
    """Return the norm that was noted; None where there is no note, or it is void."""
    note: tuple[float, int] | None = getattr(vector, _NAME, None)
    return note[0] if note is not None and note[1] == vector._version else None
