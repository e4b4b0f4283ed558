"""What is public is on a list: every key of every public file of a run is held against it."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import nn

import fedquilt
from fedquilt.aggregation import ServerOptimizer
from fedquilt.audit.cases import known_entropy
from fedquilt.config import option_fields, plain_config
from fedquilt.data import ImageDataset, load_dataset
from fedquilt.experiment import loop as training_loop
from fedquilt.experiment.api import RunResult, run_config
from fedquilt.privacy.mechanism import NoiseReport
from fedquilt.privacy.run_account import RunAccount
from fedquilt.record.result import as_line, published, split_private
from fedquilt.record.schema import (
    CHECKPOINT_PUBLIC,
    OWNER_FILES,
    RESULT_PUBLIC,
    ROUND_KEYS,
    ROUND_PUBLIC,
    WITHHELD,
)
from fedquilt.round import RoundRecord
from run_samples import TINY
from tiers import rest_is_slow

SECRET = {**TINY, "noise_seed": None, "mode": "certified"}
CONDENSED = {
    "method": "condense",
    "dataset": "digits",
    "num_clients": 3,
    "num_rounds": 2,
    "eval_every": 1,
    "ipc": 1,
    "model_epochs": 1,
}
COIN = {"selection": "poisson", "amplification": True, "policy": "worst_case"}
GROWN = {**CONDENSED, "mode": "certified", "mean_rounds": 1, "synthetic_images": 20, "epsilon": 6.0}
BOUNDED: dict[str, dict[str, Any]] = {
    "certified": SECRET,
    "rehearsal": {**SECRET, "noise_seed": 3},
    "fixed_dp": {**SECRET, "mode": "fixed_dp", "noise_layers": "all"},
    "quantile": {**SECRET, "clipping": "quantile", "noise_bands": 2},
    "amplification": {**SECRET, **COIN},
    "secure aggregation": {**SECRET, "secure_aggregation": "simulated"},
    "adam": {**SECRET, "server_optimizer": "adam", "participation_ema": 0.5},
    "early stopping": {**SECRET, "early_stopping": True, "target_accuracy": 0.01},
    "shared ledger": {**SECRET, "ledger": "shared.sqlite"},
    "heterofl": {**SECRET, "method": "heterofl", "model": "mlp"},
    "fedrolex": {**SECRET, "method": "fedrolex", "model": "mlp"},
    "depthfl": {**SECRET, "method": "depthfl", "model": "exits", "tiers": "1,1/2"},
    "condensation": GROWN,
    "condensation by a coin": {**GROWN, **COIN, "num_clients": 20, "clients_per_round": 5},
}
OPEN: dict[str, dict[str, Any]] = {
    "fedavg": {**TINY, "mode": "fedavg"},
    "fixed_dp": {**TINY, "mode": "fixed_dp"},
    "quap_fl": {**TINY, "mode": "quap_fl"},
    "quap_fl_client": {**TINY, "mode": "quap_fl_client"},
    "fednum": {**CONDENSED, "model": "convnet-32", "dc_iterations": 2, "model_n": 1},
}
# What only runs without a bound say.
OPEN_ROUND = {*WITHHELD, "groups", "client_budgets"}
OPEN_RESULT = {"history.groups", "history.client_budgets", "condensation.classes_too_small"}
OPEN_CHECKPOINT = {
    *("state/mechanism.clipper.clip_value", "state/mechanism.clipper.clip_history"),
    "state/server.sent",
}
UNKEYED = {".lock", "ledger.sqlite", "condensed.safetensors", "synthetic", "shared.sqlite"}


def ran(settings: dict[str, Any], place: Path, told: list[Any] | None = None) -> RunResult:
    """Run in a folder of its own; `told` collects the lines that an observer gets."""
    own = {"ledger": str(place / settings["ledger"])} if "ledger" in settings else {}
    config = plain_config({**settings, **own, "output_dir": str(place / "results")})
    return run_config(config, None if told is None else lambda _, line: told.append(dict(line)))


def folder_of(done: RunResult) -> Path:
    assert done.folder is not None
    return done.folder


def lines_of(folder: Path, name: str = "rounds.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def names_of(record: dict[str, Any], outer: str = "") -> set[str]:
    """Return the keys of a result, outer.inner, down to those that a list names."""
    names = set()
    for key, value in record.items():
        name = outer + key
        inner = isinstance(value, dict) and any(k.startswith(f"{name}.") for k in RESULT_PUBLIC)
        names |= names_of(value, f"{name}.") if inner else {name}
    return names


def checkpoint_names(folder: Path) -> set[str]:
    """Return the names in the checkpoint, the model's tensors as one."""
    with safetensors.safe_open(folder / "checkpoint.safetensors", framework="np") as stream:
        names = {"model/*" if name.startswith("model/") else name for name in stream.keys()}  # noqa: SIM118
        return names | set(stream.metadata() or {})


def held_against_the_lists(done: RunResult, *, bounded: bool) -> None:
    folder = folder_of(done)
    more = (set(), set(), set()) if bounded else (OPEN_ROUND, OPEN_RESULT, OPEN_CHECKPOINT)
    for line in lines_of(folder):
        shown = {key for key, value in line.items() if value is not None or key not in WITHHELD}
        assert shown <= set(ROUND_PUBLIC) | more[0]
    result = json.loads((folder / "result.json").read_text())
    assert names_of(result) <= set(RESULT_PUBLIC) | more[1]
    assert checkpoint_names(folder) <= set(CHECKPOINT_PUBLIC) | more[2]
    options = option_fields(type(plain_config(done.result["metadata"]["hyperparameters"])))
    config = tomllib.loads((folder / "config.toml").read_text())
    assert set(config) <= {"schema_version", *options}


@pytest.mark.parametrize(
    "name",
    rest_is_slow([*BOUNDED], [name for name in BOUNDED if name != "condensation by a coin"]),
)
def test_a_bounded_run_shows_what_is_listed(name: str, tmp_path: Path) -> None:
    told: list[Any] = []
    done = ran(BOUNDED[name], tmp_path, told)
    held_against_the_lists(done, bounded=True)
    assert told
    for line in told:
        assert {key for key, value in line.items() if value is not None} <= set(ROUND_PUBLIC)
    assert published(done.result) == done.result
    folder = folder_of(done)
    known = {"config.toml", "rounds.jsonl", "result.json", "checkpoint.safetensors", *UNKEYED}
    found = {path.name for path in folder.iterdir()}
    assert found <= {*known, *OWNER_FILES}
    assert {"private.jsonl", "ledger.json"} <= found
    for private in found & set(OWNER_FILES):
        assert stat.S_IMODE((folder / private).stat().st_mode) == 0o600
    for line in lines_of(folder, "private.jsonl"):
        assert set(line) == {"schema_version", "round", *WITHHELD}


@pytest.mark.parametrize("name", OPEN)
def test_a_run_without_a_bound_adds_what_is_named_here(name: str, tmp_path: Path) -> None:
    done = ran(OPEN[name], tmp_path)
    held_against_the_lists(done, bounded=False)
    assert not (folder_of(done) / "private.jsonl").exists()


def test_a_made_up_measurement_stays_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the server's report, from an evaluation, from the end of a run."""
    monkeypatch.setattr(ServerOptimizer, "report", lambda self: {"mean_update_norm": 3.2})
    adding(monkeypatch, training_loop.Experiment, "measure", {"largest_loss": 7.25})
    adding(monkeypatch, training_loop, "build_result", {"norms": [4.125]})
    adding(monkeypatch, RunAccount, "summary", {"samples": 8.5})
    told: list[Any] = []
    done = ran(SECRET, tmp_path, told)
    folder = folder_of(done)
    public = [path for path in folder.iterdir() if path.name not in OWNER_FILES]
    everything = b"".join(path.read_bytes() for path in public) + json.dumps(told).encode()
    everything += json.dumps(done.result).encode() + json.dumps(done.summary()).encode()
    for word in (b"mean_update_norm", b"largest_loss", b"norms", b"samples"):
        assert word not in everything
    assert [line["mean_update_norm"] for line in lines_of(folder, "private.jsonl")] == [3.2] * 4
    open_run = ran({**TINY, "mode": "fedavg"}, tmp_path / "open")
    assert lines_of(folder_of(open_run))[0]["mean_update_norm"] == 3.2


def adding(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, more: dict[str, Any]) -> None:
    """Let a function that returns a dictionary return more."""
    real: Callable[..., dict[str, Any]] = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: {**real(*given, **named), **more})


def test_a_line_is_parted() -> None:
    line = {"round": 0, "seconds": 0.5, "train_loss": 1.5, "mean_update_norm": 3.2, "cohort": [1]}
    public, private = split_private(line)
    assert public == {"round": 0, "seconds": None, "train_loss": None, "cohort": [1]}
    assert private == {"seconds": 0.5, "train_loss": 1.5, "mean_update_norm": 3.2}


def test_a_result_is_parted() -> None:
    result = {"mode": "certified", "norms": 1, "metadata": {"seed": 1, "sizes": [3]}, "extra": {}}
    assert published(result) == {"mode": "certified", "metadata": {"seed": 1}}


def test_every_key_has_a_reason() -> None:
    for listed in (ROUND_PUBLIC, RESULT_PUBLIC, CHECKPOINT_PUBLIC, OWNER_FILES):
        assert all(listed.values())
    assert not set(WITHHELD) & set(ROUND_PUBLIC)


@pytest.mark.parametrize("settings", [SECRET, OPEN["fedavg"]], ids=["certified", "fedavg"])
def test_nobody_else_sees_how_long_private_files_are(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    old = os.umask(0o022)
    try:
        done = run_config(plain_config({**settings, "output_dir": str(tmp_path)}))
    finally:
        os.umask(old)
    assert done.folder is not None
    assert stat.S_IMODE(done.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((done.folder / "rounds.jsonl").stat().st_mode) == 0o644  # to be handed on


def test_types_and_classes_of_one_client_are_said_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Worlds in which the victim holds floats, bytes, or a data set that knows more classes."""
    train, test = load_dataset("digits")
    x, y = train.images[:20], train.targets[:20]
    victims = {
        "floats": ImageDataset(x, y, "mine", 10),
        "bytes": ((x * 100).to(torch.uint8), y),
        "more classes": ImageDataset(x, y, "mine", 11),
        "nothing": [],
    }
    others = [
        ImageDataset(train.images[k : k + 20], train.targets[k : k + 20], "mine", 10)
        for k in (20, 40, 60)
    ]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
    seen = []
    for own in victims.values():
        caplog.clear()
        with known_entropy(1):
            done = fedquilt.run(
                model, [own, *others], (test.images, test.targets), quiet=True, num_rounds=1,
                engine="sequential", mode="certified", local_epochs=1, output_dir=str(tmp_path),
            )  # fmt: skip
        assert done.folder is not None
        metadata = json.loads((done.folder / "result.json").read_text())["metadata"]
        said = [record.getMessage() for record in caplog.records]
        seen.append((metadata["data_notes"], metadata["num_classes"], said))
    assert seen == [([], 12, [])] * len(victims)


def test_the_form_of_test_data_is_said_of_all(tmp_path: Path) -> None:
    train, test = load_dataset("digits")
    own = [(train.images[k : k + 20], train.targets[k : k + 20]) for k in (0, 20)]
    shown = ((test.images * 100).to(torch.uint8), test.targets)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    settings = {"mode": "certified", "engine": "sequential", "num_rounds": 1, "quiet": True}
    done = fedquilt.run(model, own, shown, output_dir=None, **settings)  # type: ignore[arg-type]
    assert "scaled from 0..255 to 0..1" in "".join(done.result["metadata"]["data_notes"])


def test_every_measurement_of_a_round_is_declared_once() -> None:
    """A field without a key would be in no line; a key without one of both could not be filled."""
    for kind, source in ((RoundRecord, "record"), (NoiseReport, "noise")):
        measured = {item.name for item in dataclasses.fields(kind)} - {"noise", "server"}
        assert measured == {name for name, key in ROUND_KEYS.items() if key.source == source}
    assert not any(key.public and key.column for key in ROUND_KEYS.values())
    line = as_line(RoundRecord(3, [4, 5], noise=NoiseReport(client_budgets={5: 1.0})), 0.5)
    needed = {name for name, key in ROUND_KEYS.items() if key.needed}
    assert needed <= set(line)
    assert line["client_budgets"] == [None, 1.0]
    assert not {"agg_scale", "absent"} & set(line)


def test_a_key_is_private_until_it_is_declared_with_a_reason() -> None:
    made = {name: number for number, name in enumerate([*ROUND_KEYS, "a_new_one"])}
    public, private = split_private(made)
    shown = {name for name, value in public.items() if value is not None}
    assert shown == {name for name, key in ROUND_KEYS.items() if key.public}
    assert {"a_new_one", "seconds", "groups", "client_accuracy"} <= set(private)
