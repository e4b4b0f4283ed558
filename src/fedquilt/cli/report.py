"""What runs leave behind, for people to see: a page, a card, a statement, what clients measured."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.cli.run import JSON, say
from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.common.formatting import screen_width

if TYPE_CHECKING:
    from fedquilt.record.folder import RunFolder

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
        bool, typer.Option("--look/--no-look", help="Test the models again, by class and by tier.")
    ] = True,
) -> None:
    """Make one HTML page of one or several runs: the claim first, then what happened.

    The file needs no network. It shows what anybody may see, unless --private is said.
    """
    from fedquilt.cli.progress import interruptible
    from fedquilt.common.storage import write_file
    from fedquilt.report.html_page import html_page
    from fedquilt.report.views import page_view

    with interruptible(None):
        view = page_view(runs, private=private, look=look, shown=True)
    place = Path(output) if output is not None else _place(runs)
    text = html_page(view, title=title)
    write_file(place, text.encode(), 0o600 if private else 0o666, parents=True)
    print(place)


def _place(runs: list[str]) -> Path:
    """Return where a page goes that nobody has named: into the one folder, or here."""
    return Path(runs[0]) / "report.html" if len(runs) == 1 else Path("report.html")


WHAT = typer.Argument(
    metavar="RUN_OR_LEDGER...", help="Run folders, folders in which runs appear, ledgers."
)


def watch(
    what: Annotated[list[str], WHAT],
    port: Annotated[int, typer.Option("--port", help="0 takes one that is free.")] = 0,
    private: Annotated[bool, PRIVATE] = False,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="End after so long; absent: with Ctrl-C.")
    ] = None,
) -> None:
    """Show runs or a ledger in a browser while they go on.

    The address that is printed is the key: it works on this machine only, and nobody else
    knows it. A run may be killed and resumed under the page's eyes.
    """
    from fedquilt.common import checks
    from fedquilt.common.formatting import printable
    from fedquilt.report.watch import WatchServer, source_of

    checks.integer("port", port, at_least=0, at_most=65535)
    if seconds is not None:
        checks.number("seconds", seconds, above=0)
    source = source_of(what, private=private)
    with WatchServer(source, port) as server:
        print(f"{printable(source.title)}: open the address below; Ctrl-C stops", file=sys.stderr)
        print(server.address, flush=True)
        try:
            _wait(seconds)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)


def _wait(seconds: float | None) -> None:
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        time.sleep(0.2)


def card(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    output: Annotated[
        Path | None, typer.Option(help="The file to write; README.md in the run's folder.")
    ] = None,
) -> None:
    """Write a model card, with Hugging Face's metadata, from a finished run's statement."""
    from fedquilt.common.storage import write_file
    from fedquilt.report.views.claim import model_card

    folder, result = _finished(run, "there is no statement yet")
    target = folder.path / "README.md" if output is None else output
    if target.exists():
        raise InvalidValueError(f"output={str(target)!r} must not exist: it may have been edited")
    write_file(target, model_card(result).encode(), parents=True)
    print(target)


def statement(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Print the privacy statement of a finished run."""
    from fedquilt.privacy.statement import Statement

    _, result = _finished(run, "there is no statement yet")
    if as_json:
        print(json.dumps(result["statement"]))
    else:
        say(Statement.from_json(result["statement"]).as_text(screen_width()))


def clients(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of finished runs.")],
    worst: Annotated[int, typer.Option(min=0, help="How many of the lowest to list.")] = 5,
    figure: Annotated[str | None, typer.Option(help="Draw them into this file.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Show what clients measured on samples they hold back: raw, for the owner's eyes."""
    from fedquilt.report.clients import client_tables, plot_clients

    finished = [_finished(run, "resume it first") for run in runs]
    results = [result for _, result in finished]
    measured = [folder.read_client_metrics() for folder, _ in finished]
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


def _finished(run: str, otherwise: str) -> tuple[RunFolder, dict[str, Any]]:
    """Return a finished run's folder and result."""
    from fedquilt.record.folder import RunFolder

    folder = RunFolder.open(run)
    result = folder.read_result()
    if result is None:
        raise RunFolderError(f"run folder {run!r} is not finished: {otherwise}")
    return folder, result
