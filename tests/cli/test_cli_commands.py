"""The small commands, the help, and `python -m fedquilt`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedquilt
from fedquilt.config import option_fields
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
    told = entries(cli("run", "--help").out)
    for name, item in option_fields().items():
        assert " ".join(item.metadata["help"].split()[:3]) in " ".join(told[name].split())
        if item.default is not None and item.default is not False:
            assert f"[default: ({item.default})]" in told[name]
        for choice in item.metadata["rule"].get("choices", ()):
            assert choice in told[name]


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
