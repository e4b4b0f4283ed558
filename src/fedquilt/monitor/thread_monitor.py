"""Monitors that sample in a thread: light, but their own cost is part of the samples."""

from fedquilt.observe.monitors import ThreadFileMonitor as FileMonitor
from fedquilt.observe.monitors import ThreadPrometheusMonitor as PrometheusMonitor
from fedquilt.observe.monitors import ThreadRemoteMonitor as RemoteMonitor

__all__ = ["FileMonitor", "PrometheusMonitor", "RemoteMonitor"]
