"""Several devices at once: one batched engine on each, in a process of its own.

Clients are dealt by their places in the cohort, which are public: who stands beside whom, and how
many of them in a device's program, must not follow what others hold.  Everything random is seeded
per client, so which device trains it changes nothing where devices are of one kind, and rounding
where they are not; where clients are protected unlike devices are refused.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError, NotReadyError, WorkerError
from fedquilt.training.engines.pool import (
    Failed,
    Ready,
    Setting,
    SharedTensor,
    failure,
    opened,
    shared,
)
from fedquilt.training.engines.workers import end_workers, start_fork_server, worker_context
from fedquilt.training.flat import FlatModel
from fedquilt.training.task import ClientUpdate, LocalSettings, Task

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


class _Share(NamedTuple):
    """The clients of one device in a round."""

    clients: list[int]
    round_index: int
    learning_rate: float


class _Trained(NamedTuple):
    """The update of a client lies in a slot."""

    slot: int
    client: int
    num_examples: int
    loss: float


class DevicesEngine:
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
        context = worker_context()
        try:
            data = pickle.dumps(
                (copy.deepcopy(model).cpu(), task.objective, settings, task.clients)
            )
        except Exception as error:  # whatever an object's own pickling may raise
            raise InvalidValueError(
                f"model, loss and optimizer must be picklable to be sent to devices: {error}"
            ) from error
        vector = FlatModel(model, task.public().inputs).vector
        self._setting = Setting(
            pickled=SharedTensor.copy_of(
                context, torch.frombuffer(bytearray(data), dtype=torch.uint8)
            ),
            inputs=shared(context, task.inputs),
            targets=shared(context, task.targets),
            start=SharedTensor.copy_of(context, vector),
        )
        self._start = self._setting.start.open()
        self._context = context
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, end_workers, self._workers, os.getpid())

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the cohort, in its order."""
        if not self._finalizer.alive:
            raise NotReadyError("the engine of several devices is closed: make a new one")
        clients = [int(client) for client in cohort]
        self._hire()
        self._start.copy_(start.detach())
        try:
            for number, worker in enumerate(self._workers):
                part = clients[number :: len(self._workers)]
                worker.begin(_Share(part, round_index, learning_rate))
            yield from self._in_order(clients, start.device)
        except BaseException:
            end_workers(
                self._workers, os.getpid()
            )  # what they still train must not reach the next round
            raise

    def _in_order(self, clients: list[int], device: torch.device) -> Iterator[ClientUpdate]:
        finished: dict[int, ClientUpdate] = {}
        waiting = deque(clients)
        while waiting:
            while waiting and waiting[0] in finished:
                yield finished.pop(waiting.popleft())
            if not waiting:
                return
            busy = [worker for worker in self._workers if worker.left]
            ready = wait([worker.connection for worker in busy])
            for worker in busy:
                if worker.connection in ready:
                    update = worker.receive(device)
                    finished[update.client] = update

    def _hire(self) -> None:
        """Start a worker for each device, where they do not run."""
        if self._workers:
            return
        start_fork_server(self._context)
        for number, device in enumerate(self.devices):
            shape = (_SLOTS, len(self._start))
            slots = SharedTensor(self._context, shape, self._start.dtype)
            here, there = self._context.Pipe()
            process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
                target=_work,
                args=(there, self._setting, slots, str(device)),
                name=f"fedquilt-device-{number}",
                daemon=True,
            )
            self._workers.append(_Worker(str(device), process, here, slots.open()))
            process.start()
            there.close()
        for worker in self._workers:
            worker.answer()

    def close(self) -> None:
        """End the workers; doing so again does nothing."""
        self._finalizer()


@dataclass(eq=False)
class _Worker:
    """This side of a device's process."""

    device: str
    process: BaseProcess
    connection: Connection
    slots: torch.Tensor
    left: int = field(default=0)

    def begin(self, share: _Share) -> None:
        self.left = len(share.clients)
        self._send(share)

    def receive(self, device: torch.device) -> ClientUpdate:
        """Return the next update, and give its slot free."""
        message = self.answer()
        delta = self.slots[message.slot].to(device, copy=True)
        self._send(None)
        self.left -= 1
        return ClientUpdate(message.client, delta, message.num_examples, message.loss)

    def answer(self) -> Any:
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise WorkerError(f"the process of device {self.device} has ended") from None
        if isinstance(message, Failed):
            error = WorkerError(f"training on device {self.device} failed: {message.error}")
            error.add_note(f"In the worker:\n{message.trace}")
            raise error
        return message

    def _send(self, message: _Share | None) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise WorkerError(f"the process of device {self.device} has ended") from None


def _work(connection: Connection, setting: Setting, slots: SharedTensor, device: str) -> None:
    """Train the shares that come over the connection until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        try:
            serve = _DeviceTrainer(setting, slots.open(), torch.device(device))
        except Exception as error:
            connection.send(failure(None, error))
            connection.recv()
            return
        connection.send(Ready())
        while True:
            share: _Share = connection.recv()
            try:
                serve.train(share, connection)
            except (EOFError, OSError):
                return
            except Exception as error:
                connection.send(failure(None, error))


class _DeviceTrainer:
    """A batched engine on one device."""

    def __init__(self, setting: Setting, slots: torch.Tensor, device: torch.device) -> None:
        from fedquilt.training.trainers.vmap import BatchedEngine

        model, objective, settings, clients = pickle.loads(setting.pickled.open().numpy().tobytes())
        inputs, targets = (
            trees.mapped(opened(part), lambda tensor: tensor.to(device))
            for part in (setting.inputs, setting.targets)
        )
        task = Task(inputs, targets, clients, objective=objective.to(device))
        self._engine = BatchedEngine(model.to(device), task, settings)
        self._start, self._slots, self._device = setting.start.open(), slots, device

    def train(self, share: _Share, connection: Connection) -> None:
        """Send the updates of a share, each in the next slot once that is free."""
        start = self._start.to(self._device)
        updates = self._engine.train(start, share.clients, share.round_index, share.learning_rate)
        for number, update in enumerate(updates):
            slot = number % _SLOTS
            if number >= _SLOTS:
                connection.recv()
            self._slots[slot].copy_(update.delta)
            connection.send(_Trained(slot, update.client, update.num_examples, update.loss))
        for _ in range(min(len(share.clients), _SLOTS)):
            connection.recv()
