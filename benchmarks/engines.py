"""Seconds a round takes on each engine, on synthetic clients of uneven size.

    python benchmarks/engines.py --model mlp --clients 100
    python benchmarks/engines.py --model mnist --clients 100 --device cuda

The engines take turns, round by round, so that a change in the machine's load
meets all of them; each has one round before that counts for nothing (starting
processes, first use of the device).
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from torch import nn

from fedquilt.models import make_model
from fedquilt.training import Engine, FlatModel, LocalSettings, Task, make_engine

SHAPES = {
    "mlp": (1, 28, 28),
    "mnist": (1, 28, 28),
    "digits": (1, 8, 8),
    "cifar10": (3, 32, 32),
}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Seconds a round takes on each engine.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=100, help="clients in the cohort")
    parser.add_argument("--model", choices=sorted(SHAPES), default="mlp")
    parser.add_argument("--samples", type=int, default=100, help="samples a client has on average")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    return parser.parse_args()


def make_task(clients: int, samples: int, shape: tuple[int, ...], device: str) -> Task:
    """Return random images and labels; client sizes are uniform within half of the average."""
    random = np.random.default_rng(0)
    sizes = random.integers(max(1, samples // 2), samples + samples // 2, clients, endpoint=True)
    inputs = torch.from_numpy(random.standard_normal((sizes.sum(), *shape), dtype=np.float32))
    targets = torch.from_numpy(random.integers(0, 10, sizes.sum()))
    parts = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    return Task(inputs.to(device), targets.to(device), parts)


def seconds(engine: Engine, start: torch.Tensor, clients: int, round_index: int) -> float:
    """Return how long one round takes, device work included."""
    begin = time.perf_counter()
    for update in engine.train(start, range(clients), round_index, 0.05):
        last = update.delta
    last.sum().item()
    return time.perf_counter() - begin


def measure(arguments: argparse.Namespace, model: nn.Module, task: Task) -> dict[str, list[float]]:
    """Return the seconds of each timed round, by engine."""
    names = ["sequential", "batched"] + (["processes"] if task.inputs.device.type == "cpu" else [])
    how = LocalSettings(arguments.epochs, arguments.batch_size, fedprox_mu=0.0, seed=1)
    engines = {name: make_engine(name, model, task, how) for name in names}
    start = FlatModel(model).read().clone()
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(arguments.rounds + 1):
        for name, engine in engines.items():
            times[name].append(seconds(engine, start, arguments.clients, round_index))
    for engine in engines.values():
        engine.close()
    return {name: values[1:] for name, values in times.items()}


def main() -> None:
    """Measure and print one table."""
    arguments = parse()
    shape = SHAPES[arguments.model]
    task = make_task(arguments.clients, arguments.samples, shape, arguments.device)
    model = make_model(arguments.model, shape, 10, seed=0).to(arguments.device)
    times = measure(arguments, model, task)
    reference = statistics.median(times["sequential"])
    on_gpu = task.inputs.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else f"cpu, {torch.get_num_threads()} threads"
    print(
        f"{arguments.model}, {arguments.clients} clients, {len(task.inputs)} samples, "
        f"batch {arguments.batch_size}, epochs {arguments.epochs}; "
        f"{device}; torch {torch.__version__}"
    )
    print(f"{'engine':<12}{'s/round':>10}{'fastest':>10}{'slowest':>10}{'speed-up':>10}")
    for name, values in times.items():
        median = statistics.median(values)
        print(
            f"{name:<12}{median:>10.4f}{min(values):>10.4f}{max(values):>10.4f}"
            f"{reference / median:>9.2f}x"
        )


if __name__ == "__main__":
    main()
