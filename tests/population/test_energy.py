"""Energy: batteries against a plain loop, even spending, joules in the record, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.common.errors import DataError
from fedquilt.config import build_config
from fedquilt.experiment import loop
from fedquilt.experiment.api import resume_run, run_config, run_in_memory
from fedquilt.population.fleet import EnergyTracker, load_energy

TABLE = "client,joules,battery,charge\n0,3,4,1\n1,2,6,0\n2,1,,\n3,5,20,2\n"
SMALL: dict[str, Any] = {
    "dataset": "digits",
    "model": "linear",
    "mode": "fedavg",
    "num_clients": 4,
    "clients_per_round": 4,
    "availability": "always",
    "num_rounds": 7,
    "local_epochs": 1,
    "eval_every": 7,
}


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "energy.csv"
    path.write_text(TABLE)
    return str(path)


def by_hand(rounds: int) -> tuple[list[list[int]], list[float]]:
    """Who is there and what was spent, when everybody who can joins."""
    joules, battery, charge = [3, 2, 1, 5], [4.0, 6.0, np.inf, 20.0], [1, 0, 0, 2]
    level, total, cohorts, spent = list(battery), 0.0, [], []
    for _ in range(rounds):
        cohort = [k for k in range(4) if level[k] >= joules[k]]
        for k in cohort:
            level[k] -= joules[k]
            total += joules[k]
        level = [min(battery[k], level[k] + charge[k]) for k in range(4)]
        cohorts.append(cohort)
        spent.append(total)
    return cohorts, spent


def test_batteries_and_chargers_decide_who_is_there(table: str) -> None:
    done = run_in_memory(build_config({**SMALL, "energy": table}))
    cohorts, spent = by_hand(7)
    assert done.result["history"]["client_participation"] == cohorts
    assert done.result["history"]["joules"] == spent
    assert len({tuple(cohort) for cohort in cohorts}) > 2


def test_a_fleets_energy_is_spent_evenly() -> None:
    settings = {**SMALL, "num_clients": 10, "clients_per_round": 3, "num_rounds": 10}
    done = run_in_memory(build_config({**settings, "selection": "energy"}))
    joins = np.bincount(np.concatenate(done.result["history"]["client_participation"]))
    assert joins.tolist() == [3] * 10
    plain = run_in_memory(build_config(settings))
    joins = np.bincount(np.concatenate(plain.result["history"]["client_participation"]))
    assert joins.max() > 3


def test_a_resumed_run_knows_what_batteries_hold(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    real, out = loop.Experiment.run_round, tmp_path / "out"
    settings = {**SMALL, "energy": table, "selection": "energy", "output_dir": str(out)}

    def dies(self: Any, index: int) -> Any:
        if index == 3:
            raise KeyboardInterrupt
        return real(self, index)

    monkeypatch.setattr(loop.Experiment, "run_round", dies)
    with pytest.raises(KeyboardInterrupt):
        run_config(build_config(settings))
    monkeypatch.setattr(loop.Experiment, "run_round", real)
    (folder,) = out.iterdir()
    assert resume_run(folder).result["history"]["joules"] == by_hand(7)[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("client\n0\n", "header"),
        ("client,joules\n0,1\n", "must be all 4"),
        ("client,joules\n0,-1\n", "from 0 to"),
        ("client,joules\n0,nan\n", "from 0 to"),
        ("client,joules\n9,1\n", "a new one < 4"),
        ("client,joules\n0,1\n0,1\n", "a new one < 4"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "energy.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=reason):
        load_energy(path, 4)


def test_a_foreign_client_changes_nothing(table: str) -> None:
    tracker = EnergyTracker(load_energy(table, 4))
    with pytest.raises(ValueError, match="clients"):
        tracker.update([1, 7])
    assert tracker.spent.tolist() == [0.0] * 4
    assert tracker.total_rounds == 0
