"""Mistakes in the settings: one message, exit code 2, nothing left behind."""

from __future__ import annotations

import gzip
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedquilt.config import RunConfig, build_config, option_fields
from fedquilt.errors import InvalidValueError
from run_processes import environment
from run_samples import TINY, flags

Cli = Callable[..., Any]
NUMBER = re.compile("int|float")
# One option of each kind of number.  The rules of all others are those of `RunConfig`, whose
# tests go through every field; that every field is an option is a test of `run`.
KINDS: dict[str, tuple[float, float]] = {
    "num_rounds": (0, -(10**30)),
    "warmup_rounds": (-1, -(10**30)),
    "num_clients": (0, -1),
    "clients_per_round": (-0.5, math.nextafter(1.0, 2)),
    "epsilon": (0.0, -5e-324),
    "fedprox_mu": (-5e-324, -1.0),
    "delta": (1.0, 0.0),
    "participation_ema": (math.nextafter(1.0, 2), 0.0),
}


def test_there_is_an_option_of_each_kind() -> None:
    types = {name: str(item.type) for name, item in option_fields().items()}
    numbers = {name for name, kind in types.items() if NUMBER.search(kind)}
    assert len(numbers) > 20
    assert {types[name] for name in KINDS} == {types[name] for name in numbers}


@pytest.mark.parametrize("name", KINDS)
def test_numbers_out_of_range(cli: Cli, here: Path, name: str) -> None:
    for value in KINDS[name]:
        with pytest.raises(InvalidValueError, match=rf"^{name}=.* must be ") as caught:
            RunConfig(**{**TINY, name: value})
        said = cli("run", *flags(**{name: value}))
        assert said.code == 2
        assert said.out == ""
        assert said.err == f"error: {caught.value}\n"
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("text", ["nan", "-inf", "ten", ""])
def test_texts_that_are_no_finite_number(cli: Cli, here: Path, text: str) -> None:
    for name in KINDS:
        said = cli("run", f"--{name.replace('_', '-')}={text}")
        assert said.code == 2
        assert said.out == ""
        assert "Traceback" not in said.err
        assert f"{name}={text!r} must be " in said.words or f"{name}={text} must be " in said.words
    assert list(here.iterdir()) == []


def test_fractions_where_whole_numbers_belong(cli: Cli) -> None:
    for name in ("num_rounds", "num_clients"):
        said = cli("run", f"--{name.replace('_', '-')}", "3.5")
        assert said.code == 2
        assert "3.5" in said.words


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 10**30},
        {"fedprox_mu": 1e308},
        {"budget_alpha": 1e308},
        {"epsilon": 1e308, "mode": "fixed_dp"},
        {"learning_rate": 1e-320},
        {"learning_rate": 1e308},
        {"clip_norm": 1e308, "mode": "fixed_dp"},
        {"lr_decay": 1e-300},
        {"warmup_rounds": 10**30, "local_epochs": 1},
        {"eval_every": 10**30},
    ],
    ids=str,
)
def test_extreme_numbers_run_or_are_refused(cli: Cli, here: Path, changes: dict[str, Any]) -> None:
    said = cli("run", *flags(**changes), "--json")
    assert "Traceback" not in said.err
    if said.code == 0:
        said.json()
        return
    assert said.code == 2
    assert next(iter(changes)) in said.words
    assert list(here.iterdir()) == []


NAMES = [name for name, f in option_fields().items() if f.metadata["rule"].get("choices")]


@pytest.mark.parametrize("name", [*NAMES, "dataset", "model", "availability", "preset"])
def test_unknown_names(cli: Cli, here: Path, name: str) -> None:
    said = cli("run", *flags(), f"--{name}".replace("_", "-"), "nonesuch")
    assert said.code == 2
    assert f"error: {name}='nonesuch' must be " in said.err
    choices = (option_fields()[name].metadata["rule"] if name != "preset" else {}).get(
        "choices", ()
    )
    assert all(repr(choice) in said.err for choice in choices)
    assert list(here.iterdir()) == []


COIN = ["--selection=poisson", "--policy=worst_case", "--allowance=9"]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--mode", "quapfl"], "did you mean 'quap_fl'?"),
        (["--dataset", "minst"], "did you mean 'mnist'?"),
        (["--preset", "paper-minst"], "did you mean 'paper-mnist'?"),
        (["--availability", "alway"], "did you mean 'always'?"),
        (["--noise-layers", "cov*"], "noise_layers='cov*' must match a parameter"),
        (["--noise-layers", "cov*"], "fc.weight, fc.bias"),
        (["--noise-layers", " , "], "noise_layers=' , ' must name at least one pattern"),
        (["--dataset", ""], "dataset='' must be"),
        (["--model", "cifar10"], "model='cifar10' must take inputs of shape (1, 8, 8)"),
        (["--device", "cuda"], "device='cuda'"),
        (["--num-clients", "5000"], "num_clients=5000 must be at most the number of samples, 1442"),
        (["--clients-per-round", "11"], "clients_per_round=11 must be <= num_clients=10"),
        (["--clients-per-round", "1.5"], "clients_per_round=1.5 must be > 0 and <= 1"),
        (["--min-clip", "5", "--max-clip", "4"], "max_clip=4.0 must be > min_clip=5.0"),
        (["--dirichlet-alpha", "0"], "dirichlet_alpha=0.0 must be > 0"),
        (["--dirichlet-alpha", "-1"], "dirichlet_alpha=-1.0 must be > 0"),
        (["--partition", "writer"], "mnist-writers"),
        (["--partition", "shards", "--num-clients", "3"], "num_clients=3"),
        (["--early-stopping"], "target_accuracy"),
        (["--mode", "certified", "--policy", "cap"], "policy='cap' needs max_joins"),
        (
            ["--mode", "certified", "--amplification"],
            "amplification=True needs selection='poisson'",
        ),
        (
            ["--mode=certified", "--amplification", *COIN],
            "amplification=True needs allowance=3",
        ),
        (
            ["--early-stopping", "--target-accuracy", ".5", "--validation-fraction", ".9999"],
            "0.9999",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(
    cli: Cli, here: Path, typed: list[str], words: str
) -> None:
    if typed == ["--device", "cuda"]:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
    said = cli("run", *flags(), *typed, "--quiet")
    assert said.code == 2
    assert words in said.words
    assert said.err.startswith("error: ")
    assert list(here.glob("results/*")) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('num_rounds = "ten"', "num_rounds='ten' must be a whole number (in my.toml)"),
        ("num_rounds = 2.0", "num_rounds=2.0 must be a whole number (in my.toml)"),
        ("num_rounds = true", "num_rounds=True must be a whole number (in my.toml)"),
        ("epsilon = '3'", "epsilon='3' must be a number (in my.toml)"),
        ("epsilon = nan", "epsilon=nan must be > 0"),
        ("epsilon = [3]", "epsilon=[3] must be a number (in my.toml)"),
        ("mode = 3", "mode=3 must be one of"),
        ("early_stopping = 1", "early_stopping=1 must be true or false (in my.toml)"),
        ("dataset = 3", "dataset=3 must be a non-empty text (in my.toml)"),
        ("seed = 1979-05-27", "seed=datetime.date(1979, 5, 27) must be a whole number"),
        ("epsilom = 3.0", "unknown key 'epsilom' in my.toml (did you mean 'epsilon'?)"),
        ("batch-size = 3", "unknown key 'batch-size' in my.toml (did you mean 'batch_size'?)"),
        ("[privacy]\nepsilon = 3.0", "unknown key 'privacy' in my.toml"),
        ("epsilon = ", "config='my.toml' is not a TOML file"),
        ("epsilon = 1\nepsilon = 2", "config='my.toml' is not a TOML file"),
        ("schema_version = 2", "schema_version=2 must be 1 (in my.toml)"),
        ("preset = 'paper'", "preset='paper' must be one of 'paper-mnist', 'paper-cifar10'"),
        (
            "clients_per_round = 200\nnum_clients = 100",
            "clients_per_round=200 must be <= num_clients=100",
        ),
        (f"seed = {'9' * 5000}", "my.toml"),
    ],
    ids=lambda part: part[:40],
)
def test_configuration_files(cli: Cli, here: Path, text: str, words: str) -> None:
    (here / "my.toml").write_text(text)
    said = cli("run", "--config", "my.toml")
    assert said.code == 2
    assert words in said.words
    assert said.err.startswith("error: ")
    assert [path.name for path in here.iterdir()] == ["my.toml"]


def test_a_typed_mistake_is_not_blamed_on_the_file(here: Path) -> None:
    (here / "my.toml").write_text("epsilon = 3.0\n")
    with pytest.raises(InvalidValueError, match=r"^epsilon=-1 must be > 0") as caught:
        build_config({"epsilon": -1}, file=here / "my.toml")
    assert "my.toml" not in str(caught.value)


@pytest.mark.parametrize(("name", "words"), [("nowhere.toml", "No such file"), (".", "directory")])
def test_a_configuration_that_is_no_file(cli: Cli, name: str, words: str) -> None:
    said = cli("run", "--config", name)
    assert said.code == 2
    assert f"config='{name}' cannot be read" in said.err
    assert words in said.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("round,client\n0,10\n", "line 2: client=10 must be < num_clients=10"),
        ("round,client\n0,1\n0,-1\n", "line 3: client='-1' must be a whole number >= 0"),
        ("round,client\n0,two\n", "line 2: client='two' must be a whole number >= 0"),
        ("round,client\n-3,2\n", "line 2: round='-3' must be a whole number >= 0"),
        ("round,client\n0\n", "line 2: client=None must be a whole number >= 0"),
        ("0,1\n", "expected a header with 'round' and 'client'"),
        ("", "expected a header with 'round' and 'client'"),
    ],
)
def test_traces(cli: Cli, here: Path, text: str, words: str) -> None:
    (here / "trace.csv").write_text(text)
    said = cli("run", *flags(availability="trace.csv"))
    assert said.code == 2
    assert words in said.words
    assert "trace.csv" in said.words
    assert [path.name for path in here.iterdir()] == ["trace.csv"]


def test_a_trace_that_is_no_text(cli: Cli, here: Path) -> None:
    (here / "trace.csv").write_bytes(b"round,client\n\xff\xfe\n")
    said = cli("run", *flags(availability="trace.csv"))
    assert said.code == 2
    assert "trace.csv: not a CSV text file" in said.words


def test_a_trace_that_is_not_there(cli: Cli, here: Path) -> None:
    said = cli("run", *flags(availability="trace.csv"))
    assert said.code == 2
    assert "availability='trace.csv' cannot be read: No such file" in said.words
    assert list(here.iterdir()) == []


def test_an_empty_data_folder(cli: Cli, here: Path) -> None:
    (here / "data").mkdir()
    said = cli("run", "--dataset", "mnist", "--data-dir", "data", "--no-download")
    assert said.code == 2
    assert "train-images-idx3-ubyte" in said.words
    assert "data/mnist" in said.words
    assert [path.name for path in here.iterdir()] == ["data"]


@pytest.mark.parametrize("command", ["run", "compare", "condense"])
def test_a_data_folder_that_is_not_there(cli: Cli, here: Path, command: str) -> None:
    (here / "data").mkdir()
    for named in ("nonesuch", "data:nonesuch"):
        said = cli(command, "--dataset", "digits", "--data-dir", named, "--num-rounds", 1)
        assert said.code == 2
        assert "error: data_dir='nonesuch' must be a folder that exists" in said.words
    assert [path.name for path in here.iterdir()] == ["data"]


@pytest.mark.parametrize("packed", [True, False])
def test_a_truncated_idx_file(cli: Cli, here: Path, packed: bool) -> None:
    folder = here / "data" / "mnist"
    folder.mkdir(parents=True)
    content = bytes.fromhex("00000803 0000ea60 0000001c 0000001c") + bytes(5000)
    name = "train-images-idx3-ubyte" + (".gz" if packed else "")
    (folder / name).write_bytes(gzip.compress(content)[:-9] if packed else content)
    said = cli("run", "--dataset", "mnist", "--data-dir", "data", "--no-download", "--quiet")
    assert said.code == 2
    assert name in said.words
    assert said.err.startswith("error: ")
    assert [path.name for path in here.iterdir()] == ["data"]


def test_resume_stands_alone(cli: Cli, here: Path) -> None:
    (here / "my.toml").write_text("")
    others = (
        ["--seed", "1"],
        ["--config", "my.toml"],
        ["--preset", "paper-mnist"],
        ["--no-download"],
    )
    for other in others:
        said = cli("run", "--resume", "somewhere", *other)
        assert said.code == 2
        assert "resume='somewhere' must stand alone" in said.err


@pytest.mark.parametrize("place", ["nowhere", "file", "empty"])
def test_resume_of_what_is_no_run(cli: Cli, here: Path, place: str) -> None:
    (here / "file").write_text("")
    (here / "empty").mkdir()
    said = cli("run", "--resume", place)
    assert said.code == 2
    assert f"run folder '{place}' must" in said.words
    assert list((here / "empty").iterdir()) == []


@pytest.mark.parametrize("place", ["file", "file/deeper"])
def test_an_output_folder_that_cannot_be(cli: Cli, here: Path, place: str) -> None:
    (here / "file").write_text("mine")
    said = cli("run", *flags(output_dir=place), "--quiet")
    assert said.code == 2
    assert said.err.startswith(f"error: cannot write '{place}': ")
    assert (here / "file").read_text() == "mine"


def test_an_output_folder_whose_name_is_no_text(cli: Cli, here: Path) -> None:
    said = cli("run", *flags(output_dir="results\udcff"), "--quiet")
    assert "Traceback" not in said.err
    assert said.code == 2
    assert "output_dir=" in said.err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_model_for_texts_does_not_take_images(cli: Cli, command: str) -> None:
    said = cli(command, "--dataset", "digits", "--model", "lstm")
    assert said.code == 2
    assert said.err.startswith("error: model='lstm' must take inputs of shape (1, 8, 8), which")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(("option", "unbuffered"), [("--help", "1"), ("--version", "")])
def test_output_that_cannot_be_written_is_one_message(option: str, unbuffered: str) -> None:
    """In the middle of a command, or not before its end."""
    settings = {**environment(), "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "fedquilt", option]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=settings, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr == "error: standard output cannot be written: the disk is full\n"


def test_output_that_nobody_reads_ends_without_a_word() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fedquilt", "--version"]
    ended = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment(), check=False
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_slips_are_answered_once_and_plainly(cli: Cli, tmp_path: Path) -> None:
    assert cli("rnu").words.count("Did you mean") == 1
    assert "'nothere' must be a folder; it does not exist" in cli("report", "nothere").words
    (tmp_path / "run.toml").write_text("[train]\nlearning_rate = 1\n")
    said = cli("run", "--config", tmp_path / "run.toml").words
    assert "unknown key 'train'" in said
    assert "options stand in no section" in said
    help_text = cli("run", "--help").out
    assert "iid, shards, part, writer" in help_text
    assert "writer: dirichlet" not in help_text
