"""Small runs for the tests of a whole run, and ways to compare two of them."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import torch

from fedquilt.config import RunConfig, option_fields
from fedquilt.config.uses import is_effective
from fedquilt.experiment.api import RunResult, load
from fedquilt.record.folder import RunFolder

TINY: dict[str, Any] = {
    "mode": "quap_fl",
    "dataset": "digits",
    "model": "linear",
    "num_clients": 10,
    "clients_per_round": 3,
    "availability": "always",
    "num_rounds": 4,
    "local_epochs": 1,
    "batch_size": 32,
    "learning_rate": 0.01,
    "epsilon": 3.0,
    "clip_norm": 1.0,
    "normalise_updates": False,
    "eval_every": 2,
    "noise_seed": 11,
}


def tiny(**changes: Any) -> RunConfig:
    """Return the configuration of a run that takes a fraction of a second."""
    return RunConfig(**_of_use(changes))


def _of_use(changes: dict[str, Any]) -> dict[str, Any]:
    """Return `TINY` with changes, less what would do nothing beside them and be refused."""
    merged = {**TINY, **changes}
    mode = merged["mode"] or ("fedavg" if merged.get("method") else "certified")
    given = {key: value for key, value in merged.items() if value is not None}
    whole = {**{k: f.default for k, f in option_fields().items()}, **given, "mode": mode}
    return {k: v for k, v in merged.items() if k in changes or is_effective(k, whole)}


def flags(**changes: Any) -> list[str]:
    """Return the same settings as options of the command line."""
    parts: list[str] = []
    for key, value in _of_use(changes).items():
        if isinstance(value, bool):
            parts.append(f"--{'' if value else 'no-'}{key.replace('_', '-')}")
        elif value is not None:
            parts += [f"--{key.replace('_', '-')}", str(value)]
    return parts


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Tell whether two models are equal bit by bit."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


def timeless(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result as result.json holds it, without when and where it was made."""
    plain = copy.deepcopy(result)
    plain.pop("schema_version", None)
    plain["metadata"].pop("timestamp")
    plain["metadata"]["hyperparameters"].pop("output_dir")
    for key in ("ledger", "run_id", "head"):
        plain.get("ledger", {}).pop(key, None)
    return plain


def assert_same_run(first: RunResult, second: RunResult) -> None:
    """Fail unless model, history, cohorts and statement are the same bit by bit."""
    assert same_tensors(first.state_dict, second.state_dict)
    assert timeless(first.result) == timeless(second.result)
    assert first.statement == second.statement


def rounds_without_clock(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of rounds.jsonl without the wall time."""
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def folder_of(result: RunResult) -> Path:
    """Return the folder of a run that has one."""
    assert result.folder is not None
    return result.folder


def only_folder(parent: Path) -> Path:
    """Return the one run folder in a folder."""
    (folder,) = [path for path in parent.iterdir() if path.is_dir()]
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder, by relative name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def wait_for_lines(parent: Path, count: int) -> Path:
    """Return the run folder once its rounds.jsonl has so many lines."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in parent.glob("*/rounds.jsonl"):
            if path.read_bytes().count(b"\n") >= count:
                return path.parent
        time.sleep(0.005)
    raise AssertionError(f"no run in {parent} reached {count} rounds")


def assert_is_whole(folder: Path, whole: RunResult) -> None:
    """Fail unless the files of a resumed run equal those of an uninterrupted one."""
    assert whole.folder is not None
    assert rounds_without_clock(folder) == rounds_without_clock(whole.folder)
    assert_same_run(load(folder), load(whole.folder))
    ours, theirs = (RunFolder.open(path).load_checkpoint() for path in (folder, whole.folder))
    assert ours is not None
    assert theirs is not None
    assert ours.rounds == theirs.rounds
    assert same_tensors(ours.model, theirs.model)
    assert ours.state.keys() == theirs.state.keys()
    for key, array in ours.state.items():
        if key == "account.spent":
            continue  # a copy of what the ledger says, which the tests of the ledger look at
        assert array.tobytes() == theirs.state[key].tobytes(), (key, array, theirs.state[key])
    assert not list(folder.glob(".*.tmp"))


def rounds_saved(folder: Path) -> int:
    """Return how many rounds the checkpoint of a run covers; 0 without one."""
    saved = RunFolder.open(folder).load_checkpoint()
    return 0 if saved is None else saved.rounds
