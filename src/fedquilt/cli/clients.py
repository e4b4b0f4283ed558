"""`fedquilt clients RUN`: what clients measured on their own samples, for the owner."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedquilt.cli.run import JSON


def clients(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    worst: Annotated[int, typer.Option(min=0, help="How many of the lowest to list.")] = 5,
    figure: Annotated[str | None, typer.Option(help="Draw them into this file.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Show what clients measured on samples they hold back: raw, for the owner's eyes."""
    from fedquilt.report.clients import client_tables, plot_clients
    from fedquilt.run_folder import RunFolder

    text = client_tables(run, worst)
    drawn = None if figure is None else plot_clients(run, figure)
    if as_json:
        metrics = RunFolder.open(run).read_client_metrics()
        print(json.dumps({"evaluations": metrics, "figure": drawn}))
        return
    print(text)
    if drawn is not None:
        print(f"\nfigure: {drawn}")
