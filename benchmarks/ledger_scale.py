"""How the privacy ledger behaves as populations grow.

    python benchmarks/ledger_scale.py [--rounds 50] [--folder FOLDER]

One table: what a round waits for (reserve, settle), what a report waits for (epsilon
of all clients), what opening and checking cost, and the size of the file.  Times are
medians, with the slowest in brackets.  One more round, not timed, first charges
everybody, so that no balance is zero; and every client of a cohort has its own charge,
which is the larger of the two encodings.  The folder should be on the disk that will
hold the ledger: settling waits for it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from fedquilt.privacy.ledger import Ledger, Run

SHAPES = ((1_000, 100), (100_000, 1_000), (1_000_000, 10_000))


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def one_round(
    run: Run, index: int, clients: np.ndarray, rng: np.random.Generator
) -> tuple[float, float]:
    """Reserve and settle one round; return the seconds of each."""
    charges = run.budget_mu2 / 1000 * rng.uniform(0.5, 1.0, clients.size)
    start = time.perf_counter()
    reservation = run.reserve(index, clients, charges)
    reserved = time.perf_counter()
    run.settle(reservation, f"{index:064x}")
    return reserved - start, time.perf_counter() - reserved


def measure(folder: Path, num_clients: int, cohort: int, rounds: int) -> list[str]:
    """Return the table's row for one population."""
    path = folder / f"{num_clients}.sqlite"
    rng = np.random.default_rng(0)
    with Ledger.open(path, create=True) as ledger:
        population = ledger.population("all", num_clients=num_clients, epsilon=6.0, delta=1e-5)
        run = population.start_run("one", epsilon=3.0)
        one_round(run, 0, np.arange(num_clients), rng)
        cohorts = (rng.choice(num_clients, cohort, replace=False) for _ in range(rounds))
        seconds = [one_round(run, 1 + t, clients, rng) for t, clients in enumerate(cohorts)]
        epsilon = [timed(population.epsilons) for _ in range(5)]
        checks = [timed(ledger.verify) for _ in range(3)]
        run.finish()
    opening = [timed(lambda: open_and_read(path)) for _ in range(5)]
    reserve, settle = zip(*seconds, strict=True)
    columns = (reserve, settle, epsilon, opening, checks)
    size = f"{path.stat().st_size / 1e6:.2f}"
    return [f"{num_clients:,}", f"{cohort:,}", size, *(show(times) for times in columns)]


def open_and_read(path: Path) -> None:
    """Open the ledger as a new process would, and read what everybody has spent."""
    with Ledger.open(path) as ledger:
        ledger.population("all").spent()


def show(seconds: list[float] | tuple[float, ...]) -> str:
    """Return "median (slowest)" in seconds."""
    return f"{median(seconds):.4f} ({max(seconds):.4f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50, help="rounds settled in each ledger")
    parser.add_argument("--folder", type=Path, help="where the ledgers are made (then removed)")
    options = parser.parse_args()
    head = ["clients", "cohort", "file MB"]
    head += [f"{name} s" for name in ("reserve", "settle", "epsilon of all", "open", "verify")]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = [measure(Path(folder), *shape, options.rounds) for shape in SHAPES]
    print(f"ledger after {options.rounds} rounds: median (slowest)")
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
