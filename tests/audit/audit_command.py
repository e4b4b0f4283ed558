"""The audit as a command."""

from __future__ import annotations

from typing import Any

import typer
from typer.testing import CliRunner

from fedquilt.cli.audit import audit


def run(*arguments: str) -> Any:
    """Call `fedquilt audit` with arguments."""
    app = typer.Typer()
    app.command()(audit)
    return CliRunner().invoke(app, list(arguments))
