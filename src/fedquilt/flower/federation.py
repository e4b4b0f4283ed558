"""A federation on this machine: its folder, up, down, who is there, runs and keys.

FOLDER/
  federation.json   what runs: nodes, ports, the app that nodes trust
  status.json       which processes there are (written by the supervisor)
  roster.json       who is who: names and fingerprints of keys
  ca.crt server.pem nodes/*    certificates and keys; private ones are the owner's
  state.db          the SuperLink's database, while it runs: what clients send passes through it
  .lock             held by `up` and by whoever it has started
  flwr/             Flower's own home: its connection to this SuperLink, installed apps
  logs/             one file a process
  results/          the server's runs

All of it is its owner's alone, and read as files that somebody else may have written.  What
federation.json names is run, so it is believed where this user's commands have written it:
their state folder has its digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedquilt.common.errors import FedquiltError, InvalidValueError, NotReadyError
from fedquilt.common.schema import COUNT, NUMBER, ListOf, Object
from fedquilt.common.storage import lock_file, open_log, storage_errors, write_file
from fedquilt.common.untrusted import read_lines, records
from fedquilt.flower import journal, keys, processes
from fedquilt.flower.client_registry import NodeRoster, key_fingerprint, roster_of_keys
from fedquilt.flower.control import Control, app_options, check_overrides, control_client
from fedquilt.flower.policy import POLICY, read_policy, write_policy
from fedquilt.flower.run_notes import RunNotes, submitted
from fedquilt.flower.template import fab_hash
from fedquilt.privacy.run_account import state_folder

_TOLD = Object({}, {"sent": ListOf(COUNT), "at": NUMBER})
"""A line of `nodes.jsonl`, as far as it says whose reply a run waits for."""


class LocalFederation:
    """The federation of a folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self._said: str | None = None

    # -- up and down

    def prepare(
        self,
        app: str | Path,
        nodes: int | Sequence[str] = 4,
        *,
        node_config: Mapping[str, str] | None = None,
        reserved_slots: int = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """Write certificates, keys, roster and configuration; keep those that are there.

        `reserved_slots` are accounts for nodes that may join while a run goes on.
        """
        names = [f"node{i}" for i in range(nodes)] if isinstance(nodes, int) else list(nodes)
        if not names:
            raise InvalidValueError("nodes=0 must be >= 1")
        app = Path(app).resolve()
        if not (app / "pyproject.toml").exists():
            raise InvalidValueError(
                f"app={str(app)!r} must hold a pyproject.toml; `fedquilt flower new` writes one"
            )
        for name in names:
            processes.check_node_name(name)
        trusted = fab_hash(app)
        self._make_folders()
        with self._alone():
            return self._write_files(
                app, trusted, names, node_config or {}, reserved_slots, options
            )

    def _write_files(
        self,
        app: Path,
        trusted: str,
        names: Sequence[str],
        given: Mapping[str, str],
        reserved_slots: int,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        ports = processes.free_ports(2 + len(names))
        keys.make_server_files(self.folder, (), ports[0])
        keys.make_secret(self.folder / "nodes.secret")
        public = {name: self._node_key(name) for name in names}
        self._write_roster(public, reserved_slots)
        roster = self.roster()
        newer = {name: f"{name}-key{len(roster.keys[name])}" for name in names}  # as `_new_key`
        held = {path.name for path in (self.folder / "nodes").iterdir()}
        config = {
            "app": str(app),
            "trusted": trusted,
            "output": str(self.folder / "results"),
            "ports": {"superlink": ports[0], "gate": ports[1]},
            "nodes": {
                name: {
                    "port": ports[2 + place],
                    "config": given.get(name, f"partition-id={place} num-partitions={len(names)}"),
                    **({"key": newer[name]} if newer[name] in held else {}),
                }
                for place, name in enumerate(names)
                if not roster.is_revoked(name)  # it would never be let in
            },
            **options,
        }
        self._write_config(config, said=True)
        return config

    def up(self, wait: float = 180.0) -> None:
        """Start the supervisor and wait until every node is connected."""
        wanted = len(self.config()["nodes"])
        self._check_said()
        self._make_folders()
        self._check_policies()
        with self._alone() as lock:
            processes.remove_database(self.folder)
            journal.note(self.folder, "up", nodes=wanted)
            started = self._start(lock)
        until = time.monotonic() + wait
        while len(self.online()) < wanted:
            if started.poll() is not None or time.monotonic() > until:
                self.down()
                raise NotReadyError(
                    f"not all of {wanted} nodes were connected after {wait:g} s; see the files in "
                    f"{str(self.folder / 'logs')!r}"
                )
            time.sleep(1.0)

    def _check_policies(self) -> None:
        """Refuse to start a node without the policy that its site has, or had."""
        config = self.config()
        for name in config["nodes"]:
            path = processes.policy_of(self.folder, name)
            if path is not None and not path.exists():
                raise InvalidValueError(
                    f"{str(path)!r} must be there: the site of node {name!r} had this policy "
                    "(`fedquilt site init` writes one; without nodes/"
                    f"{name}.guarded the node runs with none)"
                )
            if path is not None and not config.get("warm", True):
                raise InvalidValueError(
                    f"--cold must be left out: Flower's own processes would not ask {str(path)!r}"
                )

    def _make_folders(self) -> None:
        """Make the folders for their owner alone; an older federation's becomes so."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for part in ("nodes", "logs", "flwr", "results"):
            path = self.folder / part
            if path.is_symlink() and part != "results":
                raise InvalidValueError(f"{str(path)!r} must be a folder; it is a symbolic link")
            path.mkdir(exist_ok=True, mode=0o700)
        if self.exists():
            self.folder.chmod(0o700)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[int]:
        """Hold the folder's lock while nobody of a federation lives; yield its descriptor."""
        with storage_errors(self.folder / ".lock"):
            try:
                held = lock_file(self.folder / ".lock", 0o600)
            except BlockingIOError:
                raise InvalidValueError(self._who_is_up()) from None
        with held:
            if processes.members(self.folder):
                raise InvalidValueError(self._who_is_up())
            yield held.fileno()

    def _who_is_up(self) -> str:
        left = processes.members(self.folder)
        if self.is_up() or not left:
            return f"a federation is up in {str(self.folder)!r} already"
        return (
            f"the supervisor of {str(self.folder)!r} has ended and {len(left)} of its processes "
            "go on: `fedquilt flower down` ends them"
        )

    def _start(self, lock: int) -> subprocess.Popen[bytes]:
        """Start the supervisor; it and its forks hold the lock from here on."""
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        marked = {processes.MARK: str(self.folder), "OMP_NUM_THREADS": threads}
        path = self.folder / "logs" / "supervisor.log"
        with open(open_log(path), "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "fedquilt.flower.processes", str(self.folder)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(lock,),
                umask=processes.UMASK,
                env={**os.environ, **marked},
            )

    def down(self) -> list[str]:
        """End everything that was started here; return the names of what had to be killed.

        Whoever is left is found, also when the supervisor was killed or its file is damaged.
        """
        names = {}
        with contextlib.suppress(FedquiltError):
            status = self.status() or {"pid": None, "processes": {}}
            names = {job["pid"]: name for name, job in status["processes"].items()}
            names[status["pid"]] = "supervisor"
        if processes.members(self.folder):
            journal.note(self.folder, "down")
        processes.send(self.folder, signal.SIGTERM, 30.0)
        killed = processes.send(self.folder, signal.SIGKILL, 10.0)
        if self.exists():
            with contextlib.suppress(FedquiltError), self._alone():
                processes.remove_database(self.folder)
        return [names.get(pid, f"process {pid}") for pid in killed]

    def is_up(self) -> bool:
        """Tell whether the supervisor runs."""
        status = self.status()
        return status is not None and processes.is_member(status["pid"], self.folder)

    def left(self) -> list[int]:
        """Return the processes that go on although their supervisor has ended."""
        return [] if self.is_up() else processes.members(self.folder)

    # -- who is there

    def exists(self) -> bool:
        """Tell whether there is a federation in this folder, up or down."""
        return (self.folder / processes.CONFIG).exists()

    def config(self) -> dict[str, Any]:
        """Return what the federation consists of."""
        if not self.exists():
            raise InvalidValueError(
                f"{str(self.folder)!r} must be the folder of a federation: "
                "`fedquilt flower up` makes one"
            )
        return processes.read_config(self.folder)

    def status(self) -> dict[str, Any] | None:
        """Return which processes there are; None before the first start."""
        return processes.read_status(self.folder)

    def online(self) -> dict[str, str]:
        """Return the nodes that the SuperLink says are connected, and their fingerprints."""
        roster = self.roster()
        names = roster.client_of()
        return {
            roster.names[names[value]]: value
            for value, status in self.keys_seen().items()
            if status == "online" and value in names
        }

    def keys_seen(self) -> dict[str, str]:
        """Return the fingerprint of every key that the SuperLink knows, and its node's status."""
        seen: dict[str, str] = {}
        self._with_nodes(
            lambda _, nodes: seen.update(
                (key_fingerprint(bytes(node.public_key)), node.status) for node in nodes
            )
        )
        return seen

    def _with_nodes(self, work: Callable[[Any, Any], None]) -> None:
        """Do something with the nodes that the SuperLink knows, where it answers."""
        if not processes.members(self.folder) or not self._superlink_answers():
            return
        import httpx
        from flwr.proto.control_pb2 import ListNodesRequest

        port = self.config()["ports"]["superlink"]
        away = contextlib.suppress(httpx.HTTPError)  # it has just ended, and is started again
        with away, control_client(port, self.folder / "ca.crt") as client:
            work(client, client.ListNodes(ListNodesRequest()).nodes_info)

    def node_states(self) -> dict[str, str]:
        """Return how each client of the roster stands, in a word or two.

        A process of this machine that has ended is known at once; the SuperLink takes 20 s.
        """
        config, roster, online = self.config(), self.roster(), self.online()
        jobs = (self.status() or {"processes": {}})["processes"]
        waited = self._waited_for()
        states = {}
        for number, name in enumerate(roster.names):
            alive = name in jobs and processes.is_member(jobs[name]["pid"], self.folder)
            if name in roster.reserved_slots:
                states[name] = "free"
            elif roster.is_revoked(name):
                states[name] = "revoked"
            elif name not in config["nodes"]:
                states[name] = "left"
            elif not alive:
                states[name] = "dead"
            elif name not in online:
                states[name] = "connecting"
            elif number in waited:
                states[name] = f"at work for {waited[number]:.0f} s"
            else:
                states[name] = "connected"
        return states

    def _waited_for(self) -> dict[int, float]:
        """Return whose reply a run waits for, and for how many seconds."""
        alive = [notes for notes in submitted(self.config()["output"]) if notes.is_alive()]
        folder = (alive[-1].read() or {}).get("folder") if alive else None
        path = Path(folder or "") / "nodes.jsonl"
        waited: dict[int, float] = {}
        for told in records(read_lines(path), _TOLD) if folder else ():
            if "sent" in told:
                waited = dict.fromkeys(told["sent"], float(told.get("at", 0.0)))
            elif "asked" in told:
                waited = {}
            elif isinstance(told.get("client"), int):
                waited.pop(told["client"], None)
        return {client: max(0.0, time.time() - at) for client, at in waited.items()}

    def roster(self) -> NodeRoster:
        """Return who is who."""
        return NodeRoster.read(self.folder / processes.ROSTER)

    # -- runs

    def run(
        self,
        overrides: Mapping[str, Any] | None = None,
        *,
        stream: bool = True,
        say: Callable[[str], object] = print,
    ) -> int:
        """Submit the app as a run and follow it; return 0 if it was finished, otherwise 1.

        Without `stream` it is only submitted.
        """
        notes = self.submit(overrides or {})
        return self.control().follow(notes, say) if stream else 0

    def submit(self, overrides: Mapping[str, Any]) -> RunNotes:
        """Submit the app as a run; return its notes."""
        config = self.config()
        if not self.is_up():  # its processes are this user's own
            self._check_said()
        if config.get("trusted") not in (None, fab_hash(config["app"])):
            raise InvalidValueError(
                f"app={config['app']!r} must be the one that nodes trust, and has changed since: "
                f"`fedquilt flower trust {config['app']}` lets them run it"
            )
        check_overrides(config["app"], overrides)
        return self.control().submit(config["app"], overrides)

    def control(self) -> Control:
        """Return how runs are submitted and followed."""
        config = self.config()
        places = self.folder / "ca.crt", Path(config["output"])
        return Control(config["ports"]["superlink"], *places, self.command("resume"))

    def command(self, name: str) -> str:
        """Return a command for this federation as it is typed here."""
        elsewhere = self.folder != Path("federation").resolve()
        folder = f" --folder {shlex.quote(str(self.folder))}" if elsewhere else ""
        return f"fedquilt flower {name}{folder}"

    def wait(self, rounds: int | None = None, seconds: float = 600.0) -> Path:
        """Wait until a run is finished, or has so many rounds; return its folder."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            folder = self.last_run()
            if folder is not None:
                enough = rounds is not None and rounds_of(folder) >= rounds
                if (folder / "result.json").exists() or enough:
                    return folder
            time.sleep(0.2)
        raise NotReadyError(f"the run was not there after {seconds:g} s")

    def last_run(self) -> Path | None:
        """Return the folder of the newest run."""
        made = list(Path(self.config()["output"]).glob("*/config.toml"))
        newest = max(made, key=lambda path: path.stat().st_mtime, default=None)
        return None if newest is None else newest.parent

    # -- members and keys

    def trust(self, value: str | None) -> str | None:
        """Let nodes run the app of this hash and no other (None: any); restart what they run."""
        config = self._supervised_config()
        nodes = config["nodes"]
        self._write_config({**config, "trusted": value, "nodes": {}} if self.is_up() else config)
        for name in nodes if self.is_up() else ():
            self._wait_for_processes(without=f"{name}.app")
        self._write_config({**config, "trusted": value, "nodes": nodes})
        journal.note(self.folder, "trusted", app=value)
        return value

    def join(self, name: str, node_config: str) -> bool:
        """Let a node join: a key, a line of the roster, a policy of its site, processes.

        Returns whether it takes part in a run that goes on, from its next round: it has an
        account which that run has named when it began, a reserved slot or the one it had before.
        """
        config = self._supervised_config()
        before, roster = set(self.roster().client_ids), self.roster()
        known = config["nodes"].get(name, {"port": processes.free_ports(1)[0]})
        if name in roster.keys and roster.is_revoked(name):
            known["key"] = self._new_key(name)[0]
        else:
            self._write_roster({name: self._node_key(name)})
        trusted, site = config.get("trusted"), self.folder / processes.SITES / name
        policy = {"apps": (trusted,) if trusted else (), "client": self.roster().keys[name][0]}
        write_policy(site / POLICY, **policy)
        config["nodes"][name] = {**known, "config": node_config}
        self._write_config(config)
        journal.note(self.folder, "joined", client=name, account=self.roster().keys[name][0])
        return self.roster().keys[name][0] in before

    def objection_of(self, name: str) -> str:
        """Return why a node's policy refuses runs of the app as it is configured; else nothing."""
        from fedquilt.flower.server import settings_of_app

        try:
            policy = read_policy(self.folder / processes.SITES / name / POLICY)
            policy.check_settings(settings_of_app(app_options(self.config()["app"])))
        except FedquiltError as error:
            return str(error)
        return ""

    def revoke(self, name: str) -> None:
        """Let no key of a node count any more: its processes end, its account stays.

        It may come back with another key: `join` makes one.
        """
        config = self._supervised_config()
        roster = self.roster().without_keys_of(name)
        roster.write(self.folder / processes.ROSTER)  # the server reads it before its next round
        if config["nodes"].pop(name, None) is not None:
            self._write_config(config)
            if self.is_up():
                self._wait_for_processes(without=name)
        self._unregister(roster)
        journal.note(self.folder, "revoked", client=name)

    def _unregister(self, roster: NodeRoster) -> None:
        """Let the SuperLink forget revoked keys."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        def forget(client: Any, nodes: Any) -> None:
            for node in nodes:
                value = key_fingerprint(bytes(node.public_key))
                if value in roster.revoked and node.status != "unregistered":
                    client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))

        self._with_nodes(forget)

    def leave(self, name: str) -> None:
        """Let a node leave: its processes end, its line of the roster and its account stay."""
        config = self._supervised_config()
        _node_of(config, name)
        del config["nodes"][name]
        self._write_config(config)
        journal.note(self.folder, "left", client=name)

    def rotate(self, name: str) -> str:
        """Give a node a new key; its account stays the one of its first key.

        The new key is in the roster before the node uses it; the old ones no longer count.
        Returns its fingerprint.
        """
        config = self._supervised_config()
        options = _node_of(config, name)
        stem, value = self._new_key(name)
        del config["nodes"][name]
        self._write_config(config)  # the old process ends ...
        if self.is_up():
            self._wait_for_processes(without=name)
        config["nodes"][name] = {**options, "key": stem}
        self._write_config(config)  # ... before the new one begins
        journal.note(self.folder, "rotated", client=name, key=value)
        return value

    def _new_key(self, name: str) -> tuple[str, str]:
        """Make a new key of a client, the only one that counts; return its file and fingerprint."""
        number = len(self.roster().keys.get(name, ())) + 1  # one that it lacks is refused below
        stem = f"{name}-key{number}"
        value = key_fingerprint(keys.make_node_key(self.folder / "nodes" / stem))
        self.roster().rotated(name, value).write(self.folder / processes.ROSTER)
        return stem, value

    # -- small things

    def _supervised_config(self) -> dict[str, Any]:
        """Return the configuration, which is to change: somebody must act on it, or nobody run."""
        config = self.config()
        if self.left():
            raise InvalidValueError(self._who_is_up())
        return config

    def _wait_for_processes(self, without: str, seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while without in (self.status() or {"processes": {}})["processes"]:
            if time.monotonic() > until:
                raise NotReadyError(f"node {without!r} did not end in {seconds:g} s")
            time.sleep(0.2)

    def _node_key(self, name: str) -> bytes:
        processes.check_node_name(name)
        return keys.make_node_key(self.folder / "nodes" / name)

    def _write_roster(self, public: Mapping[str, bytes], reserved_slots: int = 0) -> None:
        path = self.folder / processes.ROSTER
        roster = NodeRoster.read(path) if path.exists() else roster_of_keys(public.items())
        for name, key in public.items():
            if name not in roster.keys:
                roster = roster.with_client(name, key_fingerprint(key))
        roster.with_reserved_slots(max(0, reserved_slots - len(roster.reserved_slots))).write(path)

    def _write_config(self, config: dict[str, Any], *, said: bool = False) -> None:
        """Write the configuration; it is this user's word if it was that before, or is now."""
        said = said or self._is_said()
        write_file(self.folder / processes.CONFIG, json.dumps(config, indent=2).encode(), 0o600)
        if said:
            self._say()

    def _check_said(self) -> None:
        """Refuse to run what only a file says: whoever made the folder may be a stranger."""
        if not self._is_said():
            app = self.config()["app"]
            raise InvalidValueError(
                f"federation {str(self.folder)!r} must be yours: its files, and not you, say that "
                f"app={app!r} runs here. If you want that, `fedquilt flower up APP --folder ...` "
                "begins it with an app that you name; keys, roster and results stay"
            )

    def _is_said(self) -> bool:
        return self._digest() in (self._said, _read_note(self._note_path()))

    def _say(self) -> None:
        """Note that the configuration is this user's; where there is no place, for this object."""
        self._said = self._digest()
        with contextlib.suppress(FedquiltError, OSError):
            note = self._note_path()
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_file(note, f"{self._said}\n".encode(), 0o600)

    def _digest(self) -> str | None:
        path = self.folder / processes.CONFIG
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None

    def _note_path(self) -> Path:
        name = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:32]
        return state_folder().parent / "federations" / name

    def _superlink_answers(self) -> bool:
        return processes.answers(self.config()["ports"]["superlink"])


def _node_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    if name not in config["nodes"]:
        raise InvalidValueError(
            f"node {name!r} must be one of {', '.join(map(repr, config['nodes']))}"
        )
    found: dict[str, Any] = config["nodes"][name]
    return found


def commands_for_hosts(config: Mapping[str, Any], host: str = "server.example.org") -> str:
    """Return the same federation as commands for real hosts."""
    trusted = config.get("trusted", "FAB_HASH")
    lines = [
        "# on the server: the SuperLink on loopback, the gate before it, the server's apps",
        f"fedquilt flower setup server . --host {host}",
        "python -m fedquilt.flower.superlink --host 127.0.0.1 --port 8000 \\",
        "  --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key \\",
        "  --enable-supernode-auth --database state.db --isolation process \\",
        "  --superexec-auth-secret-file superlink.secret \\",
        "  --disable-runtime-dependency-installation",
        "python -m fedquilt.flower.gate --host 0.0.0.0 --port 443 --superlink 127.0.0.1:8000 \\",
        "  --ssl-certfile server.pem --ssl-keyfile server.key --root-certificates ca.crt",
        "FEDQUILT_FLOWER_ROSTER=roster.json FEDQUILT_FLOWER_OUTPUT=/var/lib/fedquilt/results \\",
        "FEDQUILT_FLOWER_LEDGER=/var/lib/fedquilt/ledger.sqlite \\",
        "FEDQUILT_FLOWER_POPULATION=wards \\",
        "  python -m fedquilt.flower.warm --runtime-api-address 127.0.0.1:8000 \\",
        "  --root-certificates ca.crt --superexec-auth-secret-file superlink.secret",
        "# for every node, first",
        "flwr supernode register NAME.pub fedquilt --name NAME",
        "fedquilt flower enroll NAME NAME.pub --roster roster.json",
        "# on every node, with its own key (node.pub is what the server enrolls)",
        "fedquilt flower setup node .",
        f"python -m fedquilt.flower.supernode --superlink {host}:443 --root-certificates ca.crt \\",
        "  --auth-supernode-private-key node --host 127.0.0.1 --port 9094 \\",
        "  --isolation process --superexec-auth-secret-file node.secret \\",
        "  --node-config 'data=\"/srv/data.npz\"'",
        "# its policy: the NAME.site.toml that `enroll` wrote beside NAME.pub, or one of its own",
        f"fedquilt site init site.toml --app {trusted}",
        "python -m fedquilt.flower.warm --runtime-api-address 127.0.0.1:9094 --insecure \\",
        f"  --superexec-auth-secret-file node.secret --trust {trusted} --site site.toml",
    ]
    return "\n".join(lines)


def _read_note(path: Path) -> str:
    """Return the digest in a note; an empty text where there is none."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def rounds_of(run: Path) -> int:
    """Return how many rounds of a run are written down."""
    return sum(line.endswith(b"\n") for line in read_lines(run / "rounds.jsonl"))
