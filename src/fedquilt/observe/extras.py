"""Optional packages, imported when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

from fedquilt.common.errors import InvalidValueError
from fedquilt.observe.samples import MissingExtraError


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


def wandb() -> Any:
    """Return the module wandb, or say which extra brings it."""
    return _require_tracker("wandb", "wandb")


def tensorboard_writer() -> Any:
    """Return torch's module with SummaryWriter, or say which extra brings what it needs."""
    _require_tracker("tensorboard", "tensorboard")
    return _require_tracker("tensorboard", "torch.utils.tensorboard")


def _require_tracker(tracker: str, module: str) -> Any:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise _missing(tracker) from error
    # A folder of that name in the working directory imports as an empty package.
    if getattr(found, "__file__", None) is None:
        raise _missing(tracker)
    return found


def _missing(tracker: str) -> InvalidValueError:
    return InvalidValueError(
        f"trackers={tracker!r} needs the package {tracker}, which is not installed: "
        'pip install "fedquilt[trackers]"'
    )
