"""A process that runs points one after the other, told through a pipe, one thread of its own.

It ends with whoever started it: when the pipe closes, also in the middle of a point.  Standard
output and input are no part of the protocol: a model or a library may print what it likes.
"""

from __future__ import annotations

import os
import queue
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedquilt.common.child import pipe_to_parent
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.privacy.ledger import BudgetExceededError, LedgerConflictError
from fedquilt.sweep.plan import begun_runs

_REFUSALS = (InvalidValueError, BudgetExceededError, LedgerConflictError)
"""What is said of a configuration, or by a ledger about it, and said again if it runs again."""


def run_point(config: dict[str, Any], place: Path, tracker: str = "none") -> None:
    """Run a point, or go on with what an earlier process left."""
    from fedquilt.config import plain_config
    from fedquilt.experiment.api import resume_run, run_config

    begun = begun_runs(place)
    if begun:
        resume_run(begun[0], tracker=tracker)
    else:
        run_config(plain_config(config), tracker=tracker)


def main() -> None:
    """Take points from the pipe whose number is the only argument, until it closes."""
    pipe = pipe_to_parent()
    jobs: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(pipe, jobs), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    while (job := jobs.get()) is not None:
        answer: dict[str, str | None] = {"refused": None, "failed": None}
        place = Path(job["place"])
        try:
            run_point(job["config"], place, job["tracker"])
        except FedquiltError as error:
            # A run that was begun has failed, whatever stopped it: it may have released rounds.
            refused = isinstance(error, _REFUSALS) and not begun_runs(place)
            answer["refused" if refused else "failed"] = str(error)
        jobs.task_done()  # before whoever waits for the answer closes the pipe
        pipe.send(answer)


def _read(pipe: Connection, jobs: queue.Queue[dict[str, Any] | None]) -> None:
    job: dict[str, Any] | None = {}
    while job is not None:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            job = None
        if job is None and jobs.unfinished_tasks:
            os._exit(0)  # in the middle of a point
        jobs.put(job)


if __name__ == "__main__":
    main()
