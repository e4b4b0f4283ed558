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

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedquilt.observe.samples import VDD_CPU_GPU_CV, VDD_IN, VDD_SOC, MonitorError


class PowerSource(Protocol):
    """Something that measures power.

    `read` returns milliwatts for those of the keys `power_vdd_in` (everything the
    source sees), `power_vdd_cpu_gpu_cv` (what computes) and `power_vdd_soc` (memory
    and the rest of the chip) that it knows; what it does not know is left out
    and never reported as zero.
    """

    @property
    def name(self) -> str:
        """What is measured, in a few words."""

    def read(self) -> Mapping[str, float]:
        """Return milliwatts, the mean since the last reading where counters allow it."""

    def close(self) -> None:
        """Let go of what the source holds."""


class NotOfferedError(Exception):
    """The machine does not offer this source; the text says why."""


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


class Nvml:
    """Power of all cards of the machine.

    Cards since Volta count the millijoules since the driver was loaded, which gives
    the mean since the last reading; older ones only tell their power now.
    """

    def __init__(
        self, nvml: Any, cards: list[Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml
        self._clock = clock
        self._cards = cards
        self._energy = [_energy_mj(nvml, card) for card in cards]
        self._time = clock()

    @property
    def name(self) -> str:
        """How many cards are read."""
        return f"NVML {len(self._cards)} GPU" + ("s" if len(self._cards) > 1 else "")

    def read(self) -> Mapping[str, float]:
        """Return milliwatts: ΔmJ / Δs, or the power now."""
        try:
            energy = [_energy_mj(self._nvml, card) for card in self._cards]
            now = self._clock()
            power = sum(
                self._milliwatts(card, before, after, now - self._time)
                for card, before, after in zip(self._cards, self._energy, energy, strict=True)
            )
        except self._nvml.NVMLError as error:
            raise MonitorError(f"a GPU's power can no longer be read: {error}") from error
        self._energy, self._time = energy, now
        return {VDD_IN: power, VDD_CPU_GPU_CV: power}

    def _milliwatts(
        self, card: Any, before: int | None, after: int | None, seconds: float
    ) -> float:
        if before is None or after is None:
            return float(self._nvml.nvmlDeviceGetPowerUsage(card))
        return (after - before) / max(seconds, 1e-9)

    def close(self) -> None:
        """Give the library back."""
        self._nvml.nvmlShutdown()


def _energy_mj(nvml: Any, card: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetTotalEnergyConsumption(card))
    except nvml.NVMLError_NotSupported:
        return None


def find_nvml() -> Nvml:
    """Return the machine's cards, or say why there are none."""
    try:
        import pynvml
    except ImportError:
        raise NotOfferedError("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NotOfferedError(str(error)) from error
    try:
        cards = _cards_with_power(pynvml)
        if cards:
            return Nvml(pynvml, cards)
        reason = "no GPU that tells its power"
    except pynvml.NVMLError as error:
        reason = str(error)
    pynvml.nvmlShutdown()
    raise NotOfferedError(reason)


def _cards_with_power(nvml: Any) -> list[Any]:
    cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return [card for card in cards if _tells_power(nvml, card)]


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


class Sensor(Protocol):
    """One channel of an INA3221."""

    def milliwatts(self) -> float:
        """Return the power now."""


@dataclass(frozen=True)
class HwmonSensor:
    """Files of the kernel's own driver: bus voltage in mV, current in mA."""

    voltage: Path
    current: Path

    def milliwatts(self) -> float:
        """Return mV * mA / 1000."""
        return int(self.voltage.read_text()) * int(self.current.read_text()) / 1000.0


@dataclass(frozen=True)
class IioSensor:
    """The file of NVIDIA's older driver, in mW."""

    power: Path

    def milliwatts(self) -> float:
        """Return the file's number."""
        return float(self.power.read_text())


class Jetson:
    """The rails of one module, read as they are now."""

    def __init__(self, sensors: Mapping[str, Sensor]) -> None:
        self._sensors = dict(sensors)

    @property
    def name(self) -> str:
        """The rails that are read."""
        return "Jetson " + ", ".join(self._sensors)

    def read(self) -> Mapping[str, float]:
        """Return milliwatts of input, computing and the rest of the chip."""
        try:
            rails = {label: sensor.milliwatts() for label, sensor in self._sensors.items()}
        except (OSError, ValueError) as error:
            raise MonitorError(f"a rail's sensor can no longer be read: {error}") from error
        return combine(rails)

    def close(self) -> None:
        """Do nothing: no file stays open."""


def combine(rails: Mapping[str, float]) -> dict[str, float]:
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
    found = dict([*_iio_sensors(sysfs), *_hwmon_sensors(sysfs)])
    rails = {label: sensor for label, sensor in found.items() if label in known}
    if not rails:
        seen = f"; unknown labels {sorted(found)}" if found else ""
        raise NotOfferedError(f"no INA3221 sensor with a Jetson's labels in {sysfs}{seen}")
    return Jetson(rails)


def _hwmon_sensors(sysfs: Path) -> Iterator[tuple[str, Sensor]]:
    for chip in sorted((sysfs / "class" / "hwmon").glob("hwmon*")):
        if _sensor_text(chip / "name") != "ina3221":
            continue
        for channel in (1, 2, 3):
            sensor = HwmonSensor(chip / f"in{channel}_input", chip / f"curr{channel}_input")
            yield from _working(_sensor_text(chip / f"in{channel}_label"), sensor)


def _iio_sensors(sysfs: Path) -> Iterator[tuple[str, Sensor]]:
    for chip in sorted((sysfs / "bus" / "i2c" / "drivers" / "ina3221x").glob("*/iio*device*")):
        for channel in (0, 1, 2):
            sensor = IioSensor(chip / f"in_power{channel}_input")
            yield from _working(_sensor_text(chip / f"rail_name_{channel}"), sensor)


def _working(label: str | None, sensor: Sensor) -> Iterator[tuple[str, Sensor]]:
    """Yield a sensor that has a label and can be read; channels may be switched off."""
    if not label:
        return
    try:
        sensor.milliwatts()
    except (OSError, ValueError):
        return
    yield label, sensor


def _sensor_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
