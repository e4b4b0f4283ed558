"""TensorBoard's event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import logging
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tracker_files import tensorboard_events, tensorboard_points

from fedquilt.observe.trackers import open_trackers

pytest.importorskip("tensorboard")

NAMING: dict[str, Any] = {"project": "p", "run_name": "n", "config": {}}


def log_rounds(folder: Path, rounds: range, loss: float, **more: Any) -> None:
    with open_trackers("tensorboard", folder, **NAMING) as trackers:
        for index in rounds:
            trackers.log({"round": index, "train_loss": loss + index, **more})


def test_steps_and_values_are_those_of_the_rounds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with open_trackers("tensorboard", tmp_path, **NAMING) as trackers:
        trackers.log({"round": 0, "train_loss": 2.5, "seconds": 0.5, "cohort": [1]})
        stats = {"mean": 1.5, "gini": None}
        trackers.log(
            {"round": 1, "train_loss": 1.25, "test_accuracy": 0.75, "participation_stats": stats}
        )
    assert tensorboard_points(tmp_path) == {
        "train_loss": [(1, 2.5), (2, 1.25)],
        "seconds": [(1, 0.5)],
        "accuracy": [(2, 0.75)],
        "participation_stats/mean": [(2, 1.5)],
    }
    assert capfd.readouterr().out == ""


def test_rounds_are_on_disk_before_the_end(tmp_path: Path) -> None:
    with open_trackers("tensorboard", tmp_path, **NAMING) as trackers:
        trackers.log({"round": 0, "train_loss": 2.5})
        assert tensorboard_points(tmp_path) == {"train_loss": [(1, 2.5)]}


def test_a_resumed_run_replaces_the_rounds_it_repeats(tmp_path: Path) -> None:
    log_rounds(tmp_path, range(5), loss=0.0)
    log_rounds(tmp_path, range(3, 7), loss=100.0)
    assert tensorboard_points(tmp_path) == {
        "train_loss": [(1, 0), (2, 1), (3, 2), (4, 103), (5, 104), (6, 105), (7, 106)]
    }


def test_clock_times_do_not_give_away_withheld_seconds(tmp_path: Path) -> None:
    for name, seconds in (("withheld", None), ("public", 0.02)):
        with open_trackers("tensorboard", tmp_path / name, **NAMING) as trackers:
            for index in range(3):
                time.sleep(0.02)
                trackers.log({"round": index, "test_loss": 1.0, "seconds": seconds})
    clocks = {
        name: [clock for *_, clock in tensorboard_events(tmp_path / name)["loss"]]
        for name in ("withheld", "public")
    }
    assert len(set(clocks["withheld"])) == 1
    assert all(late - early >= 0.02 for early, late in zip(*_pairs(clocks["public"]), strict=True))


def _pairs(values: list[float]) -> tuple[list[float], list[float]]:
    return values[:-1], values[1:]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_ends_the_tracker_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel refuses larger files, as it refuses to write to a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    threads = set(threading.enumerate())
    with (
        caplog.at_level(logging.WARNING, "fedquilt.trackers"),
        open_trackers("tensorboard", tmp_path, **NAMING) as trackers,
    ):
        trackers.log({"round": 0, "train_loss": 2.5})
        written = max(f.stat().st_size for f in (tmp_path / "tensorboard").iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (written + 10, limits[1]))
        try:
            for index in range(1, 30):
                trackers.log({"round": index, "train_loss": 2.5})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert trackers.names == ()
    assert set(threading.enumerate()) <= threads
    assert [record.name for record in caplog.records] == ["fedquilt.trackers"]
    assert "tensorboard" in caplog.text
    assert tensorboard_points(tmp_path)["train_loss"][0] == (1, 2.5)
