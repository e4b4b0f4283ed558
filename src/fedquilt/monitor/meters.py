"""One meter for each metric: everything since its last reading."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from fedquilt.monitor.connections import SCOPE, ConnectionTraffic
from fedquilt.monitor.cpu import CpuAccount
from fedquilt.monitor.metrics import BYTES_RECV, BYTES_SENT, CPU, MEMORY
from fedquilt.monitor.network import NamespaceTraffic, namespace_scope
from fedquilt.monitor.power import open_power
from fedquilt.monitor.processes import ProcessTree
from fedquilt.monitor.settings import Reach


class Meter(Protocol):
    """Measures from the moment it is made; each reading begins where the last ended."""

    def read(self) -> Mapping[str, float]:
        """Return the values by the keys of `stats`."""

    def close(self) -> None:
        """Let go of what the meter holds."""


class CpuMeter:
    """Processor time by wall-clock time in percent; 100 is one core all the time."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._account = CpuAccount(tree.cpu_times())
        self._time = time.monotonic()

    def read(self) -> Mapping[str, float]:
        """Return the mean load since the last reading."""
        used = self._account.used(self._tree.cpu_times())
        now = time.monotonic()
        seconds, self._time = now - self._time, now
        return {CPU: 100.0 * used / max(seconds, 1e-9)}

    def close(self) -> None:
        """Do nothing."""


class MemoryMeter:
    """Resident memory in percent of the machine's, now."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree

    def read(self) -> Mapping[str, float]:
        """Return the share of memory."""
        return {MEMORY: self._tree.memory_percent()}

    def close(self) -> None:
        """Do nothing."""


class NetworkMeter:
    """Bytes sent and received since the last reading."""

    def __init__(self, traffic: NamespaceTraffic | ConnectionTraffic) -> None:
        self._traffic = traffic

    def read(self) -> Mapping[str, float]:
        """Return the bytes."""
        traffic = self._traffic.read()
        return {BYTES_SENT: traffic.sent, BYTES_RECV: traffic.received}

    def close(self) -> None:
        """Do nothing."""


def open_traffic(pid: int, reach: Reach) -> NamespaceTraffic | ConnectionTraffic:
    """Return the traffic that `reach` asks for."""
    if reach.network_scope == "process":
        return ConnectionTraffic(ProcessTree(pid, children=reach.children))
    return NamespaceTraffic(pid, loopback=reach.loopback)


def network_scope(pid: int, reach: Reach) -> str:
    """Return in words whose traffic is measured when `pid` is monitored."""
    if reach.network_scope == "process":
        return SCOPE
    return namespace_scope(pid, loopback=reach.loopback)


def openers(pid: int, reach: Reach) -> dict[str, Callable[[], Meter]]:
    """Return what makes the meter of each metric."""
    return {
        "cpu": lambda: CpuMeter(ProcessTree(pid, children=reach.children)),
        "memory": lambda: MemoryMeter(ProcessTree(pid, children=reach.children)),
        "network": lambda: NetworkMeter(open_traffic(pid, reach)),
        "power": lambda: open_power(reach.sysfs),
    }
