"""Processor time of a tree of processes, from two readings of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ProcessKey(NamedTuple):
    """A process; the time it was created tells a reused number apart."""

    pid: int
    created: float


class CpuTimes(NamedTuple):
    """Seconds of processor time since a process began.

    `own` is its own; `reaped` that of the children which ended and were waited
    for, with all they had reaped themselves.
    """

    own: float
    reaped: float


class CpuAccount:
    """Seconds of processor time that a tree used between two readings.

    A member that is still there adds what its own time grew by.  One that has
    ended since shows up, with its whole life, in the reaped time of its parent; the
    part that earlier readings counted is taken off again:

        used = Σ_alive Δown + max(0, Σ_alive Δreaped − Σ_ended (own + reaped)_before)

    A process can end in the middle of a reading, seen neither alive nor reaped.
    Then the maximum cuts off something that the next reading needs, so it is kept
    for that one; a member that left the tree for good is forgotten after it.
    """

    def __init__(self, first: Mapping[ProcessKey, CpuTimes]) -> None:
        self._before = dict(first)
        self._carried = 0.0

    def used(self, now: Mapping[ProcessKey, CpuTimes]) -> float:
        """Return the seconds used since the last reading."""
        nothing = CpuTimes(0.0, 0.0)
        own = reaped = 0.0
        for key, times in now.items():
            before = self._before.get(key, nothing)
            own += max(0.0, times.own - before.own)
            reaped += max(0.0, times.reaped - before.reaped)
        ended = sum(sum(times) for key, times in self._before.items() if key not in now)
        balance = reaped - ended + self._carried
        self._carried = min(0.0, reaped - ended)
        self._before = dict(now)
        return own + max(0.0, balance)
