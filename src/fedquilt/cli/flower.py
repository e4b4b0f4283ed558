"""`fedquilt flower`: an app of one's own, and a federation on this machine to try it."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fedquilt.cli.run import tell
from fedquilt.common import optional
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.common.formatting import printable

if TYPE_CHECKING:
    from fedquilt.flower.federation import LocalFederation
    from fedquilt.flower.run_notes import RunNotes

flower = typer.Typer(
    name="flower",
    help="Run the round on Flower nodes: an app of your own, a federation to try it.",
    no_args_is_help=True,
)

FOLDER = typer.Option("--folder", help="The folder of the federation: keys, logs, results.")
NAME = typer.Argument(metavar="NAME", help="What people call the client.")
ROSTER = typer.Option("--roster", help="The roster of a server, where it has one of its own.")
CONFIG = typer.Option("--run-config", "-c", help="Options of the run: 'num_rounds=3 seed=1'.")
DEBUG = typer.Option("--debug", help="Show the traceback of an error of the run.")
_HERE = "federation"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # of Flower's own lines
_EVENT = ("time", "by", "event", "previous")


def _command(name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command, which says what to install where Flower is not."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def checked(**given: Any) -> None:
            optional.require("flwr", "fedquilt flower")
            function(**given)

        return flower.command(name)(checked)

    return add


@_command()
def new(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A new folder.")],
) -> None:
    """Write an app for your own model and data that runs at once."""
    from fedquilt.flower.template import write_app

    written = write_app(folder)
    tell(
        f"{written}/quiltapp/task.py has the model and the data: change it\n\n"
        f"  fedquilt flower up {written}     # a federation on this machine\n"
        f"  fedquilt flower run        # submit the app to it\n"
        f"  fedquilt flower down"
    )


@_command()
def up(
    app: Annotated[str, typer.Argument(metavar="APP", help="The folder of the app.")] = ".",
    nodes: Annotated[
        str,
        typer.Option("--nodes", help="How many SuperNodes, or their names: 'a,b'."),
    ] = "4",
    node_config: Annotated[
        str | None,
        typer.Option(
            "--node-config", help="What each node is told; {name}, {place}, {nodes} in it."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DIR", help="A node for each file or folder in it."),
    ] = None,
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
    from fedquilt.flower.federation import commands_for_hosts

    federation = _federation(folder)
    options: dict[str, Any] = {"warm": not cold}
    if ledger is not None:
        options["ledger"] = str(Path(ledger).expanduser().resolve())
        options["population"] = population or "flower"
    names, told = _nodes_of(nodes, node_config, data)
    config = federation.prepare(app, names, node_config=told, reserved_slots=seats, **options)
    if any_app:
        federation.trust(None)
    for name in set(names) - set(config["nodes"]):
        tell(f"{name} is revoked and stays out: `fedquilt flower join` lets it come back")
    federation.up()
    ports = config["ports"]
    gate, link = (f"127.0.0.1:{ports[name]}" for name in ("gate", "superlink"))
    tell(f"up: {len(config['nodes'])} nodes, gate {gate}, SuperLink {link} (loopback only)")
    tell(f"logs: {printable(federation.folder / 'logs')}\nnext: {federation.command('run')}\n")
    print("The same on hosts of their own (docs/deploy.md):\n")
    print(commands_for_hosts(federation.config()))


@_command()
def down(folder: Annotated[str, FOLDER] = _HERE) -> None:
    """End everything that `up` started."""
    killed = _federation(folder).down()
    tell("down" + (f"; had to kill {', '.join(killed)}" if killed else ""))


@_command()
def status(
    folder: Annotated[str, FOLDER] = _HERE,
    keys: Annotated[bool, typer.Option("--keys", help="Fingerprints of the nodes' keys.")] = False,
) -> None:
    """Show processes, how each node stands, and how far the last run is."""
    from fedquilt.flower.federation import rounds_of
    from fedquilt.flower.processes import is_member
    from fedquilt.flower.run_notes import submitted

    federation = _federation(folder)
    federation.config()  # refused where there is none
    record, roster = federation.status(), federation.roster()
    left = federation.left()
    orphans = f"{len(left)} processes go on without a supervisor: `fedquilt flower down` ends them"
    tell("up" if federation.is_up() else orphans if left else "down")
    for name, job in (record or {"processes": {}})["processes"].items():
        state = "running" if is_member(job["pid"], federation.folder) else "not running"
        tell(f"  {_shown(name)} {state:12} pid {job['pid'] or '-'}  restarts {job['restarts']}")
    for name, state in federation.node_states().items():
        tell(f"  {_shown(name)} {state:12}" + (f" {roster.current_key(name)}" if keys else ""))
    runs = submitted(federation.config()["output"])
    told = [(run, run.read()) for run in runs if run.is_alive() or run is runs[-1]]
    last = next((Path(n["folder"]) for _, n in told if n and n["folder"]), federation.last_run())
    if last is not None:
        ended = "finished" if (last / "result.json").exists() else "not finished"
        tell(f"last run: {printable(last)} ({rounds_of(last)} rounds, {ended})")
    for run, note in told:
        if note is not None:
            state = note["state"] if note["state"] != "running" or run.is_alive() else "killed"
            tell(f"run {run.run_id}: {printable(state)}{note['why'] and ': '}{note['why']}")


@_command("run")
def submit(
    run_config: Annotated[str | None, CONFIG] = None,
    folder: Annotated[str, FOLDER] = _HERE,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Submit the app to the federation and follow it; exit 0 if the run was finished."""
    _submit(_federation(folder), _overrides(run_config), debug)


@_command()
def resume(
    run_config: Annotated[str | None, CONFIG] = None,
    folder: Annotated[str, FOLDER] = _HERE,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Continue the last run that is not finished, from its last durable round."""
    from fedquilt.flower.control import check_overrides

    federation, given = _federation(folder), _overrides(run_config)
    check_overrides(federation.config()["app"], given, resumes=True)
    last = _last_notes(federation)
    if last is not None and last.is_alive():
        raise InvalidValueError(
            f"run {last.run_id} goes on, nothing is to be continued: follow it with `fedquilt "
            "flower logs -f`; `fedquilt flower stop` ends it after its round, to be resumed later"
        )
    if not federation.is_up():
        federation.up()
    _submit(federation, {**given, "flower_resume": True}, debug)


@_command("stop")
def stop_run(
    now: Annotated[
        bool, typer.Option("--now", help="Within the round, which then releases nothing.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="DIR", help="A server's folder of runs, of its own."),
    ] = None,
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Stop the run that goes on, after its round; `resume` continues it."""
    from fedquilt.flower.control import going_on, stop

    notes = going_on(output or _federation(folder).config()["output"])
    print(f"stopping run {notes.run_id} {'now' if now else 'after its round'}", flush=True)
    ended = stop(notes, now=now)
    note = notes.read() or {"state": "", "why": "", "folder": ""}
    print(note["why"] or f"{note['state']}: {note['folder']}")
    raise typer.Exit(0 if ended else 1)


@_command()
def logs(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A node, superlink, gate, serverapp or supervisor."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Of each file.")] = 20,
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Show the last lines of the logs: of the last run, or of a process."""
    federation = _federation(folder)
    places = federation.folder / "logs"
    notes = _last_notes(federation)
    if name is not None:
        known = sorted({path.name.split(".")[0] for path in places.glob("*.log")})
        name = name.removesuffix(".app")  # as `status` has it; shown with its node
        if name not in known:
            raise InvalidValueError(f"name={name!r} must be one of {', '.join(known) or 'nobody'}")
        paths = [places / f"{name}{end}" for end in (".log", ".app.log")]
    elif notes is None:
        raise InvalidValueError(f"no run was submitted in {str(federation.folder)!r} yet")
    else:
        paths = [notes.path / "words.log"]
    _show_ends(paths, lines, follow)
    if name is None and notes is not None and (why := (notes.read() or {"why": ""})["why"]):
        tell(f"ended: {why}")


@_command()
def revoke(
    name: Annotated[str, NAME],
    roster: Annotated[str | None, ROSTER] = None,
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Let no key of a client count from the next round on; its account stays."""
    if roster is None:
        _federation(folder).revoke(name)
    else:
        from fedquilt.flower import journal
        from fedquilt.flower.client_registry import NodeRoster

        NodeRoster.read(roster).without_keys_of(name).write(roster)
        journal.note(Path(roster).parent, "revoked", client=name)
    tell(f"{name} is not asked any more; a new key: `fedquilt flower rotate` or `join`")


@_command()
def trust(
    app: Annotated[str, typer.Argument(metavar="APP", help="The folder of the app.")] = ".",
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Print the hash of the app; nodes of a federation here run this version and no other."""
    from fedquilt.flower.template import fab_hash

    federation, value = _federation(folder), fab_hash(app)
    if federation.exists():
        federation.trust(value)
    print(value)


@_command()
def join(
    name: Annotated[str, NAME],
    node_config: Annotated[str, typer.Option("--node-config", help="What the node is told.")],
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Let a node join; where there is a seat for it, in the run that goes on as well."""
    federation = _federation(folder)
    at_once = federation.join(name, node_config)
    refusal = federation.objection_of(name)
    if refusal:
        tell(f"{name} joins, and its policy refuses runs as the app is configured: {refusal}")
    else:
        tell(f"{name} takes part " + ("from the next round" if at_once else "in later runs"))
    tell(f"what it lets be done with its data: {printable(folder)}/sites/{name}/site.toml")


@_command()
def leave(
    name: Annotated[str, NAME],
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Let a node leave; its account stays."""
    _federation(folder).leave(name)


@_command()
def rotate(
    name: Annotated[str, NAME],
    key: Annotated[
        str | None, typer.Option("--key", metavar="PUB", help="With --roster: the new public key.")
    ] = None,
    roster: Annotated[str | None, ROSTER] = None,
    folder: Annotated[str, FOLDER] = _HERE,
) -> None:
    """Give a node a new key; its account stays that of its first key, which counts no more."""
    if (key is None) != (roster is None):
        raise InvalidValueError("--key and --roster must be given together: a server's own roster")
    if key is None or roster is None:
        print(_federation(folder).rotate(name))
        return
    from fedquilt.flower import journal
    from fedquilt.flower.client_registry import NodeRoster

    value = _fingerprint(key)
    NodeRoster.read(roster).rotated(name, value).write(roster)
    journal.note(Path(roster).parent, "rotated", client=name, key=value)
    print(value)


@_command()
def setup(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="server or node.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="/etc/fedquilt, for the units.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A server's name or address; repeat it.")
    ] = None,
) -> None:
    """Write the certificates, keys and secrets of a host; what is there is kept."""
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


@_command()
def enroll(
    name: Annotated[str, NAME],
    key: Annotated[str, typer.Argument(metavar="PUB", help="The public key of its node.")],
    roster: Annotated[str, ROSTER],
) -> None:
    """Enter a new client in a server's roster; it takes a free seat where there is one.

    Beside PUB, under its name with .site.toml, it writes a policy to hand to the client: certified
    runs and nothing else.
    """
    from fedquilt.flower import journal
    from fedquilt.flower.client_registry import NodeRoster, roster_of_keys
    from fedquilt.flower.policy import ACCOUNT, write_policy

    value = _fingerprint(key)
    try:
        if Path(roster).exists():
            NodeRoster.read(roster).with_client(name, value).write(roster)
        else:
            roster_of_keys([(name, Path(key).read_bytes())]).write(roster)
    except FedquiltError as error:
        facts = {"client": name, "key": value, "why": str(error)}
        journal.note(Path(roster).parent, "enrolment refused", **facts)
        raise
    account = NodeRoster.read(roster).keys[name][0]
    policy = Path(key).with_suffix(".site.toml")
    write_policy(policy, client=account, account=ACCOUNT)
    print(f"to be handed to {name} as /etc/fedquilt/site.toml: {policy}", file=sys.stderr)
    journal.note(Path(roster).parent, "enrolled", client=name, account=account, key=value)
    print(value)


@_command()
def seats(
    count: Annotated[int, typer.Argument(metavar="COUNT", min=1, help="How many more.")],
    roster: Annotated[str, ROSTER],
) -> None:
    """Add accounts to a server's roster for clients that may join while a run goes on."""
    from fedquilt.flower import journal
    from fedquilt.flower.client_registry import NodeRoster

    NodeRoster.read(roster).with_reserved_slots(count).write(roster)
    journal.note(Path(roster).parent, "seats", count=count)
    tell(f"{count} more in {printable(roster)}: clients that `fedquilt flower enroll` enters")


@_command("audit")
def audit_log(
    places: Annotated[
        list[str], typer.Argument(metavar="DIR", help="Where audit.jsonl is: results, a roster's.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Check the chain of hashes.")] = False,
) -> None:
    """Show who did what, or check that no line was changed or taken out; exit 1 where one was.

    Whoever may write the log can compute its chain anew: the head that --verify prints, kept
    elsewhere, shows that.
    """
    from fedquilt.flower import journal

    wrong = False
    for place in places:
        if not journal.lines_of(place):
            raise InvalidValueError(f"{place!r} must hold {journal.FILE} with lines in it")
        found = journal.broken(place) if verify else []
        wrong |= bool(found)
        for number in found:
            tell(f"NOT WHOLE: line {number} does not follow from the line before it")
        if verify:
            count, where = len(journal.lines_of(place)), printable(place)
            tell(f"{where}: {count} lines, {len(found)} broken, head {journal.head(place)}")
            continue
        for event in journal.events(place):
            shown = {key: value for key, value in event.items() if key not in _EVENT}
            facts = " ".join(f"{key}={value}" for key, value in shown.items())
            tell(printable(f"{event.get('time')} {event.get('by')}: {event.get('event')} {facts}"))
    raise typer.Exit(1 if wrong else 0)


def _submit(federation: LocalFederation, given: dict[str, Any], debug: bool) -> NoReturn:
    """Submit a run and follow it to its end; Ctrl-C asks what is meant."""
    from fedquilt.flower.control import stop

    control, notes = federation.control(), federation.submit(given)
    print(f"run {notes.run_id} submitted", flush=True)
    try:
        code = control.follow(notes, tell)
    except KeyboardInterrupt:
        choice = _asked_how()
        if choice == "leave":
            tell(f"run {notes.run_id} goes on: `fedquilt flower logs -f`, `fedquilt flower stop`")
            raise typer.Exit(130) from None
        print(f"stopping {choice} ...", flush=True)
        stop(notes, now=choice == "now")
        control.follow(notes, lambda line: None)
        note = notes.read() or {"why": "stopped before it began"}
        tell(f"{note['why']}\ncontinue with: {federation.command('resume')}")
        raise typer.Exit(130) from None
    if code and debug and notes.traceback():
        print(notes.traceback(), file=sys.stderr)
    raise typer.Exit(code)


def _asked_how() -> str:
    """Return what Ctrl-C means; where nobody can be asked, that the run stops now."""
    if not sys.stdin.isatty():
        return "now"
    try:
        said = input("\nstop the run [n]ow, [a]fter its round, or [l]eave it running? [n] ")
    except (KeyboardInterrupt, EOFError):
        return "now"
    return {"a": "after its round", "l": "leave"}.get(said.strip().lower()[:1], "now")


def _last_notes(federation: LocalFederation) -> RunNotes | None:
    from fedquilt.flower.run_notes import submitted

    found = submitted(federation.config()["output"])
    return found[-1] if found else None


def _show_ends(paths: list[Path], lines: int, follow: bool) -> None:
    """Print the last lines of files, and what is added to them while somebody looks."""
    from fedquilt.flower.journal import GrowingFile

    files = [GrowingFile(path, lines) for path in paths]
    try:
        while True:
            for file in files:
                for line in file.new():
                    text = _COLOUR.sub("", line.decode(errors="replace"))
                    print(printable(text.rstrip("\n")), flush=True)
            if not follow:
                return
            time.sleep(0.5)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _nodes_of(
    nodes: str, node_config: str | None, data: str | None
) -> tuple[list[str], dict[str, str]]:
    """Return the names of nodes and what each is told; nothing: its share of the demo's data."""
    held = {} if data is None else {p.name.split(".")[0]: p for p in sorted(Path(data).iterdir())}
    if data is not None and not held:
        raise InvalidValueError(f"data={data!r} must hold a file or a folder for each node")
    count = int(nodes) if nodes.isdecimal() else None
    names = [f"node{i}" for i in range(count)] if count is not None else nodes.split(",")
    names = list(held) or [name.strip() for name in names]
    told = {name: f"data={json.dumps(str(path.resolve()))}" for name, path in held.items()}
    for place, name in enumerate(names) if node_config is not None else ():
        filled = node_config or ""
        for word, value in {"name": name, "place": place, "nodes": len(names)}.items():
            filled = filled.replace("{" + word + "}", str(value))
        told[name] = " ".join(filter(None, (told.get(name), filled)))
    return names, told


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
            given[key] = {"True": True, "False": False}.get(value, value)  # as refusals write it
        if not equals or not key:
            raise InvalidValueError(f"run_config={part!r} must be key=value")
    return given
