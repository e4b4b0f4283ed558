"""Accuracy at a proven client-level epsilon, every row with its statement.

    FEDQUILT_DATA=FOLDER python benchmarks/honest.py OUT.jsonl [--sets mnist,cifar10] [--seeds 5]
    python benchmarks/honest.py OUT.jsonl --table

100 clients (writers: all 539), Dirichlet 0.5, presence Beta(2, 5), 100 rounds, delta 1e-5, secret
noise, zero-out; accuracy on the test data, mean over seeds 0, 1, ...  Nothing was chosen on test
data or on these seeds: `fedquilt.config.modes` says on what.  `glyphs` are pen drawings by
programme, ten classes of four shapes each, warped; they had no part in any choice, but the drawing
is that of the extractor's own pictures.  A line of OUT a run; what is there already is not run
again.  Of a row that claims something the statement's epsilon is held against the claim.

| row | what it is |
|---|---|
| ours | what a run gets that names only data, clients, epsilon and rounds |
| ours, hog | the same on gradient features, where ours takes learned ones |
| one release | all rounds one window: noised class directions, one step (one-shot statistics) |
| every round | a release a round, adaptive allowances |
| worst case | DP-FedAvg: a release a round, even charges for who joins always |
| adaptive clip | the same with a private quantile for the clip (Andrew et al. 2021) |
| bands | correlated noise over 3 rounds, a release a round (DP-FTRL, banded matrices) |
| secret coin | DP-FedAvg in which a coin that nobody may see keeps half of those who are there |
| quap_fl | the paper's algorithm on the same head: epsilon is infinite, nothing is claimed |
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedquilt
from fedquilt.config import build_config
from fedquilt.data import split_clients
from fedquilt.experiment.api import run_in_memory
from fedquilt.models import make_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.train_extractor import draw, view

SETS: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits"},
    "mnist": {"dataset": "mnist"},
    "fashion-mnist": {"dataset": "fashion-mnist"},
    "cifar10": {"dataset": "cifar10"},
    "mnist-writers": {"dataset": "mnist-writers", "partition": "writer", "num_clients": 539},
    "cifar10-1000": {"dataset": "cifar10", "num_clients": 1000},
    "cifar10-10000": {"dataset": "cifar10", "num_clients": 10000},
    "glyphs": {},
}
BEFORE = {"rounds_per_release": 1, "clip_norm": 0.2, "average_late": 0.0, "local_epochs": 1,
          "learning_rate": 0.2, "batch_size": 16}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "ours": {},
    "worst case": {**BEFORE, "policy": "worst_case"},
    "every round": BEFORE,
    "one release": {**BEFORE, "rounds_per_release": 100, "clip_norm": 1.0, "local_epochs": 3},
    "adaptive clip": {**BEFORE, "policy": "worst_case", "clipping": "quantile"},
    "quap_fl": {"mode": "quap_fl", "noise_layers": "all", "local_epochs": 1, "batch_size": 16,
                "learning_rate": 0.2, "clients_per_round": 1.0},
    "bands": {**BEFORE, "noise_bands": 3},
    "secret coin": {**BEFORE, "policy": "worst_case", "selection": "poisson",
                    "amplification": True, "clients_per_round": 0.5},
    "ours, hog": {"model": "hog-linear"},
}  # fmt: skip
FIRST = ("ours", "worst case")
EPSILONS = (6.0, 3.0, 1.0)
CLASSES, SHAPES, EACH, TESTED = 10, 4, 1000, 200
Cell = tuple[str, str, float, int]


def settings(name: str, row: str, epsilon: float, seed: int) -> dict[str, Any]:
    """Return what a run of the table is told."""
    given = {**SETS[name], "epsilon": epsilon, "num_rounds": 100, "eval_every": 100, "seed": seed}
    model = {} if row == "ours" else {"model": build_config(given).model}  # all rows have one
    return {**given, **model, **ROWS[row]}


def run_one(name: str, row: str, epsilon: float, seed: int) -> dict[str, Any]:
    """Run one cell; return its line."""
    began, given = time.perf_counter(), settings(name, row, epsilon, seed)
    lines: list[dict[str, Any]] = []
    done = run_glyphs(given, lines) if name == "glyphs" else run_in_memory(
        build_config(given), lambda config, line: lines.append(line))  # fmt: skip
    stated = done.statement.epsilon_max
    if "mode" not in ROWS[row] and not stated <= epsilon:
        raise RuntimeError(f"{name}, {row}: epsilon {stated} of the statement is above {epsilon}")
    return {
        "set": name, "row": row, "epsilon": epsilon, "seed": seed,
        "accuracy": round(100 * (done.final_accuracy or 0.0), 2),
        "stated": round(stated, 4) if math.isfinite(stated) else "inf",
        "noise_to_signal": round(lines[0].get("noise_to_signal", 0.0), 3),  # of one release
        "numbers": sum(x.numel() for x in done.state_dict.values()),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def run_glyphs(given: dict[str, Any], lines: list[dict[str, Any]]) -> fedquilt.RunResult:
    """Draw the glyphs of a seed, deal them to clients and run on them as on a data set."""
    torch.manual_seed(10_000 + given["seed"])
    shapes = draw("strokes", CLASSES * SHAPES)
    shape = torch.arange(CLASSES * (EACH + TESTED)) % (CLASSES * SHAPES)
    images = torch.cat([view("strokes", shapes[part])[:, :1] for part in shape.split(1000)])
    labels, held = shape % CLASSES, CLASSES * EACH
    source = np.random.default_rng(given["seed"])
    clients = split_clients("dirichlet", labels[:held].numpy(), 100, source)
    model = make_model(given.pop("model", "hog-linear"), (1, 32, 32), CLASSES, 0)
    data = (images[:held], labels[:held]), (images[held:], labels[held:])
    return fedquilt.run(
        model, *data, clients, output_dir=None, quiet=True, availability="beta",
        observer=lambda config, line: lines.append(line), **given,
    )  # fmt: skip


def table(lines: list[dict[str, Any]]) -> str:
    """Return the table: mean and spread over seeds, noise over signal, at epsilon 6 / 3 / 1."""
    head = " | ".join(f"{e:g}" for e in EPSILONS)
    out = [f"| set | row | {head} | noise / signal | seeds |", "|---" * 7 + "|"]
    for name in SETS:
        for row in ROWS:
            mine = [x for x in lines if (x["set"], x["row"]) == (name, row)]
            found = [[x for x in mine if x["epsilon"] == e] for e in EPSILONS]
            if any(found):
                cells = " | ".join(_cell([x["accuracy"] for x in part]) for part in found)
                noise = " / ".join(f"{x[0]['noise_to_signal']:.2g}" if x else "" for x in found)
                out.append(f"| {name} | {row} | {cells} | {noise} | {max(map(len, found))} |")
    return "\n".join(out)


def summary(lines: list[dict[str, Any]]) -> str:
    """Return the means of ours beside worst-case accounting, for the README."""
    out = [
        "| accuracy at epsilon 6 / 3 / 1 | certified | worst-case accounting |",
        "|---" * 3 + "|",
    ]
    for name in (name for name in SETS if any(x["set"] == name for x in lines)):
        cells = (
            " / ".join(f"{statistics.fmean(part):.1f}" for e in EPSILONS
                       if (part := [x["accuracy"] for x in lines
                                    if (x["set"], x["row"], x["epsilon"]) == (name, row, e)]))
            for row in FIRST
        )  # fmt: skip
        out.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(out)


def _cell(values: list[float]) -> str:
    """Return mean and standard deviation of accuracies."""
    if len(values) < 2:
        return "".join(f"{value:.1f}" for value in values)
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def wanted_of(names: list[str], rows: list[str], seeds: int) -> list[Cell]:
    """Return the cells, what is ours and what everybody knows first, a seed after the other."""
    return [
        (name, row, epsilon, seed)
        for some in (FIRST, [row for row in ROWS if row not in FIRST])
        for seed in range(seeds) for name in names for row in some if row in rows
        for epsilon in EPSILONS
        if row != "quap_fl" or epsilon == EPSILONS[0]
        if row != "ours, hog" or name not in ("digits", "glyphs")
    ]  # fmt: skip


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--rows", default=";".join(ROWS), help="joined by ';'")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    given = parser.parse_args()
    text = given.out.read_text() if given.out.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    there = {(x["set"], x["row"], x["epsilon"], x["seed"]) for x in lines}
    wanted = wanted_of(given.sets.split(","), given.rows.split(";"), given.seeds)
    for cell in [] if given.table else [cell for cell in wanted if cell not in there]:
        lines.append(run_one(*cell))
        with given.out.open("a") as stream:
            stream.write(json.dumps(lines[-1]) + "\n")
        print(f"{cell}: {lines[-1]['accuracy']:.2f} in {lines[-1]['seconds']:.0f} s", flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
