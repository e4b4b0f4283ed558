"""What a worker process runs: it waits for clients and trains them.

Nothing here knows of the engine; the two sides share the messages below and
the memory of `SharedTensor`.
"""

from __future__ import annotations

import math
import pickle
import signal
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.errors import StorageError
from fedquilt.learning.engine import LocalSettings, Task
from fedquilt.learning.flat import FlatModel
from fedquilt.learning.local import find_draws, train_client


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
    """What a worker gets when it starts; the model as pickled bytes.

    The worker unpickles the model itself, so that a failure becomes a message.
    """

    model: SharedTensor
    inputs: SharedTensor
    targets: SharedTensor
    start: SharedTensor
    settings: LocalSettings


class Job(NamedTuple):
    """One client to train, and the slot that takes its update."""

    slot: int
    samples: NDArray[np.int64]
    seed: int
    learning_rate: float


class Ready(NamedTuple):
    """The worker has its model and its data."""


class Done(NamedTuple):
    """The update of a job lies in its slot."""

    slot: int
    loss: float


class Failed(NamedTuple):
    """Setting up (slot None) or a job raised an error."""

    slot: int | None
    error: str
    trace: str


def work(connection: Connection, setting: Setting, slots: SharedTensor) -> None:
    """Train what comes over the connection until it closes."""
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        _serve(connection, setting, slots.open())
    except (EOFError, OSError):
        return


def _serve(connection: Connection, setting: Setting, slots: torch.Tensor) -> None:
    try:
        trainer = _Trainer(setting, slots)
    except Exception as error:
        connection.send(_failure(None, error))
        while True:  # the parent ends this process once it has read the failure
            connection.recv()
    connection.send(Ready())
    while True:
        job: Job = connection.recv()
        connection.send(trainer.run(job))


class _Trainer:
    """The working model and the shared memory, opened."""

    def __init__(self, setting: Setting, slots: torch.Tensor) -> None:
        model = pickle.loads(setting.model.open().numpy().tobytes())
        self._inputs = setting.inputs.open()
        self._targets = setting.targets.open()
        self._start = setting.start.open()
        self._settings = setting.settings
        public = Task(self._inputs, self._targets, []).public()
        self._flat = FlatModel(model, public.inputs)
        self._flat.remember()
        self._draws = find_draws(self._flat, public)
        self._slots = slots

    def run(self, job: Job) -> Done | Failed:
        """Train one client; an error becomes an answer."""
        try:
            loss = train_client(
                self._flat,
                self._start,
                self._inputs,
                self._targets,
                torch.from_numpy(job.samples),
                job.learning_rate,
                self._settings,
                job.seed,
                draws=self._draws,
            )
            torch.sub(self._flat.read(), self._start, out=self._slots[job.slot])
        except Exception as error:
            return _failure(job.slot, error)
        return Done(job.slot, loss)


def _failure(slot: int | None, error: Exception) -> Failed:
    return Failed(slot, f"{type(error).__name__}: {error}", traceback.format_exc())
