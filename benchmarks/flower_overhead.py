"""What a round costs on Flower nodes: in this process, on Ray, in a deployment, warm and cold.

    python benchmarks/flower_overhead.py [--rounds 8] [--only in-process,mnist,ray,warm,cold]

In one process the figure is processor seconds a round (the median, without the first), which
other load on the machine does not change; Ray and deployments are wall-clock seconds, on an idle
machine.  Bytes are what one client is sent and sends in a round.  MNIST is left out where its
files are not found (FEDQUILT_DATA).  Prints one table and which limits hold; ends with 1 if one
does not.  All of it takes about five minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from fedquilt.common.errors import DataError
from fedquilt.config import RunConfig, build_config
from fedquilt.experiment.api import run_in_memory
from fedquilt.flower.federation import LocalFederation
from fedquilt.flower.simulate import simulate
from fedquilt.flower.template import write_app

DIGITS = {"dataset": "digits", "num_clients": 20, "clients_per_round": 1.0, "local_epochs": 1}
MNIST = {"dataset": "mnist", "num_clients": 500, "clients_per_round": 4, "local_epochs": 1}
USUAL = {"mode": "fedavg", "partition": "iid", "availability": "always", "seed": 0}


Row = list[Any]


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
        run_in_memory(config.replace(engine=engine), clock)  # `auto` would take steps by hand
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
    federation = LocalFederation(folder / "federation")
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


HEADERS = ["", "clock", "s a round", "times", "bytes down", "bytes up"]
# What is promised: the row, the figure's column, the most it may be.
LIMITS = (
    ("in-process, digits", 3, 1.4),
    ("in-process, MNIST CNN", 3, 1.1),
    ("deployment, warm, 4 nodes", 2, 6.0),
    ("deployment, warm, 4 nodes", 3, 1 / 2.5),
)


def one_process_rows(name: str, options: dict[str, Any], given: argparse.Namespace) -> list[Row]:
    try:
        seconds = in_one_process(options, given.rounds, given.repeats)
    except DataError as error:
        print(f"{name} left out: {error}")
        return []
    base = seconds["sequential"]
    over = seconds["flower"] / base
    return [
        [f"sequential, {name}", "cpu", base, 1.0],
        [f"in-process, {name}", "cpu", seconds["flower"], over],
    ]


def ray_rows(rounds: int) -> list[Row]:
    config = build_config({**USUAL, **DIGITS, "num_rounds": rounds})
    base = timed(config, "sequential").a_round("wall")
    began = time.perf_counter()
    clock = timed(config, "flower-ray")
    start = clock.wall[1] - began
    seconds = clock.a_round("wall")
    return [
        ["sequential, digits", "wall", base, 1.0],
        [
            f"Ray, digits ({start:.0f} s until the first round is done)",
            "wall",
            seconds,
            seconds / base,
        ],
    ]


def deployment_rows(kinds: list[str], rounds: int) -> list[Row]:
    """Return the rows of deployments; `times` is over the cold one."""
    found = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            # A cold round takes long, and fewer say as much.
            count = rounds if kind == "warm" else max(3, rounds // 2)
            found[kind] = deployed(Path(folder), count, kind == "warm")
    cold = found.get("cold", {}).get("seconds")
    return [
        [
            f"deployment, {kind}, 4 nodes",
            "wall",
            one["seconds"],
            None if cold is None else one["seconds"] / cold,
            one["down"],
            one["up"],
        ]
        for kind, one in found.items()
    ]


def limits_hold(rows: list[Row]) -> bool:
    """Say of every limit whose row is there whether it holds."""
    by_name = {row[0]: row for row in rows}
    held = []
    for name, column, most in LIMITS:
        value = by_name[name][column] if name in by_name else None
        if value is not None:
            held.append(value <= most)
            what = f"{name}, {HEADERS[column]}: {value:.3f}, at most {most:g}"
            print(f"{'ok  ' if held[-1] else 'FAIL'} {what}")
    return all(held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="in-process,mnist,ray,warm,cold")
    given = parser.parse_args()
    torch.set_num_threads(1)
    wanted = given.only.split(",")
    rows: list[Row] = []
    for key, name, options in (("in-process", "digits", DIGITS), ("mnist", "MNIST CNN", MNIST)):
        if key in wanted:
            rows += one_process_rows(name, options, given)
    if "ray" in wanted:
        rows += ray_rows(given.rounds)
    rows += deployment_rows([kind for kind in ("warm", "cold") if kind in wanted], given.rounds)
    print(tabulate(rows, headers=HEADERS, floatfmt=".3f"))
    sys.exit(0 if limits_hold(rows) else 1)


if __name__ == "__main__":
    main()
