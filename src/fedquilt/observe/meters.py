"""One meter for each metric, and all of them read together.

A meter measures from the moment it is made; each reading begins where the last ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Meter:
    """What reads the values of a metric by the keys of `stats`, and what ends it."""

    read: Callable[[], Mapping[str, float]]
    close: Callable[[], None] = lambda: None


def openers(pid: int, reach: Reach) -> dict[str, Callable[[], Meter]]:
    """Return what makes the meter of each metric."""

    def tree() -> ProcessTree:
        return ProcessTree(pid, children=reach.children)

    return {
        "cpu": lambda: cpu_meter(tree()),
        "memory": lambda: memory_meter(tree()),
        "network": lambda: network_meter(
            ConnectionTraffic(tree())
            if reach.network_scope == "process"
            else NamespaceTraffic(pid, loopback=reach.loopback)
        ),
        "power": lambda: power_meter(open_power(reach.sysfs)),
    }


def cpu_meter(tree: ProcessTree) -> Meter:
    """Processor time by wall-clock time in percent; 100 is one core all the time."""
    account, before = CpuAccount(tree.cpu_times()), time.monotonic()

    def read() -> Mapping[str, float]:
        nonlocal before
        used, now = account.used(tree.cpu_times()), time.monotonic()
        seconds, before = now - before, now
        return {CPU: 100.0 * used / max(seconds, 1e-9)}

    return Meter(read)


def memory_meter(tree: ProcessTree) -> Meter:
    """Resident memory in percent of the machine's, now."""
    return Meter(lambda: {MEMORY: tree.memory_percent()})


def network_meter(traffic: NamespaceTraffic | ConnectionTraffic) -> Meter:
    """Bytes sent and received since the last reading."""
    return Meter(lambda: dict(zip((BYTES_SENT, BYTES_RECV), traffic.read(), strict=True)))


def network_scope(pid: int, reach: Reach) -> str:
    """Return in words whose traffic is measured when `pid` is monitored."""
    if reach.network_scope == "process":
        return SCOPE
    return namespace_scope(pid, loopback=reach.loopback)


def power_meter(sources: list[PowerSource]) -> Meter:
    """Milliwatts of some sources, added up by the public keys."""

    def read() -> Mapping[str, float]:
        power: dict[str, float] = {}
        for source in sources:
            for key, milliwatts in source.read().items():
                power[key] = power.get(key, 0.0) + milliwatts
        return power

    def close() -> None:
        for source in sources:
            source.close()

    return Meter(read, close)


def open_power(sysfs: str | os.PathLike[str] = "/sys") -> list[PowerSource]:
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
    return sources


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
        sources = open_power(sysfs)
    except PowerUnavailableError:
        return []
    power_meter(sources).close()
    return [source.name for source in sources]


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
