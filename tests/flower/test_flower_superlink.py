"""A SuperLink for its own user: whose connection it is, and storage that is given back."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace
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
    app = SimpleNamespace(user_middleware=[])
    monkeypatch.setattr(command, "uvicorn", type("U", (), {"run": lambda **k: given.update(k)}))
    monkeypatch.setattr(command, "flower_superlink", lambda: command.uvicorn.run(app=app, port=1))
    internals.run_superlink(lambda app: ("guarded", app), {})
    assert given == {"app": ("guarded", app), "port": 1, "proxy_headers": False}


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


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def events_of(app: Any, path: str) -> list[tuple[Any, ...]]:
    """Return what an ASGI app sends for a request of this path."""
    sent: list[tuple[Any, ...]] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(event: Any) -> None:
        if event["type"] == "http.response.start" or event["body"]:
            sent.append((event["type"], event.get("status"), event.get("body")))

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"",
             "server": ("127.0.0.1", 1), "scheme": "http", "root_path": ""}  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent


LAYERS = importlib.import_module("flwr.superlink.main")._get_middleware()


def test_only_layers_of_one_api_are_passed_by() -> None:
    limited = {layer.cls.__name__ for layer in LAYERS
               if internals.for_its_own_api(layer.cls) is not layer.cls}  # fmt: skip
    kept = {layer.cls.__name__ for layer in LAYERS} - limited
    assert kept == {"BaseHTTPMiddleware", "ProtobufTranslationMiddleware"}
    assert {"ControlAuthenticationMiddleware", "NodeAuthMiddleware"} < limited


@pytest.mark.parametrize(
    "layer",
    [each.cls for each in LAYERS if internals.for_its_own_api(each.cls) is not each.cls],
    ids=lambda kind: kind.__name__,
)
def test_what_passes_by_a_layer_is_what_the_layer_itself_passes_on(
    layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that did something for another API would have to be passed through."""
    monkeypatch.setenv("FLWR_TRACING_ENABLED", "1")
    name, seen = layer.__name__, []

    async def noted(self: Any, request: Any, call_next: Any) -> Any:
        seen.append(request.url.path)
        return await call_next(request)

    watched = type(name, (layer,), {"dispatch": noted})
    limited = internals.for_its_own_api(watched)(hello)
    (own,) = (path for start, path in internals._LAYERS.items() if name.startswith(start))
    paths = [f"/v1/{api}/x" for api in ("control", "fleet", "runtime")]
    for path in [*paths, "/v1/else/x", "/health"]:
        answer = events_of(hello, path)
        assert events_of(limited, path) == answer
        if not path.startswith(own):
            assert events_of(layer(hello), path) == answer
    assert seen == [own + "x", "/v1/else/x", "/health"]
