"""Ways to do a benchmark's work: a plain loop, the engines, other frameworks.

A `Way` does one round at a time and keeps its own global model; federated averaging weighs
clients by their samples in all of them.
"""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from benchmarks.bench.work import ROUNDS_OF_A_RUN, Work
from fedquilt.common.errors import WorkerError
from fedquilt.training import FlatModel, choose_engine, evaluate, make_engine
from fedquilt.training.task import one_thread


class Way(Protocol):
    """One of those who take turns."""

    def round(self, index: int) -> float:
        """Do a round, return its seconds."""

    def accuracy(self) -> float:
        """Return the test accuracy of the model so far."""

    def close(self) -> None:
        """End processes."""


class EngineWay:
    """An engine of this package and a weighted mean; `auto` is what a run would take."""

    def __init__(self, name: str, work: Work) -> None:
        self._work = work
        self._flat = FlatModel(work.model, work.task.public().inputs)
        self.note = ""
        trainer = None
        if name == "auto":
            cohort = len(work.cohorts[0])
            choice = choose_engine(self._flat, work.task, work.settings, ROUNDS_OF_A_RUN, cohort)
            name, trainer = choice.engine, choice.trainer
            self.note = f"{choice.engine}: {choice.reason}"
        self._engine = make_engine(name, work.model, work.task, work.settings, trainer=trainer)
        self._weights = self._flat.read().clone()

    def round(self, index: int) -> float:
        """Do a round, return its seconds."""
        with one_thread(self._engine.is_small):  # as a run has it
            return self._timed(index)

    def _timed(self, index: int) -> float:
        began = time.perf_counter()
        work, total, count = self._work, torch.zeros_like(self._weights), 0
        updates = self._engine.train(self._weights, work.cohorts[index], index, work.learning_rate)
        for update in updates:
            total.add_(update.delta, alpha=update.num_examples)
            count += update.num_examples
        self._weights += total / count
        return time.perf_counter() - began

    def accuracy(self) -> float:
        """Return the test accuracy of the model so far."""
        self._flat.write(self._weights)
        return evaluate(self._flat.module, *self._work.test)[0]

    def close(self) -> None:
        """End processes."""
        self._engine.close()


class PlainLoop:
    """What one would write first: torch's SGD on one client after the other, in processes."""

    def __init__(self, work: Work, file: Path, processes: int) -> None:
        self._work, self._processes = work, processes
        self._module = copy.deepcopy(work.model)
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            context = get_context("forkserver")
            self._pool = ProcessPoolExecutor(processes, context, _begin, (str(file),))
        else:
            self._data = (work.task.inputs, work.task.targets)

    def round(self, index: int) -> float:
        """Do a round, return its seconds."""
        began = time.perf_counter()
        work = self._work
        state = self._module.state_dict()
        cohort = [int(client) for client in work.cohorts[index]]
        how = (work.settings.epochs, work.settings.batch_size, work.learning_rate)
        if self._pool is None:
            parts = [(client, work.task.clients[client]) for client in cohort]
            sums = [_plain(self._module, state, parts, *self._data, how)]
        else:
            sizes = [len(work.task.clients[client]) for client in cohort]
            dealt = deal(cohort, sizes, self._processes)
            jobs = [
                self._pool.submit(_job, state, [(c, work.task.clients[c]) for c in part], how)
                for part in dealt
            ]
            sums = [job.result() for job in jobs]
        count = sum(number for _, number in sums)
        mean = {name: sum(total[name] for total, _ in sums) / count for name in state}
        self._module.load_state_dict(mean)
        return time.perf_counter() - began

    def accuracy(self) -> float:
        """Return the test accuracy of the model so far."""
        return evaluate(self._module, *self._work.test)[0]

    def close(self) -> None:
        """End processes."""
        if self._pool is not None:
            self._pool.shutdown()


State = dict[str, torch.Tensor]
Parts = list[tuple[int, NDArray[np.int64]]]
_held: dict[str, Any] = {}  # of a process of the plain loop


def _begin(file: str) -> None:
    torch.set_num_threads(1)
    _held.update(torch.load(file, weights_only=False, mmap=True))


def _job(state: State, parts: Parts, how: tuple[int, int, float]) -> tuple[State, int]:
    from benchmarks.bench.work import WORKS
    from fedquilt.models import make_model

    if "module" not in _held:
        shape = tuple(_held["inputs"].shape[1:])
        _held["module"] = make_model(WORKS[_held["name"]].model, shape, 10, 0)
    return _plain(_held["module"], state, parts, _held["inputs"], _held["targets"], how)


def _plain(
    module: torch.nn.Module,
    start: State,
    parts: Parts,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    how: tuple[int, int, float],
) -> tuple[State, int]:
    """Return the sum of the clients' weights, times their samples, and how many those are."""
    epochs, batch_size, learning_rate = how
    begin = {name: tensor.clone() for name, tensor in start.items()}
    total = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    count = 0
    module.train()
    for _, samples in parts:
        module.load_state_dict(begin)
        optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate)
        index = torch.as_tensor(samples)
        x, y = inputs[index], targets[index]
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(index)), batch_size):
                optimizer.zero_grad()
                functional.cross_entropy(module(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        for name, tensor in module.state_dict().items():
            total[name] += tensor * len(index)
        count += len(index)
    return total, count


class PeerWay:
    """Another framework, in a process and an environment of its own (`benchmarks/peers`)."""

    def __init__(self, python: Path, script: Path, work: Path, options: list[str]) -> None:
        self._log = work.with_name(f"{work.stem}-{script.stem}-{'-'.join(options)}.log")
        self._errors = self._log.open("w")
        self._name = script.stem
        self._process = subprocess.Popen(
            [str(python), str(script.resolve()), str(work), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=script.parent,
        )

    def round(self, index: int) -> float:
        """Do a round, return its seconds."""
        return float(self._ask("go")["seconds"])

    def accuracy(self) -> float:
        """Return the test accuracy of the model so far."""
        return float(self._ask("end")["accuracy"])

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the answer that is missing says so
        for answer in self._answers():
            return answer
        said = self._log.read_text(errors="replace").strip().splitlines()
        raise WorkerError(f"{self._name} ended: {said[-1] if said else 'it said nothing'}")

    def _answers(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if text.startswith("@@ "):
                yield json.loads(text[3:])

    def close(self) -> None:
        """End processes."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def python_of(environment: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    inner = ("Scripts", "python.exe") if sys.platform == "win32" else ("bin", "python")
    return environment.joinpath(*inner)


def deal(clients: Sequence[int], sizes: Sequence[int], hands: int) -> list[list[int]]:
    """Deal clients to hands, the largest first, each to the hand that has least.

    `sizes[i]` is that of `clients[i]`.

    >>> deal([7, 3, 2, 9], [5, 9, 1, 4], 2)
    [[3], [7, 9, 2]]
    """
    dealt: list[list[int]] = [[] for _ in range(hands)]
    loads = [0] * hands
    for place in sorted(range(len(clients)), key=lambda place: -sizes[place]):
        hand = loads.index(min(loads))
        dealt[hand].append(clients[place])
        loads[hand] += sizes[place]
    return dealt
