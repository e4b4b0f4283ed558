"""The figures of scale, from one command.

    python benchmarks/scale.py [--quick]

1. A million clients with natural sizes: what a round costs beside its training, from selection
   to checkpoint (whole rounds of `Experiment` on a tiny model), limit 50 ms.
2. A cohort of 10,000 small clients: the highest memory of a round of 1,000 and of 10,000, which
   must be the same but for the cohort's own numbers.
3. A model of 50 million parameters with 10 clients (`benchmarks/memory.py`).

`--quick` takes a tenth of everything.
"""

from __future__ import annotations

import argparse
import json
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

LIMIT_MS, LIMIT_MB = 50, 20


def peak_bytes() -> int:
    """Return the most memory the process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def population(clients: int, mode: str) -> dict[str, Any]:
    """Return the milliseconds of rounds in which ten clients train a tiny model.

    Training itself is measured and taken off; what is left is selection, history, ledger,
    record and checkpoint.
    """
    import fedquilt
    from fedquilt.learning import make_engine
    from fedquilt.method import MethodParts

    sizes = np.random.default_rng(0).zipf(2.0, clients).clip(1, 3)
    ends = np.cumsum(sizes)
    parts = np.split(np.arange(ends[-1]), ends[:-1])
    inputs, targets = torch.rand(int(ends[-1]), 4), torch.zeros(int(ends[-1]), dtype=torch.int64)
    trained: list[float] = []

    class Timed:
        """An engine that says how long it trained."""

        def __init__(self, parts: MethodParts) -> None:
            self._inner = make_engine("sequential", parts.flat, parts.task, parts.local_settings)

        def train(self, *given: Any) -> Any:
            began = time.perf_counter()
            updates = list(self._inner.train(*given))
            trained.append(time.perf_counter() - began)
            yield from updates

        def close(self) -> None:
            self._inner.close()

    seconds: list[float] = []
    before = [0.0]

    def note(config: Any, line: dict[str, Any]) -> None:
        now = time.perf_counter()
        seconds.append(now - before[0] - trained[-1])
        before[0] = now

    own = {"noise_seed": 1} if mode == "certified" else {}
    with tempfile.TemporaryDirectory() as folder:
        fedquilt.run(
            *(torch.nn.Linear(4, 2), (inputs, targets), None, parts),
            mode=mode,
            engine=Timed,
            clients_per_round=10,
            num_rounds=13,
            eval_every=13,
            output_dir=folder,
            observer=note,
            quiet=True,
            **own,
        )
    rounds = seconds[2:-1]  # the first ones set up, the last one evaluates
    return {"median": 1e3 * statistics.median(rounds), "slowest": 1e3 * max(rounds)}


def cohort(clients: int) -> dict[str, Any]:
    """Return the highest memory of a round of so many clients of twenty samples."""
    from fedquilt.learning import FlatModel, LocalSettings, Task, make_engine
    from fedquilt.models import MLP

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


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, *arguments = json.loads(options.child)
        print(json.dumps({"population": population, "cohort": cohort}[what](*arguments)))
        return
    share = 10 if options.quick else 1
    for mode in ("fedavg", "certified"):
        found = apart("population", 1_000_000 // share, mode)
        print(
            f"{1_000_000 // share:,} clients, {mode}: {found['median']:.1f} ms a round beside "
            f"training, slowest {found['slowest']:.1f} (limit {LIMIT_MS})",
            flush=True,
        )
    for clients in (1_000 // share, 10_000 // share):
        found = apart("cohort", clients)
        print(
            f"cohort of {clients:,} clients: {found['seconds']:.1f} s, memory grows by "
            f"{found['grown_mb']:.1f} MB (limit {LIMIT_MB})",
            flush=True,
        )
    memory = Path(__file__).with_name("memory.py")
    size = str(50_000_000 // share)
    subprocess.run([sys.executable, memory, "--only", "model", "--parameters", size], check=True)


if __name__ == "__main__":
    main()
