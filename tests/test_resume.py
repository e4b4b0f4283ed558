"""Runs that are killed at any moment and go on as if nothing had happened."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_processes import Nursery, environment
from run_samples import (
    assert_is_whole,
    assert_same_run,
    contents,
    flags,
    only_folder,
    rounds_without_clock,
    same_tensors,
    tiny,
    wait_for_lines,
)
from torch import nn

import fedquilt
from fedquilt import experiment
from fedquilt.config import MODES
from fedquilt.data import load_dataset
from fedquilt.errors import InvalidValueError, RunFolderError
from fedquilt.experiment import RunResult, resume_run, run_config
from fedquilt.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")

# Everything that has a state between two rounds: clip rule, moving average, momentum.
RICH: dict[str, Any] = {
    "mode": "quap_fl",
    "num_rounds": 3,
    "participation_ema": 0.3,
    "server_optimizer": "adam",
}
# What a run of three rounds does to the disk with a checkpoint after each: it writes
# config.toml; four times (the last one at the end) it flushes rounds.jsonl and
# replaces the checkpoint; it writes result.json.
FSYNCS, REPLACES, ROUNDS = 1 + 2 * 4 + 1, 1 + 4 + 1, 3
MOMENTS = [
    *(("fsync", number) for number in range(1, FSYNCS + 1)),
    *(("replace", number) for number in range(1, REPLACES + 1)),
    *(("replaced", number) for number in range(1, REPLACES + 1)),
    *((event, n) for event in ("round", "torn", "recorded") for n in range(1, ROUNDS + 1)),
]
BEFORE_THE_CONFIGURATION = {("fsync", 1), ("replace", 1)}


def killed(nursery: Nursery, parent: Path, moment: tuple[str, int], **changes: Any) -> Path:
    """Start a run in a process of its own, let it die, return the folder it leaves."""
    ended = nursery.run("run", *flags(**changes, output_dir=parent), "--quiet", die_at=moment)
    assert ended.code == -signal.SIGKILL, ended
    return only_folder(parent)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: f"{moment[0]}-{moment[1]}")
def test_killed_at_every_moment_that_touches_the_disk(
    nursery: Nursery, tmp_path: Path, uninterrupted: Callable[..., RunResult], moment: tuple[str, int]
) -> None:
    folder = killed(nursery, tmp_path, moment, **RICH)
    if moment in BEFORE_THE_CONFIGURATION:
        with pytest.raises(RunFolderError, match=r"must hold a config\.toml"):
            resume_run(folder)
        return
    resumed = resume_run(folder)
    assert resumed.folder == folder
    assert_same_run(resumed, uninterrupted(**RICH))
    assert_is_whole(folder, uninterrupted(**RICH))


def test_no_moment_was_forgotten(nursery: Nursery, tmp_path: Path) -> None:
    for event, count in (("fsync", FSYNCS), ("replace", REPLACES), ("round", ROUNDS)):
        parent = tmp_path / event
        beyond = (event, count + 1)
        ended = nursery.run("run", *flags(**RICH, output_dir=parent), "--quiet", die_at=beyond)
        assert ended.code == 0, ended


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("server_optimizer", ["sgd", "momentum", "yogi"])
def test_every_mode_and_server_state_survives(
    nursery: Nursery,
    tmp_path: Path,
    uninterrupted: Callable[..., RunResult],
    mode: str,
    server_optimizer: str,
) -> None:
    changes = {"mode": mode, "server_optimizer": server_optimizer}
    if mode == "fedavg":
        changes["noise_seed"] = None
    folder = killed(nursery, tmp_path, ("replaced", 3), **changes)
    assert RunFolder.open(folder).load_checkpoint()[0] == 2  # type: ignore[index]
    resume_run(folder)
    assert_is_whole(folder, uninterrupted(**changes))


def test_killed_again_and_again(
    nursery: Nursery, tmp_path: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    changes = {**RICH, "num_rounds": 5, "model": "auto"}
    folder = killed(nursery, tmp_path, ("recorded", 1), **changes)
    for moment in (("torn", 2), ("replace", 1), ("fsync", 4), ("round", 2), ("replace", 2)):
        ended = nursery.run("run", "--resume", folder, "--json", die_at=moment)
        assert ended.code == -signal.SIGKILL, (moment, ended)
        assert ended.out == ""
    ended = nursery.run("run", "--resume", folder, "--json")
    assert ended.code == 0, ended
    assert_is_whole(folder, uninterrupted(**changes))


def test_killed_at_random_moments(
    nursery: Nursery, tmp_path: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    draws = random.Random(7)
    changes = {"mode": "quap_fl_client", "num_rounds": 250, "eval_every": 20, "batch_size": 1024}
    child = nursery.start("run", *flags(**changes, output_dir=tmp_path), "--quiet")
    folder = wait_for_lines(tmp_path, 1)
    kills = 0
    for _ in range(4):
        time.sleep(draws.uniform(0.02, 0.15))
        child.kill(signal.SIGKILL)
        kills += child.wait().code == -signal.SIGKILL
        child = nursery.start("run", "--resume", folder, "--quiet")
    assert child.wait().code == 0
    assert kills >= 2
    assert_is_whole(folder, uninterrupted(**changes))


def test_the_installed_command_killed_from_outside(
    tmp_path: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    changes = {"mode": "fedavg", "noise_seed": None, "num_rounds": 300, "batch_size": 1024}
    command = [sys.executable, "-m", "fedquilt", "run", *flags(**changes, output_dir=tmp_path)]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL) as process:
        folder = wait_for_lines(tmp_path, 3)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    resume_run(folder)
    assert_is_whole(folder, uninterrupted(**changes))


def test_early_stopping_stays_where_it_stopped(
    nursery: Nursery, tmp_path: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    changes = {"mode": "fedavg", "early_stopping": True, "target_accuracy": 0.01, "eval_every": 1}
    folder = killed(nursery, tmp_path, ("replaced", 2), **changes)
    resumed = resume_run(folder)
    assert resumed.result["rounds"] == 1
    assert_is_whole(folder, uninterrupted(**changes))


def test_a_finished_run_returns_its_result_and_is_left_alone(
    tmp_path: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    whole = uninterrupted(mode="fedavg")
    folder = tmp_path / "copy"
    shutil.copytree(whole.folder, folder)  # type: ignore[arg-type]
    before = contents(folder)
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert_same_run(resume_run(folder), whole)
    assert contents(folder) == before
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps


def test_secret_noise_is_neither_stored_nor_reused(nursery: Nursery, tmp_path: Path) -> None:
    changes = {"mode": "fixed_dp", "noise_layers": "all", "noise_seed": None}
    folder = killed(nursery, tmp_path / "one", ("replaced", 3), **changes)
    twin = tmp_path / "twin"
    shutil.copytree(folder, twin)
    rounds, model, state = RunFolder.open(folder).load_checkpoint()  # type: ignore[misc]
    assert rounds == 2
    size = sum(tensor.numel() for tensor in model.values())
    for name, array in state.items():  # noise would have one number per weight
        assert array.size <= 10 < size, name
    first, second = resume_run(folder), resume_run(twin)
    assert first.result["cohorts"] == second.result["cohorts"]
    assert not same_tensors(first.state_dict, second.state_dict)
    norms = [run.result["history"]["noise_stats"] for run in (first, second)]
    assert norms[0][:2] == norms[1][:2]
    assert all(a["noise_norm"] != b["noise_norm"] for a, b in zip(*(n[2:] for n in norms), strict=True))


def test_rounds_that_run_again_draw_new_secret_noise(nursery: Nursery, tmp_path: Path) -> None:
    changes = {"mode": "quap_fl_client", "noise_seed": None}
    ended = nursery.run(
        *("run", *flags(**changes, output_dir=tmp_path), "--quiet"),
        die_at=("recorded", 3),
        checkpoint_seconds=3600,
    )
    assert ended.code == -signal.SIGKILL
    folder = only_folder(tmp_path)
    lost = rounds_without_clock(folder)
    assert len(lost) == 3
    resume_run(folder)
    again = rounds_without_clock(folder)
    assert [line["cohort"] for line in again[:3]] == [line["cohort"] for line in lost]
    assert [line["noise_std"] for line in again[:1]] == [line["noise_std"] for line in lost[:1]]
    for old, new in zip(lost, again, strict=False):
        assert old["noise_norm"] != new["noise_norm"]


class Normalised(nn.Module):
    """A model whose running statistics travel, one of them a whole number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm = nn.BatchNorm1d(64)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(x.flatten(1)))  # type: ignore[no-any-return]


class Stop(Exception):
    """Raised by an observer to end a run in the middle."""


def own_run(model: nn.Module, stop_after: int | None = None, **options: Any) -> RunResult:
    """Run somebody's own model on digits, raising `Stop` after some round."""
    train, test = load_dataset("digits")
    clients = [range(start, 1000, 10) for start in range(10)]

    def observe(config: object, line: dict[str, Any]) -> None:
        if stop_after is not None and line["round"] + 1 == stop_after:
            raise Stop

    return fedquilt.run(model, train, test, clients, observer=observe, **options)


OWN = {"mode": "fedavg", "num_rounds": 4, "clients_per_round": 3, "local_epochs": 1}


@pytest.mark.parametrize("build", [Normalised, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))])
def test_resume_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module]
) -> None:
    monkeypatch.setattr(experiment, "CHECKPOINT_SECONDS", 0.0)
    model = build()
    whole = own_run(model, output_dir=None, **OWN)
    with pytest.raises(Stop):
        own_run(model, 2, output_dir=str(tmp_path), **OWN)
    folder = only_folder(tmp_path)
    with pytest.raises(RunFolderError, match="not finished"):
        fedquilt.load(folder, model)
    with pytest.raises(RunFolderError, match=r"fedquilt\.run\(model, train, test, clients, resume"):
        resume_run(folder)
    resumed = own_run(model, resume=folder)
    assert same_tensors(resumed.state_dict, whole.state_dict)
    assert resumed.result["history"]["test_accuracy"] == whole.result["history"]["test_accuracy"]
    assert resumed.result["cohorts"] == whole.result["cohorts"]
    again = own_run(model, resume=folder)  # finished now: nothing runs
    assert_same_run(again, resumed)


def test_resume_from_python_keeps_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "CHECKPOINT_SECONDS", 0.0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(Stop):
        own_run(model, 2, output_dir=str(tmp_path), **OWN)
    folder = only_folder(tmp_path)
    before = contents(folder)
    with pytest.raises(InvalidValueError, match=r"num_rounds=9 must be 4"):
        own_run(model, resume=folder, num_rounds=9)
    with pytest.raises(InvalidValueError, match=r"unknown key 'num_round'.*'num_rounds'"):
        own_run(model, resume=folder, num_round=4)
    with pytest.raises(RunFolderError, match="does not fit"):
        own_run(nn.Sequential(nn.Flatten(), nn.Linear(64, 12)), resume=folder)
    assert contents(folder) == before
    own_run(model, resume=folder, num_rounds=4, mode="fedavg")


def test_a_run_in_memory_leaves_nothing_to_resume(tmp_path: Path) -> None:
    assert run_config(tiny(output_dir=str(tmp_path))).folder == only_folder(tmp_path)
    finished = own_run(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), output_dir=None, **OWN)
    assert finished.folder is None
    assert finished.summary()["output"] is None
