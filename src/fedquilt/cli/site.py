"""`fedquilt site`: what a data holder allows, and what it has given away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedquilt.cli.run import tell
from fedquilt.common import optional
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import format_bound, format_left, printable

site = typer.Typer(
    name="site",
    help="For whoever holds the data of a Flower node: the policy, and what it has given away.",
    no_args_is_help=True,
)

_FILE = typer.Argument(metavar="site.toml", help="The policy of the site.")
_REFUSALS_SHOWN = 5


@site.command()
def init(
    path: Annotated[str, _FILE],
    app: Annotated[
        list[str] | None, typer.Option("--app", metavar="HASH", help="An app it runs; repeat it.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="What it gives in its life.")
    ] = None,
    delta: Annotated[float, typer.Option("--delta", help="With this delta.")] = 1e-5,
    account: Annotated[
        str, typer.Option("--account", metavar="FILE", help="Where its account is, from there.")
    ] = "site.sqlite",
) -> None:
    """Write a policy that allows certified runs and nothing else, to be changed by hand."""
    from fedquilt.flower.policy import LIFE, write_policy

    place, epsilon = Path(path), LIFE if epsilon is None else epsilon
    chosen = {"apps": tuple(app or ()), "epsilon": epsilon, "delta": delta, "account": account}
    if not write_policy(place, **chosen):
        raise InvalidValueError(f"{path!r} must be a new file: a site has one policy")
    tell(f"{printable(place)}: certified runs, epsilon {epsilon:g} at delta {delta:g} in all")


@site.command("show")
def given_away(
    path: Annotated[str, _FILE],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what this site has given away, in which runs and rounds, and what it refused."""
    facts = _facts(Path(path))
    if as_json:
        print(json.dumps(facts, indent=2, allow_nan=False))
        return
    _print_account(facts)
    for line in facts["refused"][-_REFUSALS_SHOWN:]:
        tell(f"  {printable(line)}")
    tell(f"refused: {len(facts['refused'])} orders")


@site.command("verify")
def verify_account(
    path: Annotated[str, _FILE],
    receipts: Annotated[
        str | None,
        typer.Option("--receipts", metavar="FILE", help="As the server's `ledger receipts` says."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Check this site's account, and the server's receipts against it; exit 1 for what is wrong.

    Exit 3 where the last round of a run alone is in no receipt, as after a kill of its server.
    """
    account = _account(Path(path))
    if account is None:
        tell("this site has answered no order: there is no account to check")
        return
    from fedquilt.cli.ledger import paid_in_receipts, say_short

    ledger, population = account
    with ledger:
        report = ledger.verify()
        code = 0 if report.ok else 1
        if code or not as_json:
            state = f"whole: {report.entries} entries" if report.ok else "NOT WHOLE"
            tell("\n".join([state, *map(printable, report.problems)]))
        if receipts is not None:
            paid = paid_in_receipts(Path(receipts))
            code = code or say_short(population, Path(ledger.path), paid, as_json)
    raise typer.Exit(code)


@site.command("statement")
def own_statement(path: Annotated[str, _FILE]) -> None:
    """Print what this site can say of itself: what it allows, gave away, enforces and believes."""
    from fedquilt.flower.policy import read_policy

    facts, policy = _facts(Path(path)), read_policy(Path(path))
    tell(f"Statement of a data holder{': ' + printable(policy.client) if policy.client else ''}\n")
    _print_account(facts)
    tell(
        f"allowed: modes {', '.join(policy.modes)}; methods {', '.join(policy.methods)}; beside "
        f"the update {', '.join(policy.may_send) or 'nothing'}; at most epsilon "
        f"{policy.epsilon:g} in all at delta {policy.delta:g} ({policy.adjacency})\n"
        f"refused: {len(facts['refused'])} orders\n"
        "enforced here: no vector was longer than what was charged, and the charge was on disk "
        "before the vector left\n"
        "believed of the server: that it added the noise that its orders named, and asked as many "
        "others as it said"
    )


@site.command()
def page(
    path: Annotated[str, _FILE],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE.html", help="Where it goes.")
    ] = "site.html",
) -> None:
    """Make one HTML page of this site's account, for its owner alone; it needs no network."""
    from fedquilt.common.storage import write_file
    from fedquilt.flower.policy import read_policy
    from fedquilt.flower.site import account_path
    from fedquilt.report.html_page import html_page
    from fedquilt.report.views import ledger_view

    account = account_path(Path(path), read_policy(Path(path)))
    if not account.exists():
        raise InvalidValueError(f"{path!r} has no account yet: this site has answered no order")
    text = html_page(ledger_view(account), title="What this site has given away")
    write_file(Path(output), text.encode(), 0o600, parents=True)
    print(output)


def _print_account(facts: dict[str, Any]) -> None:
    if "head" not in facts:
        tell("given away: nothing; this site has answered no order")
        return
    tell(
        f"given away: epsilon {facts['epsilon']} of {facts['lifetime_epsilon']:g} at delta "
        f"{facts['delta']:g} ({facts['adjacency']}), in {facts['replies']} replies; "
        f"left: epsilon {facts['epsilon_left']}"
    )
    for run in facts["runs"]:
        tell(
            f"  {run['run']}: {run['replies']} replies in rounds {run['rounds']}, epsilon "
            f"{run['epsilon']}, last {run['last']}"
        )
    tell(f"head of the account: {facts['head']}")


def _facts(path: Path) -> dict[str, Any]:
    """Return what a site's account and its list of refusals say, as plain data."""
    optional.require("flwr", "fedquilt site")
    from fedquilt.common.untrusted import read_lines
    from fedquilt.flower.site import refusals_path, run_facts

    told = refusals_path(path)
    lines = read_lines(told) if told.exists() else []
    refused = {"refused": [line.decode(errors="replace").rstrip() for line in lines]}
    account = _account(path)
    if account is None:
        return {"replies": 0, "runs": [], **refused}
    ledger, population = account
    with ledger:
        info = population.info
        return {
            "lifetime_epsilon": info.epsilon,
            "delta": info.delta,
            "adjacency": info.adjacency,
            "epsilon": format_bound(float(population.epsilons()[0])),
            "epsilon_left": format_left(float(population.epsilon_left()[0])),
            "replies": int(population.joins()[0]),
            "runs": [run_facts(population, run) for run in population.runs()],
            **refused,
            "head": ledger.head(),
        }


def _account(path: Path) -> tuple[Any, Any] | None:
    """Open the account of a policy's file; None where nothing was given away yet."""
    optional.require("flwr", "fedquilt site")
    from fedquilt.flower.policy import read_policy
    from fedquilt.flower.site import account_path, site_account

    policy = read_policy(path)
    place = account_path(path, policy)
    return site_account(place, policy, read_only=True) if place.exists() else None
