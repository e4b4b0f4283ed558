"""Runs that are tracked, from Python: what every tracker is told, and what none is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedquilt
from fedquilt.common.errors import InvalidValueError, StorageError
from fedquilt.experiment.api import resume_run, run_config
from fedquilt.observe.trackers import open_trackers
from fedquilt.report.views.run import run_view
from run_samples import flags, tiny
from tiers import rest_is_slow

SECRET = {"mode": "certified", "noise_seed": None}


@pytest.mark.parametrize("tracker", ["mlflow", "tensorboard", "wandb"])
def test_every_tracker_is_told_spend_and_noise_and_nothing_private(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is logged goes through `scalars_of`; look at it there, for the real run."""
    pytest.importorskip(tracker)
    from fedquilt.observe import trackers

    told: list[dict[str, Any]] = []
    real = trackers.scalars_of
    monkeypatch.setattr(trackers, "scalars_of", lambda line: told.append(real(line)) or told[-1])
    done = run_config(tiny(**SECRET, output_dir=str(tmp_path)), tracker=tracker)
    assert done.folder is not None
    assert (done.folder / tracker).is_dir()
    assert len(told) == 4
    spent = [line["epsilon_max"] for line in told]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(done.statement.epsilon_max, rel=1e-6)
    assert all("without_allowance" in line for line in told)
    ratios = [line["noise_to_signal"] for line in told]
    assert ratios == pytest.approx(run_view(done.folder)["noise_ratio"], rel=1e-3)
    assert ratios[-1] == pytest.approx(ratios[0] / 2, rel=1e-3), "of all four rounds, not of one"
    private = {"seconds", "train_loss", "noise_norm", "signal_norm", "clipped_fraction"}
    assert not private & set().union(*told)
    lines = (done.folder / "private.jsonl").read_text().splitlines()
    values = {v for line in lines for v in json.loads(line).values() if isinstance(v, float)}
    logged = {value for line in told for value in line.values()}
    assert not (values - {0.0, 1.0}) & logged


COMMANDS: dict[str, list[str]] = {
    "run": ["run"],
    "run on Flower": ["run", "--engine", "flower"],
    "compare": ["compare", "--modes", "certified", "--seeds", "0"],
    "sweep": ["sweep", "--over", "epsilon=2", "--seeds", "0", "--folder", "s"],
}
PUBLIC_TAGS = {"epsilon_max", "without_allowance", "noise_to_signal", "accuracy"}
PRIVATE_TAGS = (b"noise_norm", b"signal_norm", b"clipped_fraction", b"train_loss", b"seconds")


@pytest.mark.parametrize(
    "command", rest_is_slow([*COMMANDS], [name for name in COMMANDS if name != "sweep"])
)
def test_every_command_tracks_what_is_public_and_nothing_else(
    command: str, cli: Callable[..., Any], here: Path
) -> None:
    if "Flower" in command:
        pytest.importorskip("flwr")
    name, *options = COMMANDS[command]
    own = {**SECRET, "num_rounds": 2, "eval_every": 1}
    dropped = dict.fromkeys(("mode", "clip_norm", "normalise_updates", "epsilon"))
    given = flags(**{**own, **(dropped if name == "compare" else {})})
    said = cli(name, *given, *options, "--tracker", "tensorboard", "--json")
    assert said.code == 0, said.err
    (file,) = here.rglob("events.out.tfevents.*")
    content = file.read_bytes()
    assert all(tag.encode() in content for tag in PUBLIC_TAGS)
    assert not [tag for tag in PRIVATE_TAGS if tag in content]
    assert (file.parents[1] / "private.jsonl").exists(), "there was something to keep back"


def test_python_runs_take_trackers_too(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
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
    assert list((done.folder / "tensorboard").iterdir())
    assert (done.folder / "mlflow" / "run-id.txt").is_file()
    with pytest.raises(InvalidValueError, match="needs an output_dir"):
        fedquilt.run(*given, output_dir=None, tracker="mlflow", **settings)
    with pytest.raises(InvalidValueError, match="must be one of"):
        fedquilt.run(*given, output_dir=str(tmp_path), tracker="excel", **settings)


def test_a_finished_run_is_resumed_without_a_tracker(tmp_path: Path) -> None:
    done = run_config(tiny(mode="fedavg", output_dir=str(tmp_path)))
    assert done.folder is not None
    again = resume_run(done.folder, tracker="tensorboard")
    assert again.result["rounds"] == 4


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_tracker_does_not_write_where_a_link_leads(tmp_path: Path, name: str, deep: bool) -> None:
    """A run folder may be a stranger's; what its trackers write stays in it."""
    pytest.importorskip(name)
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / name).mkdir(parents=True)
    (folder / name / "within").symlink_to(".")  # wandb makes such links
    if not deep:
        (folder / name / "within").unlink()
        (folder / name).rmdir()
    (folder / name / "0" if deep else folder / name).symlink_to(elsewhere)
    refused = "must not lead out of" if deep else "must be a folder of its own"
    with pytest.raises(StorageError, match=refused):
        open_trackers(name, folder, project="p", run_name="r", config={})
    assert not list(elsewhere.iterdir())
