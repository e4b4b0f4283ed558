"""The figures of scale, from one command.

    python benchmarks/scale.py [--quick] [--folder FOLDER]

1. Populations of 10,000, 100,000 and a million clients with natural sizes: what a round costs
   beside its training, from selection to checkpoint (whole rounds of `Experiment` on a tiny
   model, a hundred clients each, a checkpoint after every one), limit 50 ms.  `certified` has a
   ledger; in the rows `paid before` every client has spent before, another amount each, which is
   the longest that a round's quantiles of epsilon take.
2. A cohort of 10,000 small clients: the highest memory of a round of 1,000 and of 10,000, which
   must be the same but for the cohort's own numbers.
3. A model of 50 million parameters with 10 clients: 3 models and one update (`memory.py`).

Milliseconds are wall time, once with the run's files in memory (/dev/shm, where there is one)
and once on the disk of `--folder` (the system's folder for temporary files), where a certified
round waits for it a dozen times, however many clients there are: the time of one such wait is
said above the table.  Processor time stands beside them, because a busy machine shows in wall
time only.  `--quick` takes a tenth of everything.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

COHORT, ROUNDS, SKIPPED = 100, 23, 3
LIMIT_MS, LIMIT_MB, LIMIT_MODELS = 50, 20, 4.25
MODES = ("fedavg", "certified", "certified, paid before")


def peak_bytes() -> int:
    """Return the most memory the process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def natural_parts(clients: int) -> tuple[list[Any], int]:
    """Return index lists of one to three samples, most of one, and how many samples there are."""
    sizes = np.random.default_rng(0).zipf(2.0, clients).clip(1, 3)
    ends = np.cumsum(sizes)
    return np.split(np.arange(ends[-1]), ends[:-1]), int(ends[-1])


class Clock:
    """Wall and processor seconds of rounds, less those of training."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, float]] = []
        self._began = self.now()
        self._trained = (0.0, 0.0)

    @staticmethod
    def now() -> tuple[float, float]:
        """Return wall and processor time."""
        return time.perf_counter(), time.process_time()

    def train(self, engine: Any, given: tuple[Any, ...]) -> list[Any]:
        """Train a cohort beside the clock."""
        began = self.now()
        updates = list(engine.train(*given))
        ended = self.now()
        self._trained = ended[0] - began[0], ended[1] - began[1]
        return updates

    def note(self, config: Any, line: dict[str, Any]) -> None:
        """Note a round that has just ended."""
        now = self.now()
        passed = [b - a - t for a, b, t in zip(self._began, now, self._trained, strict=True)]
        self.rounds.append((passed[0], passed[1]))
        self._began = now


def population(clients: int, mode: str, parent: str | None) -> dict[str, Any]:
    """Return the milliseconds of rounds beside their training, and the memory of the run."""
    import fedquilt
    from fedquilt.common import storage
    from fedquilt.experiment import loop as training_loop
    from fedquilt.method import MethodParts
    from fedquilt.privacy.run_account import RunAccount
    from fedquilt.training import make_engine

    training_loop.CHECKPOINT_SECONDS = 0.0
    mode, _, paid = mode.partition(", ")
    if paid:
        _spend_before(RunAccount)
    parts, samples = natural_parts(clients)
    inputs, targets = torch.rand(samples, 4), torch.zeros(samples, dtype=torch.int64)
    clock = Clock()

    class Timed:
        """An engine that says how long it trained."""

        def __init__(self, parts: MethodParts) -> None:
            self._inner = make_engine("sequential", parts.flat, parts.task, parts.local_settings)

        def train(self, *given: Any) -> Any:
            yield from clock.train(self._inner, given)

        def close(self) -> None:
            self._inner.close()

    written = _count_bytes(storage)
    before = peak_bytes()
    own = {"noise_seed": 1} if mode == "certified" else {}
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        fedquilt.run(
            *(torch.nn.Linear(4, 2), (inputs, targets), None, parts),
            mode=mode,
            engine=Timed,
            clients_per_round=COHORT,
            local_epochs=1,
            num_rounds=ROUNDS,
            eval_every=ROUNDS,
            output_dir=folder,
            observer=clock.note,
            quiet=True,
            **own,
        )
    rounds = clock.rounds[SKIPPED:-1]  # the first ones set up, the last one evaluates
    walls, works = ([1e3 * seconds for seconds in column] for column in zip(*rounds, strict=True))
    return {
        "median": statistics.median(walls),
        "worst": max(walls),
        "processor": statistics.median(works),
        "kilobytes": statistics.median(written[SKIPPED:-1]) / 1e3,
        "mb": (peak_bytes() - before) / 1e6,
    }


def _spend_before(account: Any) -> None:
    """Let clients have spent other amounts each, as after many rounds of this run."""
    spent = account.spent

    def more(self: Any) -> Any:
        return spent(self) + np.random.default_rng(1).random(self._count) * 1e-3

    def quantiles_only(self: Any, levels: Any) -> Any:
        self.spent = more.__get__(self)
        try:
            return ours(self, levels)
        finally:
            del self.spent

    ours = account.epsilon_at
    account.epsilon_at = quantiles_only


def _count_bytes(storage: Any) -> list[int]:
    """Return a list that gets the bytes of every file that is replaced."""
    written: list[int] = []
    write = storage.write_file

    def counted(path: Path, content: Any, *given: Any, **named: Any) -> None:
        parts = [content] if isinstance(content, bytes) else list(content)
        if path.name.startswith("checkpoint"):
            written.append(sum(len(part) for part in parts))
        write(path, parts, *given, **named)

    storage.write_file = counted
    return written


def cohort(clients: int) -> dict[str, Any]:
    """Return the highest memory of a round of so many clients of twenty samples."""
    from fedquilt.models import MLP
    from fedquilt.training import FlatModel, LocalSettings, Task, make_engine

    inputs = torch.rand(2000, 1, 28, 28)
    targets = torch.randint(0, 10, (2000,))
    parts = [(np.arange(20) + 7 * number) % 2000 for number in range(clients)]
    task = Task(inputs, targets, parts)
    model = MLP((1, 28, 28), 10)
    engine = make_engine("batched", model, task, LocalSettings(1, 20, 0.0, 0))
    start = FlatModel(model).read().clone()
    total = torch.zeros_like(start)
    for update in engine.train(start, range(10), 0, 0.1):
        total += update.delta
    before, began = peak_bytes(), time.perf_counter()
    for update in engine.train(start, range(clients), 0, 0.1):
        total += update.delta
    return {"seconds": time.perf_counter() - began, "grown_mb": (peak_bytes() - before) / 1e6}


def apart(what: str, *arguments: Any) -> dict[str, Any]:
    """Return what a function of this file returns in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps([what, *arguments])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def holds(clause: str, kept: bool) -> str:
    """Return a line that says whether a clause holds."""
    return f"{'holds' if kept else 'DOES NOT HOLD'}: {clause}"


def populations(share: int, parent: str | None) -> list[str]:
    """Print the table of populations; return what it says."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else parent
    print(f"a file of this disk takes {wait_ms(parent):.1f} ms to be durable (median)\n")
    print(
        "| clients | mode | ms a round | worst | ms of a processor | on disk, ms a round | worst | "
        "checkpoint, kB | memory, MB |\n|---|---|---|---|---|---|---|---|---|"
    )
    slowest, on_disk = 0.0, 0.0
    for clients in (10_000 // share, 100_000 // share, 1_000_000 // share):
        for mode in MODES:
            found = apart("population", clients, mode, memory)
            waits = apart("population", clients, mode, parent)
            slowest, on_disk = max(slowest, found["median"]), max(on_disk, waits["median"])
            print(
                f"| {clients:,} | {mode} | {found['median']:.1f} | {found['worst']:.1f} | "
                f"{found['processor']:.1f} | {waits['median']:.1f} | {waits['worst']:.1f} | "
                f"{found['kilobytes']:.1f} | {found['mb']:.0f} |",
                flush=True,
            )
    clause = f"selection, history, ledger and checkpoint under {LIMIT_MS} ms a round"
    return [
        holds(f"{clause}, without the disk", slowest < LIMIT_MS),
        holds(f"{clause}, with this disk", on_disk < LIMIT_MS),
    ]


def wait_ms(parent: str | None) -> float:
    """Return how long a small file takes to be durable."""
    waits = []
    with tempfile.NamedTemporaryFile(dir=parent) as stream:
        for _ in range(20):
            stream.write(b"a line of a round\n")
            stream.flush()
            began = time.perf_counter()
            os.fsync(stream.fileno())
            waits.append(1e3 * (time.perf_counter() - began))
    return statistics.median(waits)


def cohorts(share: int) -> list[str]:
    """Print the table of cohorts; return what it says."""
    print("\n| cohort | seconds | memory grows by, MB |\n|---|---|---|")
    grown = []
    for clients in (1_000 // share, 10_000 // share):
        found = apart("cohort", clients)
        grown.append(found["grown_mb"])
        print(f"| {clients:,} | {found['seconds']:.1f} | {found['grown_mb']:.1f} |", flush=True)
    clause = f"a cohort of ten times the clients takes at most {LIMIT_MB} MB more"
    return [holds(clause, grown[1] - grown[0] <= LIMIT_MB)]


def large_model(share: int) -> list[str]:
    """Print what a large model takes; return what that says."""
    from memory import measured

    size = 50_000_000 // share
    print(f"\n| a model of {size:,} parameters, 10 clients | models at the highest |\n|---|---|")
    highest = 0.0
    for mode in ("fedavg", "certified"):
        case = {"kind": "model", "mode": mode, "watch": True, "keep": False}
        found = measured({**case, "parameters": size, "rounds": 2})
        highest = max(highest, found["peak"] / found["model"])
        print(f"| {mode} | {found['peak'] / found['model']:.2f} |", flush=True)
    return [holds("3 models and one update a worker", highest <= LIMIT_MODELS)]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", help="where runs are written")
    parser.add_argument("--only", choices=("populations", "cohorts", "model"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, *arguments = json.loads(options.child)
        print(json.dumps({"population": population, "cohort": cohort}[what](*arguments)))
        return
    share = 10 if options.quick else 1
    clauses = []
    if options.only in (None, "populations"):
        clauses += populations(share, options.folder)
    if options.only in (None, "cohorts"):
        clauses += cohorts(share)
    if options.only in (None, "model"):
        clauses += large_model(share)
    print("\n" + "\n".join(clauses))


if __name__ == "__main__":
    main()
