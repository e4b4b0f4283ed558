"""Monitors that sample in a thread: light, but their own cost is part of the samples."""

from __future__ import annotations

from fedquilt.observe import monitors
from fedquilt.observe.runners import ThreadRunner

__all__ = ["FileMonitor", "PrometheusMonitor", "RemoteMonitor"]


class FileMonitor(monitors.FileMonitor):
    __doc__ = monitors.FileMonitor.__doc__
    _runner_type = ThreadRunner


class PrometheusMonitor(monitors.PrometheusMonitor):
    __doc__ = monitors.PrometheusMonitor.__doc__
    _runner_type = ThreadRunner


class RemoteMonitor(monitors.RemoteMonitor):
    __doc__ = monitors.RemoteMonitor.__doc__
    _runner_type = ThreadRunner
