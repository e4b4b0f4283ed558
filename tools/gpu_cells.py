"""Missing cells of docs/reproduction, many processes at once on one GPU, and their import.

    python tools/gpu_cells.py run --out OUT --work WORK --commit SHA [--jobs 8] [--deadline 570]
    python tools/gpu_cells.py import OUT/cells.jsonl     # into docs/reproduction, and the page

A cell that has ended is a line of OUT/cells.jsonl at once; OUT/log.txt says what began and ended,
with seconds, and OUT/done that nothing runs any more.  What the deadline stops goes on from WORK
with the same command.  A cell of FedNum has its baselines computed beside it, each in a process of
its own: DM and the coreset need nothing of the condensation, the others only its bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from fedquilt.common.storage import write_file  # noqa: E402
from fedquilt.config import CondenseConfig, plain_config  # noqa: E402
from fedquilt.record.folder import finite  # noqa: E402
from reproduction.baselines import run_baseline  # noqa: E402
from reproduction.cells import Cell, kept_cells, kept_path, run_cells  # noqa: E402
from reproduction.command import Wanted, reproduce  # noqa: E402
from reproduction.papers import PAPERS  # noqa: E402

KEPT = ROOT / "docs" / "reproduction"
PRECISION = {"heflwr": "float32", "fednum": "bf16"}
"""As the cells that are kept."""
LONGEST_FIRST = ("default", "full", "heterofl", "dropout", "fedrolex", "mfl", "fjord", "depthfl")
NO_BUDGET = ("dm", "coreset")
"""Baselines that the bytes of the condensation do not change."""


class Driver:
    """Runs cells, some at a time, and writes down each as it ends."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.began = given, time.monotonic()
        self.out, self.work = Path(given.out), Path(given.work)
        self.lock, self.children = threading.Lock(), set[subprocess.Popen[bytes]]()
        self.seconds: dict[str, float] = {}
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "done").unlink(missing_ok=True)

    def run(self) -> int:
        """Run what is missing until the deadline; return how many cells have not ended."""
        jobs = self.missing()
        self.say(f"{len(jobs)} cells, {self.given.jobs} at once")
        pool = ThreadPoolExecutor(self.given.jobs)
        futures = {pool.submit(self.timed, *job): job[1].name for job in jobs}
        try:
            for future in as_completed(futures, timeout=self.given.deadline):
                self.told(futures[future], future)
        except TimeoutError:
            self.say("deadline")
        left = [name for name in futures.values() if name not in self.seconds]
        for name, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            self.say(f"{seconds:8.1f} s  {name}")
        self.say(f"{len(left)} not ended: {' '.join(left)}")
        (self.out / "done").write_text(f"{len(left)}\n")
        for child in list(self.children):
            child.kill()
        return len(left)

    def missing(self) -> list[tuple[str, Cell]]:
        """Return the cells that are asked for and neither kept nor in OUT, longest first."""
        scale, found = self.given.scale, []
        for paper in self.given.papers.split(","):
            cells = [self.shortened(c) for c in PAPERS[paper].cells(scale, PAPERS[paper].parts)]
            kept = kept_cells(KEPT / paper / scale, cells).keys() | (
                kept_cells(self.work / "kept" / paper / scale, cells).keys()
            )
            found += [(paper, cell) for cell in cells if cell.name not in kept]
        wanted = self.given.only.split(",")
        found = [job for job in found if any(fnmatch.fnmatch(job[1].name, w) for w in wanted)]
        return sorted(found, key=lambda job: _rank(job[1]))

    def shortened(self, cell: Cell) -> Cell:
        """Return the cell as a trial of few rounds, where one is asked for."""
        if self.given.rounds is None:
            return cell
        short = dict.fromkeys(("num_rounds", "eval_every"), self.given.rounds)
        if cell.settings["method"] == "condense":
            short |= {"dc_iterations": 2, "model_epochs": 2}
        return dataclasses.replace(cell, settings={**cell.settings, **short})

    def timed(self, paper: str, cell: Cell) -> float:
        """Run a cell, write down its record, and return the seconds it took beside others."""
        began = time.monotonic()
        self.say(f"begins {cell.name}")
        folder = self.work / "kept" / paper / self.given.scale
        device = self.given.device
        precision = PRECISION[paper] if device == "cuda" else "float32"
        how = {"device": device, "engine": "auto", "precision": precision}
        if device == "cpu":
            how["engine"] = PAPERS[paper].cpu_engine
        record = self.with_baselines(cell, how) if cell.baselines else self.alone(cell, how)
        text = json.dumps(record, indent=1, allow_nan=False)
        write_file(kept_path(folder, cell), f"{text}\n".encode(), parents=True)
        name = f"{paper}/{self.given.scale}/{cell.name}.json"
        self.append("cells.jsonl", json.dumps({"path": name, "record": record}))
        return time.monotonic() - began

    def alone(self, cell: Cell, how: Mapping[str, Any]) -> dict[str, Any]:
        """Run a cell in a process of its own; return its record."""
        work, commit = self.work / "runs" / cell.name, self.given.commit
        kept = run_cells(self.work / "alone", [cell], work, how, commit=commit)
        return dict(kept[cell.name].record)

    def with_baselines(self, cell: Cell, how: Mapping[str, Any]) -> dict[str, Any]:
        """Run a condensation and what stands beside it at once; return the whole record."""
        with ThreadPoolExecutor(len(cell.baselines)) as pool:

            def begin(name: str, budget: int) -> Future[dict[str, Any]]:
                return pool.submit(self.row, name, cell, how, budget)

            rows = {name: begin(name, 0) for name in cell.baselines if name in NO_BUDGET}
            record = self.alone(dataclasses.replace(cell, baselines=()), how)
            budget = record["bytes_up"] + record["bytes_down"]
            rows |= {name: begin(name, budget) for name in cell.baselines if name not in rows}
            beside = {name: rows[name].result() for name in cell.baselines}
        return dict(finite({**record, "beside": beside}))

    def row(self, name: str, cell: Cell, how: Mapping[str, Any], budget: int) -> dict[str, Any]:
        """Return the row of a baseline, computed once in a process of its own."""
        path = self.work / "rows" / f"{cell.name}.{name}.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            job = {"config": {**cell.settings, "seed": cell.seed, **how}, "path": str(path)}
            began = time.monotonic()
            with open(f"{path}.log", "wb") as log:
                child = subprocess.Popen(
                    [sys.executable, __file__, "row", name, json.dumps({**job, "budget": budget})],
                    stdout=log,
                    stderr=log,
                )
            self.children.add(child)
            code = child.wait()
            self.children.discard(child)
            if code != 0:
                said = Path(f"{path}.log").read_text(errors="replace")[-800:]
                raise RuntimeError(f"{name} of {cell.name} ended with code {code}: {said}")
            self.say(f"row {name} of {cell.name}: {time.monotonic() - began:.0f} s")
        return dict(json.loads(path.read_text()))

    def told(self, name: str, future: Future[float]) -> None:
        """Write down how a cell ended."""
        error = future.exception()
        if error is None:
            self.seconds[name] = future.result()
            self.say(f"ended {name}: {self.seconds[name]:.0f} s")
        else:
            self.say(f"FAILED {name}: {type(error).__name__}: {error}")

    def say(self, line: str) -> None:
        """Write a line with the seconds since the beginning to the log and the screen."""
        said = f"{time.monotonic() - self.began:7.1f} {line}"
        print(said, flush=True)
        self.append("log.txt", said)

    def append(self, name: str, line: str) -> None:
        """Add a line to a file of OUT."""
        with self.lock, open(self.out / name, "a") as file:
            file.write(f"{line}\n")


def _rank(cell: Cell) -> tuple[int, str]:
    for place, word in enumerate(LONGEST_FIRST):
        if word in cell.name.split("-"):
            return place, cell.name
    return len(LONGEST_FIRST), cell.name


def compute_row(given: argparse.Namespace) -> int:
    """Compute the row of a baseline beside the condensation of a configuration."""
    from fedquilt.setup.build_task import build_task

    job = json.loads(given.job)
    config, problem = build_task(plain_config(job["config"]))
    assert isinstance(config, CondenseConfig)
    row = dataclasses.asdict(run_baseline(given.name, config, problem, job["budget"]))
    write_file(Path(job["path"]), json.dumps(finite(row), allow_nan=False).encode())
    return 0


def run(given: argparse.Namespace) -> int:
    """Run cells, on a GPU under CUDA's multi-process service where there is one."""
    if given.device == "cuda":
        print("multi-process service:", "on" if _service() else "off", flush=True)
    left = Driver(given).run()
    sys.stdout.flush()
    os._exit(min(left, 1))  # threads that wait for stopped cells end here, and with them those


def _service() -> bool:
    """Start CUDA's multi-process service; stop it again where a process finds no GPU through it."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or subprocess.run([control, "-d"], check=False).returncode != 0:
        return False
    trial = [sys.executable, "-c", "import torch; torch.ones(9, device='cuda').sum().item()"]
    try:
        if subprocess.run(trial, check=False, timeout=60).returncode == 0:
            return True
    except subprocess.TimeoutExpired:
        pass
    subprocess.run([control], input=b"quit -t 1\n", check=False)
    return False


def import_cells(given: argparse.Namespace) -> int:
    """Keep the cells of a file, those of the present tables alone, and render the page."""
    papers = set()
    for line in Path(given.file).read_text().splitlines():
        entry = json.loads(line)
        paper, scale, name = entry["path"].split("/")
        cells = {f"{c.name}.json": c for c in PAPERS[paper].cells(scale, PAPERS[paper].parts)}
        path = kept_path(KEPT / paper / scale, cells[name])
        before = path.read_bytes() if path.is_file() else None
        text = json.dumps(entry["record"], indent=1, allow_nan=False)
        write_file(path, f"{text}\n".encode(), parents=True)
        if not kept_cells(path.parent, [cells[name]]):
            path.unlink() if before is None else write_file(path, before)
            raise SystemExit(f"{entry['path']}: its configuration is not that of the table")
        papers.add((paper, scale))
        print(f"kept {entry['path']}: {entry['record']['accuracy']}")
    for paper, scale in sorted(papers):
        page = str(KEPT.with_suffix(".md"))
        reproduce(paper, Wanted(scale=scale, folder=str(KEPT), page=page, render=True))
    return 0


def main() -> int:
    """Read the options and do what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    def command(name: str, does: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=does.__doc__)
        made.set_defaults(does=does)
        return made

    runs = command("run", run)
    for option in ("--out", "--work"):
        runs.add_argument(option, required=True)
    runs.add_argument("--commit", help="Of the source, where there is no git to ask.")
    runs.add_argument("--jobs", type=int, default=8)
    runs.add_argument("--deadline", type=float, default=570.0, help="Seconds.")
    runs.add_argument("--papers", default="fednum,heflwr")
    runs.add_argument("--only", default="*", help="Patterns of names, by commas.")
    runs.add_argument("--scale", default="full")
    runs.add_argument("--device", default="cuda")
    runs.add_argument("--rounds", type=int, help="A trial of so many rounds, in no table.")
    row = command("row", compute_row)
    row.add_argument("name")
    row.add_argument("job")
    command("import", import_cells).add_argument("file")
    given = parser.parse_args()
    return int(given.does(given))


if __name__ == "__main__":
    sys.exit(main())
