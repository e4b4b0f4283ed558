"""MLflow, against the real library: a file store in the run's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedquilt.observe.trackers import open_trackers

pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")

LINE = {"round": 0, "train_loss": 2.5, "seconds": 0.5, "cohort": [1, 2], "stats": {"mean": 0.25}}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a reader of the store below a folder."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    return lambda folder: MlflowClient(tracking_uri=(folder / "mlflow").resolve().as_uri())


def only_run(reader: Any) -> Any:
    """Return the one run in a store."""
    experiments = [e.experiment_id for e in reader.search_experiments()]
    (run,) = reader.search_runs(experiments)
    return run


def opened(folder: Path, **changes: Any) -> Any:
    names = {"project": "digits", "run_name": "seed 0", "config": {"seed": 0, "mode": "fedavg"}}
    return open_trackers("mlflow", folder, **{**names, **changes})


def test_rounds_are_metrics_and_settings_parameters(tmp_path: Path, client: Any) -> None:
    with opened(tmp_path) as trackers:
        trackers.log(LINE)
        trackers.log({**LINE, "round": 1, "train_loss": 1.5})
    run = only_run(client(tmp_path))
    assert run.data.params == {"seed": "0", "mode": "fedavg"}
    assert run.info.run_name == "seed 0"
    assert run.info.status == "FINISHED"
    history = client(tmp_path).get_metric_history(run.info.run_id, "epoch_avg_loss")
    assert [(one.step, one.value) for one in history] == [(1, 2.5), (2, 1.5)]
    assert run.data.metrics["stats/mean"] == 0.25
    assert "cohort" not in run.data.metrics


def test_a_run_that_fails_says_so(tmp_path: Path, client: Any) -> None:
    trackers = opened(tmp_path)
    trackers.log(LINE)
    trackers.close(failed=True)
    assert only_run(client(tmp_path)).info.status == "FAILED"


def test_times_are_withheld_with_the_seconds(tmp_path: Path, client: Any) -> None:
    with opened(tmp_path) as trackers:
        for index in range(3):
            trackers.log({**LINE, "round": index, "seconds": None})
    reader = client(tmp_path)
    run = only_run(reader)
    history = reader.get_metric_history(run.info.run_id, "epoch_avg_loss")
    assert len({one.timestamp for one in history}) == 1
    assert run.info.start_time == run.info.end_time == history[0].timestamp


def test_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, client: Any) -> None:
    for lines in ([0, 1], [1, 2]):
        with opened(tmp_path) as trackers:
            for index in lines:
                trackers.log({**LINE, "round": index})
    reader = client(tmp_path)
    history = reader.get_metric_history(only_run(reader).info.run_id, "epoch_avg_loss")
    assert [one.step for one in history] == [1, 2, 3]


def test_nothing_of_the_environment_is_changed(tmp_path: Path) -> None:
    before = dict(os.environ)
    with opened(tmp_path) as trackers:
        trackers.log(LINE)
    assert dict(os.environ) == before
