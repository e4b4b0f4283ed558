"""The power of this machine, whatever measures it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from fedquilt.monitor.errors import PowerUnavailableError
from fedquilt.monitor.power.jetson import find_jetson
from fedquilt.monitor.power.nvml import find_nvml
from fedquilt.monitor.power.rapl import find_rapl
from fedquilt.monitor.power.source import NotOfferedError, PowerSource


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
