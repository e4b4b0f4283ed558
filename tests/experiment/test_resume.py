"""Runs that are killed at any moment and go on as if nothing had happened."""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import fedquilt
from fedquilt.config import MODES
from fedquilt.data import load_dataset
from fedquilt.errors import InvalidValueError, RunFolderError
from fedquilt.experiment import loop as training_loop
from fedquilt.experiment.api import RunResult, resume_run, run_config
from fedquilt.privacy.accounting.gaussian import gaussian_epsilon
from fedquilt.privacy.ledger import Ledger
from fedquilt.record.folder import RunFolder
from run_processes import Nursery, environment
from run_samples import (
    assert_is_whole,
    assert_same_run,
    contents,
    flags,
    only_folder,
    rounds_saved,
    rounds_without_clock,
    same_tensors,
    tiny,
    wait_for_lines,
)
from tiers import one_of_each, rest_is_slow

pytestmark = pytest.mark.usefixtures("one_thread")

# Everything that has a state between two rounds: clip rule, moving average, momentum.
RICH: dict[str, Any] = {
    "mode": "quap_fl",
    "num_rounds": 3,
    "participation_ema": 0.3,
    "server_optimizer": "adam",
}
# What a run of three rounds does to the disk with a checkpoint after each: it makes its
# folders and writes config.toml and clients.json; it makes rounds.jsonl; four times (the last
# one at the end) it flushes that and replaces the checkpoint; it writes result.json.
FSYNCS, REPLACES, ROUNDS = 1 + 2 + 2 + 1 + 3 * 4 + 2, 1 + 1 + 4 + 1, 3
MOMENTS = [
    *(("fsync", number) for number in range(1, FSYNCS + 1)),
    *(("replace", number) for number in range(1, REPLACES + 1)),
    *(("replaced", number) for number in range(1, REPLACES + 1)),
    *((event, n) for event in ("round", "torn", "recorded") for n in range(1, ROUNDS + 1)),
]
BEFORE_THE_CONFIGURATION = {("fsync", 1), ("fsync", 2), ("replace", 1)}


def killed(nursery: Nursery, parent: Path, moment: tuple[str, int], **changes: Any) -> Path:
    """Start a run in a process of its own, let it die, return the folder it leaves."""
    ended = nursery.run("run", *flags(**changes, output_dir=parent), "--quiet", die_at=moment)
    assert ended.code == -signal.SIGKILL, ended
    return only_folder(parent)


def named(moment: tuple[str, int]) -> str:
    return f"{moment[0]}-{moment[1]}"


@pytest.mark.parametrize(
    "moment",
    rest_is_slow(
        MOMENTS,
        one_of_each(MOMENTS, lambda moment: (moment[0], moment in BEFORE_THE_CONFIGURATION)),
    ),
    ids=named,
)
def test_killed_at_every_moment_that_touches_the_disk(
    nursery: Nursery,
    tmp_path: Path,
    uninterrupted: Callable[..., RunResult],
    moment: tuple[str, int],
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
        parent.mkdir()
        beyond = (event, count + 1)
        ended = nursery.run("run", *flags(**RICH, output_dir=parent), "--quiet", die_at=beyond)
        assert ended.code == 0, ended


SERVERS = ["sgd", "momentum", "yogi"]
EVERY = [(mode, server) for mode in MODES for server in SERVERS]
DIAGONAL = [(mode, SERVERS[place % 3]) for place, mode in enumerate(MODES)]


@pytest.mark.parametrize(("mode", "server_optimizer"), rest_is_slow(EVERY, DIAGONAL, names=2))
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
    folder = killed(nursery, tmp_path, ("recorded", 3), **changes)
    assert rounds_saved(folder) == 2
    resume_run(folder)
    assert_is_whole(folder, uninterrupted(**changes))


def ledger_of(folder: Path) -> tuple[NDArray[np.float64], bool, int]:
    """Return what each client has spent by a run's own ledger, whether it is whole, and runs."""
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        (population,) = ledger.populations()
        return population.spent(), ledger.verify().ok, len(population.runs())


CERTIFIED: dict[str, Any] = {
    "mode": "certified",
    "num_rounds": 3,
    "clipping": "quantile",
    "noise_bands": 2,
}
LEDGER_MOMENTS = [
    *((event, n) for event in ("reserved", "settled", "recorded", "torn") for n in (1, 2, 3)),
    *(("replace", number) for number in range(2, 9)),
    *(("replaced", number) for number in range(1, 9)),
]


@pytest.mark.parametrize(
    "moment",
    rest_is_slow(LEDGER_MOMENTS, one_of_each(LEDGER_MOMENTS, lambda moment: moment[0])),
    ids=named,
)
def test_certified_killed_between_any_two_steps(
    nursery: Nursery,
    tmp_path: Path,
    uninterrupted: Callable[..., RunResult],
    moment: tuple[str, int],
) -> None:
    """With a seed the round that was lost comes out the same, and is not paid for twice."""
    whole = uninterrupted(**CERTIFIED)
    folder = killed(nursery, tmp_path, moment, **CERTIFIED)
    resume_run(folder)
    assert_is_whole(folder, whole)
    assert whole.folder is not None
    spent, ok, _ = ledger_of(folder)
    assert ok
    np.testing.assert_array_equal(spent, ledger_of(whole.folder)[0])
    lines = (folder / "private.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2]


@pytest.mark.parametrize("moment", [("reserved", 2), ("settled", 2), ("recorded", 2)], ids=str)
def test_a_run_that_is_killed_within_a_window_begins_it_again_and_pays_once(
    nursery: Nursery,
    tmp_path: Path,
    uninterrupted: Callable[..., RunResult],
    moment: tuple[str, int],
) -> None:
    changes = {**CERTIFIED, "num_rounds": 6, "rounds_per_release": 2, "availability": "beta"}
    changes["average_late"] = 1.0
    whole = uninterrupted(**changes)
    folder = killed(nursery, tmp_path, moment, **changes)
    resume_run(folder)
    assert_is_whole(folder, whole)
    assert whole.folder is not None
    np.testing.assert_array_equal(ledger_of(folder)[0], ledger_of(whole.folder)[0])


@pytest.mark.parametrize("moment", [("reserved", 2), ("settled", 2), ("recorded", 3)], ids=str)
def test_a_certified_run_never_forgets_a_charge(
    nursery: Nursery, tmp_path: Path, moment: tuple[str, int]
) -> None:
    """With secret noise a lost round is a second release: it is charged again, within epsilon."""
    changes = {"mode": "certified", "noise_seed": None, "clients_per_round": 10}
    folder = killed(nursery, tmp_path, moment, **changes)
    before, ok, _ = ledger_of(folder)
    assert ok
    assert (before > 0).any() == (moment[0] != "reserved" or moment[1] > 1)
    resumed = resume_run(folder)
    after, ok, _ = ledger_of(folder)
    assert ok
    assert (after >= before).all()
    assert 0 < resumed.statement.epsilon_max <= 3.0
    largest = max(gaussian_epsilon(math.sqrt(spent), 1e-5) for spent in after)
    assert resumed.statement.epsilon_max == pytest.approx(largest, rel=1e-6)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    folder = killed(nursery, tmp_path, ("replaced", 3), **changes)
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
    changes = {"mode": "quap_fl", "noise_layers": "all", "noise_seed": None}
    folder = killed(nursery, tmp_path / "one", ("replaced", 4), **changes)
    twin = tmp_path / "twin"
    shutil.copytree(folder, twin)
    saved = RunFolder.open(folder).load_checkpoint()
    assert saved is not None
    assert saved.rounds == 2
    size = sum(tensor.numel() for tensor in saved.model.values())
    for name, array in saved.state.items():  # noise would have one number per weight
        assert array.size <= 10 < size, name
    first, second = resume_run(folder), resume_run(twin)
    assert first.result["cohorts"] == second.result["cohorts"]
    assert not same_tensors(first.state_dict, second.state_dict)
    norms = [
        [entry["noise_norm"] for entry in run.result["history"]["noise_stats"]]
        for run in (first, second)
    ]
    assert norms[0][:2] == norms[1][:2]
    assert all(one != other for one, other in zip(norms[0][2:], norms[1][2:], strict=True))


@pytest.mark.parametrize(
    "changes",
    [{}, {"noise_bands": 3, "clipping": "quantile"}, {"secure_aggregation": "protocol"}],
    ids=str,
)
def test_a_certified_checkpoint_holds_no_noise(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Correlated noise needs the last noise vectors; they must not reach the disk either."""
    config = tiny(mode="certified", noise_seed=None, output_dir=str(tmp_path), **changes)
    folder = run_config(config).folder
    assert folder is not None
    saved = RunFolder.open(folder).load_checkpoint()
    assert saved is not None
    assert all(array.size <= 10 for array in saved.state.values())


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


class StopError(Exception):
    """Raised by an observer to end a run in the middle."""


def own_run(model: nn.Module, stop_after: int | None = None, **options: Any) -> RunResult:
    """Run somebody's own model on digits, raising `StopError` after some round."""
    train, test = load_dataset("digits")
    clients = [range(start, 1000, 10) for start in range(10)]

    def observe(config: object, line: dict[str, Any]) -> None:
        if stop_after is not None and line["round"] + 1 == stop_after:
            raise StopError

    return fedquilt.run(model, train, test, clients, observer=observe, **options)


OWN = {"mode": "fedavg", "num_rounds": 4, "clients_per_round": 3, "local_epochs": 1}


@pytest.mark.parametrize(
    "build", [Normalised, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))]
)
def test_resume_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module]
) -> None:
    monkeypatch.setattr(training_loop, "CHECKPOINT_SECONDS", 0.0)
    model = build()
    whole = own_run(model, output_dir=None, **OWN)
    with pytest.raises(StopError):
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
    monkeypatch.setattr(training_loop, "CHECKPOINT_SECONDS", 0.0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(StopError):
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


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: (run / "rounds.jsonl").unlink(),
        lambda run: (run / "rounds.jsonl").write_bytes(b""),
        lambda run: (run / "rounds.jsonl").write_bytes(b'{"round": 0'),
        lambda run: (run / "checkpoint.safetensors").write_bytes(b""),
        lambda run: (run / "ledger.json").unlink(),
        lambda run: (run / "config.toml").write_text('dataset = "digits"\n'),
    ],
    ids=["no rounds", "empty rounds", "torn rounds", "checkpoint", "no account", "config"],
)
def test_a_resume_that_is_refused_leaves_the_ledger_as_it_was(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    """A ledger that outlives runs is not told that a run goes on which then does not."""

    def stop(config: Any, line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt

    ledger = tmp_path / "ledger.sqlite"
    options = {"mode": "certified", "noise_seed": None, "ledger": str(ledger), "population": "p"}
    with pytest.raises(KeyboardInterrupt):
        run_config(tiny(**options, num_rounds=4, output_dir=str(tmp_path / "runs")), stop)
    run = only_folder(tmp_path / "runs")
    damage(run)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("ledger.sqlite*")}
    with pytest.raises((RunFolderError, InvalidValueError)):
        resume_run(run)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("ledger.sqlite*")} == before
