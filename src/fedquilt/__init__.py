"""fedquilt: federated learning for clients that are not equal.

Public names load when they are first used, so that `import fedquilt` costs
nothing and training needs torch and numpy only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedquilt._version import __version__ as __version__

if TYPE_CHECKING:
    from fedquilt.common.observer import Observer as Observer
    from fedquilt.config import RunConfig as RunConfig
    from fedquilt.data import register_dataset as register_dataset
    from fedquilt.experiment.api import run as run
    from fedquilt.method import Method as Method
    from fedquilt.method import MethodParts as MethodParts
    from fedquilt.method import WholeModel as WholeModel
    from fedquilt.privacy.certified import Certified as Certified
    from fedquilt.privacy.mechanism import Mechanism as Mechanism
    from fedquilt.privacy.statement import Statement as Statement
    from fedquilt.record.result import RunResult as RunResult
    from fedquilt.record.result import load as load
    from fedquilt.setup.mechanism import MechanismParts as MechanismParts
    from fedquilt.training import ClientUpdate as ClientUpdate
    from fedquilt.training import Engine as Engine

_HOME = {
    "Certified": "fedquilt.privacy.certified",
    "ClientUpdate": "fedquilt.training",
    "Engine": "fedquilt.training",
    "Mechanism": "fedquilt.privacy.mechanism",
    "MechanismParts": "fedquilt.setup.mechanism",
    "Method": "fedquilt.method",
    "MethodParts": "fedquilt.method",
    "Observer": "fedquilt.common.observer",
    "WholeModel": "fedquilt.method",
    "RunConfig": "fedquilt.config",
    "RunResult": "fedquilt.record.result",
    "Statement": "fedquilt.privacy.statement",
    "load": "fedquilt.record.result",
    "register_dataset": "fedquilt.data",
    "run": "fedquilt.experiment.api",
}
__all__ = sorted([*_HOME, "__version__"])

_DOCUMENTS = (
    *("config", "data", "errors", "fed", "framework"),
    *("log", "models", "monitor", "nn", "utils"),
)
"""Modules by the names of the published documents: `fedquilt.errors` works without an import."""


def __getattr__(name: str) -> Any:
    if name in _DOCUMENTS:
        return importlib.import_module(f"fedquilt.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'fedquilt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
