"""The paper's settings on a GPU, whole runs on real data: seconds, accuracy, times `sequential`.

    FEDQUILT_DATA=FOLDER python benchmarks/gpu_paper.py --dataset mnist --seeds 0,1,2

100 clients, Dirichlet 0.5 over labels, 30 a round, 5 local epochs, batch 32, 200 rounds,
evaluation every 10.  Every row is a run of its own process: kernels that an earlier process has
compiled are found on the disk (Triton's cache), everything else begins anew.  "run" is the
whole of `fedquilt.run_config`: data, model, start, capture, rounds, evaluation, result.
`sequential` is measured over a few rounds of the same run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time

import numpy as np

ROWS = "fedavg:bf16,fedavg:float32,certified:bf16"


def child(case: dict[str, object]) -> dict[str, float]:
    """Run one case in this process and return what it took."""
    began = time.perf_counter()
    from fedquilt.config import RunConfig
    from fedquilt.experiment.api import run_config

    imported = time.perf_counter()
    stamps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            num_clients=100,
            clients_per_round=30,
            dirichlet_alpha=0.5,
            local_epochs=5,
            batch_size=32,
            eval_every=10,
            device="cuda",
            output_dir=folder,
            **case,  # type: ignore[arg-type]
        )
        result = run_config(config, lambda config, line: stamps.append(time.perf_counter()))
    ended = time.perf_counter()
    rounds = np.diff(stamps)
    return {
        "imports": imported - began,
        "run": ended - imported,
        "first": stamps[0] - imported,
        "round_ms": 1e3 * float(np.median(rounds)) if len(rounds) else float("nan"),
        "accuracy": result.result["metadata"]["final_accuracy"],
    }


def measured(case: dict[str, object]) -> dict[str, float]:
    """Run a case in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps(case)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    return found


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="mnist", choices=("mnist", "cifar10"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--rows", default=ROWS, help="mode:precision, separated by commas")
    parser.add_argument("--sequential-rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return
    common: dict[str, object] = {"dataset": options.dataset}
    slow = float("nan")
    if options.sequential_rounds:
        case = {**common, "mode": "fedavg", "engine": "sequential", "seed": 0}
        found = measured({**case, "num_rounds": options.sequential_rounds})
        slow = found["round_ms"]
        print(f"{options.dataset} fedavg sequential: {slow:.0f} ms a round", flush=True)
    for row in options.rows.split(","):
        mode, precision = row.split(":")
        case = {**common, "mode": mode, "precision": precision, "engine": "batched"}
        results = []
        for seed in map(int, options.seeds.split(",")):
            found = measured({**case, "seed": seed, "num_rounds": options.rounds})
            results.append(found)
            print(
                f"{options.dataset} {mode} {precision} seed {seed}: run {found['run']:.1f} s "
                f"(first round after {found['first']:.1f}, then {found['round_ms']:.0f} ms, "
                f"{slow / found['round_ms']:.0f} times sequential; imports "
                f"{found['imports']:.1f} s), accuracy {found['accuracy']:.4f}",
                flush=True,
            )
        values = [found["accuracy"] for found in results]
        seconds = [found["run"] for found in results]
        print(
            f"{options.dataset} {mode} {precision}: {np.mean(seconds):.1f} s (least "
            f"{min(seconds):.1f}), accuracy {np.mean(values):.4f} +- {np.std(values):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
