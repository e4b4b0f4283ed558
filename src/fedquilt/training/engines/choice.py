"""Which engine `auto` is: a cost model, from public numbers alone.

A measurement would choose differently on a busy day, and then the same run would round
differently; counted operations choose alike wherever the settings, the number of cores and the
device are the same.  What clients hold does not enter, not even how many samples: all of them
would see whose data changed the engine.

One client is taken to hold `SAMPLES` samples.  A step on a batch of n costs

    3 n F / rate + layers * call,

with the F operations of a forward pass of one sample; the rates and the seconds of a call are
those of one core of a usual server.  Worker processes cost their start and, for each client, a
message and two copies of the model; they are chosen where they save more than that.
"""

from __future__ import annotations

import copy
import math
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fedquilt.common import trees
from fedquilt.common.operations import OperationCount
from fedquilt.training.flat import FlatModel
from fedquilt.training.hardware import usable_cores
from fedquilt.training.task import LocalSettings, Task
from fedquilt.training.trainers.autograd import LARGE, find_draws
from fedquilt.training.trainers.manual import CpuTraining
from fedquilt.training.trainers.plan import Conv, Dense, NoPlanError, Plan

SAMPLES = 500
"""What a client is taken to hold."""
_HAND_RATE, _HAND_CALL = 80e9, 20e-6
_AUTOGRAD_RATE, _AUTOGRAD_CALL = 60e9, 80e-6
_START_SECONDS = 4.0
_MESSAGE_SECONDS, _COPY_RATE = 2e-4, 2e9
_HELD_BYTES = 2**30  # of updates that wait for their turn


@dataclass(frozen=True)
class Choice:
    """An engine, and why."""

    engine: str
    reason: str


def choose_engine(
    flat: FlatModel, task: Task, settings: LocalSettings, rounds: int, cohort: int
) -> Choice:
    """Return the engine that trains cohorts of so many clients fastest, and why."""
    if task.device.type == "cuda":
        from fedquilt.training.trainers.vmap import BatchedEngine

        if BatchedEngine.supports(flat.module, task, settings):
            return Choice("batched", "many clients fill a GPU")
        return Choice("sequential", "the model cannot run as a stack of clients")
    if task.class_mask is not None or flat.vector.numel() > LARGE:
        return Choice("sequential", f"above {LARGE:,} parameters, or with hidden classes")
    plan, why = _plan(flat, task, settings)
    alone = "sequential" if plan is None else "batched"
    seconds = client_seconds(flat, task, settings, plan)
    obstacle = _no_workers(flat, task, settings, rounds, cohort, seconds)
    if obstacle is None:
        return Choice("processes", f"{usable_cores()} cores; each client {why}")
    return Choice(alone, f"each client {why}; no worker processes: {obstacle}")


def client_seconds(
    flat: FlatModel, task: Task, settings: LocalSettings, plan: Plan | None
) -> float:
    """Return what a client of `SAMPLES` samples costs one core in a round."""
    steps = settings.epochs * math.ceil(SAMPLES / settings.batch_size)
    size = min(SAMPLES, settings.batch_size)
    if plan is not None:
        work, layers = sum(map(_operations, plan.layers)), len(plan.layers)
        return steps * (3 * size * work / _HAND_RATE + layers * _HAND_CALL)
    layers = sum(1 for module in flat.module.modules() if not any(module.children()))
    return steps * (3 * size * _counted(flat, task) / _AUTOGRAD_RATE + layers * _AUTOGRAD_CALL)


def _plan(flat: FlatModel, task: Task, settings: LocalSettings) -> tuple[Plan | None, str]:
    """Return the plan that the engine will find, tried as there, and how a client trains."""
    public = task.public()
    own = FlatModel(flat.module, public.inputs)
    try:
        training = CpuTraining(own, task, settings, find_draws(own, public))
        return training.plan, "trains with gradients by hand"
    except NoPlanError as error:
        return None, f"trains by autograd ({error})"
    finally:
        own.restore()  # following the forward pass leaves placeholders in classes and closures


def _no_workers(
    flat: FlatModel,
    task: Task,
    settings: LocalSettings,
    rounds: int,
    cohort: int,
    seconds: float,
) -> str | None:
    """Return why worker processes are not used, None where they are."""
    cores = usable_cores()
    if cores < 2 or cohort < 2 * cores:
        return f"{cores} cores and cohorts of {cohort}"
    size = flat.vector.numel() * flat.vector.element_size()
    if size * cohort > _HELD_BYTES:
        return f"the updates of a cohort take {size * cohort / 2**30:.1f} GiB"
    if seconds < 2 * (_MESSAGE_SECONDS + size / _COPY_RATE):
        return f"a client takes {1e3 * seconds:.2g} ms, a message not much less"
    saved = rounds * cohort * seconds * (1 - 1 / cores)
    if saved < _START_SECONDS:
        return f"they would save {saved:.1f} s and take {_START_SECONDS:g} s to start"
    return _cannot_start(flat.module, task, settings)


def _cannot_start(module: nn.Module, task: Task, settings: LocalSettings) -> str | None:
    """Return why workers could not be started here, None where they can.

    A worker imports the main script again, which is safe for this package's own commands only:
    a script without a guard would run its work again.
    """
    main = sys.modules.get("__main__")
    name = Path(getattr(main, "__file__", None) or "").name
    own = "fedquilt" in (getattr(getattr(main, "__spec__", None), "name", "") or "").split(".")
    if not own and name not in ("fedquilt", "fedquilt.exe"):
        return "the main script may not be made to be imported by them"
    try:
        pickle.dumps((module, task.objective, settings))
    except Exception as error:  # whatever an object's own pickling may raise
        return f"the model cannot be sent to them ({type(error).__name__})"
    return None


def _operations(layer: object) -> int:
    if isinstance(layer, Conv):
        high, wide = layer.out_size
        return 2 * high * wide * layer.kernel[0] * layer.kernel[1] * layer.inputs * layer.outputs
    return 2 * layer.inputs * layer.outputs if isinstance(layer, Dense) else 0


@torch.no_grad()
def _counted(flat: FlatModel, task: Task) -> float:
    """Return the operations of a forward pass of one public sample, as torch counts them."""
    module, public = copy.deepcopy(flat.module), task.public()
    counter = OperationCount()
    with counter, torch.random.fork_rng(devices=[]):
        try:
            trees.call_with(module, public.inputs)
        except Exception:  # a model that needs its labels: its parameters stand for it
            return 2.0 * flat.vector.numel()
        finally:
            flat.restore()
    return counter.total / trees.length(public.inputs)
