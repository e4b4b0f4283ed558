"""`fedquilt watch RUN_OR_LEDGER`: the page of a report, live, on this machine only."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from fedquilt.cli.report import PRIVATE

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
