"""Electrical power, where the machine offers it.

| source | what it measures | how |
|---|---|---|
| Jetson | the module's supply rails | INA3221 sensors in sysfs, a reading now |
| RAPL | processor packages and memory (Intel, AMD) | energy counters in sysfs, differenced |
| NVML | NVIDIA cards | energy counters of the driver, differenced |

A Jetson's rails cover the whole module and are used alone; otherwise RAPL and NVML
are added.  All of them measure the machine, not a process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt.common import optional
from fedquilt.common.errors import MissingPackageError
from fedquilt.observe.samples import (
    VDD_CPU_GPU_CV,
    VDD_IN,
    VDD_SOC,
    MonitorError,
    PowerUnavailableError,
)


class NotOfferedError(Exception):
    """The machine does not offer this source; the text says why."""


class PowerSource:
    """Something that measures power; `name` says what, in a few words.

    `read` returns milliwatts, the mean since the last reading where counters allow it, for
    those of the keys `power_vdd_in` (everything the source sees), `power_vdd_cpu_gpu_cv`
    (what computes) and `power_vdd_soc` (memory and the rest of the chip) that it knows;
    what it does not know is left out and never reported as zero.
    """

    name: str

    def read(self) -> Mapping[str, float]:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what the source holds."""


@dataclass(frozen=True)
class Zone:
    """One energy counter in µJ: its name, its file and the value after which it wraps."""

    name: str
    counter: Path
    range_uj: int

    def energy_uj(self) -> int:
        return int(self.counter.read_text())


class Rapl(PowerSource):
    """Mean power of packages and memory since the last reading: ΔµJ / Δs / 1000 mW."""

    def __init__(self, zones: list[Zone], clock: Callable[[], float] = time.monotonic) -> None:
        self.name = "RAPL " + ", ".join(zone.name for zone in zones)
        self._zones = zones
        self._clock = clock
        self._energy = [zone.energy_uj() for zone in zones]
        self._time = clock()

    def read(self) -> Mapping[str, float]:
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


def used_uj(before: int, after: int, range_uj: int) -> int:
    """Return the difference of a counter that may have wrapped once."""
    return after - before if after >= before else after + range_uj - before


def find_rapl(sysfs: Path) -> Rapl:
    """Return the machine's RAPL, or say why there is none."""
    folder = sysfs / "class" / "powercap"
    zones = []
    try:
        # intel-rapl is the name on AMD too; intel-rapl-mmio shows the same counters again.
        for path in sorted(folder.glob("intel-rapl:*")):
            name = (path / "name").read_text().strip()
            if name.startswith(("package", "dram")):
                wraps = int((path / "max_energy_range_uj").read_text())
                zones.append(Zone(name, path / "energy_uj", wraps))
        if zones:
            return Rapl(zones)
    except (OSError, ValueError) as error:
        raise NotOfferedError(
            f"the counters must be readable ({error}; by default root's)"
        ) from error
    raise NotOfferedError(f"no package or dram zone in {folder}")


class Nvml(PowerSource):
    """Power of all cards of the machine.

    Cards since Volta count the millijoules since the driver was loaded, which gives
    the mean since the last reading, ΔmJ / Δs; older ones only tell their power now.
    """

    def __init__(
        self, nvml: Any, cards: list[Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = f"NVML {len(cards)} GPU" + ("s" if len(cards) > 1 else "")
        self._nvml = nvml
        self._clock = clock
        self._cards = cards
        self._energy = [self._energy_mj(card) for card in cards]
        self._time = clock()

    def read(self) -> Mapping[str, float]:
        try:
            energy = [self._energy_mj(card) for card in self._cards]
            now = self._clock()
            seconds = max(now - self._time, 1e-9)
            power = 0.0
            for card, before, after in zip(self._cards, self._energy, energy, strict=True):
                if before is None or after is None:
                    power += self._nvml.nvmlDeviceGetPowerUsage(card)
                else:
                    power += (after - before) / seconds
        except self._nvml.NVMLError as error:
            raise MonitorError(f"a GPU's power can no longer be read: {error}") from error
        self._energy, self._time = energy, now
        return {VDD_IN: power, VDD_CPU_GPU_CV: power}

    def _energy_mj(self, card: Any) -> int | None:
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(card))
        except self._nvml.NVMLError_NotSupported:
            return None

    def close(self) -> None:
        self._nvml.nvmlShutdown()


def find_nvml() -> Nvml:
    """Return the machine's cards, or say why there are none."""
    try:
        nvml = optional.require("pynvml", "the power of NVIDIA cards")
    except MissingPackageError as error:
        raise NotOfferedError(str(error)) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NotOfferedError(str(error)) from error
    try:
        cards = [nvml.nvmlDeviceGetHandleByIndex(k) for k in range(nvml.nvmlDeviceGetCount())]
        cards = [card for card in cards if _tells_power(nvml, card)]
        if cards:
            return Nvml(nvml, cards)
        reason = "no GPU that tells its power"
    except nvml.NVMLError as error:
        reason = str(error)
    nvml.nvmlShutdown()
    raise NotOfferedError(reason)


def _tells_power(nvml: Any, card: Any) -> bool:
    try:
        nvml.nvmlDeviceGetPowerUsage(card)
    except nvml.NVMLError:
        return False
    return True


INPUT = ("VDD_IN", "POM_5V_IN")
# AGX Orin has GPU and SoC on one rail, which is counted as computing.
COMPUTE = (
    *("VDD_CPU_GPU_CV", "VDD_CPU_GPU", "VDD_GPU_SOC", "VDD_CPU_CV", "GPU", "CPU", "CV"),
    *("VDD_GPU", "VDD_CPU", "VDD_SYS_GPU", "VDD_SYS_CPU", "POM_5V_GPU", "POM_5V_CPU"),
)
SOC = ("VDD_SOC", "SOC", "VDDRQ", "VDD_SYS_SOC", "VDD_SYS_DDR", "VDDQ_VDD2_1V8AO")
# Boards without an input rail: their total is a sum, of these too.
OTHER = ("SYS5V", "VIN_SYS_5V0")
# Fed by VIN_SYS_5V0, so the sum must not count it again.
INSIDE_OTHER = ("VDDQ_VDD2_1V8AO",)


@dataclass(frozen=True)
class Rail:
    """One channel of an INA3221: files whose numbers, multiplied and scaled, are mW."""

    files: tuple[Path, ...]
    scale: float

    def milliwatts(self) -> float:
        product = self.scale
        for file in self.files:
            product *= int(file.read_text())
        return product


class Jetson(PowerSource):
    """The rails of one module, read as they are now."""

    def __init__(self, rails: Mapping[str, Rail]) -> None:
        self.name = "Jetson " + ", ".join(rails)
        self._rails = dict(rails)

    def read(self) -> Mapping[str, float]:
        try:
            return combine_rails({label: rail.milliwatts() for label, rail in self._rails.items()})
        except (OSError, ValueError) as error:
            raise MonitorError(f"a rail's sensor can no longer be read: {error}") from error


def combine_rails(rails: Mapping[str, float]) -> dict[str, float]:
    """Add up rails under the three public keys.

    The input is the module's input rail, or on boards that have none the sum of all.
    """
    power = {}
    inputs = [rails[label] for label in INPUT if label in rails]
    parts = [value for label, value in rails.items() if label not in INSIDE_OTHER]
    power[VDD_IN] = sum(inputs) if inputs else sum(parts)
    for key, labels in ((VDD_CPU_GPU_CV, COMPUTE), (VDD_SOC, SOC)):
        held = [rails[label] for label in labels if label in rails]
        if held:
            power[key] = sum(held)
    return power


def find_jetson(sysfs: Path) -> Jetson:
    """Return the module's rails, or say why there are none."""
    known = {*INPUT, *COMPUTE, *SOC, *OTHER}
    found = dict(_rails(sysfs))
    rails = {label: rail for label, rail in found.items() if label in known}
    if not rails:
        seen = f"; unknown labels {sorted(found)}" if found else ""
        raise NotOfferedError(f"no INA3221 sensor with a Jetson's labels in {sysfs}{seen}")
    return Jetson(rails)


def _rails(sysfs: Path) -> Iterator[tuple[str, Rail]]:
    """Yield the rails that have a label and can be read; channels may be switched off."""
    for label, rail in (*_older_driver(sysfs), *_kernel_driver(sysfs)):
        try:
            text = label.read_text().strip()
            rail.milliwatts()
        except (OSError, ValueError):
            continue
        if text:
            yield text, rail


def _kernel_driver(sysfs: Path) -> Iterator[tuple[Path, Rail]]:
    """Yield label and rail of the kernel's own driver: bus voltage in mV, current in mA."""
    for name in sorted((sysfs / "class" / "hwmon").glob("hwmon*/name")):
        if name.read_text().strip() == "ina3221":
            for k in (1, 2, 3):
                files = (name.with_name(f"in{k}_input"), name.with_name(f"curr{k}_input"))
                yield name.with_name(f"in{k}_label"), Rail(files, 0.001)


def _older_driver(sysfs: Path) -> Iterator[tuple[Path, Rail]]:
    """Yield label and rail of NVIDIA's older driver, in mW."""
    for chip in sorted((sysfs / "bus" / "i2c" / "drivers" / "ina3221x").glob("*/iio*device*")):
        for k in (0, 1, 2):
            yield chip / f"rail_name_{k}", Rail((chip / f"in_power{k}_input",), 1.0)


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
    for source in sources:
        source.close()
    return [source.name for source in sources]
