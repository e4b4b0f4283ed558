"""Small runs for the tests of a whole run, and ways to compare two of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from fedquilt.config import RunConfig
from fedquilt.experiment import RunResult

TINY: dict[str, Any] = {
    "dataset": "digits",
    "model": "linear",
    "num_clients": 10,
    "clients_per_round": 3,
    "availability": "always",
    "num_rounds": 4,
    "local_epochs": 1,
    "eval_every": 2,
    "noise_seed": 11,
}


def tiny(**changes: Any) -> RunConfig:
    """Return the configuration of a run that takes a fraction of a second."""
    return RunConfig(**{**TINY, **changes})


def flags(**changes: Any) -> list[str]:
    """Return the same settings as options of the command line."""
    parts: list[str] = []
    for key, value in {**TINY, **changes}.items():
        if value is True:
            parts.append(f"--{key.replace('_', '-')}")
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
