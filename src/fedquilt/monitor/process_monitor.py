"""Monitors that sample from a process of their own, whose cost is not part of the samples."""

from fedquilt.observe.monitors import FileMonitor, PrometheusMonitor, RemoteMonitor

__all__ = ["FileMonitor", "PrometheusMonitor", "RemoteMonitor"]
