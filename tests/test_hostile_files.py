"""Files of a run that somebody else has written: refused in one message, before anything runs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import fedquilt
from fedquilt.common import storage, untrusted
from fedquilt.config import RunConfig, build_config
from fedquilt.errors import DataError, FedquiltError, InvalidValueError, RunFolderError
from fedquilt.experiment.api import RunResult, resume_run
from run_samples import contents

pytestmark = pytest.mark.usefixtures("no_figures")

Cli = Callable[..., Any]
Make = Callable[..., RunResult]
DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 6_000
ESCAPE = "\x1b[31mred"


@pytest.fixture
def finished(uninterrupted: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a finished run with a ledger of its own, and of which no other copy is known."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = uninterrupted(mode="certified", noise_seed=None).folder
    assert made is not None
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture
def stopped(uninterrupted: Make, tmp_path: Path) -> Path:
    """A copy of a run that ended just before its result was written."""
    made = uninterrupted(mode="quap_fl", server_optimizer="adam").folder
    assert made is not None
    folder = Path(shutil.copytree(made, tmp_path / "stopped"))
    (folder / "result.json").unlink()
    return folder


def one_message(said: Any, *words: str) -> None:
    """Fail unless a command ended with one message that can be printed."""
    assert said.code == 2
    message = said.err.strip()
    assert message.startswith("error: ")
    assert message.isprintable()
    for word in words:
        assert word in said.err


def refused_unchanged(folder: Path, match: str) -> None:
    """Fail unless resuming is refused in words and changes nothing."""
    before = contents(folder)
    with pytest.raises(FedquiltError, match=match):
        resume_run(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["result.json", "ledger.json"])
@pytest.mark.parametrize("value", [DEEP, DIGITS, "NaN"])
def test_json_beyond_the_limits(cli: Cli, finished: Path, name: str, value: str) -> None:
    (finished / name).write_text(f'{{"schema_version": 1, "x": {value}}}')
    command = ("statement",) if name == "result.json" else ("ledger", "show")
    one_message(cli(*command, finished), name, "must be a JSON object: ")


@pytest.mark.parametrize("value", [DEEP, DIGITS])
def test_lines_beyond_the_limits(stopped: Path, value: str) -> None:
    path = stopped / "rounds.jsonl"
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first[:-1] + ', "x": ' + value + "}", *rest, ""]))
    refused_unchanged(stopped, r"rounds\.jsonl, line 1 must be one JSON object a line: ")


@pytest.mark.parametrize("key", ["train_loss", "noise_norm", "cohort", "epsilon"])
def test_lines_that_lack_a_key_are_found_before_a_round_runs(stopped: Path, key: str) -> None:
    path = stopped / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1].pop(key)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused_unchanged(stopped, rf"rounds\.jsonl, line 2 lacks '{key}'")


@pytest.mark.parametrize(
    ("key", "value"),
    [("non_finite", 5), ("absent", {}), ("without_allowance", []), ("clipped_fraction", "x")],
)
def test_lines_with_a_key_of_another_kind_are_found_before_a_round_runs(
    stopped: Path, key: str, value: object
) -> None:
    path = stopped / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1][key] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused_unchanged(stopped, rf"rounds\.jsonl, line 2: {key} must be ")


def test_a_line_that_withholds_who_was_left_out_is_read(stopped: Path) -> None:
    path = stopped / "rounds.jsonl"
    lines = [{**json.loads(line), "non_finite": None} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert resume_run(stopped).result["rounds"] == 4


def test_deep_configurations(cli: Cli, here: Path) -> None:
    (here / "c.toml").write_text(f"num_rounds = {'[' * 20_000}{']' * 20_000}")
    one_message(cli("run", "--config", "c.toml"), "'c.toml' is not a TOML file: it is nested")
    (here / "c.toml").write_text("x = 1\n" * 100_000)
    one_message(cli("run", "--config", "c.toml"), "larger than")


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a checkpoint and leave everything else as it is."""
    path = folder / "checkpoint.safetensors"
    with safetensors.safe_open(path, framework="pt") as stream:
        metadata = stream.metadata()
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    change(tensors)
    path.write_bytes(safetensors.torch.save(tensors, metadata))


COUNTS = "state/tracker.participation_count"


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        (COUNTS, torch.ones(10, dtype=torch.bfloat16), "of type BF16, which no state has"),
        (COUNTS, torch.ones(11, dtype=torch.float64), r"must be floats of shape \[10\]"),
        (COUNTS, torch.full((10,), np.nan, dtype=torch.float64), "holds values that no run of 4"),
        (COUNTS, torch.full((10,), 5.0, dtype=torch.float64), "holds values that no run of 4"),
        ("state/tracker.total_rounds", torch.zeros(0, dtype=torch.int64), r"of shape \[1\]"),
        ("state/tracker.total_rounds", torch.tensor([3]), "holds values that no run of 4"),
        ("state/mechanism.squared_gdp", torch.zeros(3), r"of shape \[10\]"),
        ("state/weights", torch.zeros(7), r"state/weights is F32 of shape \[7\]"),
        ("state/server.first", torch.zeros(7, dtype=torch.float64), r"server\.first"),
        ("model/fc.bias", torch.zeros(10, dtype=torch.float64), "fc.bias is torch.float64"),
        ("model/fc.bias", torch.zeros(11), "does not fit the saved weights"),
    ],
)
def test_a_checkpoint_of_another_type_size_or_value(
    stopped: Path, name: str, value: torch.Tensor, match: str
) -> None:
    edited(stopped, lambda tensors: tensors.update({name: value}))
    refused_unchanged(stopped, match)


def result_with(folder: Path, *path: str, value: object) -> None:
    """Put a value into result.json."""
    result = json.loads((folder / "result.json").read_text())
    inside = result
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    (folder / "result.json").write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("notes", 3),
        ("notes", [3]),
        ("covered", "fc"),
        ("epsilon_max", [1]),
        ("epsilon_max", "nan"),
        ("epsilon_max", -1),
        ("delta", "small"),
        ("unit", None),
    ],
)
def test_statements_of_wrong_types(cli: Cli, finished: Path, key: str, value: object) -> None:
    result_with(finished, "statement", key, value=value)
    one_message(cli("statement", finished), "result.json", key)
    one_message(cli("statement", finished, "--json"), "result.json", key)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("metadata", "input_shape"), [1, 100_000, 100_000]),
        (("metadata", "input_shape"), [1, 4_000, 4_000]),
        (("metadata", "num_classes"), 2**40),
        (("metadata", "seed"), "x"),
        (("history", "test_accuracy"), 3),
        (("history", "client_participation"), [1]),
        (("ledger",), "x"),
    ],
)
def test_results_of_wrong_types_and_sizes(
    finished: Path, path: tuple[str, ...], value: object
) -> None:
    result_with(finished, *path, value=value)
    with pytest.raises(RunFolderError, match=r"result\.json"):
        fedquilt.load(finished)


def test_what_is_printed_of_files_and_paths_moves_no_cursor(cli: Cli, finished: Path) -> None:
    result_with(finished, "statement", "notes", value=[f"{ESCAPE}\nclaim      everything"])
    said = cli("statement", finished)
    assert said.code == 0
    assert r"note       \x1b[31mred\nclaim      everything" in said.out
    assert "\x1b" not in said.out
    for command in (("ledger", "show"), ("ledger", "verify"), ("statement",), ("run", "--resume")):
        one_message(cli(*command, f"nowhere/{ESCAPE}\n"), r"\x1b[31mred")
    path = finished / "checkpoint.safetensors"
    with safetensors.safe_open(path, framework="pt") as stream:
        metadata = {**stream.metadata(), "ledger_head": ESCAPE}
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    path.write_bytes(safetensors.torch.save(tensors, metadata))
    said = cli("ledger", "verify", finished)
    assert said.code == 1
    assert r"head \x1b[31mred was seen by a run" in said.out
    assert "\x1b" not in said.out


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("config.toml", ("run", "--resume")),
        ("rounds.jsonl", ("run", "--quiet", "--resume")),
        ("private.jsonl", ("run", "--quiet", "--resume")),
        ("ledger.json", ("ledger", "show")),
        ("result.json", ("statement",)),
    ],
)
def test_files_without_the_right_to_read(
    cli: Cli,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    command: tuple[str, ...],
) -> None:
    if command != ("statement",):
        (finished / "result.json").unlink()
    real = os.open

    def without_rights(path: Any, *arguments: Any, **named: Any) -> int:
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(storage.os, "open", without_rights)
    one_message(cli(*command, finished), name, "no permission")


@pytest.mark.parametrize("name", ["clip_norm", "min_clip"])
def test_clip_bounds_that_float32_does_not_hold(name: str) -> None:
    with pytest.raises(InvalidValueError, match=f"{name}=1e-42 must be >= 1e-30: float32"):
        build_config({name: 1e-42})
    assert getattr(RunConfig(**{name: 1e-30}), name) == 1e-30


def test_tables_of_clients_beyond_the_limits(tmp_path: Path) -> None:
    from fedquilt.population import load_trace
    from fedquilt.slices.selection import client_widths

    path = tmp_path / "t.csv"
    random = np.random.default_rng(0)
    for text in (f"{DIGITS},1", "0,1e999999999", "0,1/" + DIGITS, '0,"' + "1" * 200_000):
        path.write_text(f"client,width\n{text}\n")
        with pytest.raises(InvalidValueError):
            client_widths(str(path), 1, random, lambda width: (1.0, 1.0))
    path.write_text(f"round,client\n{DIGITS},0\n")
    with pytest.raises(FedquiltError, match="must be a whole number"):
        load_trace(path, 1)


def test_plans_with_a_coin_end(cli: Cli) -> None:
    coin = ("--amplification", "--selection", "poisson", "--clients-per-round", 0.3)
    plan = ("plan", *coin, "--policy", "worst_case", "--parameters", 650)
    assert cli(*plan, "--num-rounds", 100_000_000, "--json").json()["method"] == "rdp"
    one_message(cli(*plan, "--epsilon", 2147483647), "epsilon=2147483647.0 must be", "<= 10000")
    said = cli(*plan, "--num-rounds", 100_000, "--adjacency", "replace_one")
    one_message(said, "joins=100000 must be <= 10000")


def test_a_file_of_holes_is_refused_unread(tmp_path: Path) -> None:
    """It says that it is larger than any may be: nothing is read to find that out."""
    path = tmp_path / "rounds.jsonl"
    with path.open("wb") as stream:
        stream.truncate(1 << 33)
    tracemalloc.start()
    with pytest.raises(DataError, match="must be a file of at most"):
        untrusted.read_bytes(path, 1 << 27)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20
