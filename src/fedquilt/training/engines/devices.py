"""Several devices at once: one batched engine on each, in a process of its own.

Clients are dealt by their places in the cohort, which are public: who stands beside whom, and how
many of them in a device's program, must not follow what others hold.  Everything random is seeded
per client, so which device trains it changes nothing where devices are of one kind, and rounding
where they are not; where clients are protected unlike devices are refused.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from fedquilt.common.errors import InvalidValueError, NotReadyError
from fedquilt.training.engines import make_engine
from fedquilt.training.engines.pool import (
    ClientJob,
    Serve,
    WorkerPool,
    WorkerProcess,
    WorkerTask,
    failure,
)
from fedquilt.training.flat import FlatModel
from fedquilt.training.task import ClientIds, ClientUpdate, Engine, LocalSettings, Task

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
        self._pool = WorkerPool(WorkerProcess, "devices", on_cpu, task, settings, vector)

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
                worker.send(ClientJob(share, samples, round_index, learning_rate, []))
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


def _receive(worker: WorkerProcess, device: torch.device) -> ClientUpdate:
    """Return the next update of a worker, and give its slot free."""
    message: _Trained = worker.receive()
    delta = worker.slots[message.slot].to(device, copy=True)
    worker.send(None)
    worker.in_hand.remove(message.client)
    return ClientUpdate(message.client, delta, message.num_examples, message.loss)


def _serve(here: WorkerTask) -> Serve:
    """Return what a worker does with its clients of a round: many at once, on its device."""
    engine = make_engine("batched", here.model, here.task, here.settings)

    def train(job: ClientJob, connection: Connection) -> None:
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

    def serve(job: ClientJob, connection: Connection) -> None:
        try:
            train(job, connection)
        except (EOFError, OSError):
            raise
        except Exception as error:
            connection.send(failure(None, error))

    return serve
