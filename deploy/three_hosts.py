"""Three hosts on one machine: the units of `deploy/systemd` in network namespaces.

    sudo python deploy/three_hosts.py [--folder DIR] [--rounds 3]

A server and two nodes, each with a network of its own and no way out, joined by a bridge: what
each runs are the commands of its units, with `docs/deploy.md`'s files in a folder in the place of
`/etc/fedquilt` and `/var/lib/fedquilt`.  Runs an app to its end, and looks from a node and from a
stranger's host at what can be reached.  Needs Linux, root and `ip`; ends with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fedquilt.flower.simulate import OFFLINE
from fedquilt.flower.template import fab_hash, write_app

UNITS = Path(__file__).resolve().parent / "systemd"
BIN = Path(sys.executable).parent
NETWORK, SERVER = "fq-net", "10.77.0.1"
HOSTS = {"fq-server": SERVER, "fq-a": "10.77.0.2", "fq-b": "10.77.0.3", "fq-else": "10.77.0.4"}
NODES = ("fq-a", "fq-b")

# Says what a POST to a path is answered with; 0 where nothing answers.
PROBE = """
import http.client, ssl, sys
host, port, path, authority = sys.argv[1:]
if authority:
    context = ssl.create_default_context(cafile=authority)
    link = http.client.HTTPSConnection(host, int(port), timeout=5, context=context)
else:
    link = http.client.HTTPConnection(host, int(port), timeout=5)
try:
    link.request("POST", path, headers={"content-type": "application/protobuf"})
    print(link.getresponse().status)
except OSError as error:
    print(0, type(error).__name__)
"""


def ip(*arguments: str) -> None:
    """Run `ip`, and stop with what it says when it is refused."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ip {' '.join(arguments)} was refused: {done.stderr.strip()}")


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Have the namespaces, a bridge between them, and nothing of it in the machine's own."""
    made: list[str] = []
    try:
        for name in (NETWORK, *HOSTS):
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", NETWORK, "link", "add", "bridge", "type", "bridge")
        ip("-n", NETWORK, "link", "set", "bridge", "up")
        for name, address in HOSTS.items():
            ip("-n", NETWORK, "link", "add", name, "type", "veth", "peer", "eth0", "netns", name)
            ip("-n", NETWORK, "link", "set", name, "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield
    finally:
        for name in made:
            ip("netns", "delete", name)


class Host:
    """One of the hosts: its namespace, its folder, and the processes of its units."""

    def __init__(self, name: str, folder: Path, **environment: str) -> None:
        self.name, self.folder = name, folder
        self._started: list[subprocess.Popen[bytes]] = []
        self._places = {"/opt/fedquilt/bin": str(BIN), "/var/lib/fedquilt": str(folder)}
        self._environment = {
            **os.environ,
            **OFFLINE,
            "FLWR_HOME": str(folder / "flwr"),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            **environment,
        }
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, *command: str) -> str:
        """Run a command here and return what it prints."""
        done = subprocess.run(
            self._command(command),
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{self.name}: {command[0]} ended so:\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def start(self, unit: str) -> None:
        """Start the command of a unit, as systemd would."""
        text = (UNITS / f"fedquilt-{unit}.service").read_text().replace("\\\n", " ")
        (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
        (mask,) = re.findall(r"^UMask=(.*)$", text, re.MULTILINE)
        for place, here in self._places.items():
            line = line.replace(place, here)
        line = re.sub(r" \$(\w+)", lambda found: " " + self._environment.get(found[1], ""), line)
        words = [self._filled(word) for word in shlex.split(line)]
        with open(self.folder / f"{unit}.log", "ab") as log:
            self._started.append(
                subprocess.Popen(
                    self._command(words),
                    cwd=self.folder,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    umask=int(mask, 8),
                )
            )

    def stop(self) -> None:
        """End what was started here."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._started:
                if process.poll() is None:
                    process.send_signal(number)
            until = time.monotonic() + 10
            while any(p.poll() is None for p in self._started) and time.monotonic() < until:
                time.sleep(0.1)

    def reaches(self, address: str, port: int, path: str, authority: Path | str = "") -> str:
        """Return what a request from here is answered with."""
        return self.run(str(BIN / "python"), "-c", PROBE, address, str(port), path, str(authority))

    def _command(self, words: list[str] | tuple[str, ...]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def _filled(self, word: str) -> str:
        return re.sub(r"\$\{(\w+)\}", lambda found: self._environment[found.group(1)], word)


def set_up(folder: Path, rounds: int) -> tuple[Host, list[Host]]:
    """Do what the guide says on each host; nothing runs yet."""
    app = write_app(folder / "app", num_rounds=rounds, flower_min_nodes=len(NODES))
    server = Host(
        "fq-server",
        folder / "server",
        FEDQUILT_FLOWER_ROSTER="roster.json",
        FEDQUILT_FLOWER_OUTPUT="results",
    )
    flower = (str(BIN / "fedquilt"), "flower")
    server.run(*flower, "setup", "server", ".", "--host", SERVER)
    hosts = []
    for place, name in enumerate(NODES):
        node = Host(
            name,
            folder / name,
            SUPERLINK=f"{SERVER}:443",
            NODE_CONFIG=f"partition-id={place} num-partitions={len(NODES)}",
            TRUST=fab_hash(app),
        )
        node.run(*flower, "setup", "node", ".")
        (node.folder / "ca.crt").write_bytes((server.folder / "ca.crt").read_bytes())
        (server.folder / f"{name}.pub").write_bytes((node.folder / "node.pub").read_bytes())
        server.run(*flower, "enroll", name, f"{name}.pub", "--roster", "roster.json")
        policy = (server.folder / f"{name}.site.toml").read_text()
        (node.folder / "site.toml").write_text(
            policy.replace("/var/lib/fedquilt", str(node.folder))
        )
        hosts.append(node)
    return server, hosts


def bring_up(server: Host, nodes: list[Host]) -> None:
    """Start the units, the server's first, and register the nodes' keys."""
    for unit in ("superlink", "gate", "serverapp"):
        server.start(unit)
    authority = server.folder / "ca.crt"
    until = time.monotonic() + 120
    while server.reaches("127.0.0.1", 8000, "/", authority).startswith("0"):
        if time.monotonic() > until:
            raise SystemExit(f"the SuperLink does not answer; see {server.folder}")
        time.sleep(1)
    for node in nodes:
        name = node.name
        server.run("flwr", "supernode", "register", f"{name}.pub", "fedquilt", "--name", name)
        for unit in ("node", "node-app"):
            node.start(unit)


def checks(server: Host, node: Host, outsider: Host) -> list[tuple[str, str, bool]]:
    """Look from a node and from a stranger's host at what can be reached."""
    authority = server.folder / "ca.crt"
    found = []
    for path, wanted in (
        *(("/v1/control/list-runs", "403"), ("/v1/control/start-run", "403")),
        *(("/v1/runtime/get-nodes", "403"), ("/v1/fleet/pull-messages", "4")),
    ):
        for host in (node, outsider):
            said = host.reaches(SERVER, 443, path, authority)
            held = said.startswith(wanted) and (wanted == "403" or said != "403")
            found.append((f"{host.name} to the gate, {path}", said, held))
    for host in (node, outsider):
        said = host.reaches(SERVER, 8000, "/v1/control/list-runs", authority)
        found.append((f"{host.name} to the SuperLink itself", said, said.startswith("0")))
    said = outsider.reaches(HOSTS[node.name], 9094, "/v1/runtime/get-nodes")
    found.append((f"{outsider.name} to the Runtime of {node.name}", said, said.startswith("0")))
    said = server.reaches("127.0.0.1", 8000, "/v1/control/list-runs", authority)
    found.append(("the operator, on the server, to Control", said, said == "200"))
    return found


def main() -> None:
    """Bring three hosts up, run an app, look around, and take everything down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="kept; a temporary one by default")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, network():
        folder = Path(given.folder or temporary).resolve()
        server, nodes = set_up(folder, given.rounds)
        outsider = Host("fq-else", folder / "else")
        try:
            bring_up(server, nodes)
            said = server.run("flwr", "run", str(folder / "app"), "fedquilt", "--stream")
            rounds = re.findall(r"round \d+ of \d+.*", said)
            print("\n".join(rounds))
            found = checks(server, nodes[0], outsider)
        finally:
            for host in (*nodes, server):
                host.stop()
        (result,) = (server.folder / "results").glob("*/result.json")
        found.append(("the run, to its end", str(result.parent.name), len(rounds) == given.rounds))
    for what, answer, held in found:
        print(f"{'ok  ' if held else 'FAIL'} {what}: {answer}")
    sys.exit(0 if all(held for _, _, held in found) else 1)


if __name__ == "__main__":
    main()
