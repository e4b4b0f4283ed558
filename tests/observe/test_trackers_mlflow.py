"""MLflow, against the real library: one file store beside the runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedquilt.errors import StorageError
from fedquilt.observe.trackers import open_trackers

pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")

LINE = {"round": 0, "train_loss": 2.5, "seconds": 0.5, "cohort": [1, 2], "stats": {"mean": 0.25}}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a reader of the store beside a run's folder."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    return lambda place: MlflowClient(tracking_uri=(place / "mlflow").resolve().as_uri())


def only_run(reader: Any) -> Any:
    """Return the one run in a store."""
    experiments = [e.experiment_id for e in reader.search_experiments()]
    (run,) = reader.search_runs(experiments)
    return run


def opened(folder: Path, **changes: Any) -> Any:
    names = {"project": "digits", "run_name": "seed 0", "config": {"seed": 0, "mode": "fedavg"}}
    return open_trackers("mlflow", folder / "run", **{**names, **changes})


def test_rounds_are_metrics_and_settings_parameters(tmp_path: Path, client: Any) -> None:
    with opened(tmp_path) as trackers:
        trackers.log(LINE)
        trackers.log({**LINE, "round": 1, "train_loss": 1.5})
    run = only_run(client(tmp_path))
    assert run.data.params == {"seed": "0", "mode": "fedavg"}
    assert run.info.run_name == "seed 0"
    assert run.info.status == "FINISHED"
    history = client(tmp_path).get_metric_history(run.info.run_id, "train_loss")
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
    history = reader.get_metric_history(run.info.run_id, "train_loss")
    assert len({one.timestamp for one in history}) == 1
    assert run.info.start_time == run.info.end_time == history[0].timestamp


def test_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, client: Any) -> None:
    for lines in ([0, 1], [1, 2]):
        with opened(tmp_path) as trackers:
            for index in lines:
                trackers.log({**LINE, "round": index})
    reader = client(tmp_path)
    history = reader.get_metric_history(only_run(reader).info.run_id, "train_loss")
    assert [one.step for one in history] == [1, 2, 3]


def test_nothing_of_the_environment_is_changed(tmp_path: Path) -> None:
    before = dict(os.environ)
    with opened(tmp_path) as trackers:
        trackers.log(LINE)
    assert dict(os.environ) == before


def test_runs_of_one_folder_are_compared_in_one_store(tmp_path: Path, client: Any) -> None:
    for seed in (0, 1):
        names = {"project": "digits", "run_name": f"seed {seed}", "config": {"seed": seed}}
        with open_trackers("mlflow", tmp_path / f"run{seed}", **names) as trackers:
            trackers.log({**LINE, "test_accuracy": 0.5 + seed / 4})
        assert [file.name for file in (tmp_path / f"run{seed}" / "mlflow").iterdir()] == [
            "run-id.txt"
        ]
    reader = client(tmp_path)
    (experiment,) = [e for e in reader.search_experiments() if e.name == "digits"]
    found = reader.search_runs([experiment.experiment_id], order_by=["metrics.accuracy DESC"])
    assert [(run.info.run_name, run.data.metrics["accuracy"]) for run in found] == [
        ("seed 1", 0.75),
        ("seed 0", 0.5),
    ]


def test_the_store_that_the_user_names_is_sent_withheld_rounds_at_the_end(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "elsewhere"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (named / "mlflow").as_uri())
    trackers = opened(tmp_path)
    trackers.log({**LINE, "seconds": None})
    reader = client(named)
    assert only_run(reader).data.metrics == {}
    trackers.close()
    assert only_run(reader).data.metrics["train_loss"] == 2.5
    assert not (tmp_path / "mlflow").exists()


def test_a_store_that_an_older_version_made_in_the_run_goes_on(tmp_path: Path, client: Any) -> None:
    (tmp_path / "run" / "mlflow" / "0").mkdir(parents=True)
    with opened(tmp_path) as trackers:
        trackers.log(LINE)
    assert not (tmp_path / "mlflow").exists()
    assert only_run(client(tmp_path / "run")).info.run_name == "seed 0"


def test_a_store_does_not_lie_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mlflow").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="must be a folder of its own"):
        opened(tmp_path)
