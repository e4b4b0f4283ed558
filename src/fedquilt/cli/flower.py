"""`fedquilt flower`: an app of one's own, and a federation on this machine to try it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.common import optional
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import printable

if TYPE_CHECKING:
    from fedquilt.flower.federation import LocalFederation

flower = typer.Typer(
    name="flower",
    help="Run the round on Flower nodes: an app of your own, a federation to try it.",
    no_args_is_help=True,
)

FOLDER = typer.Option("--folder", help="The folder of the federation: keys, logs, results.")
NAME = typer.Argument(metavar="NAME", help="What people call the client.")
ROSTER = typer.Option("--roster", help="The roster of a server, where it has one of its own.")
CONFIG = typer.Option("--run-config", "-c", help="Options of the run: 'num_rounds=3 seed=1'.")
_HERE = "federation"


@flower.command()
def new(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A new folder.")],
) -> None:
    """Write an app for your own model and data that runs at once."""
    _needed()
    from fedquilt.flower.template import write_app

    written = write_app(folder)
    print(
        f"{written}/quiltapp/task.py has the model and the data: change it\n\n"
        f"  fedquilt flower up {written}     # a federation on this machine\n"
        f"  fedquilt flower run        # submit the app to it\n"
        f"  fedquilt flower down"
    )


@flower.command()
def up(
    app: Annotated[str, typer.Argument(metavar="APP", help="The folder of the app.")] = ".",
    nodes: Annotated[int, typer.Option("--nodes", help="How many SuperNodes.")] = 4,
    folder: Annotated[str, FOLDER] = _HERE,
    ledger: Annotated[
        str | None, typer.Option("--ledger", help="A ledger that outlives runs.")
    ] = None,
    population: Annotated[
        str | None, typer.Option("--population", help="Name of the clients in the ledger.")
    ] = None,
    seats: Annotated[
        int, typer.Option("--seats", min=0, help="Accounts for nodes that join during a run.")
    ] = 0,
    cold: Annotated[
        bool, typer.Option("--cold", help="Flower's own processes: slow, and any app is run.")
    ] = False,
    any_app: Annotated[
        bool, typer.Option("--any-app", help="Let nodes run any app that is submitted.")
    ] = False,
) -> None:
    """Start a federation on loopback: TLS, node keys, a gate, SuperLink and SuperNodes."""
    _needed()
    from fedquilt.flower.federation import commands_for_hosts

    federation = _federation(folder)
    options: dict[str, Any] = {"warm": not cold}
    if ledger is not None:
        options["ledger"] = str(Path(ledger).expanduser().resolve())
        options["population"] = population or "flower"
    config = federation.prepare(app, nodes, reserved_slots=seats, **options)
    if any_app:
        federation.trust(None)
    federation.up()
    ports = config["ports"]
    print(f"up: {nodes} nodes, gate 127.0.0.1:{ports['gate']}, SuperLink 127.0.0.1:", end="")
    logs = printable(federation.folder / "logs")
    print(f"{ports['superlink']} (loopback only)\nlogs: {logs}\n")
    print("The same on hosts of their own (docs/deploy.md):\n")
    print(commands_for_hosts(federation.config()))


@flower.command()
def down(folder: Annotated[str, FOLDER] = _HERE) -> None:
    """End everything that `up` started."""
    _needed()
    killed = _federation(folder).down()
    print("down" + (f"; had to kill {', '.join(killed)}" if killed else ""))


@flower.command()
def status(folder: Annotated[str, FOLDER] = _HERE) -> None:
    """Show processes, nodes that are connected, and how far the last run is."""
    _needed()
    from fedquilt.flower.federation import rounds_of
    from fedquilt.flower.processes import is_member

    federation = _federation(folder)
    config, record, roster = federation.config(), federation.status(), federation.roster()
    left = federation.left()
    orphans = f"{len(left)} processes go on without a supervisor: `fedquilt flower down` ends them"
    print("up" if federation.is_up() else orphans if left else "down")
    for name, job in (record or {"processes": {}})["processes"].items():
        state = "running" if is_member(job["pid"], federation.folder) else "not running"
        print(f"  {_shown(name)} {state:12} pid {job['pid']}  restarts {job['restarts']}")
    online = federation.online()
    for name, prints in roster.keys.items():
        known = "connected" if name in online else "away" if name in config["nodes"] else "left"
        known = "free" if name in roster.reserved_slots else known
        print(f"  {_shown(name)} {known:12} {prints[0][:20]}...")
    last = federation.last_run()
    if last is not None:
        ended = "finished" if (last / "result.json").exists() else "not finished"
        print(f"last run: {printable(last)} ({rounds_of(last)} rounds, {ended})")


@flower.command("run")
def submit(
    run_config: Annotated[str | None, CONFIG] = None,
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Submit the app to the federation and follow it."""
    _needed()
    raise typer.Exit(_federation(folder).run(_overrides(run_config)))


@flower.command()
def resume(
    run_config: Annotated[str | None, CONFIG] = None,
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Continue the last run that is not finished, from its last durable round."""
    _needed()
    federation = _federation(folder)
    if not federation.is_up():
        federation.config()
        federation.up()
    raise typer.Exit(federation.run({**_overrides(run_config), "flower_resume": True}))


@flower.command()
def trust(
    app: Annotated[str, typer.Argument(metavar="APP", help="The folder of the app.")] = ".",
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Print the hash of the app; nodes of a federation here run this version and no other."""
    _needed()
    from fedquilt.flower.template import fab_hash

    federation, value = _federation(folder), fab_hash(app)
    if federation.exists():
        federation.trust(value)
    print(value)


@flower.command()
def join(
    name: Annotated[str, NAME],
    node_config: Annotated[str, typer.Option("--node-config", help="What the node is told.")],
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Let a node join; where there is a seat for it, in the run that goes on as well."""
    _needed()
    at_once = _federation(folder).join(name, node_config)
    print(f"{name} takes part " + ("from the next round" if at_once else "in later runs"))


@flower.command()
def leave(
    name: Annotated[str, NAME],
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Let a node leave; its account stays."""
    _needed()
    _federation(folder).leave(name)


@flower.command()
def rotate(
    name: Annotated[str, NAME],
    key: Annotated[
        str | None, typer.Option("--key", metavar="PUB", help="With --roster: the new public key.")
    ] = None,
    roster: Annotated[str | None, ROSTER] = None,
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Give a node a new key; its account stays that of its first key, which counts no more."""
    _needed()
    if (key is None) != (roster is None):
        raise InvalidValueError("--key and --roster must be given together: a server's own roster")
    if key is None or roster is None:
        print(_federation(folder).rotate(name))
        return
    from fedquilt.flower.client_registry import NodeRoster

    value = _fingerprint(key)
    NodeRoster.read(roster).rotated(name, value).write(roster)
    print(value)


@flower.command()
def setup(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="server or node.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="/etc/fedquilt, for the units.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A server's name or address; repeat it.")
    ] = None,
) -> None:
    """Write the certificates, keys and secrets of a host; what is there is kept."""
    _needed()
    from fedquilt.flower import keys
    from fedquilt.flower.client_registry import key_fingerprint

    if kind not in ("server", "node"):
        raise InvalidValueError(f"kind={kind!r} must be 'server' or 'node'")
    if (kind == "server") != bool(host):
        raise InvalidValueError("--host must name a server as nodes reach it, and only a server")
    if kind == "server":
        keys.make_server_files(Path(folder), host or ())
        print("nodes get ca.crt and nothing else; keep ca.key offline")
    else:
        print(key_fingerprint(keys.make_node_files(Path(folder))))


@flower.command()
def enroll(
    name: Annotated[str, NAME],
    key: Annotated[str, typer.Argument(metavar="PUB", help="The public key of its node.")],
    roster: Annotated[str, ROSTER],
) -> None:
    """Enter a new client in a server's roster; it takes a free seat where there is one."""
    _needed()
    from fedquilt.flower.client_registry import NodeRoster, roster_of_keys

    value = _fingerprint(key)
    if Path(roster).exists():
        NodeRoster.read(roster).with_client(name, value).write(roster)
    else:
        roster_of_keys([(name, Path(key).read_bytes())]).write(roster)
    print(value)


@flower.command()
def seats(
    count: Annotated[int, typer.Argument(metavar="COUNT", min=1, help="How many more.")],
    roster: Annotated[str, ROSTER],
) -> None:
    """Add accounts to a server's roster for clients that may join while a run goes on."""
    _needed()
    from fedquilt.flower.client_registry import NodeRoster

    NodeRoster.read(roster).with_reserved_slots(count).write(roster)


def _fingerprint(path: str) -> str:
    """Return what stands for the public key in a file."""
    from fedquilt.flower.client_registry import key_fingerprint

    try:
        return key_fingerprint(Path(path).read_bytes())
    except OSError as error:
        raise InvalidValueError(
            f"key {path!r} must be a file that can be read: {error.strerror}"
        ) from error


def _shown(name: str) -> str:
    """Return a name of a file, in a column of its own."""
    return f"{printable(name)[:40]:14}"


def _needed() -> None:
    optional.require("flwr", "fedquilt flower")


def _federation(folder: str) -> LocalFederation:
    from fedquilt.flower.federation import LocalFederation

    return LocalFederation(folder)


def _overrides(text: str | None) -> dict[str, Any]:
    """Read `key=value key=value`, values as in TOML."""
    given: dict[str, Any] = {}
    for part in (text or "").split():
        key, equals, value = part.partition("=")
        try:
            given |= tomllib.loads(f"{key} = {value}") if equals else {}
        except tomllib.TOMLDecodeError:
            given[key] = value
        if not equals or not key:
            raise InvalidValueError(f"run_config={part!r} must be key=value")
    return given
