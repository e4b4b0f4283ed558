"""Local training: the flat view of a model, the local steps, the engines."""

from __future__ import annotations

from fedquilt.training import fit
from fedquilt.training.engines import Choice, choose_engine, make_engine
from fedquilt.training.flat import FlatModel, freeze_others
from fedquilt.training.metrics import MakeMetric, evaluate, make_metrics, measure
from fedquilt.training.objective import Objective, auto_loss, outputs_of, shifts_labels
from fedquilt.training.optimizers import ClientOptimizer, make_client_optimizer
from fedquilt.training.task import (
    ClassMask,
    ClientIds,
    ClientUpdate,
    Engine,
    LocalSettings,
    Loss,
    LossOf,
    StepLoss,
    Task,
    WrappedEngine,
    as_engine,
    public_inputs,
)

__all__ = [
    "Choice",
    "ClassMask",
    "ClientIds",
    "ClientOptimizer",
    "ClientUpdate",
    "Engine",
    "FlatModel",
    "LocalSettings",
    "Loss",
    "LossOf",
    "MakeMetric",
    "Objective",
    "StepLoss",
    "Task",
    "WrappedEngine",
    "as_engine",
    "auto_loss",
    "choose_engine",
    "evaluate",
    "fit",
    "freeze_others",
    "make_client_optimizer",
    "make_engine",
    "make_metrics",
    "measure",
    "outputs_of",
    "public_inputs",
    "shifts_labels",
]
