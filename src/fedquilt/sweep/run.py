"""Running the points of a sweep, several at a time, each in a process with one thread."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt.common import checks
from fedquilt.common.child import ChildProcess
from fedquilt.common.errors import FedquiltError, InvalidValueError, RunFolderError
from fedquilt.common.storage import lock_file, storage_errors
from fedquilt.privacy.ledger import Ledger
from fedquilt.privacy.ledger.entries import epsilon_spent
from fedquilt.record.folder import RunFolder
from fedquilt.sweep.plan import Plan, Point, begun_runs
from fedquilt.sweep.table import FAILED, REFUSED, WAITING, Table

Progress = Callable[[int, int], None]
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MOST_WORDS = 500
_NOT_DONE = (WAITING, REFUSED, FAILED)


def run_sweep(
    folder: Path,
    plan: Plan | None = None,
    *,
    jobs: int = 1,
    tracker: str = "none",
    progress: Progress | None = None,
    only: Collection[int] | None = None,
    ledger: str | None = None,
) -> Table:
    """Run what is left of a sweep; with a plan, begin it.

    A point whose configuration is refused before its run begins stays refused; one that fails
    for any other reason (a full disk, a busy ledger, a dead process) runs again next time.

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
        Called with the number of points that have ended and of all, first before any runs.
    only
        Numbers of the points that run now; the others go on waiting.
    ledger
        Without a plan: the ledger that the sweep's runs may be charged to, several joined by
        commas.  What a folder says is not enough, because it may be a stranger's.
    """
    checks.integer("jobs", jobs, at_least=1)
    if plan is None:
        Plan.read(folder)  # what is none is left as it is
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            held = lock_file(folder / ".lock")
        except BlockingIOError as error:
            raise RunFolderError(f"sweep {str(folder)!r} is running in another process") from error
    with held:
        is_new = plan is not None
        if plan is not None:
            _check_new(folder, plan)
            plan.write(folder)
        plan = Plan.read(folder)
        table = Table(folder, plan)
        table.prepare()
        left = [point for point in _left(table, folder) if only is None or point.number in only]
        if not is_new:
            _check_word(plan.ledgers(left), ledger)
        # On a ledger who comes first finds more left: one after the other, in their order.
        count = 1 if plan.ledgers(plan.points) else jobs
        _run_all(folder, table, left, [_Worker(tracker) for _ in range(count)], progress)
        table.measure({p.number: _released(folder, p) for p in table.points(_NOT_DONE)})
        return table


def _check_new(folder: Path, plan: Plan) -> None:
    if (folder / "sweep.json").exists() and Plan.read(folder) != plan:
        raise RunFolderError(
            f"sweep {str(folder)!r} holds another sweep: resume it, or take a new folder"
        )


def _check_word(named: list[str], word: str | None) -> None:
    """Refuse to charge ledgers that only the sweep's folder names."""
    given = set() if word is None else set(map(_place, (word, *word.split(","))))
    if not set(map(_place, named)) <= given - {None}:
        raise InvalidValueError(
            f"ledger={word!r} must be {','.join(named)!r}, which the runs of this sweep are "
            "charged to: say it again when a sweep is resumed (--ledger), because its folder may "
            "have been changed since"
        )


def _place(path: str) -> Path | None:
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # no path at all
        return None


def _left(table: Table, folder: Path) -> list[Point]:
    """Return the points that are still to run; results that are there are taken."""
    begun = [p for p in table.points((REFUSED,)) if begun_runs(folder / p.name)]
    for point in begun:  # so an older fedquilt wrote down whatever stopped a run
        table.lose(point, "")
    return [p for p in table.points((WAITING, FAILED)) if not _take(table, folder, p)]


def _run_all(
    folder: Path, table: Table, left: list[Point], workers: list[_Worker], progress: Progress | None
) -> None:
    plan = table.plan
    waiting: queue.SimpleQueue[Point] = queue.SimpleQueue()
    for point in left:
        waiting.put(point)
    total, lock, ended = len(plan.points), threading.Lock(), [len(plan.points) - len(left)]
    workers = workers[: len(left)]
    if progress is not None:
        progress(ended[0], total)
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
        table.lose(point, said.failed or "it ended without a result")


def _take(table: Table, folder: Path, point: Point) -> bool:
    """Take a point's result into the table; tell whether there is one."""
    run = finished_run(folder, point)
    result = None if run is None else run.read_result()
    if result is None:
        return False
    table.finish(point, result)
    return True


def finished_run(folder: Path, point: Point) -> RunFolder | None:
    """Return the run of a sweep's point when it has ended."""
    for path in begun_runs(folder / point.name):
        run = RunFolder.open(path)
        if run.read_result() is not None:
            return run
    return None


def _released(folder: Path, point: Point) -> dict[str, Any]:
    """Return what a point that has not ended has given away, by its own files.

    A run with a ledger of its own has spent what that ledger says, which is written before
    anything is released; any other is bounded by nothing as soon as it has a round.  So is what
    cannot be read.
    """
    runs = [_released_by(path) for path in begun_runs(folder / point.name)]
    runs = [run for run in runs if run["claimed_epsilon"]]
    if len(runs) > 1:  # made by hand
        runs[0]["claimed_epsilon"] = math.inf
    return runs[0] if runs else dict.fromkeys(_SPENT)


def _released_by(path: Path) -> dict[str, Any]:
    """Return what an unfinished run has given away; an epsilon of 0 where it is nothing."""
    rounds, epsilon, delta, charged = 0, math.inf, 0.0, 0
    with contextlib.suppress(FedquiltError):
        run = RunFolder.open(path)
        config, account = run.read_config(), run.read_account()
        delta, charged = config.delta, int(config.ledger is not None)
        rounds = len(run.peek_rounds())
        if account is not None and not charged:
            epsilon = _spent(path / "ledger.sqlite")
        elif not run.has_released():
            epsilon = 0.0
    return dict(zip(_SPENT, (rounds, epsilon, delta, charged), strict=True))


_SPENT = ("rounds", "claimed_epsilon", "claimed_delta", "charged")


def _spent(path: Path) -> float:
    """Return the largest epsilon that anybody has given away by a ledger."""
    with Ledger.open(path, read_only=True) as ledger:
        spent = [epsilon_spent(p.spent(), p.info.delta).max() for p in ledger.populations()]
    return float(max(spent, default=0.0))


@dataclass(frozen=True)
class _Answer:
    """What a worker says of a point: nothing, why it was refused, or why it failed."""

    refused: str | None = None
    failed: str | None = None


class _Worker:
    """A process that runs points for this one, and ends with it."""

    def __init__(self, tracker: str = "none") -> None:
        self._tracker = tracker
        self._child: ChildProcess | None = None

    def close(self) -> None:
        """End the process, also in the middle of a point."""
        child = self._child  # whose thread lets go of it as soon as it has ended
        if child is not None:
            with contextlib.suppress(OSError):
                child.pipe.send(None)
            child.process.wait(timeout=30)
            child.close()

    def run(self, plan: Plan, point: Point, folder: Path) -> _Answer:
        """Run a point and return what became of it."""
        try:
            config = plan.config(point, folder).as_dict()
        except InvalidValueError as error:  # a plan that was written by hand
            return _Answer(refused=str(error))
        if self._child is None:
            self._child = ChildProcess("fedquilt.sweep.worker", dict.fromkeys(_THREADS, "1"))
        child = self._child
        job = {"config": config, "place": str(folder / point.name), "tracker": self._tracker}
        try:
            child.pipe.send(job)
            return _Answer(**child.pipe.recv())
        except (OSError, EOFError):  # it has died, or was ended by who stops the sweep
            code, said = child.process.wait(), child.last_words().split("\n")[-1].strip()
            child.close()
            self._child = None
            words = f": {said[:_MOST_WORDS]}" if said else ""
            return _Answer(failed=f"its process ended with code {code}{words}")
