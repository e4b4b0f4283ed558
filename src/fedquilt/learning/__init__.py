"""Local training: the flat view of a model, the local steps, the engines."""

from fedquilt.learning.engine import ClientUpdate, Engine, LocalSettings, Task, make_engine
from fedquilt.learning.evaluate import evaluate
from fedquilt.learning.flat import FlatModel, freeze_others

__all__ = [
    "ClientUpdate",
    "Engine",
    "FlatModel",
    "LocalSettings",
    "Task",
    "evaluate",
    "freeze_others",
    "make_engine",
]
