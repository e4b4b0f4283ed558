"""Where clients train: in this process (`LocalEngine`), in workers, on several devices.

Every engine runs the same local steps on the same batches, drawn from the same
per-client seeds, so engines differ in speed and floating-point rounding only.

| engine | where | trainers |
|---|---|---|
| `sequential` | this process | autograd |
| `local` | this process | manual or autograd; on a GPU as `batched`, or captured |
| `batched` | this process, many clients as one program | gpu or vmap; on a CPU manual or vmap |
| `processes` | worker processes, one a core | manual or autograd |

Which engine `auto` is follows from a cost model, from public numbers alone.  A measurement would
choose differently on a busy day, and then the same run would round differently; counted
operations choose alike wherever the settings, the number of cores and the device are the same.
What clients hold does not enter, not even how many samples: all of them would see whose data
changed the engine.

One client is taken to hold `SAMPLES` samples.  A step on a batch of n costs

    3 n F / rate + layers * call,

with the F operations of a forward pass of one sample; the rates and the seconds of a call are
those of one core of a usual server.  Worker processes cost their start and, for each client, a
message and two copies of the model; they are chosen where they save more than that.

Several devices at once have one batched engine each, in a process of its own.  Clients are dealt by
their places in the cohort, which are public: who stands beside whom, and how many of them in a
device's program, must not follow what others hold.  Everything random is seeded per client, so
which device trains it changes nothing where devices are of one kind, and rounding where they are
not; where clients are protected unlike devices are refused.
"""

from __future__ import annotations

import copy
import logging
import math
import pickle
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError, NotReadyError
from fedquilt.config.choices import ENGINES, FLOWER_ENGINES
from fedquilt.training.engines import pool
from fedquilt.training.flat import FlatModel
from fedquilt.training.hardware import OperationCount, usable_cores
from fedquilt.training.task import ClientIds, ClientUpdate, Engine, LocalSettings, LossOf, Task
from fedquilt.training.trainers import Trainer
from fedquilt.training.trainers.autograd import (
    LARGE,
    AutogradTrainer,
    find_draws,
    refuse_hidden_state,
)
from fedquilt.training.trainers.captured import CapturedTrainer
from fedquilt.training.trainers.gpu import GpuTrainer
from fedquilt.training.trainers.manual import ManualTrainer, try_manual
from fedquilt.training.trainers.plan import Conv, Dense, LayerPlan, NoPlanError, is_interpreted
from fedquilt.training.trainers.vmap import VmapTrainer, why_not_stacked

_log = logging.getLogger(__name__)

SAMPLES = 500
"""What a client is taken to hold."""
_HAND_RATE, _HAND_CALL = 80e9, 20e-6
_AUTOGRAD_RATE, _AUTOGRAD_CALL = 60e9, 80e-6
_START_SECONDS = 4.0
_MESSAGE_SECONDS, _COPY_RATE = 2e-4, 2e9
_HELD_BYTES = 2**30  # of updates that wait for their turn


class LocalEngine(Engine):
    """Trains a cohort in this process, group by group, with one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def is_small(self) -> bool:
        """Whether a round is so short that a second thread of torch only costs time."""
        return self.trainer.is_small

    @property
    def starts_early(self) -> bool:
        """Whether the first group is training on a device when `train` returns."""
        return self.trainer.starts_early

    def lend_updates(self) -> None:
        """Let an update lie in the working model's memory, where the trainer has no other."""
        self.trainer.lend_updates()

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the cohort, in its order."""
        clients, size = [int(client) for client in cohort], self.trainer.group_size
        groups = [clients[first : first + size] for first in range(0, len(clients), size)]

        def begin(group: list[int]) -> Iterator[ClientUpdate]:
            return self.trainer.train(start, group, round_index, learning_rate)

        first = [begin(groups[0])] if groups and self.starts_early else []

        def updates() -> Iterator[ClientUpdate]:
            try:
                for group in groups:
                    yield from first.pop() if first else begin(group)
            finally:
                # What is made or evaluated next sees nothing of the last clients.
                self.trainer.restore()

        return updates()

    def close(self) -> None:
        """Restore what training has changed outside the model, such as attributes of its class."""
        self.trainer.restore()


def make_engine(
    name: str,
    model: nn.Module | FlatModel,
    task: Task,
    settings: LocalSettings,
    loss_of: LossOf | None = None,
    trainer: Trainer | None = None,
) -> Engine:
    """Return the engine of a name; `auto` is `local`.

    A run that asks for `auto` decides before it begins, by what it costs (`choose_engine`);
    what is left to decide here are slices of a model and the clients of a Flower node.
    A loss of its own for each client can only be trained by autograd.
    A `FlatModel` lends its memory to autograd; the other trainers copy its module.
    `trainer` is the one that `choose_engine` has made, where it has made one.
    """
    if loss_of is not None and name not in ("auto", "local", "sequential"):
        raise InvalidValueError(
            f"engine={name!r} must be 'auto' or 'sequential' where clients have their own loss"
        )
    if name == "sequential":
        return LocalEngine(AutogradTrainer(model, task, settings, loss_of))
    if loss_of is not None:
        return LocalEngine(_one_by_one(model, task, settings, loss_of))
    module = model.module if isinstance(model, FlatModel) else model
    if name == "processes":
        from fedquilt.training.engines.workers import ProcessEngine

        return ProcessEngine(module, task, settings, trainer=trainer)
    if name in ("auto", "local"):
        return LocalEngine(trainer or local_trainer(model, task, settings))
    if name == "batched":
        return LocalEngine(batched_trainer(module, task, settings))
    if name in FLOWER_ENGINES:
        raise InvalidValueError(
            f"engine={name!r} must be used with `fedquilt run` or fedquilt.flower.simulate"
        )
    # Whoever comes here has named none of these.
    raise InvalidValueError(f"engine={name!r} must be one of {', '.join(map(repr, ENGINES))}")


def local_trainer(model: nn.Module | FlatModel, task: Task, settings: LocalSettings) -> Trainer:
    """Return the fastest trainer of a model on its device, autograd where there is no other."""
    module = model.module if isinstance(model, FlatModel) else model
    if task.device.type == "cuda" and why_not_stacked(module, task, settings) is None:
        return batched_trainer(module, task, settings)
    autograd = _one_by_one(model, task, settings)
    if task.device.type != "cpu":
        return autograd
    size = autograd.flat.vector.numel()
    if size > LARGE:
        _log.info("the model trains by autograd: %d parameters are more than %d", size, LARGE)
        return autograd
    return try_manual(autograd.flat, task, settings, autograd.draws) or autograd


def _one_by_one(
    model: nn.Module | FlatModel,
    task: Task,
    settings: LocalSettings,
    loss_of: LossOf | None = None,
) -> AutogradTrainer:
    """Return the trainer of one client after the other; on a GPU its steps are captured."""
    kind = CapturedTrainer if task.device.type == "cuda" else AutogradTrainer
    return kind(model, task, settings, loss_of)


def batched_trainer(module: nn.Module, task: Task, settings: LocalSettings) -> Trainer:
    """Return the trainer of many clients as one program; on a CPU steps by hand are faster.

    Raises
    ------
    InvalidValueError
        The model cannot run as a stack; the message says why.
    """
    if task.device.type == "cpu" and not is_interpreted():
        return manual_trainer(module, task, settings) or VmapTrainer(module, task, settings)
    return gpu_trainer(module, task, settings) or VmapTrainer(module, task, settings)


def manual_trainer(module: nn.Module, task: Task, settings: LocalSettings) -> ManualTrainer | None:
    """Return the trainer by hand on a copy of the model; None where there is none."""
    public = task.public()
    flat = FlatModel(module, public.inputs)
    draws = find_draws(flat, public)
    trainer = try_manual(flat, task, settings, draws)
    if trainer is not None:
        refuse_hidden_state(flat, public, settings, draws)
    return trainer


def gpu_trainer(module: nn.Module, task: Task, settings: LocalSettings) -> GpuTrainer | None:
    """Return the trainer by a GPU program on a copy of the model; None where there is none."""
    public = task.public()
    flat = FlatModel(module, public.inputs)
    first = flat.read().clone()
    try:
        draws = find_draws(flat, public)
        trainer = GpuTrainer(flat, task, settings, draws)
    except NoPlanError as error:
        _log.info("the model runs as a stack, by torch.func.vmap: %s", error)
        return None
    finally:
        flat.write(first)  # following the forward pass may have left something behind
    flat.module.train()
    refuse_hidden_state(flat, public, settings, draws)
    return trainer


@dataclass(frozen=True)
class Choice:
    """An engine, and why; the trainer that was made to find out, where one was."""

    engine: str
    reason: str
    trainer: Trainer | None = field(default=None, compare=False, repr=False)


def choose_engine(
    flat: FlatModel, task: Task, settings: LocalSettings, rounds: int, cohort: int
) -> Choice:
    """Return the engine that trains cohorts of so many clients fastest, and why."""
    if task.device.type == "cuda":
        if why_not_stacked(flat.module, task, settings) is None:
            return Choice("batched", "many clients fill a GPU")
        return Choice("local", "the model cannot run as a stack of clients")
    if task.class_mask is not None or flat.vector.numel() > LARGE:
        return Choice("sequential", f"above {LARGE:,} parameters, or with hidden classes")
    manual, why = _manual_or_why(flat, task, settings)
    plan = None if manual is None else manual.plan
    seconds = client_seconds(flat, task, settings, plan)
    obstacle = _no_workers(flat, task, settings, rounds, cohort, seconds)
    if obstacle is None:
        return Choice("processes", f"{usable_cores()} cores; each client {why}", manual)
    alone = "sequential" if manual is None else "local"
    return Choice(alone, f"each client {why}; no worker processes: {obstacle}", manual)


def _manual_or_why(
    flat: FlatModel, task: Task, settings: LocalSettings
) -> tuple[ManualTrainer | None, str]:
    """Return the trainer by hand, None where there is none, and how a client trains."""
    public = task.public()
    own = FlatModel(flat.module, public.inputs)
    draws = find_draws(own, public)
    try:
        trainer = ManualTrainer(own, task, settings, draws)
    except NoPlanError as error:
        return None, f"trains by autograd ({error})"
    finally:
        own.restore()  # following the forward pass leaves placeholders in classes and closures
    refuse_hidden_state(own, public, settings, draws)
    return trainer, "trains with gradients by hand"


def client_seconds(
    flat: FlatModel, task: Task, settings: LocalSettings, plan: LayerPlan | None
) -> float:
    """Return what a client of `SAMPLES` samples costs one core in a round."""
    steps = settings.epochs * math.ceil(SAMPLES / settings.batch_size)
    size = min(SAMPLES, settings.batch_size)
    if plan is not None:
        work, layers = sum(map(_operations, plan.layers)), len(plan.layers)
        return steps * (3 * size * work / _HAND_RATE + layers * _HAND_CALL)
    layers = sum(1 for module in flat.module.modules() if not any(module.children()))
    return steps * (3 * size * _counted(flat, task) / _AUTOGRAD_RATE + layers * _AUTOGRAD_CALL)


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


_SLOTS = 4


def parse_devices(names: str) -> list[torch.device]:
    """Return the devices of a list such as `cuda:0,cuda:1` or `cpu,cpu`.

    >>> parse_devices("cpu, cpu")
    [device(type='cpu'), device(type='cpu')]
    """
    devices = []
    for name in names.split(","):
        try:
            device = torch.device(name.strip())
        except RuntimeError as error:
            raise InvalidValueError(
                f"devices={names!r} must be devices joined by commas, such as 'cuda:0,cuda:1'"
            ) from error
        if device.type not in ("cpu", "cuda"):
            raise InvalidValueError(f"devices={names!r} must be cpu or cuda devices")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise InvalidValueError(
                f"devices={names!r}: torch finds {torch.cuda.device_count()} GPUs here"
            )
        devices.append(device)
    return devices


def refuse_unlike(devices: Sequence[torch.device]) -> None:
    """Refuse devices that round differently: a client's numbers would tell where it was trained."""
    kinds = {_kind(device) for device in devices}
    if len(kinds) > 1:
        names = ",".join(map(str, devices))
        raise InvalidValueError(
            f"devices={names!r} must be of one kind where clients are protected, as their numbers "
            f"would tell which one trained them; these are {', '.join(sorted(kinds))}"
        )


def _kind(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    about = torch.cuda.get_device_properties(device)
    version, size = f"{about.major}.{about.minor}", about.total_memory // 2**30
    return f"{about.name} ({version}, {about.multi_processor_count} processors, {size} GiB)"


class _Trained(NamedTuple):
    """The update of a client lies in a slot."""

    slot: int
    client: int
    num_examples: int
    loss: float


class DevicesEngine(Engine):
    """Train a cohort on several devices.

    Parameters
    ----------
    devices : sequence of torch.device
        One worker process for each; a device may be named more than once.

    Raises
    ------
    InvalidValueError
        The model cannot be sent to another process, or cannot run as a stack there; or devices
        are not of one kind where clients are protected.
    WorkerError
        While training: a worker died or raised an error.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: LocalSettings,
        devices: Sequence[torch.device],
    ) -> None:
        if not devices:
            raise InvalidValueError("devices must name at least one device")
        if task.class_mask is not None:
            raise InvalidValueError("devices must be left out where clients hide classes")
        if settings.silent:
            refuse_unlike(devices)
        self.task, self.settings, self.devices = task, settings, list(devices)
        vector = FlatModel(model, task.public().inputs).vector
        on_cpu = copy.deepcopy(model).cpu()
        self._pool = pool.WorkerPool(pool.WorkerProcess, "devices", on_cpu, task, settings, vector)

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the cohort, in its order."""
        if not self._pool.close.alive:
            raise NotReadyError("the engine of several devices is closed: make a new one")
        clients = [int(client) for client in cohort]
        self._hire()
        self._pool.start.copy_(start.detach())
        try:
            for number, worker in enumerate(self._pool.workers):
                share = clients[number :: len(self.devices)]
                samples = [np.asarray(self.task.clients[c], dtype=np.int64) for c in share]
                worker.in_hand += share
                worker.send(pool.ClientJob(share, samples, round_index, learning_rate, []))
            yield from self._in_order(clients, start.device)
        except BaseException:
            self._pool.end()
            raise

    def _in_order(self, clients: list[int], device: torch.device) -> Iterator[ClientUpdate]:
        finished: dict[int, ClientUpdate] = {}
        waiting = deque(clients)
        while waiting:
            while waiting and waiting[0] in finished:
                yield finished.pop(waiting.popleft())
            if not waiting:
                return
            busy = [worker for worker in self._pool.workers if worker.in_hand]
            ready = wait([worker.connection for worker in busy])
            for worker in busy:
                if worker.connection in ready:
                    update = _receive(worker, device)
                    finished[update.client] = update

    def _hire(self) -> None:
        """Start a worker for each device, where they do not run."""
        if not self._pool.workers:
            for device in self.devices:
                self._pool.hire(f"the process of device {device}", _SLOTS, _serve, str(device))
            for worker in self._pool.workers:
                worker.receive()

    def close(self) -> None:
        """End the workers; doing so again does nothing."""
        self._pool.close()


def _receive(worker: pool.WorkerProcess, device: torch.device) -> ClientUpdate:
    """Return the next update of a worker, and give its slot free."""
    message: _Trained = worker.receive()
    delta = worker.slots[message.slot].to(device, copy=True)
    worker.send(None)
    worker.in_hand.remove(message.client)
    return ClientUpdate(message.client, delta, message.num_examples, message.loss)


def _serve(here: pool.WorkerTask) -> pool.Serve:
    """Return what a worker does with its clients of a round: many at once, on its device."""
    engine = make_engine("batched", here.model, here.task, here.settings)

    def train(job: pool.ClientJob, connection: Connection) -> None:
        start = here.take(job)
        updates = engine.train(start, job.clients, job.round_index, job.learning_rate)
        for number, update in enumerate(updates):
            slot = number % _SLOTS
            if number >= _SLOTS:
                connection.recv()  # a slot is free again
            here.slots[slot].copy_(update.delta)
            connection.send(_Trained(slot, update.client, update.num_examples, update.loss))
        for _ in range(min(len(job.clients), _SLOTS)):
            connection.recv()

    def serve(job: pool.ClientJob, connection: Connection) -> None:
        try:
            train(job, connection)
        except (EOFError, OSError):
            raise
        except Exception as error:
            connection.send(pool.failure(None, error))

    return serve
