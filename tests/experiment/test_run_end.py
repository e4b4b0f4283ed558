"""Why a run ended: a model that is no number any more, allowances, or its last round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedquilt.errors import RunInterrupted
from fedquilt.experiment.api import RunResult, resume_run, run_config
from fedquilt.experiment.loop import Experiment
from fedquilt.privacy.ledger import Ledger
from run_samples import flags, folder_of, only_folder, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

DEAD = "the model is not finite any more"
DIVERGES: dict[str, Any] = {"server_lr": 1e300, "num_rounds": 4}


def rounds_charged(path: Path) -> list[int]:
    """Return the rounds whose releases a ledger charged."""
    with Ledger.open(path, read_only=True) as ledger:
        entries = ledger.export()["entries"]
    return [entry["round"] for entry in entries if entry["kind"] == "settle"]


def diverged(folder: Path, **changes: Any) -> RunResult:
    return run_config(tiny(**{**DIVERGES, **changes, "output_dir": str(folder)}))


@pytest.mark.parametrize("mode", ["certified", "fixed_dp", "quap_fl", "fedavg"])
def test_a_dead_model_ends_the_run(tmp_path: Path, mode: str) -> None:
    seed = {"noise_seed": None} if mode == "fedavg" else {}
    result = diverged(tmp_path, mode=mode, **seed)
    assert result.result["stopped"] == DEAD
    assert result.result["rounds"] == 1
    assert not all(bool(tensor.isfinite().all()) for tensor in result.state_dict.values())


def test_a_dead_model_charges_nothing_more(tmp_path: Path) -> None:
    result = diverged(tmp_path, mode="certified")
    joins = result.result["joins"]
    assert sum(joins) == 3
    assert rounds_charged(folder_of(result) / "ledger.sqlite") == [0]


def test_a_dead_model_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "finish", _interrupted)
        with pytest.raises(RunInterrupted):
            diverged(tmp_path, mode="certified")
    folder = only_folder(tmp_path)
    result = resume_run(folder)
    assert result.result["stopped"] == DEAD
    assert rounds_charged(folder / "ledger.sqlite") == [0]


def test_the_command_says_why_the_run_ended(cli: Any, no_figures: None) -> None:
    said = cli("run", *flags(mode="certified", **DIVERGES), "--quiet")
    assert said.code == 0
    assert f"ended     after round 1: {DEAD}" in said.out


def test_a_run_that_refused_every_update_says_so(
    tmp_path: Path,
) -> None:
    changes: dict[str, Any] = {
        "learning_rate": 1e30,
        "fedprox_mu": 1e8,
        "noise_seed": None,
        "num_rounds": 2,
    }
    loose = run_config(tiny(**changes, mode="fedavg", output_dir=str(tmp_path)))
    assert loose.result["stopped"] is None, "the model stays as it was"
    assert "every update was NaN or infinity and left out in 2 of 2 rounds" in loose.statement.notes
    assert loose.result["statement"]["notes"] == list(loose.statement.notes)
    strict = run_config(tiny(**changes, mode="certified", output_dir=str(tmp_path)))
    assert not any("NaN" in note for note in strict.statement.notes), "that would tell on clients"


def test_killed_after_the_last_round_it_says_that_all_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(
        mode="certified",
        num_rounds=2,
        policy="cap",
        max_joins=2,
        clients_per_round=10,
        output_dir=str(tmp_path),
    )
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "finish", _interrupted)
        with pytest.raises(RunInterrupted):
            run_config(config)
    result = resume_run(only_folder(tmp_path))
    assert result.result["rounds"] == 2
    assert result.result["stopped"] is None


def _interrupted(experiment: Experiment, stopped: str | None = None) -> RunResult:
    raise KeyboardInterrupt
