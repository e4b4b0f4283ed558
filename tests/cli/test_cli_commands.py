"""The small commands, the help, and `python -m fedquilt`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import fedquilt
from fedquilt.cli.app import app
from fedquilt.config import MODE_TABLE, option_fields
from fedquilt.config.option import Flag
from fedquilt.config.run import option_names
from fedquilt.config.uses import modes_of
from fedquilt.data import DATASETS
from fedquilt.population import ParticipationTracker
from run_processes import environment

Cli = Callable[..., Any]


def test_version(cli: Cli) -> None:
    said = cli("--version")
    assert (said.code, said.out, said.err) == (0, f"fedquilt {fedquilt.__version__}\n", "")


def test_python_dash_m_is_the_same_command(here: Path) -> None:
    command = [sys.executable, "-m", "fedquilt"]
    wrong = subprocess.run(
        [*command, "run", "--mode", "quapfl"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr.startswith("error: mode='quapfl' must be one of")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("command", [[], ["run"], ["compare"], ["data"], ["validate"]])
def test_help(cli: Cli, command: list[str]) -> None:
    said = cli(*command, "--help")
    assert said.code == 0
    assert "Usage" in said.out
    assert cli(*command, "-h").out == said.out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["report"], "Run folders, or folders that hold some."),
        (["compare"], "Compare these finished runs; train nothing."),
        (["ledger", "show"], "A ledger file, or the folder of a run."),
    ],
)
def test_the_help_says_what_arguments_are(cli: Cli, command: list[str], said: str) -> None:
    assert said in cli(*command, "--help").out


@pytest.mark.parametrize(
    ("command", "module"), [("bench", "benchmarks.bench"), ("reproduce", "reproduction")]
)
def test_a_command_that_has_left_says_where_it_is(cli: Cli, command: str, module: str) -> None:
    said = cli(command, "--rounds", 1)
    assert said.code == 2
    assert f"fedquilt {command} is now `python -m {module}`" in said.err
    assert command not in cli("--help").out


def test_every_argument_has_a_help() -> None:
    def arguments(command: Any, path: str) -> Iterator[tuple[str, str | None]]:
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                yield f"{path} {parameter.name}", parameter.help
        for name, inner in getattr(command, "commands", {}).items():
            yield from arguments(inner, f"{path} {name}")

    found = dict(arguments(typer.main.get_command(app), "fedquilt"))
    assert len(found) > 20
    assert [name for name, text in found.items() if not text] == []


def entries(text: str) -> dict[str, str]:
    """Return what the help says of each option, by its name."""
    rows: list[str] = []
    for line in text.splitlines():
        inside = line.strip("│ \n")
        if line.startswith("│ --"):
            rows.append(inside)
        elif rows and line.startswith("│"):
            rows[-1] += f" {inside}"
    return {row.split()[0].removeprefix("--").replace("-", "_"): row for row in rows}


def test_the_help_of_run_lists_every_option_with_default_and_choices(cli: Cli) -> None:
    told = entries(cli("run", "--help-all").out)
    usual = MODE_TABLE["certified"].defaults
    for name, item in option_fields().items():
        said = " ".join(item.metadata["help"].split()[:3]).rstrip(".")
        assert said in " ".join(told[name].split())
        default = usual.get(name, item.default)
        if default is not None and default is not False and default is not True:
            assert f"[{default}" in told[name]
        for choice in item.metadata["rule"].get("choices", ()):
            assert choice in told[name]
    assert "[60; other modes 200]" in told["num_rounds"]
    assert "default: (" not in " ".join(told.values())


def test_the_help_of_condense_says_where_defaults_differ(cli: Cli) -> None:
    told = {
        name: " ".join(row.split())
        for name, row in entries(cli("condense", "--help-all").out).items()
    }
    assert "[8; certified 40]" in told["num_rounds"]
    assert "[20; certified 100]" in told["num_clients"]
    assert "[convnet-64; certified hog-linear]" in told["model"]
    assert "[sgd; colour images adam]" in told["image_optimizer"]
    assert "[off; certified on]" in told["normalise_updates"]


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_help_of_run_fits_two_screens(
    cli: Cli, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    said = cli("run", "--help")
    assert len(said.out.splitlines()) <= 100
    told = entries(said.out)
    assert set(option_names(Flag.COMMON)) <= set(told)
    assert all("certified" in modes_of(name) for name in option_names(Flag.COMMON))
    for other in ("clip_quantile", "noise_layers", "warmup_rounds", "max_agg_norm"):
        assert other not in told
    assert "<bool>" not in " ".join(row for name, row in told.items() if name != "help")
    whole = cli("run", "--help-all").out
    assert "Only in the modes of the QuAP-FL papers" in whole
    assert cli("run", "--help").out == said.out  # asking for all is not remembered


def test_engines_are_explained(cli: Cli) -> None:
    told = entries(cli("run", "--help").out)["engine"]
    for word in ("one client after the other", "many in one program", "several cores"):
        assert word in " ".join(told.split())


@pytest.mark.parametrize("command", ["run", "compare", "plan", "condense"])
def test_every_command_of_runs_has_the_long_help(cli: Cli, command: str) -> None:
    short, whole = cli(command, "--help").out, cli(command, "--help-all").out
    assert len(short.splitlines()) < len(whole.splitlines())
    assert "--noise-bands" in whole


def test_commands_and_options_that_are_not_there(cli: Cli, here: Path) -> None:
    for arguments, words in (
        (["runn"], "No such command 'runn'"),
        (["run", "--epsilom", "3"], "No such option"),  # then it is quoted, in some versions
        (["run", "--epsilom", "3"], "--epsilom"),
        (["run", "extra"], "extra"),
        (["run", "--epsilon"], "--epsilon"),
    ):
        said = cli(*arguments)
        assert said.code == 2
        assert words in said.words
    assert list(here.iterdir()) == []


def test_validate(cli: Cli) -> None:
    said = cli("validate")
    assert said.code == 0
    assert said.out.count("ok") == 4


def test_validate_notices_a_wrong_formula(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ParticipationTracker, "get_participation_rate", lambda tracker, client: 0.25
    )
    said = cli("validate")
    assert said.code == 1
    assert said.out.count("ok") == 3


def test_data_lists_what_is_here(cli: Cli) -> None:
    said = cli("data")
    assert said.code == 0
    for name in DATASETS:
        assert name in said.out
    lines = {line.split()[0]: line for line in said.out.splitlines() if line.split()}
    assert "ready" in lines["digits"]
    assert "missing" in lines["mnist"]
    assert f"looked in {Path('data').absolute()} (the folders of --data-dir" in said.out
    assert "fetch one with  fedquilt data mnist" in said.out


def test_data_verifies_one(cli: Cli) -> None:
    said = cli("data", "digits")
    assert said.code == 0
    assert "1442 training and 355 test samples of 1x8x8" in said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["minst"], "dataset='minst' must be one of"),
        (["minst"], "did you mean 'mnist'?"),
        (["mnist", "--no-download"], "train-images-idx3-ubyte"),
        (["mnist", "--no-download", "--data-dir", "empty"], "empty/mnist"),
        (["mnist", "--no-download", "--data-dir", "file"], "data_dir='file' must be a folder"),
    ],
)
def test_data_that_cannot_be_had(cli: Cli, here: Path, arguments: list[str], words: str) -> None:
    (here / "empty").mkdir()
    (here / "file").write_text("")
    said = cli("data", *arguments)
    assert said.code == 2
    assert words in said.words
    assert "Traceback" not in said.err
