"""Resource monitor: CPU, memory, network and power of a run, while it runs.

`process_monitor` samples from a process of its own, `thread_monitor` in a thread; both
have a `FileMonitor`, a `PrometheusMonitor` and a `RemoteMonitor`.

    from fedquilt.monitor.process_monitor import FileMonitor

    with FileMonitor("usage.txt", interval=5) as monitor:
        train()
    monitor.summary()["avg_cpu_usage"]
"""

from fedquilt.monitor import process_monitor, thread_monitor
from fedquilt.observe.monitors import RoundMonitor
from fedquilt.observe.power import power_sources
from fedquilt.observe.samples import (
    DeliveryError,
    MetricTypeError,
    MonitorError,
    PowerUnavailableError,
    Reach,
)

__all__ = [
    "DeliveryError",
    "MetricTypeError",
    "MonitorError",
    "PowerUnavailableError",
    "Reach",
    "RoundMonitor",
    "power_sources",
    "process_monitor",
    "thread_monitor",
]
