"""The folder of a federation: whose its files are, who lives in it, what strangers put there."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from command_line import Said
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.flower import journal, keys, prefork, processes, run_notes
from fedquilt.flower.client_registry import NodeRoster
from fedquilt.flower.federation import LocalFederation
from fedquilt.flower.keys import make_server_files
from fedquilt.flower.policy import POLICY, write_policy
from fedquilt.flower.processes import Supervisor
from fedquilt.flower.template import write_app

Cli = Callable[..., Said]
PUBLIC = {"ca.crt", "server.pem", "node0.pub", "node1.pub"}
ESCAPE = "\x1b[31mred"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of two nodes and a seat, prepared by somebody whose files all may read."""
    folder = tmp_path_factory.mktemp("prepared")
    before = os.umask(0o022)
    try:
        LocalFederation(folder / "fed").prepare(write_app(folder / "app"), 2, reserved_slots=1)
    finally:
        os.umask(before)
    return folder / "fed"


@pytest.fixture
def federation(prepared: Path, tmp_path: Path) -> LocalFederation:
    copied = LocalFederation(shutil.copytree(prepared, tmp_path / "fed"))
    copied._say()  # a copy of this user's own
    return copied


@pytest.fixture
def start(federation: LocalFederation) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a process that sleeps, of the federation or not; it is ended in any case."""
    started = []

    def start(*, member: bool) -> subprocess.Popen[bytes]:
        mark = {processes.MARK: str(federation.folder)} if member else {}
        started.append(subprocess.Popen(["sleep", "60"], env={**os.environ, **mark}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def note(federation: LocalFederation, supervisor: int, **jobs: int) -> dict[str, Any]:
    """Write what a supervisor says of itself and its processes."""

    def entry(pid: int) -> dict[str, Any]:
        return {"pid": pid, "began": run_notes.began_at(pid), "restarts": 0}

    told = {name: entry(pid) for name, pid in jobs.items()}
    status = {"state": "running", **entry(supervisor), "processes": told}
    (federation.folder / processes.STATUS).write_text(json.dumps(status))
    return status


# -- whose the files are


def test_whatever_a_federation_prepares_is_its_owners_alone(prepared: Path) -> None:
    found = [prepared, *prepared.rglob("*")]
    shared = {path.name for path in found if stat.S_IMODE(path.lstat().st_mode) & 0o077}
    assert {processes.CONFIG, processes.ROSTER, "logs"} <= {path.name for path in found}
    assert shared == PUBLIC, "certificates and public keys, in a folder that is closed"


def test_the_folder_of_an_older_federation_is_closed_and_others_stay_as_they_are(
    federation: LocalFederation, tmp_path: Path
) -> None:
    federation.folder.chmod(0o755)
    app = federation.config()["app"]
    federation.prepare(app, 2)
    assert stat.S_IMODE(federation.folder.stat().st_mode) == 0o700
    somebodys = tmp_path / "shared"
    somebodys.mkdir(mode=0o755)
    LocalFederation(somebodys).prepare(app, 1)
    assert stat.S_IMODE(somebodys.stat().st_mode) == 0o755
    open_to_all = {p.name for p in somebodys.rglob("*") if stat.S_IMODE(p.stat().st_mode) & 0o077}
    assert open_to_all <= PUBLIC


def test_a_roster_is_written_for_its_owner_and_by_root_for_the_folders(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    if os.geteuid() == 0:
        os.chown(tmp_path, 65534, 65534)
    NodeRoster({"a": ("key:" + "0" * 64,)}).write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_uid == tmp_path.stat().st_uid, "whoever serves can read it"


# -- who lives there


def test_what_goes_on_without_its_supervisor_is_seen_not_doubled_and_ended(
    cli: Cli, federation: LocalFederation, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    orphan, gone = start(member=True), start(member=True)
    gone.kill()
    gone.wait()
    note(federation, gone.pid, superlink=orphan.pid)
    (federation.folder / "state.db").write_text("an update of node0")
    (federation.folder / "state.db-wal").write_text("another")
    before = {name: (federation.folder / name).read_bytes() for name in ("status.json", "state.db")}
    folder = ("--folder", federation.folder)
    said = cli("flower", "status", *folder)
    assert said.out.startswith("1 processes go on without a supervisor")
    assert f"superlink      running      pid {orphan.pid}" in said.out
    for command in (("up", federation.config()["app"]), ("resume",), ("leave", "node0")):
        said = cli("flower", *command, *folder)
        assert said.code == 2
        assert "1 of its processes go on: `fedquilt flower down` ends them" in said.words
    assert before == {name: (federation.folder / name).read_bytes() for name in before}
    assert cli("flower", "down", *folder).out == "down\n"
    assert orphan.wait(5) == -15, "ended, and not killed"
    assert not list(federation.folder.glob("state.db*")), "what clients had sent"
    assert cli("flower", "status", *folder).out.startswith("down")


def test_a_process_is_not_ended_for_its_number(
    federation: LocalFederation, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    somebodys = start(member=False)
    note(federation, somebodys.pid, superlink=somebodys.pid)
    assert not federation.is_up()
    assert federation.down() == []
    assert somebodys.poll() is None


def test_what_is_left_is_ended_though_nobody_wrote_it_down(
    federation: LocalFederation, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    orphan = start(member=True)
    (federation.folder / processes.STATUS).write_text("{")
    federation.down()
    assert orphan.wait(5) == -15


def test_of_two_who_start_at_once_one_is_refused(federation: LocalFederation) -> None:
    config = (federation.folder / processes.CONFIG).read_bytes()
    with federation._alone():
        for begin in (federation.up, lambda: federation.prepare(federation.config()["app"])):
            with pytest.raises(InvalidValueError, match=r"is up in .* already"):
                begin()
    assert (federation.folder / processes.CONFIG).read_bytes() == config


# -- what strangers put there


def put(federation: LocalFederation, name: str, change: Callable[[Any], object]) -> None:
    """Change what stands in one of the files."""
    if name == processes.STATUS:
        note(federation, 4_000_001, superlink=4_000_000)
    path = federation.folder / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (processes.CONFIG, lambda c: c.pop("nodes"), "lacks 'nodes'"),
        (processes.CONFIG, lambda c: c.update(nodes=[1]), "nodes must be an object"),
        (processes.CONFIG, lambda c: c.update(ports=7), "ports must be an object"),
        (processes.CONFIG, lambda c: c["ports"].update(gate="x"), "must be a port"),
        (processes.CONFIG, lambda c: c["nodes"].update({"../x": c["nodes"]["node0"]}), "'../x'"),
        (processes.CONFIG, lambda c: c["nodes"]["node0"].update(key="../../x"), "'../../x'"),
        (processes.CONFIG, lambda c: c.update(output=3), "output must be a text"),
        (processes.CONFIG, lambda c: c.update(app="--help"), "must be a whole path"),
        (processes.STATUS, lambda c: c.pop("began"), "lacks 'began'"),
        (processes.STATUS, lambda c: c.update(processes=[{}]), "processes must be an object"),
        (processes.STATUS, lambda c: c["processes"].update(x=None), "x must be an object"),
        (processes.STATUS, lambda c: c.update(pid=-1), "pid must be the number of a process"),
        (processes.ROSTER, lambda c: c.update(clients=[]), "clients must be an object"),
        (processes.ROSTER, lambda c: c["clients"].update(a=3), "a must be a list"),
        (processes.ROSTER, lambda c: c["clients"].update(a=["key:" + ESCAPE]), "hexadecimal"),
        (processes.ROSTER, lambda c: c.update(revoked=[[]]), "revoked must be a list"),
    ],
)
def test_a_foreign_file_is_refused_in_one_line(
    cli: Cli, federation: LocalFederation, name: str, change: Callable[[Any], object], words: str
) -> None:
    put(federation, name, change)
    said = cli("flower", "status", "--folder", federation.folder)
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert said.err.strip().isprintable()
    assert words in said.err
    assert cli("flower", "down", "--folder", federation.folder).code == 0


@pytest.mark.parametrize("command", [("run",), ("resume",)])
@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(app=c["app"] + "/../app"),
        lambda c: c.update(trusted=None),
        lambda c: c.update(ledger="/srv/ledger.sqlite", population="wards"),
        lambda c: c.update(output="/srv/results"),
        lambda c: c["nodes"]["node0"].update(config="data='/srv/data.npz'"),
    ],
    ids=["app", "any app", "ledger", "output", "node"],
)
def test_what_only_a_strangers_file_names_is_not_run(
    cli: Cli,
    federation: LocalFederation,
    change: Callable[[Any], object],
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(*given: object, **options: object) -> None:
        raise AssertionError("something is run")

    monkeypatch.setattr("fedquilt.flower.federation.subprocess.Popen", started)
    monkeypatch.setattr("fedquilt.flower.federation.subprocess.run", started)
    put(federation, processes.CONFIG, change)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_mode) for p in federation.folder.rglob("*")}
    said = cli("flower", *command, "--folder", federation.folder)
    assert said.code == 2
    assert "must be yours: its files, and not you" in said.words
    assert cli("flower", "leave", "node1", "--folder", federation.folder).code == 0
    said = cli("flower", *command, "--folder", federation.folder)
    assert "must be yours" in said.words, "a change of a stranger's file is no word about it"
    after = {p: (p.stat().st_mtime_ns, p.stat().st_mode) for p in federation.folder.rglob("*")}
    changed = {
        path.name for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    }
    assert changed <= {processes.CONFIG, ".lock", journal.FILE, "audit.lock"}, "of `leave` alone"


def test_a_received_folder_is_run_once_an_app_is_named(
    cli: Cli, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = LocalFederation(shutil.copytree(prepared, tmp_path / "received"))
    folder = ("--folder", federation.folder)
    assert "must be yours" in cli("flower", "resume", *folder).words
    begun: list[list[str]] = []

    class Ended:
        def __init__(self, command: list[str], **options: object) -> None:
            begun.append(command)

        def poll(self) -> int:
            return 1

    monkeypatch.setattr("fedquilt.flower.federation.subprocess.Popen", Ended)
    roster = (federation.folder / processes.ROSTER).read_bytes()
    federation.prepare(federation.config()["app"], 2)
    for _ in range(2):  # from another process as well: the word is in the user's state folder
        assert "not all of 2 nodes were connected" in cli("flower", "resume", *folder).words
    assert begun == 2 * [
        [sys.executable, "-m", "fedquilt.flower.processes", str(federation.folder)]
    ]
    assert (federation.folder / processes.ROSTER).read_bytes() == roster


def test_names_of_a_foreign_file_move_no_cursor(cli: Cli, federation: LocalFederation) -> None:
    job = {"pid": None, "began": None, "restarts": 0}
    put(federation, processes.STATUS, lambda c: c["processes"].update({ESCAPE: job}))
    put(
        federation,
        processes.ROSTER,
        lambda c: c["clients"].update({f"{ESCAPE}2": ["key:" + "1" * 64]}),
    )
    (federation.folder / "results" / ESCAPE).mkdir(parents=True)
    (federation.folder / "results" / ESCAPE / "config.toml").touch()
    put(
        federation,
        processes.CONFIG,
        lambda c: c.update(output=str(federation.folder / "results")),
    )
    said = cli("flower", "status", "--folder", federation.folder)
    assert said.code == 0, said.err
    assert said.out.count("\\x1b[31mred") == 3
    assert "\x1b" not in said.out


# -- names of hosts


LONG = "internal-" + "a" * 40 + "-1234567890.elb.eu-central-1.amazonaws.com"


@pytest.mark.parametrize("host", [LONG, "münchen.example.org", "server_1", "::1"])
def test_a_host_of_any_name_is_served_by_its_certificate(host: str, tmp_path: Path) -> None:
    """The name is checked as a node does it: by OpenSSL, in the name's ASCII form."""
    assert len(LONG) > 64
    make_server_files(tmp_path, [host])
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    here, there = socket.socketpair()
    server = threading.Thread(target=lambda: serving.wrap_socket(there, server_side=True).close())
    server.start()
    name = host.encode("idna").decode() if not host.isascii() else host
    with trusting.wrap_socket(here, server_hostname=name) as link:
        assert link.version() == "TLSv1.3"
    server.join()


@pytest.mark.parametrize("host", ["", "a..b", "two words", "x" * 64, "a." * 130 + "org", ESCAPE])
def test_what_is_no_name_of_a_host_is_refused_and_nothing_written(
    cli: Cli, host: str, tmp_path: Path
) -> None:
    said = cli("flower", "setup", "server", tmp_path / "etc", "--host", host)
    assert said.code == 2
    assert "must be an address or a name" in said.err
    assert said.err.count("\n") == 1
    assert not (tmp_path / "etc").exists()


def test_a_damaged_authority_is_refused_in_one_line(cli: Cli, tmp_path: Path) -> None:
    make_server_files(tmp_path, ["a"])
    (tmp_path / "server.pem").unlink()
    (tmp_path / "ca.crt").write_text("no certificate")
    said = cli("flower", "setup", "server", tmp_path, "--host", "a")
    assert said.code == 2
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("content", [None, "tool = 3\n", "[project]\nname = 'x'\n"])
def test_where_there_is_no_app_there_is_nothing_to_trust(
    cli: Cli, content: str | None, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    if content is not None:
        (tmp_path / "empty" / "pyproject.toml").write_text(content)
    said = cli("flower", "trust", tmp_path / "empty")
    assert said.code == 2
    assert "must be a Flower app" in said.err
    assert said.err.count("\n") == 1


def test_logs_and_keys_of_a_received_federation_lead_nowhere_else(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "gate.log").symlink_to(victim)
    said = prefork.fork(lambda: print("something"), tmp_path / "gate.log")
    assert os.waitstatus_to_exitcode(os.waitpid(said, 0)[1]) == 1
    assert victim.read_bytes() == b"precious"
    (tmp_path / "node0").write_bytes(b"a key")
    os.mkfifo(tmp_path / "node0.pub")
    with pytest.raises(FedquiltError, match="a pipe"):
        keys.make_node_key(tmp_path / "node0")


# -- policies of sites


@pytest.fixture
def apps_of(
    federation: LocalFederation, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], dict[str, Any]]:
    """Return what a supervisor would start for the app of node0: nothing is started."""

    def started() -> dict[str, Any]:
        given: dict[str, Any] = {"program": "flower-superexec"}
        monkeypatch.setattr(prefork, "fork", lambda work, log: work() or 1)
        monkeypatch.setattr(prefork, "serve", lambda *_, **options: given.update(options))
        monkeypatch.setattr(Supervisor, "_command", lambda *_: 1)
        Supervisor(federation.folder)._node_apps("node0")
        return given

    return started


def test_a_node_never_runs_without_the_policy_that_its_site_has_had(
    federation: LocalFederation, apps_of: Callable[[], dict[str, Any]]
) -> None:
    assert apps_of()["policy"] is None
    path = federation.folder / processes.SITES / "node0" / POLICY
    write_policy(path)
    assert apps_of()["policy"] == str(path)
    put(federation, processes.CONFIG, lambda c: c.update(warm=False))
    assert apps_of()["policy"] == str(path), "Flower's own process would ask nobody"
    federation._say()
    with pytest.raises(InvalidValueError, match="--cold must be left out"):
        federation.up()
    put(federation, processes.CONFIG, lambda c: c.update(warm=True))
    federation._say()
    path.unlink()
    assert apps_of()["policy"] == str(path), "and its prefork server refuses every order"
    with pytest.raises(InvalidValueError, match="site of node 'node0' had this policy"):
        federation.up()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("certified", "node0 takes part from the next round\n"),
        ("fedavg", "refuses runs as the app is configured: mode='fedavg' is not one of 'cert"),
    ],
)
def test_who_joins_is_told_what_the_node_will_refuse(
    cli: Cli, federation: LocalFederation, tmp_path: Path, mode: str, words: str
) -> None:
    app = write_app(tmp_path / "app", mode=mode)
    put(federation, processes.CONFIG, lambda c: c.update(app=str(app)))
    given = ("--node-config", "partition-id=0 num-partitions=2", "--folder", federation.folder)
    said = cli("flower", "join", "node0", *given)
    assert said.code == 0
    assert words in said.out
