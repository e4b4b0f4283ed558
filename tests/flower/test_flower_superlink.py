"""A SuperLink for its own user: whose connection it is, and storage that is given back."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedquilt.flower import internals, superlink
from fedquilt.flower.superlink import for_owner, give_back_storage, owner_of

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel must be Linux")


def asked(ends: tuple[Any, Any], allowed: list[int]) -> list[Any]:
    """Return what a request over a connection gets: the app's word, or a status."""
    said: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        said.append("served")

    async def send(event: Any) -> None:
        said.append(event.get("status", event.get("body")))

    scope = {"type": "http", "server": ends[0], "client": ends[1]}
    asyncio.run(for_owner(app, allowed)(scope, None, send))
    return said


@linux
@pytest.mark.parametrize("way", ["one connection", "the table of all"])
def test_the_kernel_says_whose_a_connection_is(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of all has a row for each connection of the machine, and is not read otherwise."""
    number = 4 if way == "one connection" else 10**6
    monkeypatch.setattr(superlink, "_SOCK_DIAG", number, raising=False)
    if way == "one connection":
        monkeypatch.setattr(superlink, "_TABLE", Path("/nowhere"))
    me, other = os.geteuid(), os.geteuid() + 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            held, address = listener.accept()
            ends = (held.getsockname(), address)
            assert owner_of(*ends) == me
            assert owner_of(ends[0], ("127.0.0.1", 1)) is None
            assert owner_of(ends[0], None) is None
            assert owner_of(ends[0], ("::1", 80)) is None
            assert asked(ends, [me]) == ["served"]
            assert asked(ends, [other])[0] == 403
            assert client.fileno() > 0
        assert owner_of(*ends) is None, "it was closed, and its end is nobody's"
        assert asked(ends, [me])[0] == 403
        held.close()


def test_a_header_cannot_say_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn believes `X-Forwarded-For` of loopback, with a port, unless it is told not to."""
    command: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    given: dict[str, Any] = {}
    monkeypatch.setattr(command, "uvicorn", type("U", (), {"run": lambda **k: given.update(k)}))
    monkeypatch.setattr(command, "flower_superlink", lambda: command.uvicorn.run(app="app", port=1))
    internals.run_superlink(lambda app: f"guarded {app}", {})
    assert given == {"app": "guarded app", "port": 1, "proxy_headers": False}


def test_what_is_deleted_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    for step in range(2):  # a new file, and one of before
        give_back_storage(str(path))
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE IF NOT EXISTS x (y BLOB)")
            database.execute("INSERT INTO x VALUES (?)", (b"z" * 3_000_000,))
            database.commit()
            assert path.stat().st_size > 3_000_000
            database.execute("DELETE FROM x")
            database.commit()
        database.close()
        assert path.stat().st_size < 100_000, step


def test_an_address_that_others_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("0.0.0.0", "server.example.org", "::"):
        monkeypatch.setattr(sys, "argv", ["superlink", "--host", host])
        with pytest.raises(SystemExit, match="must be an address of loopback"):
            superlink.main()
