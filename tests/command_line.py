"""The command line called in this process, in an empty folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedquilt.cli import main


@dataclass(frozen=True)
class Said:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The error output on one line, without the frame around it."""
        return " ".join(self.err.translate(str.maketrans("│╭╮╰╯─", "      ")).split())

    def json(self) -> Any:
        """Read standard output as one strict JSON object and nothing else."""
        assert self.code == 0, self.err
        assert self.out.endswith("\n")
        assert self.out.count("\n") == 1
        return json.loads(self.out, parse_constant=pytest.fail)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, without data folders from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDQUILT_DATA", raising=False)
    return tmp_path


@pytest.fixture
def cli(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """Call `fedquilt` with arguments."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["fedquilt", *map(str, arguments)])
        capsys.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code or 0
        assert isinstance(code, int)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the slow part where a test is about something else."""
    monkeypatch.setattr("fedquilt.cli.run.draw_history", lambda finished: None)
