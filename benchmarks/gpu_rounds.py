"""Milliseconds a round takes on a GPU: sequential, vmap, plan in float32 and bf16.

    python benchmarks/gpu_rounds.py --rounds 6

100 clients, Dirichlet 0.5 over labels, 30 a round, 5 local epochs, batch 32: random images of
the size of MNIST and CIFAR-10, which take as long as real ones.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from fedquilt.data.split import dirichlet_split
from fedquilt.models import make_model
from fedquilt.training import FlatModel, LocalSettings, Task
from fedquilt.training.engines import LocalEngine, batched_trainer
from fedquilt.training.trainers.vmap import VmapTrainer

SHAPES = {"mnist": (60_000, (1, 28, 28)), "cifar10": (50_000, (3, 32, 32))}


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description="Milliseconds a round takes on a GPU.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--vmap", action="store_true", help="measure the general way too")
    arguments = parser.parse_args()
    for name, (count, shape) in SHAPES.items():
        random = np.random.default_rng(0)
        inputs = torch.from_numpy(random.standard_normal((count, *shape), dtype=np.float32)).cuda()
        targets = torch.from_numpy(random.integers(0, 10, count))
        parts = dirichlet_split(targets, 100, 10, 0.5, random)
        task = Task(inputs, targets.cuda(), parts)
        model = make_model(name, shape, 10, 0)
        start = FlatModel(model, inputs[:2]).read().clone()
        cohorts = [random.choice(100, 30, replace=False) for _ in range(arguments.rounds + 1)]
        for precision in ("float32", "bf16", *(("vmap",) if arguments.vmap else ())):
            how = LocalSettings(
                5, 32, 0.0, 1, precision="float32" if precision == "vmap" else precision
            )
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            make = VmapTrainer if precision == "vmap" else batched_trainer
            engine = LocalEngine(make(model, task, how))
            if precision != engine.trainer.name == "vmap":
                print("no plan")
            built = time.perf_counter() - begin
            times = []
            for index, cohort in enumerate(cohorts):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                updates = list(engine.train(start, cohort, index, 0.01))
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            steps = [max(5 * -(-len(parts[c]) // 32) for c in cohort) for cohort in cohorts]
            work = [sum(5 * -(-len(parts[c]) // 32) for c in cohort) for cohort in cohorts]
            print(
                f"{name} {precision}: {1000 * np.median(times[1:]):.0f} ms a round (first "
                f"{1000 * times[0]:.0f}, built in {built:.1f} s); the longest client has "
                f"{np.mean(steps):.0f} steps, the average one {np.mean(work) / 30:.0f}; "
                f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB; "
                f"first update {float(updates[0].delta.norm()):.5f}",
                flush=True,
            )
            del engine


if __name__ == "__main__":
    main()
