"""The processes of a federation on this machine, watched by one supervisor.

    python -m fedquilt.flower.processes FOLDER

(as `Federation.up` runs it) starts what `federation.json` in the folder describes and keeps it
running: the SuperLink on loopback, the proxy before it, the server's apps, and for every node a
SuperNode and its prefork server.  What ends is started again, after a pause; a SuperNode that was
killed is refused by its SuperLink for about 20 seconds, so it is tried until it is let in.
`nodes` in the file may change meanwhile: nodes then join and leave.  The supervisor imports
torch once; prefork servers are forks of it.

Every process has the folder in its environment (`MARK`): whoever is left when a supervisor was
killed is found by it, and nobody else is ever taken for one of them.  All of them write for
their owner alone.  The SuperLink's database holds what clients have sent, so it is removed
when a federation ends and before one begins; while one runs it outlives the SuperLink.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt.common.errors import DataError, FedquiltError, InvalidValueError
from fedquilt.common.schema import (
    ANY_TEXT,
    COUNT,
    NUMBER,
    TEXT,
    MapOf,
    Object,
    Scalar,
    check,
    maybe,
)
from fedquilt.common.storage import open_log, write_file
from fedquilt.common.untrusted import read_json
from fedquilt.flower import internals, prefork, supernode
from fedquilt.flower.journal import cut_logs
from fedquilt.flower.policy import POLICY
from fedquilt.flower.run_notes import began_at
from fedquilt.flower.simulate import OFFLINE

CONFIG, STATUS, ROSTER = "federation.json", "status.json", "roster.json"
DATABASE = "state.db"
SITES = "sites"
"""The folder of a federation in which NAME/site.toml is the policy of a node's site."""
MARK = "FEDQUILT_FLOWER_FEDERATION"
UMASK = 0o077
_FILE_BYTES = 1 << 24
_TICK = 0.2
_PAUSES = (0.5, 1.0, 2.0, 5.0)
_STEADY_SECONDS = 20.0
_PATIENCE_SECONDS = 6.0
_START_SECONDS = 120.0
_SHARED = {"superlink", "gate", "serverapp"}

_PORT = Scalar("a port, 1 to 65535", frozenset({int}), least=1, most=65535)
_PROCESS = {
    "pid": maybe(Scalar("the number of a process", frozenset({int}), least=1, most=2**22)),
    "began": ANY_TEXT,
}
_STATUS = Object(
    {"state": TEXT, **_PROCESS, "processes": MapOf(Object({**_PROCESS, "restarts": COUNT}))}
)
_CONFIG = Object(
    {
        "app": TEXT,
        "output": TEXT,
        "ports": Object({"superlink": _PORT, "gate": _PORT}),
        "nodes": MapOf(Object({"port": _PORT, "config": TEXT}, {"key": TEXT})),
    },
    {
        **dict.fromkeys(("trusted", "ledger", "population"), ANY_TEXT),
        "warm": Scalar("true or false", frozenset({bool})),
        "poll": NUMBER,
    },
)


def check_node_name(name: str) -> None:
    """Refuse what cannot be the name of a node and of its files."""
    plain = name.replace("-", "").replace("_", "").isalnum()
    if not plain or len(name) > 64 or name in _SHARED:
        raise InvalidValueError(
            f"node name {name[:80]!r} must be at most 64 letters, digits, '-' and '_', and none of "
            f"{', '.join(sorted(_SHARED))}"
        )


def policy_of(folder: Path, name: str) -> Path | None:
    """Return the policy of a node's site; of one that is gone, too, and the node takes no order.

    That there was one is remembered beside the node's key.
    """
    path, remembered = folder / SITES / name / POLICY, folder / "nodes" / f"{name}.guarded"
    if os.path.lexists(path) and not remembered.exists():
        write_file(remembered, b"", 0o600)
    return path if remembered.exists() else None


def read_config(folder: Path) -> dict[str, Any]:
    """Return what a federation consists of."""
    path = folder / CONFIG
    config = read_json(path, DataError, _FILE_BYTES)
    check(config, _CONFIG, path, DataError)
    for name in ("app", "output"):
        if not config[name].startswith("/") or "\0" in config[name]:
            raise DataError(f"{path}: {name}={config[name][:80]!r} must be a whole path")
    for name, options in config["nodes"].items():
        for called in (name, options.get("key", name)):
            check_node_name(called)
    return config


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return which processes a supervisor has started; None before the first start."""
    path = folder / STATUS
    if not os.path.lexists(path):
        return None
    status = read_json(path, DataError, _FILE_BYTES)
    check(status, _STATUS, path, DataError)
    return status


@dataclass
class ManagedProcess:
    """One process that must run: how it is started, and how it has fared."""

    name: str
    start: Callable[[], int]
    pid: int | None = None
    began: float = 0.0
    restarts: int = -1
    failures: int = 0
    not_before: float = 0.0


class Supervisor:
    """Starts, restarts and ends the processes of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.config = read_config(self.folder)
        self._jobs: dict[str, ManagedProcess] = {}
        self._read_at = 0
        self._registered: set[str] = set()
        self._ended = False

    def run(self) -> None:
        """Run until a signal says to stop."""
        os.environ.update(self._environment())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "_ended", True))
        self._tell("starting")
        try:
            self._add("superlink", self._superlink)
            self._watch_until(lambda: answers(self._port("superlink")))
            prefork.preload()
            self._register()
            self._add("gate", self._proxy)
            self._add("serverapp", self._server_apps)
            while not self._ended:
                cut_logs(self.folder / "logs")
                self._follow_config()
                self._tick()
                time.sleep(_TICK)
        finally:
            self._stop(list(self._jobs))
            remove_database(self.folder)
            self._tell("ended")

    # -- what runs

    def _superlink(self) -> int:
        return self._command(
            "superlink",
            [
                *("python", "-m", "fedquilt.flower.superlink", "--host", "127.0.0.1"),
                *("--port", str(self._port("superlink"))),
                *("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem"),
                *("--ssl-keyfile", "server.key", "--enable-supernode-auth"),
                *("--database", DATABASE, "--isolation", "process"),
                *("--superexec-auth-secret-file", "superlink.secret"),
                "--disable-runtime-dependency-installation",
            ],
        )

    def _proxy(self) -> int:
        from fedquilt.flower import proxy

        arguments = [
            *("gate", "--port", str(self._port("gate")), "--ssl-certfile", "server.pem"),
            *("--ssl-keyfile", "server.key", "--root-certificates", "ca.crt"),
            *("--superlink", f"127.0.0.1:{self._port('superlink')}"),
            *("--metrics", self.config["output"]),
            # All nodes are at one address here.
            *("--connections", str(max(128, 16 * len(self.config["nodes"])))),
        ]

        def work() -> None:
            sys.argv = arguments
            proxy.main()

        return prefork.fork(work, self._log("gate"))

    def _server_apps(self) -> int:
        return self._prefork(
            "serverapp",
            f"127.0.0.1:{self._port('superlink')}",
            "superlink.secret",
            root_certificates="ca.crt",
            trusted=None,
        )

    def _node(self, name: str) -> int:
        options = self.config["nodes"][name]
        arguments = [
            *("flower-supernode", "--superlink", f"127.0.0.1:{self._port('gate')}"),
            *("--root-certificates", "ca.crt", "--host", "127.0.0.1"),
            *("--auth-supernode-private-key", f"nodes/{options.get('key', name)}"),
            *("--port", str(options["port"]), "--node-config", options["config"]),
            *("--isolation", "process", "--superexec-auth-secret-file", "nodes.secret"),
        ]
        if not self.config.get("warm", True):
            return self._command(name, arguments)

        def work() -> None:
            sys.argv = arguments
            internals.forget_exit_handlers()
            supernode.main()

        return prefork.fork(work, self._log(name))

    def _node_apps(self, name: str) -> int:
        return self._prefork(
            f"{name}.app",
            f"127.0.0.1:{self.config['nodes'][name]['port']}",
            "nodes.secret",
            root_certificates=None,
            trusted=self.config.get("trusted"),
            policy=policy_of(self.folder, name),
            key=f"nodes/{self.config['nodes'][name].get('key', name)}",
        )

    def _prefork(
        self,
        name: str,
        address: str,
        secret: str,
        *,
        root_certificates: str | None,
        trusted: str | None,
        policy: Path | None = None,
        key: str | None = None,
    ) -> int:
        if policy is None and not self.config.get("warm", True):
            tls = ["--root-certificates", root_certificates] if root_certificates else []
            return self._command(
                name,
                [
                    *("flower-superexec", "--runtime-api-address", address),
                    *(tls or ["--insecure"]),
                    *("--superexec-auth-secret-file", secret),
                ],
            )
        return prefork.fork(
            lambda: prefork.serve(
                address,
                insecure=root_certificates is None,
                root_certificates=root_certificates,
                secret_file=secret,
                trusted=trusted,
                policy=None if policy is None else str(policy),
                key=key,
                roster=None if key is None else ROSTER,
            ),
            self._log(name),
        )

    # -- how it is kept running

    def _follow_config(self) -> None:
        """Start nodes that have joined and end those that have left."""
        path = self.folder / CONFIG
        changed = path.stat().st_mtime_ns
        if changed == self._read_at:
            return
        self._read_at = changed
        try:
            self.config = read_config(self.folder)
        except FedquiltError as error:
            print(f"all stays as it was: {error}", file=sys.stderr, flush=True)
            return
        nodes = set(self.config["nodes"])
        running = {name.removesuffix(".app") for name in self._jobs} - _SHARED
        left = running - nodes
        if left:
            self._stop([job for name in left for job in (name, f"{name}.app")])
            self._tell("running")
        self._register()
        for name in sorted(nodes - running):
            self._add(name, lambda name=name: self._node(name))  # type: ignore[misc]
            self._add(f"{name}.app", lambda name=name: self._node_apps(name))  # type: ignore[misc]

    def _add(self, name: str, start: Callable[[], int]) -> None:
        self._jobs[name] = ManagedProcess(name, start)
        self._tick()

    def _tick(self) -> None:
        """Bury who has ended and start who is missing; write down the changes."""
        changed, now = False, time.monotonic()
        for job in self._jobs.values():
            if job.pid is not None and _has_ended(job.pid):
                steady = now - job.began > _STEADY_SECONDS
                job.failures = 0 if steady else job.failures + 1
                job.pid = None
                job.not_before = now + _PAUSES[min(job.failures, len(_PAUSES) - 1)]
                changed = True
            if job.pid is None and now >= job.not_before:
                job.pid, job.began, job.restarts = job.start(), now, job.restarts + 1
                changed = True
        if changed:
            self._tell("running")

    def _watch_until(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + _START_SECONDS
        while not done() and not self._ended and time.monotonic() < until:
            self._tick()
            time.sleep(_TICK)

    def _stop(self, names: list[str]) -> None:
        """End processes, gently and then not."""
        pids = [pid for name in names if (pid := self._jobs.pop(name).pid) is not None]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            until = time.monotonic() + _PATIENCE_SECONDS
            while pids and time.monotonic() < until:
                pids = [pid for pid in pids if not _has_ended(pid)]
                time.sleep(0.05)

    def _register(self) -> None:
        """Let the SuperLink know the keys of nodes that it has not been told yet."""
        keys = {options.get("key", name): name for name, options in self.config["nodes"].items()}
        new = {key: name for key, name in keys.items() if key not in self._registered}
        if not new:
            return

        def work() -> None:
            from flwr.cli.app import app

            for key, name in new.items():
                with contextlib.suppress(SystemExit):  # one that it knows is refused
                    path = f"nodes/{key}.pub"
                    app(["supernode", "register", path, "fedquilt", "--name", name])

        child = prefork.fork(work, self._log("register"))
        os.waitpid(child, 0)
        self._registered |= set(new)

    # -- small things

    def _port(self, name: str) -> int:
        return int(self.config["ports"][name])

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def _environment(self) -> dict[str, str]:
        os.chdir(self.folder)
        output, ledger = self.config.get("output"), self.config.get("ledger")
        population = self.config.get("population")
        wanted = {
            **OFFLINE,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # Flower's commands call one another by name.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.folder / "flwr"),
            prefork.POLL: str(self.config.get("poll", 0.2)),
            "FEDQUILT_FLOWER_ROSTER": str(self.folder / ROSTER),
            "FEDQUILT_FLOWER_OUTPUT": output,
            "FEDQUILT_FLOWER_LEDGER": ledger,
            "FEDQUILT_FLOWER_POPULATION": population,
        }
        return {name: str(value) for name, value in wanted.items() if value}

    def _command(self, name: str, arguments: list[str]) -> int:
        """Start one of Flower's commands, from beside this interpreter."""
        beside = Path(sys.executable).parent / arguments[0]
        program = sys.executable if arguments[0] == "python" else beside
        with open(open_log(self._log(name)), "ab") as log:
            started = subprocess.Popen(
                [str(program), *arguments[1:]], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        return started.pid

    def _tell(self, state: str) -> None:
        """Write down which processes there are."""
        jobs = {
            job.name: {"pid": job.pid, "began": began_at(job.pid), "restarts": max(0, job.restarts)}
            for job in self._jobs.values()
        }
        me = os.getpid()
        record = {"state": state, "pid": me, "began": began_at(me), "processes": jobs}
        write_file(self.folder / STATUS, json.dumps(record, indent=2).encode(), 0o600)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_member(pid: int | None, folder: Path) -> bool:
    """Tell whether a process is alive and one of the federation of a folder."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()  # empty once it has ended
    except OSError:
        return False
    return os.fsencode(f"{MARK}={folder}") in environment.split(b"\0")


def members(folder: Path) -> list[int]:
    """Return the processes of the federation of a folder, whoever of them has started which."""
    numbers = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    return [pid for pid in numbers if is_member(pid, folder)]


def send(folder: Path, number: signal.Signals, seconds: float) -> list[int]:
    """Send a signal to every process of a federation and wait for their end; return which."""
    until = time.monotonic() + seconds
    with contextlib.ExitStack() as opened:
        handles = {}
        for pid in members(folder):
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)  # this process, never the next of that number
                opened.callback(os.close, handle)
                if is_member(pid, folder):
                    signal.pidfd_send_signal(handle, number)
                    handles[pid] = handle
        for handle in handles.values():
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            ended.poll(max(0.0, until - time.monotonic()) * 1000)
    return list(handles)


def remove_database(folder: Path) -> None:
    """Remove what the SuperLink has kept of messages; no SuperLink may run."""
    for path in folder.glob(f"{DATABASE}*"):
        path.unlink(missing_ok=True)


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def main() -> None:
    """Watch over the federation of a folder, in the environment that `Federation.up` makes."""
    folder = Path(sys.argv[1]).resolve()
    if not is_member(os.getpid(), folder):
        sys.exit("a supervisor is started by `fedquilt flower up`")
    Supervisor(folder).run()


if __name__ == "__main__":
    main()
