"""All CPU cores: each worker process trains whole clients, one thread a worker.

The data, the global weights and the updates lie in memory that the processes
share; only small messages travel.  Which worker trains a client changes
nothing, because everything random is seeded per client.

Workers come from a fork server where the system has one.  Forking this process
is not safe once torch has started threads, and a fresh interpreter for each
worker takes seconds to import torch; the server is a fresh interpreter that
imports torch once and forks the workers before it has used it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common import checks, trees
from fedquilt.common.errors import InvalidValueError, NotReadyError, WorkerError
from fedquilt.training.engines.pool import (
    Done,
    Failed,
    Job,
    Ready,
    Setting,
    SharedTensor,
    shared,
    work,
)
from fedquilt.training.flat import FlatModel
from fedquilt.training.hardware import one_thread, usable_cores
from fedquilt.training.task import ClientUpdate, LocalSettings, Task
from fedquilt.training.trainers.autograd import find_draws, refuse_hidden_state
from fedquilt.training.trainers.manual import hand_training

# One job in training and one waiting, so that a worker need not wait for the next.
_JOBS = 2
_PATIENCE_SECONDS = 5.0
_SAME_SIGNAL_SECONDS = 0.5
_SOCKETS = "fq-mp-"  # short: the name of a socket has room for 107 characters
_JUST_MADE_SECONDS = 60.0
_IMPORTABLE = (
    "worker processes import the main script again: define the model's class at the top "
    "level of a file, and start the work under `if __name__ == '__main__':`"
)


class ProcessEngine:
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

    Raises
    ------
    InvalidValueError
        Model or data are not on the CPU, or the model cannot be pickled.
    WorkerError
        While training: a worker died or raised an error; the message names it.
    """

    def __init__(
        self, model: nn.Module, task: Task, settings: LocalSettings, workers: int | None = None
    ) -> None:
        _check_on_cpu(model, task)
        limit = usable_cores() if workers is None else workers
        self._limit = checks.integer("workers", limit, at_least=1)
        self.task = task
        self.settings = settings
        pickled = _pickled(model, task, settings)
        public = task.public()
        flat = FlatModel(model, public.inputs)
        draws = find_draws(flat, public)
        refuse_hidden_state(flat, public, settings, draws)
        training = hand_training(flat, task, settings, draws)
        self.by_hand = training is not None
        self.is_small = training is not None and training.is_small
        self._together = 1 if training is None else training.together
        self._context = worker_context()
        self._setting = Setting(
            pickled=SharedTensor.copy_of(self._context, pickled),
            inputs=shared(self._context, task.inputs),
            targets=shared(self._context, task.targets),
            start=SharedTensor.copy_of(self._context, flat.vector),
        )
        self._start = self._setting.start.open()
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, end_workers, self._workers, os.getpid())
        self._training = False

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers that run now."""
        return [worker.pid for worker in self._workers]

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the cohort, in its order."""
        if not self._finalizer.alive:
            raise NotReadyError("engine='processes' is closed: make a new one to train on")
        if self._training:
            raise NotReadyError("engine='processes' trains one round at a time: finish the last")
        clients = [int(client) for client in cohort]
        self._training = True
        try:
            # The workers have the cores: a second thread here would wait for work on one of them.
            with one_thread():
                self._start.copy_(start.detach())
                self._hire(min(self._limit, len(clients)))
                yield from self._train_all(clients, round_index, learning_rate)
        except BaseException:
            # Jobs are still under way; their results must not reach the next round.
            end_workers(self._workers, os.getpid())
            raise
        finally:
            self._training = False

    def _train_all(
        self, clients: list[int], round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        waiting = self._jobs(clients)
        finished: dict[int, ClientUpdate] = {}

        def hand_out() -> None:
            while waiting and self._workers:
                worker = min(self._workers, key=lambda worker: worker.load)
                if worker.jobs == _JOBS:
                    return
                given = [self._given(place, clients[place]) for place in waiting.popleft()]
                worker.send(given, round_index, learning_rate)

        for place in range(len(clients)):
            if waiting:  # nobody shall be idle while updates are used here
                self._collect(finished, timeout=0)
                hand_out()
            while place not in finished:
                self._collect(finished, timeout=None)
                hand_out()
            yield finished.pop(place)

    def _jobs(self, clients: list[int]) -> deque[list[int]]:
        """Return the places of clients that train together, the largest clients first.

        As many as may train together, but for the last job of every worker: those share the
        rest, so that all end at about the same time.
        """
        if not clients:
            return deque()
        sizes = [len(self.task.clients[client]) for client in clients]
        places = sorted(range(len(clients)), key=lambda place: -sizes[place])
        workers, most = len(self._workers), self._together
        turns = -(-len(places) // (workers * most))
        first = (turns - 1) * workers * most
        share = -(-(len(places) - first) // workers)
        return deque(
            [places[at : at + most] for at in range(0, first, most)]
            + [places[at : at + share] for at in range(first, len(places), share)]
        )

    def _given(self, place: int, client: int) -> _Given:
        return _Given(place, client, np.asarray(self.task.clients[client], dtype=np.int64))

    def _collect(self, finished: dict[int, ClientUpdate], timeout: float | None) -> None:
        """Take in what the workers have sent; wait for something if `timeout` is None."""
        busy = [worker for worker in self._workers if worker.given]
        if not busy and timeout is None:
            raise NotReadyError("engine='processes' was closed in the middle of a round")
        ready = wait([worker.connection for worker in busy], timeout)
        for worker in busy:
            if worker.connection in ready:
                finished |= worker.receive()

    def _hire(self, count: int) -> None:
        """Start workers until there are `count`."""
        if len(self._workers) < count:
            start_fork_server(self._context)
        for number in range(len(self._workers), count):
            shape = (_JOBS * self._together, len(self._start))
            slots = SharedTensor(self._context, shape, self._start.dtype)
            here, there = self._context.Pipe()
            process = _process(self._context, number, there, self._setting, slots)
            self._workers.append(_Worker(number, process, here, slots.open()))
            process.start()
            there.close()

    def close(self) -> None:
        """End the workers; doing so again does nothing."""
        self._finalizer()


class _Given(NamedTuple):
    """What a worker trains: a client, its place in the cohort and its samples."""

    place: int
    client: int
    samples: NDArray[np.int64]


@dataclass(eq=False)
class _Worker:
    """This side of a worker process: what it was given and where its updates lie."""

    number: int
    process: BaseProcess
    connection: Connection
    slots: torch.Tensor
    jobs: int = 0
    load: int = 0
    given: dict[int, _Given] = field(default_factory=dict)
    """The clients in hand, by slot; they and their samples make the `load`."""
    ready: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    @property
    def name(self) -> str:
        return f"worker process {self.number} (pid {self.pid})"

    def send(self, given: list[_Given], round_index: int, learning_rate: float) -> None:
        """Give the worker clients to train."""
        free = [slot for slot in range(len(self.slots)) if slot not in self.given]
        slots = tuple(free[: len(given)])
        self.given |= zip(slots, given, strict=True)
        self.jobs += 1
        self.load += sum(1 + len(client.samples) for client in given)
        clients = tuple(client.client for client in given)
        samples = tuple(client.samples for client in given)
        try:
            self.connection.send(Job(slots, clients, samples, round_index, learning_rate))
        except OSError:
            raise self._death() from None

    def receive(self) -> dict[int, ClientUpdate]:
        """Return the finished clients by their places in the cohort, if that is the message."""
        try:
            message: Ready | Done | Failed = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(message, Failed):
            raise self._failure(message)
        self.ready = True
        if isinstance(message, Ready):
            return {}
        self.jobs -= 1
        updates = {}
        for slot, loss in zip(message.slots, message.losses, strict=True):
            place, client, samples = self.given.pop(slot)
            self.load -= 1 + len(samples)
            delta = self.slots[slot].clone()
            updates[place] = ClientUpdate(client, delta, len(samples), loss)
        return updates

    def _failure(self, message: Failed) -> WorkerError:
        if message.slot is None:
            text = f"{self.name} could not set up the model: {message.error}; {_IMPORTABLE}"
        else:
            client = self.given[message.slot].client
            text = f"training client {client} failed in {self.name}: {message.error}"
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
        clients = ", ".join(str(given.client) for given in self.given.values())
        return WorkerError(f"{self.name} {how} with work in hand (clients: {clients})")


def end_workers(workers: list[Any], owner: int) -> None:
    """End the processes of workers, which have a `process` and a `connection`.

    A forked copy of the owner leaves them alone.
    """
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
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
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


def _process(
    context: BaseContext, number: int, there: Connection, setting: Setting, slots: SharedTensor
) -> BaseProcess:
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=work, args=(there, setting, slots), name=f"fedquilt-worker-{number}", daemon=True
    )
    return process


def _check_on_cpu(model: nn.Module, task: Task) -> None:
    samples = [*trees.leaves(task.inputs), *trees.leaves(task.targets)]
    tensors = [*samples, *model.parameters(), *model.buffers()]
    elsewhere = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    if elsewhere is not None:
        raise InvalidValueError(
            f"engine='processes' needs model and data on the CPU, got {elsewhere}; "
            "use engine='batched'"
        )


def _pickled(model: nn.Module, task: Task, settings: LocalSettings) -> torch.Tensor:
    """Return model, objective and settings as bytes; raise for the part that cannot be."""
    named = {
        f"model={type(model).__qualname__}": model,
        "loss": task.objective,
        "optimizer": settings,
    }
    for name, part in named.items():
        try:
            pickle.dumps(part)
        except Exception as error:
            raise InvalidValueError(
                f"{name} must be picklable for engine='processes', which it is not: {error}; "
                "define it at the top level of a module"
            ) from error
    data = pickle.dumps((model, task.objective, settings))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
