"""What one round costs the population part when there are a million clients.

    python benchmarks/population_scale.py [--clients 1000000] [--cohort 1000] [--rounds 10]

One table: for each selection rule, with and without the moving average of participation,
the time of one round (availability, selection, history update, rates of the cohort) as
the median with the slowest in brackets, and the memory at its highest above the process
after its imports.  Every row runs in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from fedquilt.common.randomness import generator
from fedquilt.population import Availability, CohortSelector, ParticipationTracker, propensities

RULES = ("uniform", "weighted", "poisson")
LIMIT_MS, LIMIT_MB = 50, 100


def resident_bytes() -> int:
    """Return the memory the process holds now; its highest so far where /proc is missing."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return peak_bytes()


def peak_bytes() -> int:
    """Return the most memory the process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(rule: str, ema: float | None, clients: int, cohort: int, rounds: int) -> list[str]:
    """Return the table's row for one rule."""
    before = resident_bytes()
    began = time.perf_counter()
    draws = propensities(clients, generator(0, "propensity"))
    availability = Availability.make("beta", clients, draws)
    selector = CohortSelector(availability, draws, rule=rule, limit=cohort, seed=0)
    tracker = ParticipationTracker(clients, ema)
    built = time.perf_counter() - began
    seconds, sizes = [], []
    for index in range(rounds):
        start = time.perf_counter()
        chosen = selector.select(index).clients
        tracker.update(chosen)
        tracker.rates(chosen)
        seconds.append(time.perf_counter() - start)
        sizes.append(len(chosen))
    memory = (peak_bytes() - before) / 1e6
    return [
        rule,
        "-" if ema is None else f"{ema:g}",
        f"{np.mean(sizes):.0f}",
        f"{1e3 * built:.0f}",
        f"{1e3 * median(seconds):.1f} ({1e3 * max(seconds):.1f})",
        f"{memory:.0f}",
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=10, help="rounds measured in each row")
    options = parser.parse_args()
    rows = []
    for rule, ema in itertools.product(RULES, (None, 0.1)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            arguments = (rule, ema, options.clients, options.cohort, options.rounds)
            rows.append(pool.apply(measure, arguments))
    head = ["rule", "ema", "cohort", "build ms", "round ms", "memory MB"]
    print(f"{options.clients:,} clients: limits {LIMIT_MS} ms a round, {LIMIT_MB} MB")
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
