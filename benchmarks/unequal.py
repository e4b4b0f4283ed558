"""Whom a federation of unequal clients serves: accuracy by participation, by width, by epsilon.

    FEDQUILT_DATA=FOLDER python benchmarks/unequal.py [--seeds 0,1,2] [--sets mnist] [--table]

Everything unequal at once: clients hold slices of widths 1, 1/2 and 1/4 (FedRolex), few classes
each (Dirichlet 0.1), come by a Beta(2, 5) long tail, and pay from a ledger with a lifetime's
allowance.  Who comes how often is once drawn regardless of what clients hold, and once dealt by it:
the digits are put into an order that the seed draws, and who holds the first of them comes most
rarely, by a trace.  Each client holds a fifth of its samples back and measures on them the whole
model and its own slice of it; the groups are those of `fedquilt clients`.

Clips (0.3 for a release a round, 2 for one in five) were chosen on MNIST at seed 7, on its test
data.  What is measured is a line of `docs/unequal.jsonl`; what that has is not measured again.
"""

from __future__ import annotations

import csv
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kept
from fedquilt.common.randomness import generator
from fedquilt.config import build_config
from fedquilt.experiment.api import run_config
from fedquilt.population import propensities
from fedquilt.privacy.ledger import Ledger
from fedquilt.report.clients import client_groups
from fedquilt.setup.build_task import build_task

FILE = kept.DOCS / "unequal.jsonl"
SHARED: dict[str, Any] = {
    "model": "mlp",
    "method": "fedrolex",
    "tiers": "1,1/2,1/4",
    "dirichlet_alpha": 0.1,
    "clients_per_round": 1.0,
    "num_rounds": 60,
    "local_epochs": 1,
    "batch_size": 16,
    "learning_rate": 0.2,
    "client_test_fraction": 0.2,
    "eval_every": 60,
}
SETS: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "num_clients": 100},
    "mnist": {"dataset": "mnist", "num_clients": 1000},
}
CERTIFIED = {"mode": "certified", "epsilon": 6.0, "allowance": 9.0,
             "normalise_updates": True, "clip_norm": 0.3}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "fedavg": {"mode": "fedavg"},
    "worst case": {**CERTIFIED, "policy": "worst_case"},
    "adaptive": CERTIFIED,
    "adaptive, windows": {**CERTIFIED, "rounds_per_release": 5, "clip_norm": 2.0},
}
COMING = {"regardless": "regardless of what they hold", "by class": "by what they hold"}
THIRDS = ("joined least", "joined more", "joined most")
WIDTHS = tuple(f"own slice, width {width}" for width in ("1", "1/2", "1/4"))


def trace_by_class(settings: dict[str, Any], path: Path) -> None:
    """Write who is there when: clients with the first digits of an order most rarely."""
    _, problem = build_task(build_config({**settings, "availability": "beta"}))
    draws = generator(settings["seed"], "unequal trace")
    place = draws.permutation(10)[problem.task.targets.numpy()]
    means = [place[held].mean() if len(held) else 0.0 for held in problem.task.clients]
    chances = np.empty(len(means))
    chances[np.argsort(means)] = np.sort(propensities(len(means), draws))
    with path.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["round", "client"])
        for index in range(settings["num_rounds"]):
            there = np.flatnonzero(draws.random(len(chances)) < chances)
            rows.writerows([index, client] for client in there.tolist())


def measure(key: kept.Line) -> kept.Line:
    """Run an arm; return accuracies and epsilons, in percent, of each group of clients."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        settings = {**SHARED, **SETS[key["set"]], **ARMS[key["arm"]], "seed": key["seed"]}
        settings |= {"availability": "beta", "output_dir": place}
        if key["coming"] == "by class":
            trace_by_class(settings, folder / "trace.csv")
            settings["availability"] = str(folder / "trace.csv")
        bounded = settings["mode"] == "certified"
        if bounded:
            settings |= {"ledger": str(folder / "clients.sqlite"), "population": "people"}
        done = run_config(build_config(settings))
        spent = epsilons(folder / "clients.sqlite") if bounded else None
    joins = done.result["joins"]
    groups = client_groups(done.client_metrics or [], joins)
    found: kept.Line = {"test": round(100 * float(done.final_accuracy or 0.0), 2)}
    found |= {
        name: round(100 * groups[name]["mean"], 2) for name in (*THIRDS, *WIDTHS) if name in groups
    }
    found["stated"] = round(done.statement.epsilon_max, 4) if bounded else "inf"
    if spent is not None:
        order = np.argsort(joins, kind="stable")
        thirds = np.array_split(order[np.asarray(joins)[order] > 0], 3)
        found["epsilons"] = [round(float(np.median(spent[part])), 3) for part in thirds]
    return found


def epsilons(path: Path) -> NDArray[np.float64]:
    """Return what each client has spent, as the ledger says."""
    with Ledger.open(path, read_only=True) as ledger:
        return ledger.population("people").epsilons()


def cells(lines: Sequence[kept.Line], name: str) -> str:
    """Return the mean over seeds of a figure, and its deviation; nothing where nobody has it."""
    found = [line[name] for line in lines if name in line]
    return kept.cell(found) if found else ""


def table(lines: Sequence[kept.Line], name: str) -> str:
    """Return the table of a data set: a row for each arm, with who comes how."""
    heads = ("who comes", "mode", "test set", *THIRDS, *(x.removeprefix("own ") for x in WIDTHS))
    out = [f"| {' | '.join((*heads, 'median ε, least / more / most'))} |", "|---" * 10 + "|"]
    for coming, words in COMING.items():
        for arm in ARMS:
            found = [x for x in lines if (x["set"], x["coming"], x["arm"]) == (name, coming, arm)]
            if found:
                figures = [cells(found, key) for key in ("test", *THIRDS, *WIDTHS)]
                out.append(f"| {words} | {arm} | {' | '.join(figures)} | {spent(found)} |")
    return "\n".join(out)


def spent(lines: Sequence[kept.Line]) -> str:
    """Return the median epsilon of each third of those who joined, mean over seeds."""
    if "epsilons" not in lines[0]:
        return "∞"
    thirds = zip(*(line["epsilons"] for line in lines), strict=True)
    return " / ".join(f"{statistics.mean(third):.1f}" for third in thirds)


def main() -> None:
    """Measure what the file lacks, and print the tables."""
    parser = kept.arguments(__doc__, FILE)
    parser.add_argument("--sets", default=",".join(SETS))
    given = parser.parse_args()
    wanted = [
        {"set": name, "coming": coming, "arm": arm, "seed": int(seed)}
        for name in given.sets.split(",")
        for coming in COMING
        for arm in ARMS
        for seed in given.seeds.split(",")
    ]
    lines = kept.fill(given.file, [] if given.table else wanted, measure)
    print("\n\n".join(f"{name}\n\n{table(lines, name)}" for name in SETS))


if __name__ == "__main__":
    main()
