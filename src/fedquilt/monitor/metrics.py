"""Which metrics there are, and which are switched on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from fedquilt import validate
from fedquilt.monitor.errors import MetricTypeError

CPU = "cpu_usage"
MEMORY = "memory_usage"
BYTES_SENT = "network_bytes_sent"
BYTES_RECV = "network_bytes_recv"
VDD_IN = "power_vdd_in"
VDD_CPU_GPU_CV = "power_vdd_cpu_gpu_cv"
VDD_SOC = "power_vdd_soc"

NETWORK = (BYTES_SENT, BYTES_RECV)
POWER = (VDD_IN, VDD_CPU_GPU_CV, VDD_SOC)
KEYS = (CPU, MEMORY, *NETWORK, *POWER)


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
            validate.choice("metric", name, known)
            if not isinstance(flag, bool):
                raise MetricTypeError(f"{name}={flag!r} must be True or False")
            known[name] = flag
        return replace(self, **known)
