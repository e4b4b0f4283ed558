"""One meter for each metric, and all of them read together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from fedquilt.observe.network import SCOPE, ConnectionTraffic, NamespaceTraffic, namespace_scope
from fedquilt.observe.power import NotOfferedError, PowerSource, find_jetson, find_nvml, find_rapl
from fedquilt.observe.processes import CpuAccount, ProcessTree
from fedquilt.observe.samples import (
    BYTES_RECV,
    BYTES_SENT,
    CPU,
    MEMORY,
    Metrics,
    PowerUnavailableError,
    Reach,
    Sample,
)


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


class PowerMeter:
    """Some sources, added up."""

    def __init__(self, sources: list[PowerSource]) -> None:
        self._sources = sources

    @property
    def names(self) -> list[str]:
        """What is measured."""
        return [source.name for source in self._sources]

    def read(self) -> Mapping[str, float]:
        """Return milliwatts by the public keys."""
        power: dict[str, float] = {}
        for source in self._sources:
            for key, milliwatts in source.read().items():
                power[key] = power.get(key, 0.0) + milliwatts
        return power

    def close(self) -> None:
        """Close every source."""
        for source in self._sources:
            source.close()


def open_power(sysfs: str | os.PathLike[str] = "/sys") -> PowerMeter:
    """Return what measures power here, or raise and say what was looked for."""
    root = Path(sysfs)
    reasons: dict[str, str] = {}
    sources = _found(reasons, Jetson=lambda: find_jetson(root))
    if not sources:
        sources = _found(reasons, RAPL=lambda: find_rapl(root), NVML=find_nvml)
    if not sources:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise PowerUnavailableError(
            f"power=True, but this machine offers no power meter ({listed})"
        )
    return PowerMeter(sources)


def _found(reasons: dict[str, str], **finders: Callable[[], PowerSource]) -> list[PowerSource]:
    sources = []
    for name, find in finders.items():
        try:
            sources.append(find())
        except NotOfferedError as missing:
            reasons[name] = str(missing)
    return sources


def power_sources(sysfs: str | os.PathLike[str] = "/sys") -> list[str]:
    """Return what can measure power on this machine; an empty list: nothing can."""
    try:
        meter = open_power(sysfs)
    except PowerUnavailableError:
        return []
    meter.close()
    return meter.names


class Sampler:
    """Takes samples of a process; the first one covers the time since it was made."""

    def __init__(self, pid: int, reach: Reach, metrics: Metrics) -> None:
        self._openers = openers(pid, reach)
        self._meters: dict[str, Meter] = {}
        self.switch(metrics)
        self._time = time.monotonic()

    def switch(self, metrics: Metrics) -> None:
        """Open and close meters; when one cannot be opened, all stays as it was."""
        wanted = [name for name, on in asdict(metrics).items() if on]
        added: dict[str, Meter] = {}
        try:
            for name in wanted:
                if name not in self._meters:
                    added[name] = self._openers[name]()
        except BaseException:
            _close(added)
            raise
        dropped = {name: meter for name, meter in self._meters.items() if name not in wanted}
        kept = {name: meter for name, meter in self._meters.items() if name in wanted}
        self._meters = {**kept, **added}
        _close(dropped)

    def read(self) -> Sample:
        """Return a sample over the time since the last one."""
        values: dict[str, float] = {}
        for meter in self._meters.values():
            values.update(meter.read())
        now = time.monotonic()
        seconds, self._time = now - self._time, now
        return Sample(time.time(), seconds, values)

    def close(self) -> None:
        """Close every meter."""
        meters, self._meters = self._meters, {}
        _close(meters)


def _close(meters: dict[str, Meter]) -> None:
    for meter in meters.values():
        meter.close()
