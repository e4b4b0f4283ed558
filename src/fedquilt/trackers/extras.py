"""The packages that only trackers need, imported when a tracker is opened."""

from __future__ import annotations

import importlib
from typing import Any

from fedquilt.errors import InvalidValueError


def wandb() -> Any:
    """Return the module wandb, or say which extra brings it."""
    return _require("wandb", "wandb")


def tensorboard_writer() -> Any:
    """Return torch's module with SummaryWriter, or say which extra brings what it needs."""
    _require("tensorboard", "tensorboard")
    return _require("tensorboard", "torch.utils.tensorboard")


def _require(tracker: str, module: str) -> Any:
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
