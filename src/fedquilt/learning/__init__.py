"""Local training: the flat view of a model, the local steps, the engines."""

from fedquilt.learning.engine import (
    ClassMask,
    ClientUpdate,
    Engine,
    LocalSettings,
    Loss,
    LossOf,
    Task,
    make_engine,
    public_inputs,
)
from fedquilt.learning.evaluate import evaluate
from fedquilt.learning.flat import FlatModel, freeze_others

__all__ = [
    "ClassMask",
    "ClientUpdate",
    "Engine",
    "FlatModel",
    "LocalSettings",
    "Loss",
    "LossOf",
    "Task",
    "evaluate",
    "freeze_others",
    "make_engine",
    "public_inputs",
]
