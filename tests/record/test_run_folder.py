"""The files of a run: names, formats, versions, and what is refused."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import fedquilt
from fedquilt.common import storage
from fedquilt.config import build_config
from fedquilt.errors import FedquiltError, RunFolderError, StorageError
from fedquilt.experiment import loop as training_loop
from fedquilt.experiment.api import RunResult, resume_run, run_config
from fedquilt.record.folder import RunFolder, finite, storage_errors
from run_samples import TINY, contents, only_folder, same_tensors, tiny


@pytest.fixture
def half_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was stopped after two of its four rounds."""
    return make_half_run(tmp_path / "half", monkeypatch)


def make_half_run(parent: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    def stop(config: object, line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise RuntimeError("stop here")

    with monkeypatch.context() as patch:
        patch.setattr(training_loop, "CHECKPOINT_SECONDS", 0.0)
        with pytest.raises(RuntimeError, match="stop here"):
            run_config(tiny(**changes, output_dir=str(parent)), stop)
    return only_folder(parent)


def refused(folder: Path, match: str) -> None:
    """Fail unless resuming is refused in words and changes nothing."""
    before = contents(folder)
    with pytest.raises(FedquiltError, match=match) as caught:
        resume_run(folder)
    assert str(folder) in str(caught.value)
    assert contents(folder) == before


def test_the_files_and_their_versions(uninterrupted: Callable[..., RunResult]) -> None:
    folder = uninterrupted(mode="fixed_dp").folder
    assert folder is not None
    assert re.fullmatch(r"digits_fixed_dp_seed0_\d{8}_\d{6}(-\d+)?", folder.name)
    names = {path.name for path in folder.iterdir()} - {".lock"}
    assert names == {
        *("config.toml", "clients.json", "rounds.jsonl", "checkpoint.safetensors", "result.json")
    }
    assert tomllib.loads((folder / "config.toml").read_text())["schema_version"] == 1
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [line["schema_version"] for line in lines] == [1] * 4
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert json.loads((folder / "result.json").read_text())["schema_version"] == 1
    with safetensors.safe_open(folder / "checkpoint.safetensors", "pt") as stream:
        assert stream.metadata()["schema_version"] == "1"
        assert stream.metadata()["rounds"] == "4"


def test_result_json_holds_what_is_documented(uninterrupted: Callable[..., RunResult]) -> None:
    whole = uninterrupted(mode="fixed_dp")
    assert whole.folder is not None
    result = json.loads((whole.folder / "result.json").read_text())
    assert {"mode", "metadata", "history", "cohorts", "statement"} <= result.keys()
    assert result["mode"] == "fixed_dp"
    metadata = result["metadata"]
    assert metadata["dataset"] == "digits"
    assert metadata["seed"] == 0
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", metadata["timestamp"])
    assert metadata["target_accuracy"] is None
    assert metadata["final_accuracy"] == result["history"]["test_accuracy"][-1]
    assert metadata["final_loss"] == result["history"]["test_loss"][-1]
    written = tomllib.loads((whole.folder / "config.toml").read_text())
    set_ones = {k: v for k, v in metadata["hyperparameters"].items() if v is not None}
    assert set_ones == {k: v for k, v in written.items() if k != "schema_version"}
    asked = {**TINY, "mode": "fixed_dp"}
    assert {k: metadata["hyperparameters"][k] for k in TINY} == asked
    assert result["cohorts"] == result["history"]["client_participation"]
    joins = np.bincount(np.concatenate(result["cohorts"]), minlength=10)
    assert result["joins"] == joins.tolist()


def test_config_toml_fed_back_is_the_same_configuration(tmp_path: Path) -> None:
    awkward = 'quo"te \\ back\tslash \n new \x7f ünï'
    config = tiny(output_dir=awkward, target_accuracy=0.123456789012345678, delta=1e-17)
    folder = RunFolder.create(config, str(tmp_path))
    folder.close()
    assert folder.read_config() == config
    assert build_config(file=folder.path / "config.toml") == config


def test_two_runs_in_one_second_get_two_folders(tmp_path: Path) -> None:
    made = []
    for _ in range(3):
        folder = RunFolder.create(tiny(), str(tmp_path))
        folder.close()
        made.append(folder.path)
    assert len(set(made)) == 3
    assert all((path / "config.toml").is_file() for path in made)


def test_a_name_cannot_leave_the_output_folder(tmp_path: Path) -> None:
    inside = tmp_path / "deep" / "inside"
    inside.mkdir(parents=True)
    x, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    model = torch.nn.Linear(3, 2)
    options = {"mode": "fedavg", "num_rounds": 1, "availability": "always"}
    with pytest.raises(FedquiltError, match="dataset="):
        fedquilt.run(
            model, (x, y), (x, y), [[0, 1]], dataset="../x", output_dir=str(inside), **options
        )
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["inside"]
    assert list(inside.iterdir()) == []


def test_a_second_lock_is_refused(half_run: Path) -> None:
    first, second = RunFolder.open(half_run), RunFolder.open(half_run)
    first.acquire()
    with pytest.raises(RunFolderError, match="in use by another process"):
        second.acquire()
    second.close()
    with pytest.raises(RunFolderError, match="in use by another process"):
        resume_run(half_run)
    first.close()
    second.acquire()
    second.close()


def test_the_lock_is_given_back_after_an_error(half_run: Path) -> None:
    (half_run / "rounds.jsonl").unlink()
    refused(half_run, "must hold 2 rounds; it holds 0")
    folder = RunFolder.open(half_run)
    folder.acquire()
    folder.close()


def test_a_resumed_run_syncs_the_names_it_finds_before_it_builds_on_them(
    half_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill may fall between the rename of a checkpoint and the sync of its folder."""
    (half_run / "synthetic").mkdir()
    called: list[str] = []
    sync, load = storage.sync_folder, RunFolder.load_checkpoint

    def noted_sync(path: Path) -> None:
        called.append(path.name)
        sync(path)

    def noted_load(folder: RunFolder, *given: Any) -> Any:
        called.append("load")
        return load(folder, *given)

    monkeypatch.setattr(storage, "sync_folder", noted_sync)
    monkeypatch.setattr(RunFolder, "load_checkpoint", noted_load)
    resume_run(half_run)
    assert {half_run.name, "synthetic"} <= set(called[: called.index("load")])


def test_tensors_survive_bit_by_bit(half_run: Path) -> None:
    folder = RunFolder.open(half_run)
    base = torch.arange(12.0)
    model = {
        "view": base[3:9],
        "turned": base.view(3, 4).t(),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "odd": torch.tensor([math.nan, math.inf, -0.0]),
    }
    state = {
        "a.b": np.array([1.5, np.nan]),
        "n": np.array([3], dtype=np.int64),
        "none": np.zeros(0),
    }
    folder.save_checkpoint(2, model, state)
    loaded = folder.load_checkpoint()
    assert loaded is not None
    assert loaded.rounds == 2
    tensors, arrays = loaded.model, loaded.state
    assert tensors.keys() == model.keys()
    for name, tensor in model.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        ours, theirs = (t.reshape(-1).view(torch.uint8) for t in (tensors[name], tensor))
        assert torch.equal(ours, theirs)
    assert arrays.keys() == state.keys()
    assert all(arrays[key].tobytes() == state[key].tobytes() for key in state)


def test_a_failed_write_keeps_the_old_file(half_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.open(half_run)
    before = contents(half_run)

    def fail(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(StorageError):
        folder.save_checkpoint(3, {"x": torch.zeros(3)}, {})
    with pytest.raises(StorageError):
        folder.write_result({"a": 1})
    assert contents(half_run) == before


def test_numbers_that_json_does_not_know_are_null() -> None:
    value = {"a": math.nan, "b": [1.0, -math.inf, (math.inf, "inf")], "c": {"d": True, "e": 3}}
    assert finite(value) == {"a": None, "b": [1.0, None, [None, "inf"]], "c": {"d": True, "e": 3}}


def test_storage_errors_pass_on_their_own_kind() -> None:
    with pytest.raises(StorageError, match=r"^mine$"), storage_errors("/x"):
        raise StorageError("mine")
    with pytest.raises(StorageError) as caught, storage_errors("/x"):
        raise PermissionError(13, "Permission denied")
    assert str(caught.value) == "cannot write '/x': no permission"
    assert isinstance(caught.value, OSError)


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("nowhere", "file", "."):
        with pytest.raises(RunFolderError, match="run folder") as caught:
            resume_run(tmp_path / place)
        assert str(tmp_path) in str(caught.value)


FILES = [
    *("config.toml", "rounds.jsonl", "checkpoint.safetensors", "private.jsonl", ".lock"),
    *("ledger.json", "result.json", "condensed.safetensors", "baselines.json"),
    *("ledger.sqlite", "ledger.sqlite-journal", "ledger.sqlite-wal", "ledger.sqlite-shm"),
]


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_the_folder_is_not_followed(half_run: Path, tmp_path: Path, name: str) -> None:
    victim, own = tmp_path / "victim", half_run / name
    victim.write_bytes(own.read_bytes() if own.exists() else b"")
    own.unlink(missing_ok=True)
    own.symlink_to(victim)
    before = victim.read_bytes()
    refused(half_run, f"{re.escape(name)}' must be a regular file; it is a symbolic link")
    assert victim.read_bytes() == before
    assert own.is_symlink()


@pytest.mark.parametrize("name", [name for name in FILES if name != "config.toml"])
def test_a_pipe_in_the_folder_is_not_waited_for(half_run: Path, name: str) -> None:
    (half_run / name).unlink(missing_ok=True)
    os.mkfifo(half_run / name)
    refused(half_run, f"{re.escape(name)}' must be a regular file; it is a pipe")


def test_what_becomes_a_link_later_is_not_followed(half_run: Path, tmp_path: Path) -> None:
    folder = RunFolder.open(half_run)
    victim = tmp_path / "victim"
    for name in ("rounds.jsonl", "result.json", "checkpoint.safetensors", "config.toml"):
        (half_run / name).unlink(missing_ok=True)
        (half_run / name).symlink_to(victim)
    for use in (
        lambda: folder.append_round({"round": 2}),
        lambda: folder.amend_round({"round": 1}),
        lambda: folder.read_rounds(2),
        folder.read_result,
        folder.load_checkpoint,
        folder.read_config,
    ):
        with pytest.raises(RunFolderError, match="must be a regular file; it is a symbolic link"):
            use()
    assert not victim.exists()


def test_images_elsewhere_are_neither_deleted_nor_written(half_run: Path, tmp_path: Path) -> None:
    folder, photos = RunFolder.open(half_run), tmp_path / "photos"
    photos.mkdir()
    for name in ("round_0005_holiday.jpg", ".x.tmp"):
        (photos / name).write_text("mine")
    (half_run / "synthetic").symlink_to(photos)
    for use in (
        lambda: folder.drop_images(1),
        lambda: folder.room_for_synthetic(3),
        lambda: RunFolder.open(half_run),
    ):
        with pytest.raises(RunFolderError, match="synthetic' must be a folder of its own"):
            use()
    assert contents(photos) == dict.fromkeys((".x.tmp", "round_0005_holiday.jpg"), b"mine")


def test_a_pipe_among_the_images_is_refused(half_run: Path) -> None:
    (half_run / "synthetic").mkdir()
    os.mkfifo(half_run / "synthetic" / "round_0001.safetensors")
    refused(half_run, "round_0001.safetensors' must be a regular file; it is a pipe")


def test_the_folder_itself_may_be_reached_through_a_link(half_run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(half_run)
    assert resume_run(tmp_path / "elsewhere").result["rounds"] == 4


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = json.loads(path.read_text())
    changed = change(record)
    path.write_text(json.dumps(record if changed is None else changed))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("schema_version = 2\n", "schema_version=2 must be 1"),
        ("num_rounds = [", "not a TOML file"),
        ("num_rounds = 'four'\n", "num_rounds='four' must be a whole number"),
        ("num_runds = 4\n", r"unknown key 'num_runds'.*did you mean 'num_rounds'"),
        (b"\xff\xfe", "not a TOML file"),
    ],
)
def test_a_configuration_that_cannot_be_used(half_run: Path, text: str | bytes, match: str) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    (half_run / "config.toml").write_bytes(content)
    refused(half_run, match)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"schema_version": 2, "round": 0}', "schema_version=2 must be 1"),
        ('{"round": 0}', "schema_version=None must be 1"),
        ('{"schema_version": 1, "round": 5}', "expected round 0"),
        ('{"schema_version": 1}', "expected round 0"),
        ('{"schema_version": 1, "rou', "one JSON object a line"),
        ("[1]", "rounds.jsonl"),
        ("null", "rounds.jsonl"),
        ("", "one JSON object a line"),
        (b"\xff\xfe\xfd", "one JSON object a line"),
    ],
)
def test_rounds_that_cannot_be_used(half_run: Path, line: str | bytes, match: str) -> None:
    path = half_run / "rounds.jsonl"
    second = path.read_bytes().splitlines()[1]
    first = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(first + b"\n" + second + b"\n")
    refused(half_run, match)


def test_rounds_beyond_the_checkpoint_may_be_torn(half_run: Path) -> None:
    with open(half_run / "rounds.jsonl", "ab") as stream:
        stream.write(b'{"schema_version": 1, "round": 2, "coh\xff')
    whole = resume_run(half_run)
    assert whole.result["rounds"] == 4
    lines = (half_run / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3]


def save_foreign(folder: Path, metadata: dict[str, str] | None, **tensors: torch.Tensor) -> None:
    content = safetensors.torch.save(tensors or {"x": torch.zeros(3)}, metadata)
    (folder / "checkpoint.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        (None, "is not a checkpoint of fedquilt"),
        ({"format": "pt"}, "is not a checkpoint of fedquilt"),
        ({"schema_version": "2", "rounds": "2"}, "schema_version=2 must be 1"),
        ({"schema_version": "one", "rounds": "2"}, "is not a checkpoint of fedquilt"),
        ({"schema_version": "1"}, "is not a checkpoint of fedquilt"),
        ({"schema_version": "1", "rounds": "two"}, "is not a checkpoint of fedquilt"),
        ({"schema_version": "1", "rounds": "-1"}, "is not a checkpoint of fedquilt"),
        ({"schema_version": "1", "rounds": "2"}, "is not a checkpoint of fedquilt: 'config'"),
        ({"schema_version": "1", "rounds": "2", "config": "x"}, "is the checkpoint of another run"),
    ],
)
def test_a_foreign_checkpoint(half_run: Path, metadata: dict[str, str] | None, match: str) -> None:
    save_foreign(half_run, metadata)
    refused(half_run, match)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, 0.5, -1])
def test_a_torn_checkpoint(half_run: Path, kept: float) -> None:
    path = half_run / "checkpoint.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))] if kept == 0.5 else whole[: int(kept)])
    refused(half_run, "is not a checkpoint of fedquilt")


def test_a_checkpoint_of_text(half_run: Path) -> None:
    (half_run / "checkpoint.safetensors").write_text("weights go here")
    refused(half_run, "is not a checkpoint of fedquilt")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_clients": 12},
        {"mode": "fedavg"},
        {"mode": "fixed_dp"},
        {"participation_ema": 0.5},
        {"server_optimizer": "adam"},
        {"seed": 1},
        {"num_rounds": 7},
    ],
    ids=str,
)
def test_the_checkpoint_of_another_run(
    half_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    other = make_half_run(tmp_path / "other", monkeypatch, **changes)
    shutil.copy(other / "checkpoint.safetensors", half_run)
    refused(half_run, "checkpoint")


@pytest.mark.parametrize(
    "name", ["participation_count", "weight", "nominal_epsilon", "total_rounds"]
)
def test_a_checkpoint_that_lacks_something(half_run: Path, name: str) -> None:
    path = half_run / "checkpoint.safetensors"
    with safetensors.safe_open(path, "pt") as stream:
        metadata = stream.metadata()
        tensors = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118
    (lost,) = [key for key in tensors if key.endswith(name)]
    del tensors[lost]
    save_foreign(half_run, metadata, **tensors)
    refused(half_run, name)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda record: record.update(schema_version=2), "schema_version=2 must be 1"),
        (lambda record: record.pop("schema_version") and None, "schema_version=None must be 1"),
        (lambda record: [record], "result.json"),
        (lambda record: "result", "result.json"),
        (lambda record: record.pop("statement") and None, "result.json.*statement"),
        (lambda record: record.pop("metadata") and None, "result.json.*metadata"),
        (lambda record: record["metadata"].pop("num_classes") and None, "result.json.*num_classes"),
        (lambda record: record["statement"].update(epsilon_max=None), "result.json"),
    ],
)
def test_a_result_that_cannot_be_used(
    tmp_path: Path,
    uninterrupted: Callable[..., RunResult],
    change: Callable[[dict[str, Any]], Any],
    match: str,
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(uninterrupted().folder, folder)  # type: ignore[arg-type]
    rewrite(folder / "result.json", change)
    refused(folder, match)


def test_a_torn_result(tmp_path: Path, uninterrupted: Callable[..., RunResult]) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(uninterrupted().folder, folder)  # type: ignore[arg-type]
    path = folder / "result.json"
    path.write_bytes(path.read_bytes()[:100])
    refused(folder, "must be a JSON object")
    path.write_bytes(b"\xff" * 10)
    refused(folder, "must be a JSON object")


def test_a_finished_run_without_its_checkpoint(
    tmp_path: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(uninterrupted().folder, folder)  # type: ignore[arg-type]
    (folder / "checkpoint.safetensors").unlink()
    refused(folder, "no checkpoint")


def test_load_gives_the_trained_model_back(uninterrupted: Callable[..., RunResult]) -> None:
    whole = uninterrupted(mode="fedavg", model="auto")
    assert whole.folder is not None
    loaded = fedquilt.load(whole.folder)
    assert loaded.model is not None
    assert same_tensors(dict(loaded.model.state_dict()), whole.state_dict)
    assert loaded.final_accuracy == whole.final_accuracy
    own = fedquilt.models.DigitsModel()  # type: ignore[attr-defined]
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    passed = fedquilt.load(str(whole.folder), own)
    assert passed.model is not own
    assert same_tensors(dict(own.state_dict()), before)
    assert same_tensors(dict(passed.model.state_dict()), whole.state_dict)  # type: ignore[union-attr]
    with pytest.raises(RunFolderError, match="does not fit"):
        fedquilt.load(whole.folder, torch.nn.Linear(3, 2))


def test_folders_of_runs_that_were_killed_before_they_began_are_removed(tmp_path: Path) -> None:
    """Only those: not one that is just being made, in use, begun, or holds anything else."""
    kinds = ("killed", "young", "in use", "begun", "with notes")
    folders = {kind: tmp_path / f"digits_{kind}_seed0_20260101_000000" for kind in kinds}
    for folder in folders.values():
        folder.mkdir()
        (folder / ".lock").touch()
        os.utime(folder / ".lock", (0, 0))
    os.utime(folders["young"] / ".lock")
    (folders["killed"] / ".config.toml.0123.tmp").touch()
    (folders["begun"] / "config.toml").touch()
    (folders["with notes"] / "notes.txt").touch()
    with storage.lock_file(folders["in use"] / ".lock"):
        RunFolder.create(build_config({"seed": 1}), str(tmp_path)).close()
    assert [kind for kind, folder in folders.items() if not folder.exists()] == ["killed"]


def test_what_a_kill_left_of_a_figure_is_removed_on_resume(
    tmp_path: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    folder = Path(shutil.copytree(uninterrupted().folder, tmp_path / "run"))  # type: ignore[arg-type]
    before = contents(folder)
    for name in (".training.png.0123.tmp", ".condensed_rounds.gif.4567.tmp"):
        (folder / name).write_bytes(b"half a picture")
    resume_run(folder)
    assert contents(folder) == before
