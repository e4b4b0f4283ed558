"""What a monitor samples: metrics, settings, samples, errors.

All of it is plain data: a process monitor sends its settings to another process and
gets samples back.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from fedquilt.common import checks
from fedquilt.common.errors import FedquiltError


class MonitorError(FedquiltError, RuntimeError):
    """Sampling could not start, or ended before it was told to."""


class MetricTypeError(FedquiltError, TypeError):
    """A metric was switched with something that is not True or False."""


class PowerUnavailableError(MonitorError):
    """Power was asked for and the machine offers no way to measure it."""


class DeliveryError(MonitorError):
    """Samples were taken but could not all be delivered to the remote server."""


CPU = "cpu_usage"
MEMORY = "memory_usage"
BYTES_SENT = "network_bytes_sent"
BYTES_RECV = "network_bytes_recv"
VDD_IN = "power_vdd_in"
VDD_CPU_GPU_CV = "power_vdd_cpu_gpu_cv"
VDD_SOC = "power_vdd_soc"

NETWORK = (BYTES_SENT, BYTES_RECV)
POWER = (VDD_IN, VDD_CPU_GPU_CV, VDD_SOC)

# The wording of HeFlwr's file, which programs may already read.
_TEXT = {
    CPU: "CPU Usage: {:.2f}%",
    MEMORY: "Memory Usage: {:.4f}%",
    BYTES_SENT: "Bytes Sent: {:.0f}",
    BYTES_RECV: "Bytes Recv: {:.0f}",
    VDD_IN: "VDD_IN: {:.0f}mW",
    VDD_CPU_GPU_CV: "VDD_CPU_GPU_CV: {:.0f}mW",
    VDD_SOC: "VDD_SOC: {:.0f}mW",
}
KEYS = tuple(_TEXT)

FORMS = ("fedquilt", "heflwr")
"""How a sample is written: with units and seconds, or exactly as HeFlwr's monitors write it."""
# Not rounded, a comma and a space after every value; its file and its messages differ.
_HEFLWR = {
    CPU: "CPU Usage: {}%, ",
    MEMORY: "Memory Usage: {}%, ",
    BYTES_SENT: "Bytes Sent: {:.0f}, ",
    BYTES_RECV: "Bytes Recv: {:.0f}, ",
    VDD_IN: "VDD In: {:.0f}, ",
    VDD_CPU_GPU_CV: "VDD Cpu_Gpu_Cv: {:.0f}, ",
    VDD_SOC: "VDD Soc: {:.0f}, ",
}
_HEFLWR_MESSAGE = _HEFLWR | {
    CPU: "Cpu Usage: {}%, ",
    VDD_CPU_GPU_CV: "VDD cpu_gpu_cv: {:.0f}, ",
    VDD_SOC: "VDD soc: {:.0f}, ",
}


@dataclass(frozen=True)
class Metrics:
    """What is measured."""

    cpu: bool = True
    memory: bool = True
    network: bool = True
    power: bool = False

    def switched(self, flags: Mapping[str, object]) -> Metrics:
        """Return these metrics with some switched on or off; nothing changes on an error."""
        known = asdict(self)
        for name, flag in flags.items():
            checks.choice("metric", name, known)
            if not isinstance(flag, bool):
                raise MetricTypeError(f"{name}={flag!r} must be True or False")
            known[name] = flag
        return replace(self, **known)


@dataclass(frozen=True)
class Sample:
    """What was measured over the `seconds` before `time` (seconds since 1970)."""

    time: float
    seconds: float
    values: Mapping[str, float]

    def text(self) -> str:
        """Return the sample as one line."""
        parts = [_TEXT[key].format(self.values[key]) for key in KEYS if key in self.values]
        return ", ".join([*parts, f"Seconds: {self.seconds:.2f}"])

    def heflwr_text(self, *, message: bool = False) -> str:
        """Return the sample as HeFlwr writes it, into a file or as a message."""
        form = _HEFLWR_MESSAGE if message else _HEFLWR
        return "".join(form[key].format(self.values[key]) for key in KEYS if key in self.values)


class SampleSeries:
    """The samples of one monitor, in order; safe to read while it grows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: list[Sample] = []

    def append(self, sample: Sample) -> None:
        """Add a sample."""
        with self._lock:
            self._samples.append(sample)

    def _copy(self) -> list[Sample]:
        with self._lock:
            return list(self._samples)

    def stats(self) -> dict[str, list[float]]:
        """Return the values of each metric in order; empty where it was not measured."""
        samples = self._copy()
        return {key: [s.values[key] for s in samples if key in s.values] for key in KEYS}

    def summary(self) -> dict[str, float]:
        """Return averages over time, and totals.

        With value x_i over t_i seconds: an average is Σ x_i t_i / Σ t_i (not the
        mean of the list: the last sample is usually shorter), a total of bytes
        Σ x_i, a total of power Σ x_i t_i in mW s = mJ.  The average of no sample
        is nan.
        """
        samples = self._copy()
        over_time = {
            key: sum(s.values.get(key, 0) * s.seconds for s in samples)
            for key in (CPU, MEMORY, *POWER)
        }
        averages = {}
        for key in (CPU, MEMORY):
            seconds = sum(s.seconds for s in samples if key in s.values)
            averages[f"avg_{key}"] = over_time[key] / seconds if seconds else math.nan
        sums = {f"total_{key}": sum(s.values.get(key, 0) for s in samples) for key in NETWORK}
        return {**averages, **sums, **{f"total_{key}": over_time[key] for key in POWER}}


@dataclass(frozen=True)
class Reach:
    """How far the metrics reach.

    Attributes
    ----------
    children : bool
        Whether the processes that the monitored one started count with it.
    network_scope : str
        "namespace": all traffic of the network namespace, which on a plain machine is
        the whole machine.  "process": the TCP connections of the monitored
        processes (Linux).
    loopback : bool
        Whether traffic of the machine with itself counts in the namespace's.
    sysfs : str or path
        Where the files of power sensors are.
    """

    children: bool = True
    network_scope: str = "namespace"
    loopback: bool = True
    sysfs: str | os.PathLike[str] = "/sys"

    def __post_init__(self) -> None:
        for name in ("children", "loopback"):
            checks.flag(name, getattr(self, name))
        checks.choice("network_scope", self.network_scope, ("namespace", "process"))


class Sink(Protocol):
    """A place for samples."""

    @property
    def port(self) -> int | None:
        """The port it listens on, None when it does not listen."""

    def write(self, sample: Sample) -> None:
        """Take a sample."""

    def close(self) -> None:
        """End; raise when something that was written did not arrive."""


@dataclass(frozen=True)
class SamplingSettings:
    """What is sampled, how often, and what opens the place where it goes."""

    pid: int
    interval: float
    metrics: Metrics
    reach: Reach
    open_sink: Callable[[], Sink]
