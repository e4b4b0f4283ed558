"""`fedquilt ledger`: what clients have given away, its checks, receipts and backups."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.cli.run import JSON, say, tell
from fedquilt.common import checks
from fedquilt.common.errors import DataError, InvalidValueError
from fedquilt.common.formatting import printable

if TYPE_CHECKING:
    from fedquilt.privacy.ledger.rows import Charge, Paid

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
        typer.Option("--client", metavar="NAME", help="Only what this client has given away."),
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="Ids of clients, where they have names too.")
    ] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Show what each population has spent, who spent most, and who is near the end."""
    from fedquilt.report.ledger import ledger_tables, plot_ledger

    checks.integer("most", most, at_least=0)
    with _open(path) as opened:
        chosen = _populations(opened, population)
        names = {} if keys else _names(path)
        if client is not None:
            _show_client(chosen, client, path, as_json, _names(path), keys=keys)
            return
        rows = {one.info.name: _named(one.rows(most), names) for one in chosen}
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


def _names(path: str) -> dict[str, str]:
    """Return what people call the clients of a ledger, by their ids."""
    from fedquilt.privacy.ledger.files import read_names

    return read_names(_ledger_file(Path(path)))


def _named(rows: Iterable[Any], names: dict[str, str]) -> list[Any]:
    """Return rows of clients with the names of those who have one."""
    return [dataclasses.replace(r, client_id=names.get(r.client_id, r.client_id)) for r in rows]


def _show_client(
    chosen: list[Any], client: str, path: str, as_json: bool, names: dict[str, str], *, keys: bool
) -> None:
    """Say what one client has given away: by its name, its id, or its number without one."""
    from fedquilt.privacy.ledger.files import id_of
    from fedquilt.report.ledger import client_facts

    wanted = id_of(names, client)
    found = [
        (one.info.name, row)
        for one in chosen
        for row in one.rows()
        if wanted == (str(row.client) if row.client_id is None else row.client_id)
    ]
    if not found:
        raise _stranger(client, chosen, path, names)
    if as_json:
        print(json.dumps([{"population": name, **dataclasses.asdict(row)} for name, row in found]))
        return
    shown = [row if keys else _named([row], names)[0] for _, row in found]
    say("\n\n".join(client_facts(name, row) for (name, _), row in zip(found, shown, strict=True)))


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
        tell(f"whole: {report.entries} entries, {len(heads)} kept heads found, head {report.head}")
    else:
        tell("\n".join(["NOT WHOLE", *map(printable, report.problems)]))
    raise typer.Exit(0 if report.ok else 1)


@ledger.command()
def reconcile(
    path: Annotated[str, LEDGER],
    account: Annotated[str, typer.Argument(metavar="SITE", help="The account of a site.")],
    client: Annotated[str, typer.Option("--client", help="Who the site is in the ledger.")],
    population: Annotated[str | None, POPULATION] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Compare a site's own account with the ledger, reply by reply.

    Every reply that the site has sent must have its release in the ledger, charged at no less:
    exit 1 where one has not. Exit 3 where all that is missing is the last round of a run, of which
    there is no release at all: so it is after a server was killed before its release.
    """
    from fedquilt.privacy.accounting import Adjacency
    from fedquilt.privacy.ledger.rows import paid_by

    charged, released = [], set()
    names: dict[int, str] = {}

    def run_of(charge: Charge) -> str:
        return names[charge.run]

    with _open(path) as opened:
        for one, number in _accounts_of(client, _populations(opened, population), path):
            factor = Adjacency.of(one.info.adjacency).sensitivity_factor
            names |= {run.key: run.name for run in one.runs()}
            charges = list(one.charges())
            released |= {(run_of(charge), charge.round_index) for charge in charges}
            paid = paid_by(charges, number, run_of)
            charged += [dataclasses.replace(each, mu2=each.mu2 / factor**2) for each in paid]
    with _open(account) as opened:
        (site,) = opened.populations()
        code = say_short(site, Path(account), charged, as_json, released)
    raise typer.Exit(code)


def say_short(
    site: Any,
    account: Path,
    charged: list[Paid],
    as_json: bool,
    released: Collection[tuple[str | None, int]] = (),
) -> int:
    """Say which replies of a site's account were charged at less; return the exit code.

    `charged` are charges of zero-out, in squared GDP units.
    """
    from fedquilt.privacy.accounting import Adjacency
    from fedquilt.privacy.ledger.files import read_notes
    from fedquilt.privacy.ledger.rows import paid_by, short_of

    factor, notes = Adjacency.of(site.info.adjacency).sensitivity_factor, read_notes(account)
    sent = paid_by(
        site.charges(), 0, lambda charge: notes.get(charge.digest, {}).get("run") or None
    )
    dear = [dataclasses.replace(paid, mu2=paid.mu2 * factor**2) for paid in charged]
    short = short_of(sent, dear, released)
    if as_json:
        keys = ("run", "round", "sent_mu2", "charged_mu2", "released")
        facts = [
            (s.sent.run, s.sent.round_index, s.sent.mu2, s.charged, s.is_released) for s in short
        ]
        lines = [dict(zip(keys, entry, strict=True)) for entry in facts]
        print(json.dumps({"ok": not short, "replies": len(sent), "short": lines}))
    else:
        for entry in short:
            tell(printable(entry.words))
        tell(f"{len(sent) - len(short)} of {len(sent)} replies are in the ledger at no less")
    return 0 if not short else 3 if all(entry.may_be_a_crash for entry in short) else 1


@ledger.command()
def receipts(
    path: Annotated[str | None, typer.Argument(metavar="[LEDGER]", help="The ledger.")] = None,
    client: Annotated[str | None, typer.Option("--client", help="Whose they are.")] = None,
    population: Annotated[str | None, POPULATION] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option("--compare", metavar="A B", help="Two sites' receipts, or their notes."),
    ] = None,
) -> None:
    """Write a client's receipts as JSON: of every round its charge, and the hash of the release.

    A site checks them against its own account: `fedquilt site verify site.toml --receipts FILE`.
    Two sites of a round have the same hash in theirs, for one release was made of both, and the
    same model in the notes beside their accounts (SITE.sqlite.notes.jsonl): --compare A B exits 1
    where they differ.
    """
    from fedquilt.privacy.accounting import Adjacency

    if compare is not None:
        raise typer.Exit(1 if _told_apart(*map(Path, compare)) else 0)
    if path is None or client is None:
        raise InvalidValueError("LEDGER and --client must be given, or --compare A B")

    lines = []
    with _open(path) as opened:
        for one, number in _accounts_of(client, _populations(opened, population), path):
            names = {run.key: run.name for run in one.runs()}
            factor = Adjacency.of(one.info.adjacency).sensitivity_factor
            lines += [
                {
                    "run": names[charge.run],
                    "round": charge.round_index,
                    "time": charge.time,
                    "release": charge.digest,
                    "mu2": float(paid) / factor**2 if math.isfinite(paid) else None,
                }
                for charge in one.charges()
                for paid in charge.charges_mu2[charge.clients == number]
            ]
        head = opened.head()
    print(json.dumps({"client": client, "head": head, "receipts": lines}, indent=1))


def _told_apart(one: Path, other: Path) -> bool:
    """Say of which rounds two sites were told different things; tell whether there are any."""
    first, second = _stories(one), _stories(other)
    shared = sorted(first.keys() & second.keys())
    apart = [place for place in shared if first[place] != second[place]]
    for run, index in apart:
        print(printable(f"round {index + 1} of {run}: the two sites were told different things"))
    print(f"{len(shared) - len(apart)} of {len(shared)} rounds that both know are the same in both")
    return bool(apart)


def _stories(path: Path) -> dict[tuple[str, int], set[str]]:
    """Return hashes by run and round: of releases in receipts, of models in a site's notes."""
    from fedquilt.privacy.ledger.files import notes_in

    found: dict[tuple[str, int], set[str]] = {}
    if path.name.endswith(".jsonl"):
        lines = [(note, note["received"]) for note in notes_in(path).values()]
    else:
        lines = [(line, line["release"]) for line in _receipts(path)]
    if not lines:
        raise DataError(f"{printable(path)} names no round")
    for line, told in lines:
        found.setdefault((line["run"], line["round"]), set()).add(told)
    return found


def paid_in_receipts(path: Path) -> list[Paid]:
    """Return what a server's receipts say was paid."""
    from fedquilt.privacy.ledger.rows import Paid

    lines = _receipts(path)
    made = [(line["run"], line["round"], line["release"]) for line in lines]
    if len(set(made)) < len(made):
        raise DataError(f"{printable(path)} names one release twice")
    paid = [math.inf if line["mu2"] is None else line["mu2"] for line in lines]
    return [Paid(line["run"], line["round"], mu2) for line, mu2 in zip(lines, paid, strict=True)]


def _receipts(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a server's receipts, which somebody else has written."""
    from fedquilt.common.schema import ANY_TEXT, COUNT, NUMBER, TEXT, ListOf, Object, check, maybe
    from fedquilt.common.untrusted import read_json

    line = Object(
        {"run": TEXT, "round": COUNT, "time": TEXT, "release": ANY_TEXT, "mu2": maybe(NUMBER)}
    )
    record = read_json(path, DataError)
    check(record, Object({"client": TEXT, "head": TEXT, "receipts": ListOf(line)}), path, DataError)
    lines: list[dict[str, Any]] = record["receipts"]
    return lines


def _accounts_of(client: str, chosen: list[Any], path: str) -> list[tuple[Any, int]]:
    """Return the populations that a client is in, and its number there; refuse a stranger."""
    from fedquilt.privacy.ledger.files import id_of

    names = _names(path)
    wanted = id_of(names, client)
    found = [(one, number) for one in chosen if (number := _number_of(one, wanted)) >= 0]
    if not found:
        raise _stranger(client, chosen, path, names)
    return found


def _number_of(population: Any, client: str) -> int:
    """Return the number of a client by its id, or by itself where clients have none; -1: nobody."""
    if population.info.named:
        return int(population.numbers([client])[0])
    known = client.isdecimal() and int(client) < population.info.num_clients
    return int(client) if known else -1


def _stranger(
    client: str, chosen: list[Any], path: str, names: dict[str, str]
) -> InvalidValueError:
    where = ", ".join(repr(one.info.name) for one in chosen) or "none"
    known = [row.client_id for one in chosen for row in one.rows() if row.client_id]
    hint = checks.did_you_mean(client, [*names.values(), *known])
    return InvalidValueError(
        f"client={client!r} must be the name or id of a client in {path} (populations: "
        f"{where}), or its number where clients have no ids{hint}"
    )


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
    tell(f"backed up: {report.entries} entries, head {report.head}, to {to}")


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
    tell(f"restored: {report.entries} entries, {found}, head {report.head}, to {path}")


def _open(path: str) -> Any:
    from fedquilt.privacy.ledger import open_ledger

    return open_ledger(_ledger_file(Path(path)))


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
