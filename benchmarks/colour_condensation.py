"""What a condensation of CIFAR-10 reaches: 50 clients, Dirichlet 0.1, 10 and 50 images of a class.

    python benchmarks/colour_condensation.py [--seeds 0,1,2] [--ipc 10,50] [--together 6]

Every run is what `fedquilt condense` runs, with the default settings for colour and those
of `SETTINGS` and `EPOCHS`; a ConvNet of width 128 is trained from scratch on the images.
A line for each run as it ends, then means and standard deviations over seeds.  The test set
is looked at by these accuracies only.  `--together` runs so many at a time, each a process.
On one H200 the three runs with 50 images take five minutes, three together; on a CPU days.
`KEY=VALUE ...` at the end changes settings, for a trial: `num_rounds=1 model_n=2`.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from fedquilt.config import build_config
from fedquilt.experiment import run_config

SETTINGS: dict[str, Any] = {
    "method": "condense",
    "dataset": "cifar10",
    "num_clients": 50,
    "dirichlet_alpha": 0.1,
    "model": "convnet",
    "num_rounds": 6,
    "eval_every": 6,
    "model_n": 60,
    "dc_iterations": 400,
    "min_group": 64,
    "precision": "bf16",
}
EPOCHS = {10: 1000, 50: 800}


def condense(seed: int, ipc: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Run one condensation; return its accuracy, what it cost, and what may be claimed."""
    began = time.perf_counter()
    epochs = EPOCHS.get(ipc, 800)
    config = build_config({**SETTINGS, "model_epochs": epochs, "seed": seed, "ipc": ipc, **changes})
    done = run_config(config, lambda config, line: _say(seed, ipc, line, began))
    record = done.result["condensation"]
    return {
        "seed": seed,
        "ipc": ipc,
        "accuracy": 100 * done.final_accuracy,
        "up": record["bytes_up"] / 1e6,
        "down": record["bytes_down"] / 1e6,
        "epsilon": done.statement.epsilon_max,
        "seconds": time.perf_counter() - began,
    }


def _say(seed: int, ipc: int, line: dict[str, Any], began: float) -> None:
    passed = time.perf_counter() - began
    print(f"  seed {seed}, ipc {ipc}: round {line['round'] + 1} at {passed:.0f} s", flush=True)


def main() -> None:
    """Read the arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ipc", default="10,50")
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    # The long ones first.
    counts = sorted(map(int, given.ipc.split(",")), reverse=True)
    cells = [(int(seed), ipc) for ipc in counts for seed in given.seeds.split(",")]
    changes = dict(_read(word) for word in given.changes)
    fresh = multiprocessing.get_context("spawn")  # a fork cannot use a GPU
    rows = []
    with ProcessPoolExecutor(given.together, mp_context=fresh) as pool:
        for future in as_completed([pool.submit(condense, *cell, changes) for cell in cells]):
            rows.append(future.result())
            print("{seed:>4} {ipc:>4} {accuracy:8.2f} %".format(**rows[-1]), flush=True)
    _table(rows)


class _Plain(argparse.RawDescriptionHelpFormatter):
    pass


def _read(word: str) -> tuple[str, Any]:
    key, _, value = word.partition("=")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _table(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'ipc':>4} {'accuracy':>16} {'MB up':>16} {'MB down':>8} {'epsilon':>8}  by seed")
    for ipc in sorted({row["ipc"] for row in rows}):
        of_ipc = sorted((row for row in rows if row["ipc"] == ipc), key=lambda row: row["seed"])
        reached = [row["accuracy"] for row in of_ipc]
        spread = statistics.stdev(reached) if len(reached) > 1 else float("nan")
        up = [row["up"] for row in of_ipc]
        accuracy = f"{statistics.mean(reached):.2f} +- {spread:.2f}"
        each = ", ".join(f"{value:.2f}" for value in reached)
        print(
            f"{ipc:>4} {accuracy:>16} {f'{min(up):.1f} to {max(up):.1f}':>16} "
            f"{max(row['down'] for row in of_ipc):8.3f} {of_ipc[0]['epsilon']:8.1f}  {each}",
            flush=True,
        )


if __name__ == "__main__":
    main()
