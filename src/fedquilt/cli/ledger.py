"""`fedquilt ledger show|export|verify|backup|restore`: what every client has given away."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fedquilt.cli.run import JSON, say
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import printable

ledger = typer.Typer(
    name="ledger",
    help="Look into a privacy ledger, copy it out, check it, back it up.",
    no_args_is_help=True,
)
LEDGER = typer.Argument(metavar="LEDGER", help="A ledger file, or the folder of a run.")
POPULATION = typer.Option("--population", help="Only this population.")


@ledger.command()
def show(
    path: Annotated[str, LEDGER],
    population: Annotated[str | None, POPULATION] = None,
    most: Annotated[int, typer.Option("--most", help="Clients listed, dearest first.")] = 10,
    figure: Annotated[
        str | None, typer.Option("--figure", metavar="FILE", help="Draw spend against joins.")
    ] = None,
    client: Annotated[
        str | None,
        typer.Option("--client", metavar="ID", help="Only what this client has given away."),
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Show what each population has spent, who spent most, and who is near the end."""
    from fedquilt.common import checks
    from fedquilt.report.ledger import ledger_tables, plot_ledger

    checks.integer("most", most, at_least=0)
    with _open(path) as opened:
        chosen = _populations(opened, population)
        if client is not None:
            _show_client(chosen, client, path, as_json)
            return
        rows = {one.info.name: list(one.rows(most)) for one in chosen}
        summaries = [one.summary() for one in chosen]
        if figure is not None:
            everybody = {one.info.name: list(one.rows()) for one in chosen}
            with _said_of_the_option():
                plot_ledger(summaries, everybody, figure)
        if as_json:
            print(json.dumps(_as_json(opened, chosen)))
            return
        say(ledger_tables(summaries, rows, most))
        if figure is not None:
            say(f"\nfigure: {figure}")


def _show_client(chosen: list[Any], client: str, path: str, as_json: bool) -> None:
    """Say what one client has given away: its id, or its number where clients have none."""
    from fedquilt.report.ledger import client_facts

    found = [
        (one.info.name, row)
        for one in chosen
        for row in one.rows()
        if client == (str(row.client) if row.client_id is None else row.client_id)
    ]
    if not found:
        names = ", ".join(repr(one.info.name) for one in chosen) or "none"
        raise InvalidValueError(
            f"client={client!r} must be the id of a client in {path} (populations: {names}), or "
            "its number where clients have no ids"
        )
    if as_json:
        print(json.dumps([{"population": name, **dataclasses.asdict(row)} for name, row in found]))
        return
    say("\n\n".join(client_facts(name, row) for name, row in found))


@contextlib.contextmanager
def _said_of_the_option() -> Iterator[None]:
    """Name the option of the command line where Python has an argument."""
    try:
        yield
    except InvalidValueError as error:
        raise InvalidValueError(str(error).replace("save_path=", "figure=")) from error


@ledger.command()
def export(
    path: Annotated[str, LEDGER],
    population: Annotated[str | None, POPULATION] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Rows of clients as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, which is the default.")] = False,
) -> None:
    """Write the whole ledger to standard output, as JSON or CSV."""
    from fedquilt.privacy.ledger import csv_rows

    if as_csv and as_json:
        raise InvalidValueError("--csv and --json exclude each other")
    with _open(path) as opened:
        chosen = _populations(opened, population)
        if not as_csv:
            print(json.dumps(_as_json(opened, chosen)))
            return
        if len(chosen) != 1:
            names = ", ".join(one.info.name for one in chosen)
            raise InvalidValueError(f"--csv holds one population: choose one of {names}")
        csv.writer(sys.stdout).writerows(csv_rows(chosen[0]))


@ledger.command()
def verify(
    path: Annotated[str, LEDGER],
    runs: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="RUN_FOLDER", help="A run whose kept head must be there."),
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Check the hash chain and every balance; exit 1 when something is wrong.

    Only a head kept elsewhere can show that a ledger was rolled back: name the
    folders of runs that used it.
    """
    folders = [*(runs or []), *([path] if Path(path).is_dir() else [])]
    heads = [head for folder in folders for head in _kept_heads(folder)]
    with _open(path) as opened:
        report = opened.verify(known_heads=heads)
    if as_json:
        print(
            json.dumps(
                {
                    "ok": report.ok,
                    "entries": report.entries,
                    "head": report.head,
                    "known_heads": len(heads),
                    "problems": list(report.problems),
                }
            )
        )
    elif report.ok:
        print(f"whole: {report.entries} entries, {len(heads)} kept heads found, head {report.head}")
    else:
        say("\n".join(["NOT WHOLE", *map(printable, report.problems)]))
    raise typer.Exit(0 if report.ok else 1)


@ledger.command()
def backup(
    path: Annotated[str, LEDGER],
    to: Annotated[str, typer.Argument(metavar="TO", help="The file to make.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="TO may be an older backup of this ledger.")
    ] = False,
) -> None:
    """Copy a ledger, also while runs use it, and check the copy.

    Copying the file alone may lose entries: the -journal beside it is part of the ledger.
    """
    with _open(path) as opened:
        report = opened.backup(to, replace=replace)
    say(f"backed up: {report.entries} entries, head {report.head}, to {to}")


@ledger.command()
def restore(
    kept: Annotated[str, typer.Argument(metavar="BACKUP", help="A file that `backup` made.")],
    path: Annotated[str, LEDGER],
    runs: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="RUN_FOLDER", help="A run whose kept head must be there."),
    ] = None,
) -> None:
    """Check a backup and put it in the place of a ledger, unless that would forget charges.

    A ledger that has entries which the backup lacks is left as it is. Where it is lost,
    name the folders of the runs that used it: only they know whether the backup is too old.
    """
    heads = [head for folder in runs or [] for head in _kept_heads(folder)]
    with _open(kept) as opened:
        report = opened.backup(_ledger_file(Path(path)), replace=True, known_heads=heads)
    found = f"{len(heads)} kept heads found"
    say(f"restored: {report.entries} entries, {found}, head {report.head}, to {path}")


def _open(path: str) -> Any:
    from fedquilt.privacy.ledger import Ledger

    place = _ledger_file(Path(path))
    # After a kill SQLite has to roll an unfinished entry back, which needs write access.
    writable = os.access(place, os.W_OK) and os.access(place.parent, os.W_OK)
    return Ledger.open(place, read_only=not writable)


def _ledger_file(path: Path) -> Path:
    """Return the ledger that a path means: itself, or the one a run folder names."""
    from fedquilt.record.folder import RunFolder

    if not path.is_dir():
        return path
    entered = RunFolder.open(path).read_account()
    if entered is None:
        raise InvalidValueError(f"run folder {str(path)!r} has no ledger")
    return Path(entered["ledger"])


def _kept_heads(path: str) -> list[str]:
    """Return the ledger heads that a run folder has kept."""
    from fedquilt.record.folder import RunFolder

    folder = RunFolder.open(path)
    result = folder.read_result() or {}
    heads = [folder.checkpoint_head(), (result.get("ledger") or {}).get("head", "")]
    return [head for head in heads if head]


def _populations(opened: Any, name: str | None) -> list[Any]:
    found = opened.populations()
    return found if name is None else [opened.population(name)]


def _as_json(opened: Any, chosen: list[Any]) -> dict[str, Any]:
    content: dict[str, Any] = opened.export()
    names = {one.info.name for one in chosen}
    content["populations"] = [p for p in content["populations"] if p["population"] in names]
    return content
