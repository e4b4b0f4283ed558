"""Electrical power, where the machine offers it.

| source | what it measures | how |
|---|---|---|
| Jetson | the module's supply rails | INA3221 sensors in sysfs, a reading now |
| RAPL | processor packages and memory (Intel, AMD) | energy counters in sysfs, differenced |
| NVML | NVIDIA cards | energy counters of the driver, differenced |

A Jetson's rails cover the whole module and are used alone; otherwise RAPL and NVML
are added.  All of them measure the machine, not a process.
"""

from fedquilt.monitor.power.meter import PowerMeter, open_power, power_sources

__all__ = ["PowerMeter", "open_power", "power_sources"]
