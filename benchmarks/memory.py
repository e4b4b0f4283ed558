"""How much memory a run holds at its highest: a large model, and a large population.

    python benchmarks/memory.py [--parameters 50000000] [--clients 1000000] [--only model|clients]

Every row is a run of its own process, with a run folder and, where there is one, a ledger on
disk: 10 clients that train a large model one after the other, and a million clients of one
to three samples (30 of them a round) that train a tiny one.  Memory is the highest resident
set above what the process held after its imports.  The model's rows are in multiples of the
model's bytes: once with a model that is handed over (`fedquilt.run(Net(), ...)`, or the
command line) and once with one that its caller keeps, which `fedquilt.run` copies and never
changes, and which counts as one; below them stands the highest of each phase (on Linux).
Tensors under 32 MB may stay with the allocator when they are freed:
MALLOC_MMAP_THRESHOLD_=100000 shows what is held.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedquilt
import fedquilt.experiment.api
import fedquilt.experiment.loop
import fedquilt.round
from fedquilt.aggregation import RunningMean, ServerOptimizer
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.mechanism import NoPrivacy
from fedquilt.privacy.run_account import RunAccount
from fedquilt.record.folder import RunFolder
from fedquilt.training.trainers.autograd import AutogradTrainer

MODEL_LIMIT, CLIENTS_LIMIT_MB = 5, 300
COHORT = 10

# Where a phase is: the class or module, the function, the phase's name.
PHASES = (
    (fedquilt.experiment.api, "task_from", "start"),
    (fedquilt.experiment.api, "build_method", "trial of the model"),
    (fedquilt.experiment.api, "open_account", "ledger"),
    (AutogradTrainer, "_train_one", "local training"),
    (NoPrivacy, "receive", "receive, clip"),
    (Certified, "receive", "receive, clip"),
    (Certified, "clip", "receive, clip"),
    (RunningMean, "add", "sum"),
    (RunningMean, "add_scaled", "sum"),
    (NoPrivacy, "release", "noise, division"),
    (Certified, "release", "noise, division"),
    (RunAccount, "settle", "settle"),
    (ServerOptimizer, "step", "server step"),
    (RunFolder, "save_checkpoint", "checkpoint"),
    (fedquilt.experiment.loop.Experiment, "measure", "evaluation"),
    (fedquilt.experiment.loop.Experiment, "finish", "result"),
)


class Peaks:
    """The highest resident set of each phase; the innermost one counts."""

    def __init__(self) -> None:
        self.highest: dict[str, int] = {}
        self._open = ["rest"]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is held from here on for this phase."""
        self._note()
        self._open.append(name)
        try:
            yield
        finally:
            self._note()
            self._open.pop()

    def _note(self) -> None:
        name = self._open[-1]
        self.highest[name] = max(self.highest.get(name, 0), highest_bytes())
        reset_highest()

    def watch(self) -> None:
        """Let every phase's function say when it runs."""
        for owner, function, name in PHASES:
            inner = getattr(owner, function, None)
            if inner is not None:
                setattr(owner, function, self._wrapped(inner, name))

    def _wrapped(self, inner: Any, name: str) -> Any:
        @functools.wraps(inner)
        def outer(*arguments: Any, **named: Any) -> Any:
            with self.phase(name):
                return inner(*arguments, **named)

        return outer


def highest_bytes() -> int:
    """Return the highest resident set since the last `reset_highest`."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_highest() -> None:
    """Begin to look for the highest anew, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Large(nn.Module):
    """Four wide layers: many parameters, and cheap steps on a few samples."""

    def __init__(self, parameters: int, layers: int = 4, classes: int = 10) -> None:
        super().__init__()
        width = int((parameters / layers) ** 0.5)
        sizes = [width] * (layers + 1)
        self.first = nn.Linear(16, width)
        self.body = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        for layer in self.body:
            hidden = torch.relu(layer(hidden))
        scores: torch.Tensor = self.head(hidden)
        return scores


def natural_sizes(clients: int) -> list[np.ndarray]:
    """Return index lists of one to three samples, all of one data set of 1,000 samples."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 4, clients)
    numbers = rng.integers(0, 1000, int(sizes.sum()))
    return np.split(numbers, np.cumsum(sizes)[:-1])


def child(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in this process and return what it took."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1000, 16, generator=generator)
    labels = torch.randint(10, (1000,), generator=generator)
    warm_up(features, labels)
    before, began = resident_bytes(), time.perf_counter()
    peaks = Peaks()
    if case["watch"]:
        peaks.watch()
    reset_highest()
    if case["kind"] == "model":
        model: nn.Module = Large(case["parameters"])
        clients: Any = [np.arange(8 * k, 8 * k + 8) for k in range(COHORT)]
        settings: dict[str, Any] = {"clients_per_round": 1.0}
    else:
        model = nn.Linear(16, 10)
        clients = natural_sizes(case["clients"])
        settings = {"clients_per_round": 30 / case["clients"]}
        if case.get("ids"):
            settings["client_ids"] = [f"client {k}" for k in range(case["clients"])]
    model_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    handed, kept = resident_bytes(), [model]
    del model
    stamps = [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder, peaks.phase("rest"):
        result = fedquilt.run(
            _hand_over(kept, keep=case.get("keep", True)),
            (features, labels),
            (features[:100], labels[:100]),
            clients,
            output_dir=folder,
            observer=lambda config, line: stamps.append(time.perf_counter()),
            mode=case["mode"],
            num_rounds=case["rounds"],
            availability="always",
            engine="sequential",
            device="cpu",
            local_epochs=1,
            batch_size=8,
            allow_overlap=True,  # clients share few samples, so that these take no memory
            # Not **settings: Python would keep the model among the arguments until the end.
            clients_per_round=settings["clients_per_round"],
            client_ids=settings.get("client_ids"),
        )
        ended = time.perf_counter()
    rounds = np.diff(stamps)
    return {
        "before": before,
        "handed": handed - before,
        "model": model_bytes,
        "peak": max(peaks.highest.values()) - before,
        "phases": {name: value - before for name, value in peaks.highest.items()},
        "setup": stamps[0] - began,
        "first": float(rounds[0]),
        "round": float(np.median(rounds[1:])),
        "end": ended - stamps[-1],
        "rounds": result.result["rounds"],
    }


def _hand_over(kept: list[nn.Module], *, keep: bool) -> nn.Module:
    """Return the model, which its caller keeps or not."""
    return kept[0] if keep else kept.pop()


def warm_up(features: torch.Tensor, labels: torch.Tensor) -> None:
    """Import what is imported late, with a run of two clients."""
    for mode in ("fedavg", "certified"):
        with tempfile.TemporaryDirectory() as folder:
            fedquilt.run(
                nn.Linear(16, 10),
                (features, labels),
                (features[:10], labels[:10]),
                [np.arange(4), np.arange(4, 8)],
                output_dir=folder,
                mode=mode,
                num_rounds=1,
                availability="always",
                clients_per_round=1.0,
                device="cpu",
            )


def resident_bytes() -> int:
    """Return the memory the process holds now; its highest so far where /proc is missing."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return highest_bytes()


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps(case)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", default="fedavg,certified")
    parser.add_argument("--only", choices=("model", "clients"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return
    modes = options.modes.split(",")
    if options.only != "clients":
        print(f"{options.parameters:,} parameters, {COHORT} clients; limit {MODEL_LIMIT} models")
        for mode, keep in itertools.product(modes, (False, True)):
            sizes = {"parameters": options.parameters, "rounds": options.rounds, "keep": keep}
            found = measured({"kind": "model", "mode": mode, "watch": True, **sizes})
            unit = found["model"]
            own = f"of which the caller keeps {found['handed'] / unit:.2f}"
            print(
                f"{mode:12}{found['peak'] / unit:6.2f} models at the highest, "
                f"{own if keep else 'the model handed over'}; {found['round']:.2f} s a round"
            )
            for name, value in sorted(found["phases"].items(), key=lambda item: -item[1]):
                print(f"  {name:22}{value / unit:6.2f}")
    if options.only != "model":
        print(f"{options.clients:,} clients; limit {CLIENTS_LIMIT_MB} MB")
        for mode in modes:
            sizes = {"clients": options.clients, "rounds": max(3, options.rounds)}
            found = measured({"kind": "clients", "mode": mode, "watch": True, **sizes})
            print(
                f"{mode:12}{found['peak'] / 1e6:6.0f} MB at the highest, of which the caller's "
                f"index lists {found['handed'] / 1e6:.0f}; first round after "
                f"{found['first']:.1f} s, {1e3 * found['round']:.0f} ms a round, "
                f"end {found['end']:.1f} s"
            )
            for name, value in sorted(found["phases"].items(), key=lambda item: -item[1]):
                print(f"  {name:22}{value / 1e6:6.0f}")


if __name__ == "__main__":
    main()
