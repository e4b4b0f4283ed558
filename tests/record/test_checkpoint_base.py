"""Checkpoints of many clients: long arrays whole in a base, and what has changed since."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import fedquilt
from fedquilt.common import storage
from fedquilt.errors import RunFolderError, StorageError
from fedquilt.experiment import loop as training_loop
from fedquilt.experiment.api import resume_run, run_config
from fedquilt.record import checkpoint
from fedquilt.record.folder import RunFolder
from run_samples import assert_is_whole, only_folder, tiny

MODEL = {"weight": torch.arange(3.0)}
BASES = "checkpoint-base-*.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tiny(), str(tmp_path))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let arrays of a few clients be long."""
    monkeypatch.setattr(checkpoint, "LONG", 4)
    monkeypatch.setattr(checkpoint, "SHARE", 0.5)


def clients(count: int) -> dict[str, Any]:
    odd = np.linspace(-1.0, 1.0, count)
    odd[0], odd[1] = np.nan, -0.0
    return {
        "tracker.participation_count": np.zeros(count),
        "account.spent": odd,
        "last": np.full(count, -1, dtype=np.int64),
        "flags": np.zeros(count, dtype=np.bool_),
        "tracker.total_rounds": np.zeros(1, dtype=np.int64),
        "server.first": np.zeros(count),  # changes everywhere
        "server.images": np.zeros((count, 2)),
    }


def move(state: dict[str, Any], cohort: Any, rounds: int) -> None:
    """Do to the arrays of a run what a round does."""
    state["tracker.participation_count"][cohort] += 1
    state["account.spent"][cohort] += 0.25
    state["last"][cohort] = rounds
    state["flags"][cohort] = True
    state["tracker.total_rounds"] += 1
    state["server.first"] += 1.5


def loaded(folder: RunFolder) -> tuple[int, dict[str, bytes]]:
    saved = RunFolder.open(folder.path).load_checkpoint()
    assert saved is not None
    assert torch.equal(saved.model["weight"], MODEL["weight"])
    return saved.rounds, bits(saved.state)


def bits(state: dict[str, Any]) -> dict[str, bytes]:
    return {key: array.dtype.str.encode() + array.tobytes() for key, array in state.items()}


@pytest.mark.usefixtures("short")
def test_what_is_saved_is_loaded_bit_by_bit(folder: RunFolder) -> None:
    """Over many rounds, in which bases are due now and then; the last one is whole."""
    rng, state, bases = np.random.default_rng(0), clients(20), set()
    for rounds in range(1, 40):
        move(state, rng.choice(20, size=rng.integers(3), replace=False), rounds)
        folder.save_checkpoint(rounds, MODEL, state)
        assert loaded(folder) == (rounds, bits(state))
        (base,) = folder.path.glob(BASES)
        bases.add(base.name)
    assert 2 < len(bases) < 15
    held = safetensors.numpy.load_file(folder.path / "checkpoint.safetensors")
    assert "state/server.first" in held
    assert "state/account.spent" not in held
    folder.save_checkpoint(40, MODEL, state, whole=True)
    assert loaded(folder) == (40, bits(state))
    assert not list(folder.path.glob(BASES))
    held = safetensors.numpy.load_file(folder.path / "checkpoint.safetensors")
    assert {f"state/{key}" for key in state} | {"model/weight"} == held.keys()


def test_what_a_round_writes_does_not_grow_with_the_population(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = storage.write_file

    def counted(path: Path, content: Any, *given: Any) -> None:
        parts = [content] if isinstance(content, bytes) else list(content)
        written.append(sum(len(part) for part in parts))
        write(path, parts, *given)

    monkeypatch.setattr(storage, "write_file", counted)
    sizes = []
    for count in (100_000, 400_000):
        state = {k: v for k, v in clients(count).items() if not k.startswith("server")}
        folder.save_checkpoint(0, MODEL, state)
        written.clear()
        for rounds in range(1, 4):
            move({**state, "server.first": np.zeros(1)}, np.arange(rounds, rounds + 10), rounds)
            folder.save_checkpoint(rounds, MODEL, state)
        sizes.append(max(written))
        folder.save_checkpoint(4, MODEL, state, whole=True)
        assert written[-1] > 20 * count
    assert len(written) == 4
    assert sizes[0] == sizes[1] < 4096


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("call", range(7))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_at_any_call_leaves_a_whole_checkpoint(
    folder: RunFolder, call: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rounds before or after; and the next save goes on from there."""
    state = clients(20)
    for rounds in range(2):
        folder.save_checkpoint(rounds, MODEL, state)
    before = bits(state)
    move(state, np.arange(15), 2)  # more than half, not for the first time: a base is due
    left = [call]

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*given: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == -1 and when == "before":
                raise OSError(28, "No space left on device")
            done = real(*given, **named)
            if left[0] == -1:
                raise OSError(5, "Input/output error")
            return done

        return fail

    with monkeypatch.context() as patch:
        for name in ("replace", "fsync"):
            patch.setattr(os, name, failing(getattr(os, name)))
        try:
            folder.save_checkpoint(2, MODEL, state)
        except StorageError:
            assert loaded(folder) in ((1, before), (2, bits(state)))
        else:
            assert call == 6
    move(state, np.arange(2), 3)
    folder.save_checkpoint(3, MODEL, state)
    assert loaded(folder) == (3, bits(state))
    assert len(list(folder.path.glob(BASES))) == 1


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("places/last", np.array([20], dtype=np.int32), "do not fit"),
        ("places/last", np.array([-1], dtype=np.int32), "do not fit"),
        ("places/last", np.array([[1]], dtype=np.int32), "do not fit"),
        ("places/last", np.array([1.0], dtype=np.float32), "do not fit"),
        ("places/last", np.array([1, 2], dtype=np.int32), "do not fit"),
        ("values/last", np.array([1.0]), "do not fit"),
        ("values/last", None, "are missing"),
        ("places/last", None, "are missing"),
        ("__base__", "no", "is no name of a base"),
        ("__base__", "../../../abcdef", "is no name of a base"),
        ("__base__", "0123456789abcdef", "that is not there"),
        ("__base__", None, "schema_version=2 must be 1"),
        ("__file__", b"base", "is not the base"),
        ("__file__", None, "that is not there"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_base_is_refused(
    folder: RunFolder, name: str, array: Any, message: str
) -> None:
    state = clients(20)
    folder.save_checkpoint(1, MODEL, state)
    move(state, np.arange(1), 2)
    folder.save_checkpoint(2, MODEL, state)
    path = folder.path / "checkpoint.safetensors"
    held = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, "np") as stream:
        metadata = dict(stream.metadata())
    if name == "__base__":
        metadata = {k: v for k, v in {**metadata, "base": array}.items() if v is not None}
    elif name == "__file__":
        (base,) = folder.path.glob(BASES)
        base.unlink() if array is None else base.write_bytes(array)
    else:
        held = {k: v for k, v in {**held, name: array}.items() if v is not None}
    safetensors.numpy.save_file(held, path, metadata)
    with pytest.raises(RunFolderError, match=message):
        RunFolder.open(folder.path).load_checkpoint()


@pytest.mark.usefixtures("short")
def test_a_base_is_the_folders_own_file(folder: RunFolder, tmp_path: Path) -> None:
    folder.save_checkpoint(1, MODEL, clients(20))
    (base,) = folder.path.glob(BASES)
    base.rename(tmp_path / "elsewhere")
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(fedquilt.errors.FedquiltError, match="symbolic link"):
        RunFolder.open(folder.path)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("mode", ["fedavg", "quap_fl", "certified"])
def test_a_stopped_run_goes_on_from_a_base(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would have gone on from one file."""
    monkeypatch.setattr(training_loop, "CHECKPOINT_SECONDS", 0.0)
    settings = {"mode": mode, "num_rounds": 6, "clients_per_round": 2}
    whole = run_config(tiny(**settings, output_dir=str(tmp_path / "whole")))

    def stop(config: object, line: dict[str, Any]) -> None:
        if line["round"] == 3:
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        run_config(tiny(**settings, output_dir=str(tmp_path / "half")), stop)
    half = only_folder(tmp_path / "half")
    assert list(half.glob(BASES))
    resume_run(half)
    assert_is_whole(half, whole)
    assert not list(half.glob(BASES))


@pytest.mark.usefixtures("short")
def test_an_array_that_a_run_keeps_no_more_is_not_looked_for(folder: RunFolder) -> None:
    state = clients(20)
    folder.save_checkpoint(1, MODEL, state)
    del state["last"]
    folder.save_checkpoint(2, MODEL, state)
    assert loaded(folder) == (2, bits(state))
    assert len(list(folder.path.glob(BASES))) == 1
