"""Monitors that sample from a process of their own, whose cost is not part of the samples."""

from fedquilt.observe import monitors
from fedquilt.observe.runners import ProcessRunner

__all__ = ["FileMonitor", "PrometheusMonitor", "RemoteMonitor"]


class FileMonitor(monitors.FileMonitor):
    __doc__ = monitors.FileMonitor.__doc__
    _runner_type = ProcessRunner


class PrometheusMonitor(monitors.PrometheusMonitor):
    __doc__ = monitors.PrometheusMonitor.__doc__
    _runner_type = ProcessRunner


class RemoteMonitor(monitors.RemoteMonitor):
    __doc__ = monitors.RemoteMonitor.__doc__
    _runner_type = ProcessRunner
