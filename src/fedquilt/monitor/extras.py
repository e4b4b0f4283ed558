"""Packages that only monitors need, imported when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

from fedquilt.monitor.errors import MissingExtraError


def psutil() -> Any:
    """Return the module psutil, or say which extra brings it."""
    return _require("psutil", "CPU and memory metrics")


def prometheus_client() -> Any:
    """Return the module prometheus_client, or say which extra brings it."""
    # Importing the part makes it an attribute of the whole.
    _require("prometheus_client.core", "PrometheusMonitor")
    return _require("prometheus_client", "PrometheusMonitor")


def _require(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} needs the package {module.split('.')[0]}, which is not installed: "
            "pip install 'fedquilt[monitor]'"
        ) from error
