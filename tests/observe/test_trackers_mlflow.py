"""MLflow, against the real library: a file store in the run's folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fedquilt.common.errors import InvalidValueError
from fedquilt.experiment import resume_run, run_config
from fedquilt.observe.trackers import open_trackers
from run_samples import tiny

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
    with pytest.raises(ZeroDivisionError), opened(tmp_path) as trackers:
        trackers.log(LINE)
        raise ZeroDivisionError
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


SECRET = {"mode": "certified", "noise_seed": None}


@pytest.mark.parametrize("tracker", ["mlflow", "tensorboard", "wandb"])
def test_every_tracker_is_told_spend_and_noise_and_nothing_private(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is logged goes through `scalars_of`; look at it there, for the real run."""
    from fedquilt.observe import mlflow as mlflow_tracker
    from fedquilt.observe import trackers as others

    told: list[dict[str, Any]] = []
    for module in (mlflow_tracker, others):
        real = module.scalars_of
        monkeypatch.setattr(
            module, "scalars_of", lambda line, real=real: told.append(real(line)) or told[-1]
        )
    done = run_config(tiny(**SECRET, output_dir=str(tmp_path)), tracker=tracker)
    assert done.folder is not None
    assert (done.folder / tracker).is_dir()
    assert len(told) == 4
    spent = [line["epsilon_spent"] for line in told]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(done.statement.epsilon_max, rel=1e-6)
    assert all(line["noise_to_signal"] > 0 and "without_allowance" in line for line in told)
    private = {"time", "epoch_avg_loss", "noise_norm", "signal_norm", "clipped_fraction"}
    assert not private & set().union(*told)
    lines = (done.folder / "private.jsonl").read_text().splitlines()
    values = {v for line in lines for v in json.loads(line).values() if isinstance(v, float)}
    logged = {value for line in told for value in line.values()}
    assert not (values - {0.0, 1.0}) & logged


def test_python_runs_take_trackers_too(tmp_path: Path, client: Any) -> None:
    import torch

    import fedquilt

    x = torch.randn(20, 4)
    y = x[:, :2].argmax(dim=1)
    model = torch.nn.Linear(4, 2)
    settings: dict[str, Any] = {"mode": "fedavg", "num_rounds": 2, "availability": "always"}
    given = (model, (x, y), (x, y), [range(10), range(10, 20)])
    seen: list[int] = []
    done = fedquilt.run(
        *given,
        output_dir=str(tmp_path),
        tracker="mlflow,tensorboard",
        observer=lambda _, line: seen.append(line["round"]),
        **settings,
    )
    assert seen == [0, 1]
    assert done.folder is not None
    run = only_run(client(done.folder))
    assert run.info.run_name == "fedavg_seed0"
    assert list((done.folder / "tensorboard").iterdir())
    with pytest.raises(InvalidValueError, match="needs an output_dir"):
        fedquilt.run(*given, output_dir=None, tracker="mlflow", **settings)
    with pytest.raises(InvalidValueError, match="must be one of"):
        fedquilt.run(*given, output_dir=str(tmp_path), tracker="excel", **settings)


def test_a_finished_run_is_resumed_without_a_tracker(tmp_path: Path) -> None:
    done = run_config(tiny(mode="fedavg", output_dir=str(tmp_path)))
    assert done.folder is not None
    again = resume_run(done.folder, tracker="tensorboard")
    assert again.result["rounds"] == 4
