"""All CPU cores: each worker process trains whole clients, one thread a worker.

Which worker trains a client changes nothing, because everything random is seeded per client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common import checks, trees
from fedquilt.common.errors import InvalidValueError, NotReadyError
from fedquilt.training.engines import pool
from fedquilt.training.flat import FlatModel
from fedquilt.training.hardware import usable_cores
from fedquilt.training.task import ClientIds, ClientUpdate, Engine, LocalSettings, Task, one_thread
from fedquilt.training.trainers import Trainer
from fedquilt.training.trainers.autograd import AutogradTrainer
from fedquilt.training.trainers.manual import try_manual

# One job in training and one waiting, so that a worker need not wait for the next.
_JOBS = 2


class _Done(NamedTuple):
    """The updates of a job lie in these slots."""

    slots: list[int]
    losses: list[float]


class ProcessEngine(Engine):
    """Train clients in worker processes, the largest client first.

    Workers start with the first round and stay until `close`, until the engine
    is forgotten or until the program ends.  A round that is not finished, by an
    error, Ctrl-C or a caller that stops early, ends them too; the next round
    starts new ones.  Updates wait in this process for their turn in the
    cohort's order, so it may hold all of a cohort's updates at once.

    While a round trains, torch has one thread in this process; with a small network, of which
    workers train several clients at a time, until `close`.  Of several engines the last one gives
    the threads back.

    Parameters
    ----------
    workers : int, optional
        The number of processes, at most one a client; by default the number of
        CPU cores that this process may use.
    trainer : Trainer, optional
        The one that workers will make, where it was made before to choose the engine.

    Raises
    ------
    InvalidValueError
        Model or data are not on the CPU, or the model cannot be pickled.
    WorkerError
        While training: a worker died or raised an error; the message names it.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: LocalSettings,
        workers: int | None = None,
        trainer: Trainer | None = None,
    ) -> None:
        _check_on_cpu(model, task)
        limit = usable_cores() if workers is None else workers
        self._limit = checks.integer("workers", limit, at_least=1)
        self.task = task
        self.settings = settings
        vector = FlatModel(model, task.public().inputs).vector
        self._pool = pool.WorkerPool(_Worker, "engine='processes'", model, task, settings, vector)
        trainer = trainer or worker_trainer(model, task, settings)
        self.trainer_name = trainer.name
        self._is_small = trainer.is_small
        self._together = trainer.together
        self._training = False

    @property
    def is_small(self) -> bool:
        """Whether a round is so short that a second thread of torch only costs time."""
        return self._is_small

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers that run now."""
        return [worker.process.pid or 0 for worker in self._pool.workers]

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the cohort, in its order."""
        if not self._pool.close.alive:
            raise NotReadyError("engine='processes' is closed: make a new one to train on")
        if self._training:
            raise NotReadyError("engine='processes' trains one round at a time: finish the last")
        clients = [int(client) for client in cohort]
        self._training = True
        try:
            # The workers have the cores: a second thread here would wait for work on one of them.
            with one_thread():
                self._pool.start.copy_(start.detach())
                self._hire(min(self._limit, len(clients)))
                yield from self._train_all(clients, round_index, learning_rate)
        except BaseException:
            self._pool.end()
            raise
        finally:
            self._training = False

    def _train_all(
        self, clients: list[int], round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        waiting = self._groups(clients)
        finished: dict[int, ClientUpdate] = {}

        def hand_out() -> None:
            while waiting and self._pool.workers:
                worker = min(self._pool.workers, key=lambda worker: worker.load)
                if worker.jobs == _JOBS:
                    return
                given = [self._given(place, clients[place]) for place in waiting.popleft()]
                worker.begin(given, round_index, learning_rate)

        for place in range(len(clients)):
            if waiting:  # nobody shall be idle while updates are used here
                self._collect(finished, timeout=0)
                hand_out()
            while place not in finished:
                self._collect(finished, timeout=None)
                hand_out()
            yield finished.pop(place)

    def _groups(self, clients: list[int]) -> deque[list[int]]:
        """Return the places of clients that make one job, the largest clients first.

        As many as train together, but for the last job of every worker: those share the
        rest, so that all end at about the same time.
        """
        if not clients:
            return deque()
        sizes = [len(self.task.clients[client]) for client in clients]
        places = sorted(range(len(clients)), key=lambda place: -sizes[place])
        workers, most = len(self._pool.workers), self._together
        turns = -(-len(places) // (workers * most))
        first = (turns - 1) * workers * most
        share = -(-(len(places) - first) // workers)
        return deque(
            [places[at : at + most] for at in range(0, first, most)]
            + [places[at : at + share] for at in range(first, len(places), share)]
        )

    def _given(self, place: int, client: int) -> _InHand:
        return _InHand(place, client, np.asarray(self.task.clients[client], dtype=np.int64))

    def _collect(self, finished: dict[int, ClientUpdate], timeout: float | None) -> None:
        """Take in what the workers have sent; wait for something if `timeout` is None."""
        busy = [worker for worker in self._pool.workers if worker.by_slot]
        if not busy and timeout is None:
            raise NotReadyError("engine='processes' was closed in the middle of a round")
        ready = wait([worker.connection for worker in busy], timeout)
        for worker in busy:
            if worker.connection in ready:
                finished |= worker.finished()

    def _hire(self, count: int) -> None:
        """Start workers until there are `count`."""
        for number in range(len(self._pool.workers), count):
            self._pool.hire(f"worker process {number}", _JOBS * self._together, _serve)

    def close(self) -> None:
        """End the workers; doing so again does nothing."""
        self._pool.close()


class _InHand(NamedTuple):
    """A client that a worker was given: its place in the cohort and its samples."""

    place: int
    client: int
    samples: NDArray[np.int64]


@dataclass(eq=False)
class _Worker(pool.WorkerProcess):
    """This side of a worker process: what it was given and where its updates lie."""

    jobs: int = 0
    load: int = 0
    by_slot: dict[int, _InHand] = field(default_factory=dict)
    """The clients in hand; they and their samples make the `load`."""

    def begin(self, given: list[_InHand], round_index: int, learning_rate: float) -> None:
        """Give the worker clients to train."""
        free = [slot for slot in range(len(self.slots)) if slot not in self.by_slot]
        slots = free[: len(given)]
        self.by_slot |= zip(slots, given, strict=True)
        self.jobs += 1
        self.load += sum(1 + len(client.samples) for client in given)
        clients = [client.client for client in given]
        self.in_hand += clients
        samples = [client.samples for client in given]
        self.send(pool.ClientJob(clients, samples, round_index, learning_rate, slots))

    def finished(self) -> dict[int, ClientUpdate]:
        """Return the finished clients by their places in the cohort, if that is the message."""
        message: pool.Ready | _Done = self.receive()
        if isinstance(message, pool.Ready):
            return {}
        self.jobs -= 1
        updates = {}
        for slot, loss in zip(message.slots, message.losses, strict=True):
            place, client, samples = self.by_slot.pop(slot)
            self.in_hand.remove(client)
            self.load -= 1 + len(samples)
            updates[place] = ClientUpdate(client, self.slots[slot].clone(), len(samples), loss)
        return updates


def worker_trainer(
    model: nn.Module, task: Task, settings: LocalSettings, *, is_tried: bool = False
) -> Trainer:
    """Return how a worker trains: by hand where the model allows it, else by autograd.

    `is_tried`: whether the parent has seen that the model trains alike whoever was trained before.
    """
    autograd = AutogradTrainer(model, task, settings, is_tried=is_tried)
    return try_manual(autograd.flat, task, settings, autograd.draws) or autograd


def _serve(here: pool.WorkerTask) -> pool.Serve:
    """Return what a worker does with a job, once it has its trainer."""
    trainer = worker_trainer(here.model, here.task, here.settings, is_tried=True)

    def serve(job: pool.ClientJob, connection: Connection) -> None:
        start, losses = here.take(job), list[float]()
        out = [here.slots[slot] for slot in job.slots]
        try:
            for update in trainer.train(
                start, job.clients, job.round_index, job.learning_rate, out
            ):
                losses.append(update.loss)
        except Exception as error:
            connection.send(pool.failure(job.clients[len(losses)], error))
        else:
            connection.send(_Done(job.slots, losses))

    return serve


def _check_on_cpu(model: nn.Module, task: Task) -> None:
    samples = [*trees.leaves(task.inputs), *trees.leaves(task.targets)]
    tensors = [*samples, *model.parameters(), *model.buffers()]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    if device is not None:
        raise InvalidValueError(
            f"engine='processes' needs model and data on the CPU, got {device}; "
            "use engine='batched'"
        )
