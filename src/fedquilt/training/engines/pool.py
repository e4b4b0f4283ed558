"""Worker processes that train clients: their start, their memory, their messages, their end.

Samples, the global weights and the updates lie in memory that the processes share; only small
messages travel.  A worker is told nothing but jobs, and answers `Ready`, what it has done, or
`Failed`; it ends when its connection closes.

Workers come from a fork server where the system has one.  Forking this process
is not safe once torch has started threads, and a fresh interpreter for each
worker takes seconds to import torch; the server is a fresh interpreter that
imports torch once and forks the workers before it has used it.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError, StorageError, WorkerError
from fedquilt.training.hardware import keep_freed_memory
from fedquilt.training.task import LocalSettings, Task

_PRELOADED = "fedquilt.training.engines"
_PATIENCE_SECONDS = 5.0
_SAME_SIGNAL_SECONDS = 0.5
_SOCKETS = "fq-mp-"  # short: the name of a socket has room for 107 characters
_JUST_MADE_SECONDS = 60.0
_IMPORTABLE = (
    "worker processes import the main script again: define the model's class at the top "
    "level of a file, and start the work under `if __name__ == '__main__':`"
)


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
class WorkerInit:
    """What a worker gets when it starts; model, objective and settings as pickled bytes.

    The worker unpickles them itself, so that a failure becomes a message.  `inputs` and
    `targets` are `SharedTensor`s in the form of the task's trees.
    """

    pickled: SharedTensor
    inputs: Any
    targets: Any
    start: SharedTensor


class ClientJob(NamedTuple):
    """Clients to train and their samples; `slots` take their updates where they are given."""

    clients: list[int]
    samples: list[NDArray[np.int64]]
    round_index: int
    learning_rate: float
    slots: list[int]


class Ready(NamedTuple):
    """The worker has its model and its data."""


class Failed(NamedTuple):
    """Setting up, or training, raised an error: that of a client where it is known."""

    client: int | None
    error: str
    trace: str


Serve = Callable[[ClientJob, Connection], None]
MakeServe = Callable[["WorkerTask"], Serve]


class WorkerTask:
    """The worker's side of what it shares with its parent, opened on a device."""

    def __init__(self, init: WorkerInit, slots: torch.Tensor, device: str) -> None:
        model, objective, settings = pickle.loads(init.pickled.open().numpy().tobytes())
        self.device, self.slots = torch.device(device), slots
        self.model: nn.Module = model.to(self.device)
        self.settings: LocalSettings = settings
        inputs, targets = (
            trees.mapped(opened(part), lambda tensor: tensor.to(self.device))
            for part in (init.inputs, init.targets)
        )
        # A job brings its clients' samples; nobody else's are known here.
        self._held: dict[int, NDArray[np.int64]] = {}
        clients = cast("list[NDArray[np.int64]]", self._held)
        self.task = Task(inputs, targets, clients, objective=objective.to(self.device))
        self._start = init.start.open()

    def take(self, job: ClientJob) -> torch.Tensor:
        """Know the clients of a job; return the weights they start from."""
        self._held.clear()
        self._held.update(zip(job.clients, job.samples, strict=True))
        return self._start.to(self.device)


def _work(
    connection: Connection, init: WorkerInit, slots: SharedTensor, device: str, make: MakeServe
) -> None:
    """Train what comes over the connection until it closes."""
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    with contextlib.suppress(EOFError, OSError):
        try:
            serve = make(WorkerTask(init, slots.open(), device))
        except Exception as error:
            connection.send(failure(None, error))
            while True:  # the parent ends this process once it has read the failure
                connection.recv()
        connection.send(Ready())
        while True:
            serve(connection.recv(), connection)


def failure(client: int | None, error: Exception) -> Failed:
    """Return an error as a message."""
    trace = "".join(traceback.format_exception(error))
    return Failed(client, f"{type(error).__name__}: {error}", trace)


@dataclass(eq=False)
class WorkerProcess:
    """This side of a worker."""

    label: str
    process: BaseProcess
    connection: Connection
    slots: torch.Tensor
    in_hand: list[int] = field(default_factory=list)
    """The clients that it was given and has not trained yet."""
    ready: bool = False

    @property
    def name(self) -> str:
        """What it is called in errors."""
        return f"{self.label} (pid {self.process.pid or 0})"

    def send(self, message: object) -> None:
        """Send a job or an acknowledgement."""
        try:
            self.connection.send(message)
        except OSError:
            raise self._death() from None

    def receive(self) -> Any:
        """Return the next answer; raise what failed."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(message, Failed):
            raise self._failure(message)
        self.ready = True
        return message

    def _failure(self, message: Failed) -> WorkerError:
        if not self.ready:
            text = f"{self.name} could not set up the model: {message.error}; {_IMPORTABLE}"
        else:
            who = "" if message.client is None else f" client {message.client}"
            text = f"training{who} failed in {self.name}: {message.error}"
        error = WorkerError(text)
        error.add_note(f"In the worker:\n{message.trace}")
        return error

    def _death(self) -> WorkerError:
        self.process.join(_PATIENCE_SECONDS)
        code = self.process.exitcode
        how = "closed its connection" if code is None else f"ended with exit code {code}"
        if code == -signal.SIGTERM:
            time.sleep(_SAME_SIGNAL_SECONDS)  # one to the whole group stops this process, too
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        if not self.ready:
            hint = f"; {_IMPORTABLE}" if code == 1 else ""
            return WorkerError(f"{self.name} {how} before it was ready{hint}")
        clients = ", ".join(map(str, self.in_hand))
        return WorkerError(f"{self.name} {how} with work in hand (clients: {clients})")


W = TypeVar("W", bound=WorkerProcess)


class WorkerPool(Generic[W]):
    """Worker processes of an engine; they end with `close`, and when the pool is forgotten.

    Parameters
    ----------
    kind : type
        This side of a worker: `WorkerProcess`, or what an engine adds to it.
    engine : str
        What needs them, for errors.
    model, task, settings
        What clients train.  The model lies on the CPU.
    vector : torch.Tensor
        Weights like those that rounds start from.

    Raises
    ------
    InvalidValueError
        The model, the loss or the optimizer cannot be pickled.
    """

    def __init__(
        self,
        kind: type[W],
        engine: str,
        model: nn.Module,
        task: Task,
        settings: LocalSettings,
        vector: torch.Tensor,
    ) -> None:
        self._kind = kind
        pickled = _pickled(engine, model, task, settings)
        self._context = context = worker_context()
        self._init = WorkerInit(
            pickled=SharedTensor.copy_of(context, pickled),
            inputs=shared(context, task.inputs),
            targets=shared(context, task.targets),
            start=SharedTensor.copy_of(context, vector),
        )
        self.start = self._init.start.open()
        """The weights that the next jobs start from, as workers see them."""
        self.workers: list[W] = []
        self.close = weakref.finalize(self, end_workers, self.workers, os.getpid())
        """End the workers for good; doing so again does nothing."""

    def hire(self, label: str, slots: int, make: MakeServe, device: str = "cpu") -> W:
        """Start a worker with memory for so many updates."""
        start_fork_server(self._context)
        memory = SharedTensor(self._context, (slots, len(self.start)), self.start.dtype)
        here, there = self._context.Pipe()
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=_work,
            args=(there, self._init, memory, device, make),
            name=f"fedquilt {label}",
            daemon=True,
        )
        worker = self._kind(label, process, here, memory.open())
        self.workers.append(worker)
        process.start()
        there.close()
        return worker

    def end(self) -> None:
        """End the workers that run: what they still train must not reach the next round."""
        end_workers(self.workers, os.getpid())


def end_workers(workers: list[Any], owner: int) -> None:
    """End the processes of workers; a forked copy of the owner leaves them alone."""
    if os.getpid() != owner:
        return
    started = [worker for worker in workers if worker.process.pid is not None]
    for worker in started:
        worker.process.terminate()
    for worker in started:
        worker.process.join(_PATIENCE_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join(_PATIENCE_SECONDS)
        worker.connection.close()
    workers.clear()


def worker_context() -> BaseContext:
    """Return how workers start: from a fork server, or as fresh interpreters."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    return context


def start_fork_server(context: BaseContext) -> None:
    """Start the fork server deaf to Ctrl-C, which reaches the whole process group.

    It would print a traceback while it imports torch.  Blocked signals stay blocked in what
    is started; one for this process comes when it unblocks them.
    """
    if context.get_start_method() != "forkserver":
        return
    _have_socket_folder()
    resource_tracker.ensure_running()  # unblocks the signal by itself
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _have_socket_folder() -> None:
    """Let the fork server's socket lie in a folder that is removed: by this process or the next.

    The one that multiprocessing makes is left for ever by a process that is killed.  This one
    is locked as long as its process lives; whoever starts workers removes those that are not.
    """
    import fcntl  # where there are fork servers

    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:
        return
    for left in Path(tempfile.gettempdir()).glob(f"{_SOCKETS}*"):
        with contextlib.suppress(OSError), _opened(left) as handle:  # or it is somebody's
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(handle).st_mtime > _JUST_MADE_SECONDS:
                _remove_sockets(left)
    made = tempfile.mkdtemp(prefix=_SOCKETS)
    with contextlib.suppress(OSError):  # without locks only the end of the process removes it
        fcntl.flock(os.open(made, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    atexit.register(_remove_sockets, Path(made), os.getpid())
    config["tempdir"] = made


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield handle
    finally:
        os.close(handle)


def _remove_sockets(folder: Path, owner: int | None = None) -> None:
    """Remove a folder of sockets; one that holds anything else is not ours, and stays."""
    if owner in (None, os.getpid()):
        with contextlib.suppress(OSError):
            for path in folder.glob("listener-*"):
                path.unlink()
            folder.rmdir()


def _pickled(engine: str, model: nn.Module, task: Task, settings: LocalSettings) -> torch.Tensor:
    """Return model, objective and settings as bytes; raise for the part that cannot be."""
    named = {
        f"model={type(model).__qualname__}": model,
        "loss": task.objective,
        "optimizer": settings,
    }
    for name, part in named.items():
        try:
            pickle.dumps(part)
        except Exception as error:  # whatever an object's own pickling may raise
            raise InvalidValueError(
                f"{name} must be picklable for {engine}, which it is not: {error}; "
                "define it at the top level of a module"
            ) from error
    data = pickle.dumps((model, task.objective, settings))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


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
