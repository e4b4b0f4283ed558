"""RAPL: energy counters of processor packages and memory, from Linux powercap.

Each zone under /sys/class/powercap has a `name` ("package-0", "core", "uncore",
"dram", "psys"), a counter `energy_uj` in microjoules, and `max_energy_range_uj`, after
which the counter starts at zero again (some minutes of full load at least).

A package contains its core and uncore zones, and psys overlaps the packages, so only
packages and dram are added up.  Since 2020 kernels let only root read the
counters, because they leak secrets of other processes (CVE-2020-8694).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedquilt.monitor.errors import MonitorError
from fedquilt.monitor.metrics import VDD_CPU_GPU_CV, VDD_IN, VDD_SOC
from fedquilt.monitor.power.source import NotOfferedError


@dataclass(frozen=True)
class Zone:
    """One counter: its name, its file and the value after which it wraps."""

    name: str
    counter: Path
    range_uj: int

    def energy_uj(self) -> int:
        """Return the counter."""
        return int(self.counter.read_text())


class Rapl:
    """Mean power of packages and memory since the last reading."""

    def __init__(self, zones: list[Zone], clock: Callable[[], float] = time.monotonic) -> None:
        self._zones = zones
        self._clock = clock
        self._energy = [zone.energy_uj() for zone in zones]
        self._time = clock()

    @property
    def name(self) -> str:
        """The zones that are read."""
        return "RAPL " + ", ".join(zone.name for zone in self._zones)

    def read(self) -> Mapping[str, float]:
        """Return milliwatts: ΔµJ / Δs / 1000."""
        try:
            energy = [zone.energy_uj() for zone in self._zones]
        except (OSError, ValueError) as error:
            raise MonitorError(f"a RAPL counter can no longer be read: {error}") from error
        now = self._clock()
        seconds = max(now - self._time, 1e-9)
        power: dict[str, float] = {}
        for zone, before, after in zip(self._zones, self._energy, energy, strict=True):
            milliwatts = used_uj(before, after, zone.range_uj) / seconds / 1000.0
            part = VDD_SOC if zone.name.startswith("dram") else VDD_CPU_GPU_CV
            for key in (VDD_IN, part):
                power[key] = power.get(key, 0.0) + milliwatts
        self._energy, self._time = energy, now
        return power

    def close(self) -> None:
        """Do nothing: no file stays open."""


def used_uj(before: int, after: int, range_uj: int) -> int:
    """Return the difference of a counter that may have wrapped once."""
    return after - before if after >= before else after + range_uj - before


def find_rapl(sysfs: Path) -> Rapl:
    """Return the machine's RAPL, or say why there is none."""
    folder = sysfs / "class" / "powercap"
    zones = []
    # intel-rapl is the name on AMD too; intel-rapl-mmio shows the same counters again.
    for path in sorted(folder.glob("intel-rapl:*")):
        name = _text(path / "name")
        if name.startswith(("package", "dram")):
            zones.append(Zone(name, path / "energy_uj", int(_text(path / "max_energy_range_uj"))))
    if not zones:
        raise NotOfferedError(f"no package or dram zone in {folder}")
    try:
        return Rapl(zones)
    except (OSError, ValueError) as error:
        raise NotOfferedError(
            f"the counters must be readable ({error}; by default root's)"
        ) from error


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise NotOfferedError(f"{path} must be readable: {error}") from error
