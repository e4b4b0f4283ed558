"""Long arrays of which a round changes little: whole in one file, and what changed in another.

A run of a million clients has some numbers of each of them, and a round moves those of its
cohort.  They are written whole once, as the *base*; from then on a checkpoint holds, of each
array, the places where it is not what the base says, and the values there.  A new base is due
when they are more than a `SHARE` of the array.  An array that changes everywhere from one
checkpoint to the next gains nothing, and stays whole in the checkpoint.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONG = 1 << 16
"""The length from which an array is long."""
SHARE = 1 / 16
"""The changes of a larger share of an array are not worth writing apart."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Split:
    """The arrays of a checkpoint: whole ones, changes since the base, and a base that is due."""

    whole: Arrays
    places: Arrays = field(default_factory=dict)
    values: Arrays = field(default_factory=dict)
    token: str = ""
    """The base's name; "" where the checkpoint needs none."""
    base: Arrays | None = None
    """The base, where it has to be written first."""


class LongArrays:
    """What the newest base says of a run's long arrays."""

    def __init__(self) -> None:
        self._token = ""
        self._base: Arrays = {}
        self._dense: set[str] = set()
        self._is_new = False

    def split(self, state: Mapping[str, NDArray[Any]]) -> Split:
        """Divide the arrays of a checkpoint, and take a base to be written where one is due."""
        changed = {
            key: _changed(self._base.get(key), array)
            for key, array in state.items()
            if array.ndim == 1 and array.size >= LONG and key not in self._dense
        }
        if self._is_new:  # what has changed that much since the last checkpoint always will
            dense = {key for key in self._base if key in changed and changed[key] is None}
            self._dense |= dense
            changed = {key: where for key, where in changed.items() if key not in dense}
        gone = bool(changed) and not self._base.keys() <= state.keys()
        self._is_new = gone or any(where is None for where in changed.values())
        if self._is_new:
            self._token = secrets.token_hex(8)
            self._base = {key: state[key].copy() for key in changed}
            changed = {key: np.zeros(0, dtype=np.int32) for key in changed}
        places = {key: where for key, where in changed.items() if where is not None}
        return Split(
            whole={key: array for key, array in state.items() if key not in places},
            places=places,
            values={key: state[key][where] for key, where in places.items()},
            token=self._token if places else "",
            base=self._base if self._is_new else None,
        )


def _changed(before: NDArray[Any] | None, now: NDArray[Any]) -> NDArray[np.int32] | None:
    """Return where an array has changed, bit by bit; None where a base has to say it anew."""
    if before is None or (before.shape, before.dtype) != (now.shape, now.dtype):
        return None
    bits = f"u{now.dtype.itemsize}"
    places = np.flatnonzero(before.view(bits) != np.ascontiguousarray(now).view(bits))
    return places.astype(np.int32) if places.size <= SHARE * now.size else None
