"""Names, lines and failures: what holds for every tracker."""

from __future__ import annotations

import builtins
import logging
import math
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.errors import InvalidValueError, MissingPackageError, StorageError
from fedquilt.observe.trackers import (
    Tracker,
    Trackers,
    open_trackers,
    scalars_of,
    step_number,
    withholds_time,
)

NAMING: dict[str, Any] = {"project": "p", "run_name": "n", "config": {}}


class Listener:
    """A tracker that remembers, and fails when it is told to."""

    def __init__(
        self, log_error: Exception | None = None, close_error: BaseException | None = None
    ):
        self.lines: list[Mapping[str, Any]] = []
        self.closed: list[bool] = []
        self.log_error = log_error
        self.close_error = close_error

    def log(self, line: Mapping[str, Any]) -> None:
        if self.log_error is not None:
            raise self.log_error
        self.lines.append(line)

    def close(self, *, failed: bool = False) -> None:
        self.closed.append(failed)
        if self.close_error is not None:
            raise self.close_error


def test_a_round_becomes_scalars_under_the_fixed_names() -> None:
    line = {
        "round": 3,
        "cohort": [4, 7],
        "train_loss": 0.5,
        "test_accuracy": np.float64(0.25),
        "seconds": 2,
        "epsilon": None,
        "note": "text",
        "done": True,
        "participation_stats": {"mean": 1.5, "gini": None, "by_tier": {0: 2, "big": [1]}},
    }
    assert step_number(line) == 4
    assert scalars_of(line) == {
        "train_loss": 0.5,
        "accuracy": 0.25,
        "seconds": 2,
        "done": 1,
        "participation_stats/mean": 1.5,
        "participation_stats/by_tier/0": 2,
    }


def test_metrics_and_epsilons_have_plain_names() -> None:
    line = {
        "round": 0,
        "train_loss": None,
        "epoch_avg_loss": 0.75,
        "epsilon": 2.0,
        "test_loss": 0.5,
        "test_auroc": 0.875,
        "test_epsilon": 7.0,  # somebody's own metric
        "epsilon_spent": {"lowest": 1.0, "median": 2.0, "worst": 3.0},
    }
    assert scalars_of(line) == {
        "train_loss": 0.75,
        "epsilon": 2.0,
        "loss": 0.5,
        "auroc": 0.875,
        "test_epsilon": 7.0,
        "epsilon_spent/lowest": 1.0,
        "epsilon_median": 2.0,
        "epsilon_max": 3.0,
    }


def test_only_the_top_of_a_line_is_renamed() -> None:
    assert scalars_of({"round": 0, "big": {"train_loss": 1.0}}) == {"big/train_loss": 1.0}


def test_values_that_are_not_finite_are_scalars() -> None:
    scalars = scalars_of({"round": 0, "epsilon": math.inf, "test_loss": math.nan})
    assert scalars["epsilon"] == math.inf
    assert math.isnan(scalars["loss"])


def test_a_round_without_seconds_withholds_its_time() -> None:
    assert withholds_time({"round": 0, "seconds": None})
    assert withholds_time({"round": 0})
    assert not withholds_time({"round": 0, "seconds": 0.0})


@pytest.mark.parametrize("line", [{}, {"round": None}, {"round": -1}, {"round": 1.5}])
def test_a_line_without_a_round_is_refused_before_any_tracker(line: dict[str, Any]) -> None:
    listener = Listener()
    with pytest.raises(InvalidValueError, match="round="):
        Trackers({"a": listener}).log(line)
    assert listener.lines == []


def test_every_tracker_gets_every_line_and_is_closed_once() -> None:
    first, second = Listener(), Listener()
    with Trackers({"first": first, "second": second}) as trackers:
        for index in range(3):
            trackers.log({"round": index})
        trackers.close()
    trackers.close()
    trackers.log({"round": 3})
    assert first.lines == second.lines == [{"round": 0}, {"round": 1}, {"round": 2}]
    assert first.closed == second.closed == [False]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_run_that_ends_badly_says_so(error: BaseException) -> None:
    listener = Listener()
    with pytest.raises(type(error)), Trackers({"a": listener}):
        raise error
    assert listener.closed == [True]


def test_a_tracker_that_fails_is_warned_of_once_and_left(caplog: pytest.LogCaptureFixture) -> None:
    broken = Listener(OSError("No space left on device"), RuntimeError("gone"))
    working = Listener()
    with (
        caplog.at_level(logging.WARNING, "fedquilt.trackers"),
        Trackers({"broken": broken, "working": working}) as trackers,
    ):
        for index in range(3):
            trackers.log({"round": index})
        assert trackers.names == ("working",)
    assert len(working.lines) == 3
    assert (broken.closed, working.closed) == ([True], [False])
    (record,) = caplog.records
    assert record.name == "fedquilt.trackers"
    assert record.levelno == logging.WARNING
    assert "broken" in record.getMessage()
    assert "No space left on device" in record.getMessage()


def test_a_failure_to_close_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    broken, working = Listener(close_error=OSError("disk full")), Listener()
    with caplog.at_level(logging.WARNING, "fedquilt.trackers"):
        Trackers({"working": working, "broken": broken}).close()
    assert working.closed == [False]
    assert [record.name for record in caplog.records] == ["fedquilt.trackers"]


def test_ctrl_c_while_closing_still_closes_the_others() -> None:
    others = Listener(), Listener()
    slow = Listener(close_error=KeyboardInterrupt())
    trackers = Trackers({"a": others[0], "slow": slow, "b": others[1]})
    with pytest.raises(KeyboardInterrupt):
        trackers.close()
    assert [other.closed for other in others] == [[False], [False]]
    trackers.close()
    assert slow.closed == [False]


def test_lines_of_many_threads_all_arrive() -> None:
    listener = Listener()
    trackers = Trackers({"a": listener})
    threads = [
        threading.Thread(target=lambda k=k: [trackers.log({"round": k}) for _ in range(50)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["round"] for line in listener.lines) == sorted([*range(4)] * 50)


def test_a_forked_process_leaves_the_trackers_alone() -> None:
    listener = Listener()
    trackers = Trackers({"a": listener})
    pid = os.fork()
    if pid == 0:
        trackers.log({"round": 0})
        trackers.close()
        os._exit(10 * len(listener.lines) + len(listener.closed))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    trackers.close()
    assert listener.closed == [False]


@pytest.mark.parametrize("names", ["none", " none "])
def test_none_writes_nothing(names: str, tmp_path: Path) -> None:
    with open_trackers(names, tmp_path / "run", **NAMING) as trackers:
        trackers.log({"round": 0, "train_loss": 1.0})
        assert trackers.names == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            "wandbb",
            r"trackers='wandbb' must be one of 'wandb', 'tensorboard', 'mlflow', .* 'wandb'\?",
        ),
        ("tensorboard,neptune", "trackers='neptune' must be one of 'wandb', 'tensorboard'"),
        ("none,tensorboard", "trackers='none' must be one of 'wandb', 'tensorboard'"),
        ("", "trackers='' must be one of"),
        ("tensorboard,", "trackers='' must be one of"),
        (None, "trackers=None must be names"),
    ],
)
def test_unknown_names(names: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=message):
        open_trackers(names, tmp_path / "run", **NAMING)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_package(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError) as caught:
        open_trackers(package, tmp_path / "run", **NAMING)
    assert f"trackers='{package}'" in str(caught.value)
    assert "pip install 'fedquilt[trackers]'" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_not_taken_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder `wandb`, which wandb itself makes, can be imported where wandb is absent."""
    (tmp_path / "wandb").mkdir()
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert builtins.__import__("wandb").__path__ is not None
    try:
        with pytest.raises(MissingPackageError, match="not installed"):
            open_trackers("wandb", tmp_path / "run", **NAMING)
    finally:
        sys.modules.pop("wandb", None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_folder_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"tracker {name} cannot write to"):
        open_trackers(name, tmp_path / "file" / "run", **NAMING)


def test_what_opened_is_closed_when_the_next_cannot_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    first: Tracker = Listener()
    from fedquilt.observe import trackers as opening

    def no_room(folder: Path) -> Tracker:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(opening, "WandbTracker", lambda folder, **naming: first)
    monkeypatch.setattr(opening, "TensorBoardTracker", no_room)
    with pytest.raises(StorageError, match="No space left on device"):
        open_trackers("wandb,tensorboard", tmp_path, **NAMING)
    assert isinstance(first, Listener)
    assert first.closed == [True]
