"""`fedquilt clients RUN...`: what clients measured on their own samples, for the owner."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedquilt.cli.run import JSON
from fedquilt.common.errors import RunFolderError


def clients(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of finished runs.")],
    worst: Annotated[int, typer.Option(min=0, help="How many of the lowest to list.")] = 5,
    figure: Annotated[str | None, typer.Option(help="Draw them into this file.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Show what clients measured on samples they hold back: raw, for the owner's eyes."""
    from fedquilt.record.folder import RunFolder
    from fedquilt.report.clients import client_tables, plot_clients

    results, measured = [], []
    for run in runs:
        folder = RunFolder.open(run)
        result = folder.read_result()
        if result is None:
            raise RunFolderError(f"run folder {run!r} is not finished: resume it first")
        results.append(result)
        measured.append(folder.read_client_metrics())
    texts = [client_tables(*pair, worst) for pair in zip(results, measured, strict=True)]
    drawn = None
    if figure is not None:
        drawn = (
            plot_clients(results[0], measured[0], figure)
            if len(runs) == 1
            else plot_clients(results, measured, figure)
        )
    if as_json:
        evaluations = measured[0] if len(runs) == 1 else dict(zip(runs, measured, strict=True))
        print(json.dumps({"evaluations": evaluations, "figure": drawn}))
        return
    print("\n\n".join(texts))
    if drawn is not None:
        print(f"\nfigure: {drawn}")
