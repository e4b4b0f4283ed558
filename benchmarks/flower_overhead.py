"""What a round costs on Flower nodes: in this process, on Ray, in a deployment, warm and cold.

    python benchmarks/flower_overhead.py [--rounds 8] [--only in-process,mnist,ray,warm,cold]

In one process the figure is processor seconds a round (the median, without the first), which
other load on the machine does not change; Ray and deployments are wall-clock seconds.  MNIST
is left out where its files are not found (FEDQUILT_DATA).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from fedquilt.common.errors import DataError
from fedquilt.config import RunConfig, build_config
from fedquilt.experiment import run_in_memory
from fedquilt.flower.federation import Federation
from fedquilt.flower.simulate import simulate
from fedquilt.flower.template import write_app

DIGITS = {"dataset": "digits", "num_clients": 20, "clients_per_round": 1.0, "local_epochs": 1}
MNIST = {"dataset": "mnist", "num_clients": 500, "clients_per_round": 4, "local_epochs": 1}
USUAL = {"mode": "fedavg", "partition": "iid", "availability": "always", "seed": 0}


class Clock:
    """Notes the processor's and the wall's time after every round."""

    def __init__(self) -> None:
        self.cpu, self.wall = [time.process_time()], [time.perf_counter()]

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())

    def a_round(self, which: str) -> float:
        times = getattr(self, which)
        steps = [after - before for before, after in itertools.pairwise(times[1:])]
        return statistics.median(steps)


def timed(config: RunConfig, engine: str) -> Clock:
    clock = Clock()
    if engine == "sequential":
        run_in_memory(config, clock)
    else:
        simulate(config.replace(engine=engine), clock, in_memory=True)
    return clock


def in_one_process(options: dict[str, Any], rounds: int, repeats: int) -> dict[str, float]:
    """Return processor seconds a round, the engines in turn, the best of a few repeats."""
    config = build_config({**USUAL, **options, "num_rounds": rounds, "eval_every": 10**6})
    seconds: dict[str, list[float]] = {"sequential": [], "flower": []}
    for _ in range(repeats):
        for engine, taken in seconds.items():
            taken.append(timed(config, engine).a_round("cpu"))
    return {engine: min(taken) for engine, taken in seconds.items()}


def deployed(folder: Path, rounds: int, warm: bool) -> dict[str, Any]:
    """Return wall seconds and bytes of a round of the template's app on four nodes."""
    app = write_app(folder / "app", num_rounds=rounds, eval_every=rounds, flower_min_nodes=4)
    federation = Federation(folder / "federation")
    federation.prepare(app, 4, warm=warm)
    try:
        federation.up(300)
        if federation.run() != 0:
            raise SystemExit("the run did not start; see the logs")
        run = federation.wait(seconds=1200)
    finally:
        federation.down()
    lines = [json.loads(line) for line in (run / "nodes.jsonl").read_text().splitlines()]
    totals = [line for line in lines if "asked" in line][1:]
    return {
        "seconds": statistics.median(line["seconds"] for line in totals),
        "up": totals[-1]["bytes_up"] // 4,
        "down": totals[-1]["bytes_down"] // 4,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="in-process,mnist,ray,warm,cold")
    given = parser.parse_args()
    torch.set_num_threads(1)
    wanted = given.only.split(",")
    rows: list[list[object]] = []
    for key, name, options in (("in-process", "digits", DIGITS), ("mnist", "MNIST CNN", MNIST)):
        if key in wanted:
            try:
                seconds = in_one_process(options, given.rounds, given.repeats)
            except DataError as error:
                print(f"{name} left out: {error}")
                continue
            base = seconds["sequential"]
            rows.append([f"sequential, {name}", "cpu", base, 1.0])
            rows.append([f"in-process, {name}", "cpu", seconds["flower"], seconds["flower"] / base])
    if "ray" in wanted:
        config = build_config({**USUAL, **DIGITS, "num_rounds": given.rounds})
        base = timed(config, "sequential").a_round("wall")
        seconds_ray = timed(config, "flower-ray").a_round("wall")
        rows.append(["sequential, digits", "wall", base, 1.0])
        rows.append(["Ray, digits", "wall", seconds_ray, seconds_ray / base])
    for kind in ("warm", "cold"):
        if kind in wanted:
            with tempfile.TemporaryDirectory() as folder:
                found = deployed(Path(folder), given.rounds, kind == "warm")
            text = f"deployment, {kind}, 4 nodes ({found['down']} B down, {found['up']} B up)"
            rows.append([text, "wall", found["seconds"], None])
    print(tabulate(rows, headers=["", "clock", "s a round", "times"], floatfmt=".3f"))


if __name__ == "__main__":
    main()
