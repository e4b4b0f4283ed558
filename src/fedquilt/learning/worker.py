"""What a worker process runs: it waits for clients and trains them.

Nothing here knows of the engine; the two sides share the messages below and
the memory of `SharedTensor`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import signal
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common import trees
from fedquilt.common.errors import StorageError
from fedquilt.learning.cpu_training import CpuTraining
from fedquilt.learning.engine import LocalSettings, Task
from fedquilt.learning.flat import FlatModel
from fedquilt.learning.local import (
    NEVER_SILENT,
    default_loss_of,
    find_draws,
    find_steps,
    train_client,
)
from fedquilt.learning.plan import NoPlanError

# Numbers of malloc.h, and how much a worker keeps.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**30


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
    _keep_memory()
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
        self._flat.remember()
        self._draws = find_draws(self._flat, public)
        find_steps(self._flat, public, settings)
        self._slots = slots
        self._by_hand: CpuTraining | None = None
        with contextlib.suppress(NoPlanError):  # the engine has said why
            self._by_hand = CpuTraining(self._flat, self._task, settings, self._draws)

    def run(self, job: Job) -> Done | Failed:
        """Train one client; an error becomes an answer."""
        try:
            loss = self._train(job)
        except Exception as error:
            if not self._settings.silent or isinstance(error, NEVER_SILENT):
                return failure(job.slot, error)
            self._slots[job.slot].fill_(math.nan)
            return Done(job.slot, math.nan)
        return Done(job.slot, loss)

    def _train(self, job: Job) -> float:
        """Leave the update of a client in its slot; return its loss."""
        samples, out = torch.from_numpy(job.samples), self._slots[job.slot]
        if self._by_hand is not None:
            return self._by_hand.train(self._start, samples, job.learning_rate, job.seed, out)[1]
        loss = train_client(
            self._flat,
            self._start,
            self._task.inputs,
            self._task.targets,
            samples,
            job.learning_rate,
            self._settings,
            job.seed,
            self._loss_of(0, 0),
            self._draws,
        )
        torch.sub(self._flat.read(), self._start, out=out)
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


def _keep_memory() -> None:
    """Let this process keep the memory that it frees, where its C library can be told so.

    Activations of a few megabytes come and go with every layer; given back to the system, each
    of their pages would have to be made anew.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def failure(slot: int | None, error: Exception) -> Failed:
    """Return an error as a message."""
    return Failed(slot, f"{type(error).__name__}: {error}", traceback.format_exc())
