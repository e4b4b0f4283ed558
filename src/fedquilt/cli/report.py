"""`fedquilt report RUN...`: one page to look at, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUNS = typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.")
PRIVATE = typer.Option(
    "--private", help="Show also raw measurements and what clients hold; the page says so in red."
)


def report(
    runs: Annotated[list[str], RUNS],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE.html", help="Where it goes.")
    ] = None,
    private: Annotated[bool, PRIVATE] = False,
    title: Annotated[str | None, typer.Option("--title", help="Of the page.")] = None,
    look: Annotated[
        bool,
        typer.Option("--look/--no-look", help="Test the models again, by class and by tier."),
    ] = True,
) -> None:
    """Make one HTML page of one or several runs: the claim first, then what happened.

    The file needs no network. It shows what anybody may see, unless --private is said.
    """
    from fedquilt.common.storage import write_file
    from fedquilt.report.html_page import html_page
    from fedquilt.report.views import page_view

    view = page_view(runs, private=private, look=look)
    place = Path(output) if output is not None else _place(runs)
    text = html_page(view, title=title)
    write_file(place, text.encode(), 0o600 if private else 0o666, parents=True)
    print(place)


def _place(runs: list[str]) -> Path:
    """Return where a page goes that nobody has named: into the one folder, or here."""
    return Path(runs[0]) / "report.html" if len(runs) == 1 else Path("report.html")
