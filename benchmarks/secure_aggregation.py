"""What it costs that nobody trusts the server: noise of the clients beside noise of a server.

    python benchmarks/secure_aggregation.py [--datasets digits mnist] [--epsilons 6 3 1]

100 clients that are all asked in each of 60 rounds; of the rows with drop-outs that share of each
round's clients, picked at random, never answers.  "The server" and "clients" have the same
settings, a noised release a round, and differ in who draws the noise; "windows" are the defaults
of `certified` under a server's noise, fewer releases of several rounds each, which masks cannot
have.  Accuracy is that on the test data after the last round, mean and standard deviation over
seeds (how many); bits and bytes are of one client's vector in a round, seconds of CPU of the run.

Every run is a line of `docs/secure_aggregation.jsonl`; runs that it has are not made again.
`--table` prints the table of `docs/secure-aggregation.md` from the file alone.

    python benchmarks/secure_aggregation.py --deployed [--rounds 10] [--repeats 3]

Seconds a round of five SuperNodes on this machine, with TLS and keys, without masks and with, in
turn: the median time from the orders of a round to those of the next.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.randomness import generator
from fedquilt.config import RunConfig, build_config
from fedquilt.experiment.api import run_in_memory
from fedquilt.privacy.secure import SecureCertified
from fedquilt.setup.task import FederatedTask
from fedquilt.training import ClientUpdate, Engine

CELLS = Path(__file__).resolve().parents[1] / "docs" / "secure_aggregation.jsonl"
SERVER = {"rounds_per_release": 1}  # a release a round, and clip and epochs as they are for clients
CLIENTS = {"secure_aggregation": "simulated"}
ARMS: dict[str, tuple[dict[str, Any], float]] = {
    f"{whose}{f', {lost:.0%} lost' if lost else ''}": (settings, lost)
    for whose, settings in (("windows", {}), ("the server", SERVER), ("clients", CLIENTS))
    for lost in (0.0, 0.1, 0.3)
}


class Losing(Engine):
    """An engine of whose clients a share never answers."""

    def __init__(self, inner: Engine, share: float, seed: int) -> None:
        self._inner, self._share, self._seed = inner, share, seed

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Train those who do answer."""
        draws = generator(self._seed, "lost", round_index)
        lost = set(draws.choice(len(cohort), math.floor(self._share * len(cohort)), replace=False))
        here = [int(client) for place, client in enumerate(cohort) if place not in lost]
        return self._inner.train(start, here, round_index, learning_rate)

    def close(self) -> None:
        """Close the engine inside."""
        self._inner.close()


def run(
    dataset: str, epsilon: float, seed: int, settings: dict[str, Any], lost: float
) -> dict[str, float]:
    """Return the accuracy, the seconds, and what a client sends of one run."""
    config = build_config(
        {
            "mode": "certified",
            "dataset": dataset,
            "model": "hog-linear",  # the head that the page names
            "num_clients": 100,
            "availability": "always",
            "epsilon": epsilon,
            "seed": seed,
            "eval_every": 60,
            "device": "cpu",
            **settings,
        }
    )

    def prepare(config: RunConfig, problem: FederatedTask) -> FederatedTask:
        if not lost:
            return problem
        own = dataclasses.replace(
            problem.own, engine=lambda parts: Losing(parts.make_engine(), lost, seed)
        )
        return dataclasses.replace(problem, own=own)

    sent: list[tuple[int, int]] = []
    plan_round = SecureCertified.plan_round

    def noting(mechanism: SecureCertified, *args: Any) -> Any:
        plan = plan_round(mechanism, *args)
        sent.append((plan.bits, -(-plan.bits * mechanism.secure.size // 8)))
        return plan

    SecureCertified.plan_round = noting  # type: ignore[method-assign]
    began = time.process_time()
    try:
        result = run_in_memory(config, prepare=prepare)
    finally:
        SecureCertified.plan_round = plan_round  # type: ignore[method-assign]
    seconds = time.process_time() - began
    size = sum(value.numel() for value in result.model.parameters() if value.requires_grad)
    bits, size_sent = max(sent, default=(32, 4 * size))
    accuracy = round(100 * float(result.final_accuracy or math.nan), 3)
    return {"accuracy": accuracy, "seconds": round(seconds, 1), "bits": bits, "bytes": size_sent}


def read_cells() -> dict[tuple[str, float, str, int], dict[str, Any]]:
    """Return the runs of the file by data set, epsilon, whose noise, and seed."""
    lines = CELLS.read_text().splitlines() if CELLS.exists() else []
    cells = [json.loads(line) for line in lines]
    return {(c["dataset"], c["epsilon"], c["noise"], c["seed"]): c for c in cells}


def table() -> str:
    """Return the table of the page."""
    cells = read_cells()
    sets = sorted({key[0] for key in cells}, reverse=True)
    head = ["ε", "whose noise", *(f"{name}" for name in sets), "bits", "bytes"]
    head += [f"CPU s, {name}" for name in sets]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for epsilon in sorted({key[1] for key in cells}, reverse=True):
        for arm in ARMS:
            found = [[c for k, c in cells.items() if k[:3] == (s, epsilon, arm)] for s in sets]
            if not all(found):  # a row is whole or not there
                continue
            shown = [f"{epsilon:g}", arm, *(_spread(part, "accuracy") for part in found)]
            shown += [" / ".join(dict.fromkeys(f"{p[0][of]:,}" for p in found)) for of in
                      ("bits", "bytes")]  # fmt: skip
            shown += [f"{statistics.mean(c['seconds'] for c in part):.0f}" for part in found]
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def _spread(cells: list[dict[str, Any]], name: str) -> str:
    values = [cell[name] for cell in cells]
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread} ({len(values)})"


def deployed(kind: str, rounds: int, nodes: int = 5) -> float:
    """Return the median seconds of a round on SuperNodes, from its orders to those of the next."""
    from fedquilt.flower.federation import LocalFederation
    from fedquilt.flower.template import write_app

    with tempfile.TemporaryDirectory() as folder:
        app = write_app(
            Path(folder) / "app", mode="certified", epsilon=60.0, num_rounds=rounds,
            clients_per_round=1.0, secure_aggregation=kind, eval_every=rounds,
            flower_min_nodes=nodes, seed=3,
        )  # fmt: skip
        federation = LocalFederation(Path(folder) / "federation")
        federation.prepare(app, nodes)
        try:
            federation.up()
            if federation.run() != 0:
                raise SystemExit(f"the run with secure_aggregation={kind!r} failed")
            lines = (federation.wait() / "nodes.jsonl").read_text().splitlines()
        finally:
            federation.down()
    notes = [json.loads(line) for line in lines]
    if any(note.get("absent") or note.get("refused") for note in notes):
        raise SystemExit("a node was lost: the figures are of another number of nodes")
    sent = [note["at"] for note in notes if "sent" in note]
    return statistics.median(after - before for before, after in itertools.pairwise(sent))


def main() -> None:
    """Make the runs that the file does not have, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", nargs="+", default=["digits", "mnist"])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[6.0, 3.0, 1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="print what the file has")
    parser.add_argument("--deployed", action="store_true", help="seconds a round of SuperNodes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    if asked.deployed:
        for _ in range(asked.repeats):
            for kind in ("off", "protocol"):
                seconds, load = deployed(kind, asked.rounds), os.getloadavg()[0]
                print(f"{kind}: {seconds:.2f} s a round, load {load:.1f}", flush=True)
        return
    keys = [
        (dataset, epsilon, arm, seed)
        for seed in asked.seeds
        for dataset in asked.datasets
        for epsilon in asked.epsilons
        for arm in ARMS
    ]
    for key in [] if asked.table else [key for key in keys if key not in read_cells()]:
        dataset, epsilon, arm, seed = key
        names = {"dataset": dataset, "epsilon": epsilon, "noise": arm, "seed": seed}
        line = json.dumps({**names, **run(dataset, epsilon, seed, *ARMS[arm])})
        with CELLS.open("a") as file:
            file.write(line + "\n")
    print(table())


if __name__ == "__main__":
    main()
