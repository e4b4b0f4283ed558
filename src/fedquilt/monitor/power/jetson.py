"""Jetson modules: the supply rails that INA3221 sensors watch.

The files are readable by everybody; `tegrastats` and root are not needed.  Newer
systems (JetPack 5 on) have hwmon files in mV and mA, older ones (JetPack 4) files of
NVIDIA's own driver in mW.  Labels are those of NVIDIA's developer guide, section
on power; sensors with other labels are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedquilt.monitor.errors import MonitorError
from fedquilt.monitor.metrics import VDD_CPU_GPU_CV, VDD_IN, VDD_SOC
from fedquilt.monitor.power.source import NotOfferedError

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
        if _text(chip / "name") != "ina3221":
            continue
        for channel in (1, 2, 3):
            sensor = HwmonSensor(chip / f"in{channel}_input", chip / f"curr{channel}_input")
            yield from _working(_text(chip / f"in{channel}_label"), sensor)


def _iio_sensors(sysfs: Path) -> Iterator[tuple[str, Sensor]]:
    for chip in sorted((sysfs / "bus" / "i2c" / "drivers" / "ina3221x").glob("*/iio*device*")):
        for channel in (0, 1, 2):
            sensor = IioSensor(chip / f"in_power{channel}_input")
            yield from _working(_text(chip / f"rail_name_{channel}"), sensor)


def _working(label: str | None, sensor: Sensor) -> Iterator[tuple[str, Sensor]]:
    """Yield a sensor that has a label and can be read; channels may be switched off."""
    if not label:
        return
    try:
        sensor.milliwatts()
    except (OSError, ValueError):
        return
    yield label, sensor


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
