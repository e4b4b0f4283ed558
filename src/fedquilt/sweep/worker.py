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

from fedquilt.common.errors import FedquiltError


def run_point(config: dict[str, Any], place: Path, tracker: str = "none") -> None:
    """Run a point, or go on with what an earlier process left of it."""
    from fedquilt.config import plain_config
    from fedquilt.experiment import resume_run, run_config

    begun = sorted(path.parent for path in place.glob("*/config.toml"))
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
        job = json.loads(jobs.get())
        answer: dict[str, Any] = {"refused": None}
        try:
            run_point(job["config"], Path(job["place"]), job["tracker"])
        except FedquiltError as error:
            answer["refused"] = str(error)
        print(json.dumps(answer), flush=True)


def _read(jobs: queue.Queue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
