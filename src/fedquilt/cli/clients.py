"""`fedquilt clients RUN`: what clients measured on their own samples, for the owner."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedquilt.cli.run import JSON
from fedquilt.common.errors import RunFolderError


def clients(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    worst: Annotated[int, typer.Option(min=0, help="How many of the lowest to list.")] = 5,
    figure: Annotated[str | None, typer.Option(help="Draw them into this file.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Show what clients measured on samples they hold back: raw, for the owner's eyes."""
    from fedquilt.report.clients import client_tables, plot_clients
    from fedquilt.run_folder import RunFolder

    folder = RunFolder.open(run)
    result, metrics = folder.read_result(), folder.read_client_metrics()
    if result is None:
        raise RunFolderError(f"run folder {run!r} is not finished: resume it first")
    text = client_tables(result, metrics, worst)
    drawn = None if figure is None else plot_clients(result, metrics, figure)
    if as_json:
        print(json.dumps({"evaluations": metrics, "figure": drawn}))
        return
    print(text)
    if drawn is not None:
        print(f"\nfigure: {drawn}")
