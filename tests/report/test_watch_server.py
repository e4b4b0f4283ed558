"""Who may look: this machine, with the right address, from no foreign page."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import Said
from fedquilt.common.errors import FedquiltError
from fedquilt.experiment.api import run_config
from fedquilt.privacy.ledger import Ledger
from fedquilt.report.watch import LedgerSource, RunsSource, WatchServer, source_of
from run_processes import environment
from run_samples import tiny


class Fixed:
    """A source without files."""

    title = "Fixed"
    cost = 0.0

    def __init__(self) -> None:
        self.count = 0

    def stamp(self) -> tuple[Any, ...]:
        return (self.count,)

    def data(self) -> dict[str, Any]:
        return {"fedquilt": "0", "runs": [], "series": [], "count": self.count}

    def questions(self) -> dict[str, Any]:
        return {"plan": self.answer}

    def answer(self, asked: dict[str, str]) -> dict[str, Any]:
        if "bad" in asked:
            raise FedquiltError("so not")
        return dict(asked)


@pytest.fixture
def server() -> Iterator[WatchServer]:
    with WatchServer(Fixed()) as opened:
        yield opened


def get(server: WatchServer, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """Ask for a path; a header `Host` replaces the right one."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest("GET", path, skip_host=True)
    for name, value in ({"Host": f"127.0.0.1:{server.port}"} | headers).items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def test_the_right_address_gets_the_page_and_its_data(server: WatchServer) -> None:
    status, body, headers = get(server, f"/{server.token}/")
    assert status == 200
    assert b"<title>Fixed</title>" in body
    assert b"connect-src 'self'" in body
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Server" not in headers
    assert json.loads(get(server, f"/{server.token}/data")[1])["count"] == 0


@pytest.mark.parametrize(
    "spoil", ["none", "short", "long", "other case", "other", "open end", "dots"]
)
def test_a_wrong_token_gets_nothing(server: WatchServer, spoil: str) -> None:
    token = server.token
    paths = {
        "none": "/",
        "short": f"/{token[:-1]}/",
        "long": f"/{token}a/",
        "other case": f"/{token.swapcase()}/",
        "other": "/" + "A" * len(token) + "/data",
        "open end": f"/{token}",
        "dots": f"/x/../{token}/data",
    }
    status, body, headers = get(server, paths[spoil])
    assert (status, body) == (404, b"")
    assert "Server" not in headers
    assert get(server, f"/{token}/nothing")[:2] == (404, b"")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "0.0.0.0:{port}", ""]
)
def test_a_foreign_host_gets_nothing(server: WatchServer, host: str) -> None:
    named = host.format(port=server.port)
    assert get(server, f"/{server.token}/data", Host=named)[:2] == (403, b"")
    assert get(server, f"/{server.token}/data", Host=f"localhost:{server.port}")[0] == 200


def test_another_site_s_page_gets_nothing(server: WatchServer) -> None:
    path = f"/{server.token}/data"
    assert get(server, path, Origin="http://evil.example")[:2] == (403, b"")
    assert get(server, path, Sec_Fetch_Site="cross-site")[:2] == (403, b"")
    assert get(server, path, Origin=f"http://127.0.0.1:{server.port}")[0] == 200


def test_nothing_listens_beyond_the_loopback(server: WatchServer) -> None:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    port = f":{server.port:04X}"
    bound = [line.split()[1] for line in lines if line.split()[1].endswith(port)]
    assert {place.split(":")[0] for place in bound} == {"0100007F"}
    assert not any(
        port in line.split()[1] for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]
    )
    for address in {
        info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    }:
        if not str(address).startswith("127."):
            with pytest.raises(OSError, match=r"refused|timed out"):
                socket.create_connection((address, server.port), timeout=2)


def test_only_reading_is_possible(server: WatchServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", f"/{server.token}/data", body=b"x")
    assert connection.getresponse().status == 501


def test_questions_are_answered_in_words(server: WatchServer) -> None:
    assert json.loads(get(server, f"/{server.token}/plan?a=1")[1]) == {"a": "1"}
    assert json.loads(get(server, f"/{server.token}/plan?bad=1")[1]) == {"error": "so not"}


def test_a_change_is_announced(server: WatchServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", f"/{server.token}/events")
    answer = connection.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream"
    assert answer.readline() == b"retry: 1000\n"
    assert isinstance(server.source, Fixed)
    server.source.count = 1
    lines = [answer.readline() for _ in range(3)]
    assert b"event: changed\n" in lines


def test_tokens_are_not_guessed() -> None:
    with WatchServer(Fixed()) as first, WatchServer(Fixed()) as second:
        assert first.token != second.token
        assert len(first.token) >= 43
        assert get(second, f"/{first.token}/")[:2] == (404, b"")


def test_what_can_be_watched(tmp_path: Path) -> None:
    done = run_config(tiny(mode="certified", noise_seed=None, output_dir=str(tmp_path)))
    assert done.folder is not None
    assert isinstance(source_of([str(done.folder)]), RunsSource)
    assert isinstance(source_of([str(done.folder / "ledger.sqlite")]), LedgerSource)
    with pytest.raises(FedquiltError, match="must be a ledger"):
        source_of([str(done.folder / "config.toml")])
    with pytest.raises(FedquiltError, match="or a folder of runs"):
        source_of([str(tmp_path / "nowhere")])
    both = source_of([str(done.folder), str(done.folder / "ledger.sqlite")])
    (ledger,) = both.data()["ledgers"]
    assert ledger["populations"][0]["num_clients"] == len(done.result["joins"])
    assert "epsilons" not in ledger["populations"][0], "no client alone"
    assert len(both.data()["runs"]) == 1


def test_who_works_on_a_run_is_known_by_its_lock(tmp_path: Path) -> None:
    done = run_config(tiny(mode="fedavg", output_dir=str(tmp_path)))
    assert done.folder is not None
    source = RunsSource([tmp_path])
    assert source.data()["runs"][0]["alive"] is None, "it has ended"
    (done.folder / "result.json").unlink()
    dead = source.data()["runs"][0]
    assert (dead["alive"], dead["resume"]) == (False, f"fedquilt run --resume {done.folder}")
    assert abs(dead["touched"] - time.time()) < 60
    held = [sys.executable, "-c", HOLD, str(done.folder / ".lock")]
    with subprocess.Popen(held, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert source.data()["runs"][0]["alive"] is True
        process.kill()
    assert source.data()["runs"][0]["alive"] is False


HOLD = """
import sys, time
from pathlib import Path
from fedquilt.common.storage import lock_file
held = lock_file(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_runs_that_begin_later_are_followed(tmp_path: Path) -> None:
    source = RunsSource([tmp_path])
    before = source.stamp()
    assert source.data()["runs"] == []
    run_config(tiny(mode="fedavg", output_dir=str(tmp_path)))
    assert source.stamp() != before
    assert [run["mode"] for run in source.data()["runs"]] == ["fedavg"]
    run_config(tiny(mode="fedavg", seed=1, output_dir=str(tmp_path)))
    assert len(source.data()["runs"]) == 2
    assert source.data() is source.data()
    assert source.cost > 0


def test_the_command_ends_when_it_is_told(cli: Callable[..., Said], tmp_path: Path) -> None:
    said = cli("watch", tmp_path, "--seconds", "0.1")
    assert said.code == 0
    assert said.out.startswith("http://127.0.0.1:")


def test_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    import signal

    command = [sys.executable, "-m", "fedquilt", "watch", str(tmp_path)]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (
        0,
        f"Watching {tmp_path.name}: open the address below; Ctrl-C stops\nstopped\n",
    )


def reset(server: WatchServer, *sent: bytes, read: int = 0) -> None:
    """Send something, read so many bytes of the answer, and break the connection off."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for part in sent:
            link.sendall(part)
        link.recv(read) if read else None


def test_whoever_goes_away_leaves_no_traceback(
    server: WatchServer, capfd: pytest.CaptureFixture[str]
) -> None:
    head = f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n".encode()
    for _ in range(5):
        reset(server, head)
        reset(server, head + b"\r\n")
        reset(server, head + b"\r\n", read=100)
    assert get(server, f"/{server.token}/")[0] == 200
    server.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("path", ["http://[", "http://[::1/"])
def test_what_is_no_address_is_refused_without_a_word(server: WatchServer, path: str) -> None:
    status, body, _ = get(server, path)
    assert (status, body) == (400, b"")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    with Ledger.open(tmp_path / "l.sqlite", create=True) as made:
        made.population("p", num_clients=3, epsilon=6.0, delta=1e-5)
    return tmp_path / "l.sqlite"


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("history", "population must be given"),
        ("history?population=p", "client must be given"),
        ("history?population=p&client=x", "must be a whole number"),
        ("plan?population=p", "epsilon must be given"),
        ("plan?population=p&epsilon=nan", "epsilon"),
        ("plan?epsilon=1", "population must be given"),
    ],
)
def test_a_question_that_lacks_something_is_answered_in_words(
    ledger: Path, question: str, words: str
) -> None:
    with WatchServer(LedgerSource(ledger)) as server:
        status, body, _ = get(server, f"/{server.token}/{question}")
    assert status == 400
    assert words in json.loads(body)["error"]


def gone(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_bytes(b"no ledger " * 900)


def altered(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE points (x)")


@pytest.mark.parametrize("damage", [gone, empty, foreign, altered])
def test_a_damaged_ledger_is_spoken_of_and_shown_again_when_it_is_whole(
    ledger: Path, damage: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    whole = ledger.read_bytes()
    with WatchServer(LedgerSource(ledger)) as server:
        damage(ledger)
        for path in ("", "data", "plan?population=p&epsilon=1"):
            status, body, _ = get(server, f"/{server.token}/{path}")
            assert status == 503
            words = body.decode() if path == "" else json.loads(body)["error"]
            assert "ledger" in words
            assert words.isprintable()
        ledger.unlink(missing_ok=True)
        ledger.write_bytes(whole)
        assert get(server, f"/{server.token}/data")[0] == 200
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_strangers_who_hold_connections_make_room(server: WatchServer) -> None:
    """Silent ones, and one that has begun to ask; the owner's listener is left alone."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", f"/{server.token}/events")
    listening = connection.getresponse()
    assert listening.readline() == b"retry: 1000\n"
    with contextlib.ExitStack() as held:
        for count in range(200):
            link = socket.create_connection(("127.0.0.1", server.port), timeout=10)
            held.enter_context(link)
            if count % 2:
                link.sendall(b"GET / HTTP/1.1\r\nHo")
        assert get(server, f"/{server.token}/data")[0] == 200
        serving = [thread for thread in threading.enumerate() if "process_request" in thread.name]
        assert len(serving) < 50
        assert isinstance(server.source, Fixed)
        server.source.count = 1
        assert b"event: changed\n" in iter(listening.readline, b"")
