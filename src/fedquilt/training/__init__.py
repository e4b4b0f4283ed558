"""Local training: the flat view of a model, the local steps, the engines."""

from __future__ import annotations

from torch import nn

from fedquilt.common.errors import InvalidValueError
from fedquilt.config.choices import ENGINES, FLOWER_ENGINES
from fedquilt.training import fit
from fedquilt.training.engines.choice import Choice, choose_engine
from fedquilt.training.flat import FlatModel, freeze_others
from fedquilt.training.metrics import MakeMetric, make_metrics, measure
from fedquilt.training.objective import Objective, auto_loss, outputs_of
from fedquilt.training.optimizers import ClientOptimizer, make_client_optimizer
from fedquilt.training.task import (
    ClassMask,
    ClientUpdate,
    Engine,
    LocalSettings,
    Loss,
    LossOf,
    StepLoss,
    Task,
    public_inputs,
)
from fedquilt.training.trainers.autograd import SequentialEngine, evaluate

__all__ = [
    "Choice",
    "ClassMask",
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
]


def make_engine(
    name: str,
    model: nn.Module | FlatModel,
    task: Task,
    settings: LocalSettings,
    loss_of: LossOf | None = None,
) -> Engine:
    """Return the engine of a name; `auto` is batched on a GPU, else one client after the other.

    A run that asks for `auto` decides before it begins, by what it costs (`choose_engine`);
    what is left to decide here are slices of a model and the clients of a Flower node.
    A loss of its own for each client can only be trained by the sequential engine.
    A `FlatModel` lends its memory to the sequential engine; the others copy its module.
    """
    module = model.module if isinstance(model, FlatModel) else model

    if loss_of is not None:
        if name not in ("auto", "sequential"):
            raise InvalidValueError(
                f"engine={name!r} must be 'auto' or 'sequential' where clients have their own loss"
            )
        return _one_by_one(model, task, settings, loss_of)
    if name == "auto":
        if task.device.type == "cpu":
            from fedquilt.training.engines.local import HandEngine

            return HandEngine(model, task, settings)
        if task.device.type == "cuda":
            from fedquilt.training.trainers.vmap import BatchedEngine

            if BatchedEngine.supports(module, task, settings):
                return BatchedEngine(module, task, settings)
        return _one_by_one(model, task, settings)
    if name == "sequential":
        return _one_by_one(model, task, settings)
    if name == "batched":
        from fedquilt.training.trainers.vmap import BatchedEngine

        return BatchedEngine(module, task, settings)
    if name == "processes":
        from fedquilt.training.engines.workers import ProcessEngine

        return ProcessEngine(module, task, settings)
    if name in FLOWER_ENGINES:
        raise InvalidValueError(
            f"engine={name!r} must be used with `fedquilt run` or fedquilt.flower.simulate"
        )
    # Whoever comes here has named none of these.
    raise InvalidValueError(f"engine={name!r} must be one of {', '.join(map(repr, ENGINES))}")


def _one_by_one(
    model: nn.Module | FlatModel,
    task: Task,
    settings: LocalSettings,
    loss_of: LossOf | None = None,
) -> Engine:
    """Return the engine of one client after the other; on a GPU their steps are captured."""
    if task.device.type == "cuda":
        from fedquilt.training.trainers.captured import CapturedEngine

        return CapturedEngine(model, task, settings, loss_of)
    return SequentialEngine(model, task, settings, loss_of)
