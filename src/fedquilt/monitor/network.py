"""Bytes sent and received by everybody in the network namespace of a process.

The kernel counts bytes for each network interface, and interfaces belong to a
network namespace: on a plain machine the whole machine, in a container usually
the container.  These counters do not tell processes apart; `connections` has
a count that does, for TCP.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedquilt.monitor import extras
from fedquilt.monitor.errors import MonitorError


class Traffic(NamedTuple):
    """A pair of counters, or of differences of them."""

    sent: int
    received: int


class NamespaceTraffic:
    """Traffic of all interfaces since the last reading.

    An interface that appears counts from its second reading on, one that disappears
    not at all for that reading, and one whose counter went back from zero.  Where
    traffic passes several interfaces (a bridge and the card behind it) each counts it.
    """

    def __init__(self, pid: int, *, loopback: bool, proc: str | os.PathLike[str] = "/proc") -> None:
        self._pid = pid
        self._loopback = loopback
        self._proc = Path(proc)
        self._before = self._counters()

    def read(self) -> Traffic:
        """Return the bytes since the last reading."""
        now = self._counters()
        pairs = [
            (counter, self._before[name]) for name, counter in now.items() if name in self._before
        ]
        self._before = now
        return Traffic(
            sum(_grown(after.sent, before.sent) for after, before in pairs),
            sum(_grown(after.received, before.received) for after, before in pairs),
        )

    def _counters(self) -> Mapping[str, Traffic]:
        counters = self._from_proc() if sys.platform == "linux" else _from_psutil()
        if self._loopback:
            return counters
        return {name: counter for name, counter in counters.items() if not _is_loopback(name)}

    def _from_proc(self) -> dict[str, Traffic]:
        """Parse net/dev: two heading lines, then `name: 8 receive fields 8 send fields`."""
        path = self._proc / str(self._pid) / "net" / "dev"
        try:
            lines = path.read_text().splitlines()[2:]
        except OSError as error:
            raise MonitorError(f"network counters {str(path)!r} cannot be read: {error}") from error
        counters = {}
        for line in lines:
            name, _, fields = line.rpartition(":")
            numbers = fields.split()
            counters[name.strip()] = Traffic(sent=int(numbers[8]), received=int(numbers[0]))
        return counters


def namespace_scope(pid: int, *, loopback: bool) -> str:
    """Return in words whose traffic `NamespaceTraffic` measures."""
    kept = "loopback included" if loopback else "loopback left out"
    if sys.platform != "linux":
        return f"all processes of the machine, {kept}"
    namespace = os.readlink(f"/proc/{pid}/ns/net")
    return f"all processes of the network namespace {namespace}, {kept}"


def _from_psutil() -> dict[str, Traffic]:
    counters = extras.psutil().net_io_counters(pernic=True)
    return {
        name: Traffic(sent=nic.bytes_sent, received=nic.bytes_recv)
        for name, nic in counters.items()
    }


def _grown(after: int, before: int) -> int:
    return after - before if after >= before else after


def _is_loopback(name: str) -> bool:
    return name.lower() in ("lo", "lo0") or name.lower().startswith("loopback")
