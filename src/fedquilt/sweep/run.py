"""Running the points of a sweep, several at a time, each in a process with one thread."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedquilt.common import checks
from fedquilt.common.errors import RunFolderError
from fedquilt.common.storage import lock_file, storage_errors
from fedquilt.run_folder import RunFolder
from fedquilt.sweep.plan import Plan, Point
from fedquilt.sweep.table import Table

Progress = Callable[[int, int], None]
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MOST_WORDS = 500


def run_sweep(
    folder: Path,
    plan: Plan | None = None,
    *,
    jobs: int = 1,
    tracker: str = "none",
    progress: Progress | None = None,
    only: Collection[int] | None = None,
) -> Table:
    """Run what is left of a sweep; with a plan, begin it.

    Parameters
    ----------
    folder
        Of the sweep.  With a plan it must be new or hold no other sweep.
    jobs
        Points that run at the same time.  Points on a ledger run one after the other, in
        their order: who comes first finds more left.
    tracker
        Trackers that every run also logs to, joined by commas.
    progress
        Called with the number of points that have ended and of all.
    only
        Numbers of the points that run now; the others go on waiting.
    """
    checks.integer("jobs", jobs, at_least=1)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = lock_file(folder / ".lock")
        except BlockingIOError as error:
            raise RunFolderError(f"sweep {str(folder)!r} is running in another process") from error
    with held:
        if plan is not None:
            _check_new(folder, plan)
            plan.write(folder)
        plan = Plan.read(folder)
        table = Table(folder, plan)
        table.prepare()
        workers = [_Worker(tracker) for _ in range(1 if _on_ledger(plan) else jobs)]
        _run_all(folder, plan, table, workers, progress, only)
        return table


def _check_new(folder: Path, plan: Plan) -> None:
    if (folder / "sweep.json").exists() and Plan.read(folder) != plan:
        raise RunFolderError(
            f"sweep {str(folder)!r} holds another sweep: resume it, or take a new folder"
        )


def _on_ledger(plan: Plan) -> bool:
    return "ledger" in plan.axes or plan.base.get("ledger") is not None


def _run_all(
    folder: Path,
    plan: Plan,
    table: Table,
    workers: list[_Worker],
    progress: Progress | None,
    only: Collection[int] | None = None,
) -> None:
    left = [point for point in table.waiting() if not _take(table, folder, point)]
    left = [point for point in left if only is None or point.number in only]
    waiting: queue.SimpleQueue[Point] = queue.SimpleQueue()
    for point in left:
        waiting.put(point)
    total, lock, ended = len(plan.points), threading.Lock(), [len(plan.points) - len(left)]
    workers = workers[: len(left)]
    stopped = threading.Event()

    def work(worker: _Worker) -> None:
        while not stopped.is_set():
            try:
                point = waiting.get_nowait()
            except queue.Empty:
                return
            said = worker.run(plan, point, folder)
            with lock:
                if stopped.is_set():
                    return
                _note(table, folder, point, said)
                ended[0] += 1
                if progress is not None:
                    progress(ended[0], total)

    with ThreadPoolExecutor(max(1, len(workers))) as pool:
        futures = [pool.submit(work, worker) for worker in workers]
        try:
            for future in futures:
                future.result()
        finally:
            stopped.set()
            for worker in workers:
                worker.close()


def _note(table: Table, folder: Path, point: Point, said: _Answer) -> None:
    """Write down how a point ended."""
    if _take(table, folder, point):
        return
    if said.refused is not None:
        table.refuse(point, said.refused)
    else:
        table.lose(point, said.died or "it ended without a result")


def _take(table: Table, folder: Path, point: Point) -> bool:
    """Take a point's result into the table; tell whether there is one."""
    run = finished_run(folder, point)
    result = None if run is None else run.read_result()
    if result is None:
        return False
    table.finish(point, result)
    return True


def finished_run(folder: Path, point: Point) -> RunFolder | None:
    """Return the run of a sweep's point when it, and what stands beside it, has ended."""
    for path in sorted((folder / point.name).glob("*/config.toml")):
        run = RunFolder.open(path.parent)
        ended = run.read_result() is not None
        if ended and set(point.baselines) <= set(run.read_baselines() if point.baselines else ()):
            return run
    return None


@dataclass(frozen=True)
class _Answer:
    """What a worker says of a point: nothing, why it was refused, or that the worker died."""

    refused: str | None = None
    died: str | None = None


class _Worker:
    """A process that runs points for this one, and ends with it."""

    def __init__(self, tracker: str = "none") -> None:
        self._tracker = tracker
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None

    def close(self) -> None:
        """End the process, also in the middle of a point."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait(timeout=30)
        if self._errors is not None:
            self._errors.close()

    def run(self, plan: Plan, point: Point, folder: Path) -> _Answer:
        """Run a point and return what became of it."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        config = plan.config(point, folder).as_dict()
        job = {
            "config": config,
            "place": str(folder / point.name),
            "tracker": self._tracker,
            "baselines": point.baselines,
        }
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # the pipe is broken, or closed by who stops the sweep
            line = ""
        if not line:
            code, self._process = process.wait(), None
            return _Answer(died=f"its process ended with code {code}{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return _Answer(refused=answer["refused"])

    def _last_words(self) -> str:
        """Return the last line that the process wrote to its error stream."""
        text = b""
        with contextlib.suppress(ValueError):  # closed by who stops the sweep
            if self._errors is not None:
                self._errors.seek(0)
                text = self._errors.read()
        said = [line.strip() for line in text.decode(errors="replace").split("\n") if line.strip()]
        return f": {said[-1][:_MOST_WORDS]}" if said else ""

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            if self._errors is not None:
                self._errors.close()
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fedquilt.sweep.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,  # Ctrl-C is for the sweep, which ends its workers
                env={**os.environ, **dict.fromkeys(_THREADS, "1")},
            )
        return self._process
