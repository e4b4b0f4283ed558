"""fedquilt: federated learning for clients that are not equal.

Public names load when they are first used, so that `import fedquilt` costs
nothing and training needs torch and numpy only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedquilt._version import __version__

if TYPE_CHECKING:
    from fedquilt.config import RunConfig
    from fedquilt.experiment import run
    from fedquilt.privacy.statement import Statement
    from fedquilt.record import RunResult, load

__all__ = ["RunConfig", "RunResult", "Statement", "__version__", "load", "run"]

_HOME = {
    "RunConfig": "fedquilt.config",
    "RunResult": "fedquilt.record",
    "Statement": "fedquilt.privacy.statement",
    "load": "fedquilt.record",
    "run": "fedquilt.experiment",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedquilt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
