"""One sample, its text, and the series that `stats` and `summary` read."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedquilt.monitor.metrics import (
    BYTES_RECV,
    BYTES_SENT,
    CPU,
    KEYS,
    MEMORY,
    NETWORK,
    POWER,
    VDD_CPU_GPU_CV,
    VDD_IN,
    VDD_SOC,
)

# The wording of the seed system's file, which programs may already read.
_TEXT: dict[str, Callable[[float], str]] = {
    CPU: lambda value: f"CPU Usage: {value:.2f}%",
    MEMORY: lambda value: f"Memory Usage: {value:.4f}%",
    BYTES_SENT: lambda value: f"Bytes Sent: {value:.0f}",
    BYTES_RECV: lambda value: f"Bytes Recv: {value:.0f}",
    VDD_IN: lambda value: f"VDD_IN: {value:.0f}mW",
    VDD_CPU_GPU_CV: lambda value: f"VDD_CPU_GPU_CV: {value:.0f}mW",
    VDD_SOC: lambda value: f"VDD_SOC: {value:.0f}mW",
}


@dataclass(frozen=True)
class Sample:
    """What was measured over the `seconds` before `time` (seconds since 1970)."""

    time: float
    seconds: float
    values: Mapping[str, float]

    def text(self) -> str:
        """Return the sample as one line."""
        parts = [_TEXT[key](self.values[key]) for key in KEYS if key in self.values]
        return ", ".join([*parts, f"Seconds: {self.seconds:.2f}"])


class Series:
    """The samples of one monitor, in order; safe to read while it grows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: list[Sample] = []

    def append(self, sample: Sample) -> None:
        """Add a sample."""
        with self._lock:
            self._samples.append(sample)

    def stats(self) -> dict[str, list[float]]:
        """Return the values of each metric in order; empty where it was not measured."""
        with self._lock:
            samples = list(self._samples)
        return {key: [s.values[key] for s in samples if key in s.values] for key in KEYS}

    def summary(self) -> dict[str, float]:
        """Return averages over time, and totals.

        With value x_i over t_i seconds: an average is Σ x_i t_i / Σ t_i (not the
        mean of the list: the last sample is usually shorter), a total of bytes
        Σ x_i, a total of power Σ x_i t_i in mW s = mJ.  The average of no sample
        is nan.
        """
        with self._lock:
            samples = list(self._samples)
        averages = {f"avg_{key}": _average(samples, key) for key in (CPU, MEMORY)}
        sums = {f"total_{key}": sum(s.values.get(key, 0) for s in samples) for key in NETWORK}
        energies = {
            f"total_{key}": sum(s.values.get(key, 0) * s.seconds for s in samples) for key in POWER
        }
        return {**averages, **sums, **energies}


def _average(samples: list[Sample], key: str) -> float:
    held = [(s.values[key], s.seconds) for s in samples if key in s.values]
    time = sum(seconds for _, seconds in held)
    return sum(value * seconds for value, seconds in held) / time if time else math.nan
