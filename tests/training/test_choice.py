"""Which engine `auto` is: from public numbers alone, and kept in the run's folder."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedquilt.experiment.api import resume_run, run_config
from fedquilt.models import MLP, MNISTModel
from fedquilt.record.folder import RunFolder
from fedquilt.training import FlatModel, LocalSettings, Task, choose_engine
from fedquilt.training import engines as choice
from run_samples import tiny

SHAPE = (1, 28, 28)
HOW = LocalSettings(epochs=1, batch_size=32, fedprox_mu=0.0, seed=0)


def make_task(count: int = 40, clients: int = 4) -> Task:
    inputs = torch.zeros(count, *SHAPE)
    targets = torch.zeros(count, dtype=torch.int64)
    return Task(inputs, targets, np.array_split(np.arange(count), clients))


@pytest.fixture
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "usable_cores", lambda: 2)
    monkeypatch.setattr(choice, "_cannot_start", lambda *given: None)


def chosen(model: nn.Module, rounds: int, cohort: int, task: Task | None = None) -> choice.Choice:
    task = make_task() if task is None else task
    flat = FlatModel(model, task.public().inputs)
    return choose_engine(flat, task, HOW, rounds, cohort)


@pytest.mark.usefixtures("_two_cores")
@pytest.mark.parametrize(
    ("model", "rounds", "cohort", "engine", "reason"),
    [
        (MLP(SHAPE, 10), 200, 20, "processes", "2 cores"),
        (MNISTModel(), 200, 30, "processes", "by hand"),
        (MLP(SHAPE, 10), 5, 20, "local", "to start"),
        (MLP(SHAPE, 10), 200, 3, "local", "cohorts of 3"),
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 4), nn.Tanh()), 2, 4, "sequential", "Tanh"),
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 6000)), 200, 20, "sequential", "parameters"),
    ],
    ids=["small", "cnn", "short", "few", "no plan", "large"],
)
def test_the_choice_follows_what_a_run_costs(
    model: nn.Module, rounds: int, cohort: int, engine: str, reason: str
) -> None:
    found = chosen(model, rounds, cohort)
    assert found.engine == engine
    assert reason in found.reason


@pytest.mark.usefixtures("_two_cores")
def test_what_clients_hold_does_not_enter() -> None:
    """A claim about one client: its data must not decide with what everybody trains."""
    task = make_task(40, 4)
    others = [np.arange(37), np.arange(37, 40), np.arange(0), np.arange(0)]
    other = dataclasses.replace(
        task, inputs=task.inputs + 3, targets=task.targets + 1, clients=others
    )
    for rounds in (1, 60, 200):
        assert chosen(MLP(SHAPE, 10), rounds, 20, task) == chosen(MLP(SHAPE, 10), rounds, 20, other)


def test_a_script_of_somebodys_own_is_not_started_again() -> None:
    """These tests' main module is pytest's: workers would import it."""
    found = choice._cannot_start(MLP(SHAPE, 10), make_task(), HOW)
    assert found is not None
    assert "main script" in found


def test_the_folder_says_which_engine_it_was_and_a_resumed_run_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(mode="fedavg", output_dir=str(tmp_path / "whole"))
    with caplog.at_level(logging.INFO):
        whole = run_config(config)
    assert whole.folder is not None
    assert "engine=auto is local, trainer manual" in caplog.text
    assert RunFolder.open(whole.folder).read_config().engine == "local"
    assert "# engine=auto is local, trainer manual: " in (whole.folder / "config.toml").read_text()

    again = run_config(config.replace(output_dir=str(tmp_path / "again")))
    assert all(torch.equal(t, again.state_dict[name]) for name, t in whole.state_dict.items())

    def stop(config: Any, line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_config(config.replace(output_dir=str(tmp_path / "cut")), observer=stop)
    (cut,) = (tmp_path / "cut").iterdir()
    # Whatever would be chosen now: the folder has the say.
    monkeypatch.setattr("fedquilt.setup.federation.choose_engine", _never)
    rest = resume_run(cut)
    assert all(torch.equal(t, rest.state_dict[name]) for name, t in whole.state_dict.items())


def _never(*given: object) -> None:
    raise AssertionError("a resumed run chooses no engine")
