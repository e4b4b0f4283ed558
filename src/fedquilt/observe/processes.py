"""CPU and memory of a tree of processes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedquilt.common import optional
from fedquilt.observe.samples import MonitorError


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


class ProcessTree:
    """The monitored process and, if wished, everything it started.

    The process that does the sampling is left out when it is not the monitored
    one: the cost of looking is not part of what is looked at.
    """

    def __init__(self, pid: int, *, children: bool) -> None:
        self._psutil = optional.load("psutil", "CPU and memory metrics")
        self._children = children
        self._pid = pid
        self._sampler = os.getpid() if os.getpid() != pid else None
        try:
            self._root = self._psutil.Process(pid)
        except self._psutil.NoSuchProcess as error:
            raise MonitorError(f"pid={pid} must be a running process; there is none") from error

    def members(self) -> list[Any]:
        """Return the psutil processes of the tree, the root first."""
        if not self._root.is_running():
            raise MonitorError(f"the monitored process {self._pid} has ended")
        descendants = self._root.children(recursive=True) if self._children else []
        return [self._root, *(one for one in descendants if one.pid != self._sampler)]

    def cpu_times(self) -> dict[ProcessKey, CpuTimes]:
        """Return the processor time of every member.

        The time of ended children is read for all members before anybody's own
        time: a child that is seen alive afterwards cannot have been in it.
        """
        reaped = {}
        for member in self.members():
            with self._unless_gone():
                reaped[member] = self._reaped_seconds(member)
        times = {}
        for member, seconds in reaped.items():
            with self._unless_gone():
                key = ProcessKey(member.pid, member.create_time())
                times[key] = CpuTimes(_own_seconds(member), seconds)
        return times

    def memory_percent(self) -> float:
        """Return resident memory of all members in percent of the machine's.

        Pages that members share are counted once for each of them.
        """
        resident = 0
        for member in self.members():
            with self._unless_gone():
                resident += member.memory_info().rss
        return 100.0 * resident / float(self._psutil.virtual_memory().total)

    def pids(self) -> list[int]:
        """Return the process numbers of the members."""
        return [member.pid for member in self.members()]

    def _reaped_seconds(self, member: Any) -> float:
        if not self._children:
            return 0.0
        times = member.cpu_times()
        return float(getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0))

    def _unless_gone(self) -> contextlib.suppress:
        """Leave out a member that ended meanwhile, or that belongs to somebody else."""
        return contextlib.suppress(self._psutil.NoSuchProcess, self._psutil.AccessDenied)


def _own_seconds(member: Any) -> float:
    """Return the processor time of one process, without its children.

    Linux has a clock for every process, exact to the nanosecond where /proc counts
    in steps of 10 ms; its number is what clock_getcpuclockid(3) returns.
    """
    if sys.platform == "linux":
        try:
            return time.clock_gettime((~member.pid << 3) | 2)
        except OSError:
            pass
    times = member.cpu_times()
    return float(times.user + times.system)
