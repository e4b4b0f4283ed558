"""Who may look: this machine, with the right address, from no foreign page."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import Said
from fedquilt.common.errors import FedquiltError
from fedquilt.experiment import run_config
from fedquilt.watch import LedgerSource, RunsSource, WatchServer, source_of
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
    with pytest.raises(FedquiltError, match="must be run folders"):
        source_of([str(tmp_path / "nowhere")])


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
    assert (process.returncode, error) == (0, "stopped\n")
