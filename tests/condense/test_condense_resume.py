"""Condensations that are killed, interrupted and taken up again."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from condense_samples import certified, condense, images_of, small

from fedquilt.condense.certified import GrowingServer
from fedquilt.config import RunConfig
from fedquilt.data import load_condensed, load_dataset
from fedquilt.errors import InvalidValueError, RunFolderError
from fedquilt.experiment import api as experiment
from fedquilt.experiment import loop as training_loop
from fedquilt.experiment.api import RunResult, load, resume_run, run_config
from fedquilt.privacy.ledger import Ledger
from fedquilt.record.folder import RunFolder
from run_processes import Ended, Nursery
from run_samples import (
    contents,
    only_folder,
    rounds_saved,
    rounds_without_clock,
    same_tensors,
    wait_for_lines,
)
from tiers import one_of_each, rest_is_slow

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPED: dict[str, Any] = {"num_rounds": 3, "eval_every": 2, "ipc": 1, "model_n": 1}
# What GROUPED does to the disk with a checkpoint after every round, file after file:
# 1 config.toml, 2 clients.json, 3 and 4 first images and their picture, 5 checkpoint;
# 6 and 7 images and picture after two rounds, 8 checkpoint; 9 and 10 after three,
# 11 checkpoint; 12 final images, 13 checkpoint, 14 result.json, 15 to 17 pictures.
MOMENTS = [
    *(("replace", number) for number in (6, 9, 12, 16)),
    *(("replaced", number) for number in (5, 6)),
    *(("round", 2), ("torn", 2), ("recorded", 3)),
]
BOUNDED: dict[str, Any] = {"num_rounds": 3, "eval_every": 3, "mean_rounds": 1, "noise_seed": 5}
BOUNDED_MOMENTS = [("settled", 2), ("reserved", 3), ("round", 3)]


def options(config: RunConfig) -> list[str]:
    """Return what differs from the defaults as options of the command line."""
    plain = type(config)().as_dict()
    parts: list[str] = []
    for key, value in config.as_dict().items():
        # One client and everybody, 1 and 1.0, are equal numbers.
        same = value == plain[key] and isinstance(value, type(plain[key]))
        if value is not None and not same and key != "method":
            flag = f"--{key.replace('_', '-')}"
            parts += [flag] if value is True else [flag, str(value)]
    return parts


def start(nursery: Nursery, config: RunConfig, parent: Path, **fault: Any) -> Ended:
    given = options(config.replace(output_dir=str(parent)))
    return nursery.run("condense", *given, "--quiet", **fault)


def killed(nursery: Nursery, config: RunConfig, parent: Path, moment: tuple[str, int]) -> Path:
    ended = start(nursery, config, parent, die_at=moment)
    assert ended.code == -signal.SIGKILL, ended
    return only_folder(parent)


def resume(nursery: Nursery, folder: Path, command: str = "condense") -> Ended:
    ended = nursery.run(command, "--resume", folder, "--quiet")
    assert ended.code == 0, ended
    return ended


def assert_equal_runs(folder: Path, whole: Path) -> None:
    """Fail unless images, weights, rounds and the state between rounds are the same bits."""
    assert rounds_without_clock(folder) == rounds_without_clock(whole)
    ours, theirs = load(folder), load(whole)
    assert same_tensors(ours.state_dict, theirs.state_dict)
    assert ours.statement == theirs.statement
    images = [path.relative_to(whole) for path in whole.rglob("*.safetensors")]
    assert len(images) > 3
    for name in images:
        if name.name == "checkpoint.safetensors":
            continue
        assert torch.equal(
            load_condensed(folder / name).images, load_condensed(whole / name).images
        ), name
    states = [RunFolder.open(path).load_checkpoint() for path in (folder, whole)]
    first, second = (saved.state for saved in states if saved is not None)
    assert first.keys() == second.keys()
    for key, array in first.items():
        assert key == "account.spent" or array.tobytes() == second[key].tobytes(), key
    for path in (*folder.rglob("*.png"), *folder.rglob("*.gif")):
        assert path.read_bytes() == (whole / path.relative_to(folder)).read_bytes(), path
    torn = [path.name for path in folder.rglob(".*") if path.name.endswith(".tmp")]
    assert not [name for name in torn if not name.startswith(".condensed_")], torn


@pytest.fixture(scope="module")
def whole(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[RunConfig], Path]:
    """Run a configuration to its end in a process of its own, once for all tests."""
    done: dict[RunConfig, Path] = {}

    def run(config: RunConfig) -> Path:
        if config not in done:
            parent = tmp_path_factory.mktemp("whole")
            assert start(nursery, config, parent).code == 0
            done[config] = only_folder(parent)
        return done[config]

    return run


def named(moment: tuple[str, int]) -> str:
    return f"{moment[0]}-{moment[1]}"


def event(moment: tuple[str, int]) -> str:
    return moment[0]


@pytest.mark.parametrize("moment", rest_is_slow(MOMENTS, one_of_each(MOMENTS, event)), ids=named)
def test_killed_and_resumed(
    nursery: Nursery, tmp_path: Path, whole: Callable[..., Path], moment: tuple[str, int]
) -> None:
    config = small(**GROUPED)
    folder = killed(nursery, config, tmp_path, moment)
    if moment == ("replaced", 5):
        assert rounds_saved(folder) == 1
    ended = resume(nursery, folder)
    assert str(folder) in ended.out
    assert_equal_runs(folder, whole(config))


def test_the_moments_are_what_they_are_called(nursery: Nursery, tmp_path: Path) -> None:
    folder = killed(nursery, small(**GROUPED), tmp_path / "images", ("replace", 6))
    left = {path.name for path in (folder / "synthetic").iterdir()}
    assert "round_0002.safetensors" not in left
    assert any(name.startswith(".round_0002") for name in left), "half a file of images"


@pytest.mark.slow
def test_a_model_that_goes_on_from_round_to_round(
    nursery: Nursery, tmp_path: Path, whole: Callable[..., Path]
) -> None:
    config = small(**{**GROUPED, "feature_model": "perturbed"})
    folder = killed(nursery, config, tmp_path, ("round", 3))
    resume(nursery, folder)
    assert_equal_runs(folder, whole(config))


@pytest.mark.slow
def test_killed_in_the_middle_of_rounds(
    nursery: Nursery, tmp_path: Path, whole: Callable[..., Path]
) -> None:
    """Again and again, wherever it happens to be; rounds take about a quarter of a second."""
    config = small(**{**GROUPED, "num_rounds": 4, "dc_iterations": 60})
    given = options(config.replace(output_dir=str(tmp_path)))
    child = nursery.start("condense", *given, "--quiet")
    folder = wait_for_lines(tmp_path, 1)
    kills = 0
    for pause in (0.05, 0.15, 0.1):
        time.sleep(pause)
        child.kill(signal.SIGKILL)
        kills += child.wait().code == -signal.SIGKILL
        child = nursery.start("condense", "--resume", folder, "--quiet")
    assert child.wait().code == 0
    assert kills >= 1
    assert_equal_runs(folder, whole(config))


@pytest.mark.parametrize(
    "moment", rest_is_slow(BOUNDED_MOMENTS, one_of_each(BOUNDED_MOMENTS, event)), ids=named
)
def test_certified_killed_and_resumed(
    nursery: Nursery, tmp_path: Path, whole: Callable[..., Path], moment: tuple[str, int]
) -> None:
    config = certified(**BOUNDED)
    folder = killed(nursery, config, tmp_path, moment)
    resume(nursery, folder)
    assert_equal_runs(folder, whole(config))


def test_a_lost_round_with_secret_noise_is_paid_for_again(nursery: Nursery, tmp_path: Path) -> None:
    """One client joins a round and may join both: the lost one can be paid for again."""
    changes = {"noise_seed": None, "num_rounds": 2, "eval_every": 2, "policy": "worst_case"}
    config = certified(**{**BOUNDED, **changes, "clients_per_round": 1})
    folder = killed(nursery, config, tmp_path, ("round", 2))
    path = folder / "synthetic" / "round_0002.safetensors"
    assert not path.exists(), "images are grown when the release is kept"
    resume(nursery, folder)
    assert path.exists()
    assert path.with_suffix(".png").exists()
    assert load(folder).statement.epsilon_max <= 6
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok


@pytest.mark.usefixtures("quick")
def test_an_interruption_while_images_grow_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release is in a checkpoint by then: the resumed run does not pay for it twice."""
    config = certified(**{**BOUNDED, "noise_seed": None, "eval_every": 2})
    config = config.replace(output_dir=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(GrowingServer, "_grow", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_config(config)
    folder = only_folder(tmp_path)
    assert rounds_saved(folder) == 2
    finished = resume_run(folder)
    assert finished.result["history"]["evaluation_rounds"] == [2, 3]
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        (population,) = ledger.populations()
        assert set(population.joins().tolist()) == {3}
    assert finished.statement.epsilon_max <= 6


@pytest.mark.usefixtures("quick")
def test_an_interruption_before_the_last_checkpoint_leaves_no_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line tells an accuracy, the checkpoint is from before the images grew."""
    config = certified(**BOUNDED).replace(output_dir=str(tmp_path))
    amend = RunFolder.amend_round

    def amend_and_stop(folder: RunFolder, *records: Any) -> None:
        amend(folder, *records)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "amend_round", amend_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run_config(config)
    folder = only_folder(tmp_path)
    finished = resume_run(folder)
    grown = load_condensed(folder / "synthetic" / "round_0003.safetensors").images
    assert torch.equal(images_of(finished), grown)
    assert torch.equal(load_condensed(folder / "condensed.safetensors").images, grown)


def _interrupt(server: GrowingServer) -> float:
    raise KeyboardInterrupt


def test_a_round_that_cannot_be_paid_again_leaves_the_images_of_the_others(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Killed in the last round after its charge: nothing is left to pay for it again."""
    config = certified(**{**BOUNDED, "noise_seed": None})
    folder = killed(nursery, config, tmp_path, ("round", 3))
    resume(nursery, folder)
    finished = load(folder)
    kept = sorted(path.stem for path in (folder / "synthetic").glob("*.safetensors"))
    assert kept == ["round_0000", "round_0002"]
    first, last = (load_condensed(folder / "synthetic" / f"{name}.safetensors") for name in kept)
    assert torch.equal(images_of(finished), last.images)
    assert not torch.equal(last.images, first.images), "grown from what was released before"
    assert finished.statement.epsilon_max <= 6
    lines = rounds_without_clock(folder)
    assert [line["round"] for line in lines] == [0, 1]
    assert lines[-1]["test_accuracy"] == finished.final_accuracy
    assert finished.final_accuracy is not None


def test_ctrl_c_says_how_to_go_on(
    nursery: Nursery, tmp_path: Path, whole: Callable[..., Path]
) -> None:
    config = small(**GROUPED)
    given = options(config.replace(output_dir=str(tmp_path)))
    child = nursery.start("condense", *given, slow_rounds=0.3)
    folder = wait_for_lines(tmp_path, 1)
    child.kill(signal.SIGINT)
    ended = child.wait()
    assert ended.code == 130, ended
    assert ended.out == ""
    assert f"interrupted: continue with  fedquilt condense --resume {folder}" in ended.err
    assert "Traceback" not in ended.err
    resume(nursery, folder)
    assert_equal_runs(folder, whole(config))


def test_a_finished_run_is_only_printed(
    nursery: Nursery, tmp_path: Path, whole: Callable[..., Path]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole(small(**GROUPED)), folder)
    before = contents(folder)
    said = resume(nursery, folder).out
    assert "fednum" in said
    assert "epsilon: inf" in said
    assert contents(folder) == before


def test_run_resumes_a_condensation_too(
    nursery: Nursery, tmp_path: Path, whole: Callable[..., Path]
) -> None:
    config = small(**GROUPED)
    folder = killed(nursery, config, tmp_path, ("recorded", 2))
    resume(nursery, folder, "run")
    assert torch.equal(images_of(load(folder)), images_of(load(whole(config))))
    resume(nursery, folder)  # draws what `run` has not
    assert_equal_runs(folder, whole(config))


def test_condense_does_not_resume_a_run(nursery: Nursery, tmp_path: Path) -> None:
    trained = ("--model", "linear", "--mode", "fedavg", "--num-rounds", 1, "--local-epochs", 1)
    assert nursery.run("run", *trained, "--output-dir", tmp_path, "--quiet").code == 0
    ended = nursery.run("condense", "--resume", only_folder(tmp_path))
    assert ended.code == 2
    assert "must be a condensation" in ended.err
    assert "fedquilt run --resume" in ended.err


class StopError(Exception):
    """Raised by an observer to end a run in the middle."""


def stopping(config: object, line: dict[str, Any]) -> None:
    raise StopError


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of somebody's own model and data, stopped after the first of two rounds."""
    monkeypatch.setattr(training_loop, "CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(StopError):
        condense(output_dir=str(tmp_path), observer=stopping)
    return only_folder(tmp_path)


def go_on(folder: Path, **changes: Any) -> RunResult:
    """Resume with nothing but what is given; the settings are in the folder."""
    from condense_samples import PARTS, Linear

    import fedquilt

    train, test = load_dataset("digits")
    clients = changes.pop("clients", PARTS)
    return fedquilt.run(Linear(), train, test, clients, resume=folder, **changes)


def test_resume_from_python(stopped: Path) -> None:
    resumed = go_on(stopped, method="condense", join_ratio=1, communication_rounds=2)
    assert torch.equal(images_of(resumed), images_of(condense()))
    assert same_tensors(resumed.state_dict, condense().state_dict)


def test_resume_from_python_keeps_its_settings(stopped: Path) -> None:
    before = contents(stopped)
    with pytest.raises(InvalidValueError, match="num_rounds=9 must be 2"):
        go_on(stopped, communication_rounds=9)
    with pytest.raises(InvalidValueError, match=r"unknown key 'join_ration'.*'join_ratio'"):
        go_on(stopped, join_ration=1)
    assert contents(stopped) == before


def test_resume_with_other_classes_is_refused(stopped: Path) -> None:
    labels = load_dataset("digits")[0].targets.numpy()
    few = np.flatnonzero(labels < 5)
    with pytest.raises(RunFolderError, match="begun with other clients"):
        go_on(stopped, clients=[few[:50], few[50:100]])
    (stopped / "clients.json").unlink()  # as older versions left it
    with pytest.raises(RunFolderError, match=r"does not fit: state/server\.images"):
        go_on(stopped, clients=[few[:50], few[50:100]])


def test_a_torn_checkpoint_is_an_error_that_names_it(tmp_path: Path) -> None:
    result = run_config(small(**GROUPED, output_dir=str(tmp_path)))
    folder = result.folder
    assert folder is not None
    (folder / "result.json").unlink()
    checkpoint = folder / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    with pytest.raises(RunFolderError, match=r"checkpoint\.safetensors is not a checkpoint"):
        experiment.resume_run(folder)
