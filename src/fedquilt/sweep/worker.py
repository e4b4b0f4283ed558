"""A process that runs points one after the other, told by lines of JSON, one thread of its own.

It ends with whoever started it: when its input closes, also in the middle of a point.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

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
    """Take points from standard input until it closes."""
    jobs: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    while True:
        line = jobs.get()
        if not line:
            return
        job = json.loads(line)
        answer: dict[str, str | None] = {"refused": None, "failed": None}
        place = Path(job["place"])
        try:
            run_point(job["config"], place, job["tracker"])
        except FedquiltError as error:
            # A run that was begun has failed, whatever stopped it: it may have released rounds.
            refused = isinstance(error, _REFUSALS) and not begun_runs(place)
            answer["refused" if refused else "failed"] = str(error)
        jobs.task_done()  # before whoever waits for the answer closes the input
        print(json.dumps(answer), flush=True)


def _read(jobs: queue.Queue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    if jobs.unfinished_tasks:
        os._exit(0)  # in the middle of a point
    jobs.put("")


if __name__ == "__main__":
    main()
