"""Runs to look at, made once for all tests of pages."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.config import MODE_TABLE, build_config
from fedquilt.experiment.api import run_config
from fedquilt.privacy.ledger import Ledger
from fedquilt.privacy.ledger.entries import allowance_mu2
from fedquilt.privacy.statement import Statement
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import build_result

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "model": "linear",
    "num_clients": 12,
    "clients_per_round": 5,
    "num_rounds": 6,
    "local_epochs": 1,
    "eval_every": 2,
}


def small_run(place: Path, **changes: Any) -> Path:
    """Run a few rounds and return the folder."""
    done = run_config(build_config({**SMALL, **changes, "output_dir": str(place)}))
    assert done.folder is not None
    return done.folder


def written_run(place: Path, mode: str, seed: int, *, rounds: int, num_clients: int) -> Path:
    """Write the files of a long run without training: cohorts, charges and lines as a run has."""
    source = np.random.default_rng(seed)
    wanted = {**SMALL, "mode": mode, "seed": seed, "num_rounds": rounds}
    if MODE_TABLE[mode].by_layer:
        wanted["noise_layers"] = "all"
    config = build_config({**wanted, "num_clients": num_clients, "output_dir": str(place)})
    folder = RunFolder.create(config, str(place))
    counts = np.zeros(num_clients)
    lines = [_line(source, index, num_clients, counts) for index in range(rounds)]
    for line in lines:
        folder.append_round(line)
    bounded = mode == "certified"
    if bounded:
        _charge(folder, config.epsilon, config.delta, lines, num_clients)
    claim = {"epsilon_max": 3.0, "epsilon_median": 2.5} if bounded else {}
    nothing = Statement.without_bound(
        delta=1e-5, covered=("w",), uncovered=(), noise_source="none", notes=("a note",)
    )
    result = build_result(config, lines, dataclasses.replace(nothing, **claim), counts)
    folder.write_result({**result, "stopped": None})
    folder.close()
    return folder.path


def _line(source: np.random.Generator, index: int, size: int, counts: Any) -> dict[str, Any]:
    cohort = np.sort(source.choice(size, 3 * size // 10, replace=False))
    counts[cohort] += 1
    line: dict[str, Any] = {"round": index, "cohort": cohort.tolist(), "without_allowance": 0}
    line |= {key: float(source.random()) for key in ("clip_value", "noise_std", "epsilon")}
    line |= dict.fromkeys(("train_loss", "noise_norm", "signal_norm", "seconds"))
    if index % 10 == 9:
        line |= {"test_accuracy": float(source.random()), "test_loss": 1.5}
        line["participation_stats"] = {"total_rounds": index + 1}
    return line


def _charge(
    folder: RunFolder, epsilon: float, delta: float, lines: list[dict[str, Any]], size: int
) -> None:
    share = allowance_mu2(epsilon, delta) / len(lines)
    with Ledger.open(folder.path / "ledger.sqlite", create=True) as ledger:
        people = ledger.population("people", num_clients=size, epsilon=epsilon, delta=delta)
        with ledger.transaction():
            run = people.start_run("run", epsilon=epsilon)
            for line in lines:
                charges = share * np.linspace(0.5, 1.0, len(line["cohort"]))
                reserved = run.reserve(line["round"], line["cohort"], charges)
                run.settle(reserved, release_digest=f"{line['round']:08x}")
    folder.write_account({"run_id": "run", "ledger": "ledger.sqlite", "clients": ""})


def condensation(place: Path) -> Path:
    """Grow a few images, kept after every round."""
    tiny = {"ipc": 1, "dc_iterations": 2, "model_epochs": 1, "model_n": 1, "num_clients": 3}
    settings = {"method": "condense", "dataset": "digits", "num_rounds": 3, "eval_every": 1}
    config = build_config({**settings, **tiny, "output_dir": str(place)})
    done = run_config(config)
    assert done.folder is not None
    return done.folder
