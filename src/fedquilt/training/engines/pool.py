"""What a worker process runs: it waits for clients and trains them.

Nothing here knows of the engine; the two sides share the messages below and
the memory of `SharedTensor`.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common import trees
from fedquilt.common.errors import StorageError
from fedquilt.training.flat import FlatModel
from fedquilt.training.hardware import keep_freed_memory
from fedquilt.training.task import LocalSettings, Task
from fedquilt.training.trainers.autograd import (
    NEVER_SILENT,
    client_seed,
    default_loss_of,
    find_draws,
    find_steps,
    train_client,
)
from fedquilt.training.trainers.manual import CpuTraining, Given
from fedquilt.training.trainers.plan import NoPlanError


class SharedTensor:
    """A CPU tensor in memory that a process shares with the workers it starts.

    The memory comes from the standard library's heap, which falls back to a
    temporary file where /dev/shm is too small, as it is in most containers.
    """

    def __init__(self, context: BaseContext, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        size = max(1, math.prod(shape) * dtype.itemsize)
        try:
            self._bytes = context.RawArray("b", size)
        except OSError as error:
            cause = error.strerror or error
            raise StorageError(
                f"engine='processes' needs {size} bytes of shared memory: {cause}. Make room in "
                "/dev/shm or in a temporary folder (TMPDIR), or use another engine"
            ) from error

    @classmethod
    def copy_of(cls, context: BaseContext, tensor: torch.Tensor) -> SharedTensor:
        """Return shared memory that holds the values of a tensor."""
        shared = cls(context, tuple(tensor.shape), tensor.dtype)
        shared.open().copy_(tensor.detach())
        return shared

    def open(self) -> torch.Tensor:
        """Return the tensor; every process that opens it sees the same values."""
        count = math.prod(self._shape)
        if count == 0:
            return torch.empty(self._shape, dtype=self._dtype)
        flat = torch.frombuffer(self._bytes, dtype=self._dtype, count=count)
        return flat.view(self._shape)


@dataclass(frozen=True, eq=False)
class Setting:
    """What a worker gets when it starts; model, objective and settings as pickled bytes.

    The worker unpickles them itself, so that a failure becomes a message.  `inputs` and
    `targets` are `SharedTensor`s in the form of the task's trees.
    """

    pickled: SharedTensor
    inputs: Any
    targets: Any
    start: SharedTensor


class Job(NamedTuple):
    """Clients to train, and the slots that take their updates."""

    slots: tuple[int, ...]
    clients: tuple[int, ...]
    samples: tuple[NDArray[np.int64], ...]
    round_index: int
    learning_rate: float


class Ready(NamedTuple):
    """The worker has its model and its data."""


class Done(NamedTuple):
    """The updates of a job lie in these slots."""

    slots: tuple[int, ...]
    losses: list[float]


class Failed(NamedTuple):
    """Setting up (slot None) or a client of a job raised an error."""

    slot: int | None
    error: str
    trace: str


def work(connection: Connection, setting: Setting, slots: SharedTensor) -> None:
    """Train what comes over the connection until it closes."""
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        _serve(connection, setting, slots.open())
    except (EOFError, OSError):
        return


def _serve(connection: Connection, setting: Setting, slots: torch.Tensor) -> None:
    try:
        trainer = _Trainer(setting, slots)
    except Exception as error:
        connection.send(failure(None, error))
        while True:  # the parent ends this process once it has read the failure
            connection.recv()
    connection.send(Ready())
    while True:
        job: Job = connection.recv()
        connection.send(trainer.run(job))


class _Trainer:
    """The working model and the shared memory, opened."""

    def __init__(self, setting: Setting, slots: torch.Tensor) -> None:
        model, objective, settings = pickle.loads(setting.pickled.open().numpy().tobytes())
        inputs, targets = opened(setting.inputs), opened(setting.targets)
        self._task = Task(inputs, targets, [], objective=objective)
        self._start = setting.start.open()
        self._settings: LocalSettings = settings
        public = self._task.public()
        self._loss_of = default_loss_of(self._task)
        self._flat = FlatModel(model, public.inputs)
        self._draws = find_draws(self._flat, public)
        find_steps(self._flat, public, settings)
        self._slots = slots
        self._by_hand: CpuTraining | None = None
        with contextlib.suppress(NoPlanError):  # the engine has said why
            self._by_hand = CpuTraining(self._flat, self._task, settings, self._draws)

    def run(self, job: Job) -> Done | Failed:
        """Train clients; an error becomes an answer."""
        given = [
            Given(
                torch.from_numpy(samples),
                client_seed(self._settings, job.round_index, client),
                self._slots[slot],
            )
            for slot, client, samples in zip(job.slots, job.clients, job.samples, strict=True)
        ]
        losses = []
        for slot, client, loss in zip(
            job.slots, given, self._train(given, job.learning_rate), strict=True
        ):
            if isinstance(loss, Exception):
                if not self._settings.silent or isinstance(loss, NEVER_SILENT):
                    return failure(slot, loss)
                client.out.fill_(math.nan)
                loss = math.nan
            losses.append(loss)
        return Done(job.slots, losses)

    def _train(self, given: list[Given], learning_rate: float) -> Sequence[float | Exception]:
        """Leave the updates in their slots; return the losses, or what went wrong."""
        if self._by_hand is not None:
            return self._by_hand.train(self._start, given, learning_rate)
        losses: list[float | Exception] = []
        for client in given:
            try:
                losses.append(self._train_one(client, learning_rate))
            except Exception as error:
                losses.append(error)
        return losses

    def _train_one(self, client: Given, learning_rate: float) -> float:
        loss = train_client(
            self._flat,
            self._start,
            self._task.inputs,
            self._task.targets,
            client.samples,
            learning_rate,
            self._settings,
            client.seed,
            self._loss_of(0, 0),
            self._draws,
        )
        torch.sub(self._flat.read(), self._start, out=client.out)
        return loss


def shared(context: BaseContext, tree: trees.Tree) -> Any:
    """Return a tree of `SharedTensor`s with the values of a tree of tensors."""
    return trees.mapped(tree, lambda tensor: SharedTensor.copy_of(context, tensor))  # type: ignore[arg-type,return-value]


def opened(tree: Any) -> Any:
    """Return the tensors of a tree of `SharedTensor`s."""
    if isinstance(tree, SharedTensor):
        return tree.open()
    if isinstance(tree, dict):
        return {key: opened(part) for key, part in tree.items()}
    return tuple(opened(part) for part in tree)


def failure(slot: int | None, error: Exception) -> Failed:
    """Return an error as a message."""
    trace = "".join(traceback.format_exception(error))
    return Failed(slot, f"{type(error).__name__}: {error}", trace)
