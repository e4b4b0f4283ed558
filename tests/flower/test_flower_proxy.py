"""The proxy before a SuperLink, without one: paths, sizes, rates, connections, patience."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("flwr")

import uvicorn
from starlette.testclient import TestClient

from fedquilt.flower.proxy import (
    Buckets,
    Limits,
    Listener,
    PatientProtocol,
    Room,
    address_key,
    make_proxy,
)


@pytest.fixture
def client() -> Iterator[TestClient]:
    limits = Limits(largest=100, rate=0.001, burst=5)
    with TestClient(make_proxy("127.0.0.1:1", False, limits)) as client:
        yield client


def test_what_goes_where(client: TestClient) -> None:
    assert client.post("/v1/control/start-run").status_code == 403
    assert client.get("/v1/fleet/pull-messages").status_code == 403
    assert client.post("/v1/fleet/push-object", content=b"x" * 101).status_code == 413
    assert client.post("/v1/fleet/pull-messages").status_code == 503, "nobody is behind it"


def test_a_body_without_an_announced_size_is_read_no_further_than_allowed(
    client: TestClient,
) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b"x" * 60

    assert client.post("/v1/fleet/push-object", content=endless()).status_code == 413


def test_an_address_that_asks_too_often_is_told_so(client: TestClient) -> None:
    said = [client.get("/").status_code for _ in range(7)]
    assert said == [403] * 5 + [429] * 2


def test_buckets_fill_again() -> None:
    buckets = Buckets(Limits(rate=2.0, burst=2.0))
    assert [buckets.take("a", 0.0) for _ in range(3)] == [True, True, False]
    assert buckets.take("b", 0.0)
    assert buckets.take("a", 0.5)
    assert not buckets.take("a", 0.6)
    assert [buckets.take("a", 100.0) for _ in range(3)] == [True, True, False]


@contextlib.contextmanager
def serving(app: Any, limits: Limits, head_seconds: float = 5.0) -> Iterator[int]:
    """Serve an app on loopback as the gate does, but for TLS; yield its port."""
    protocol = type("Quick", (PatientProtocol,), {"head_seconds": head_seconds})
    options: dict[str, Any] = {"loop": "asyncio", "http": protocol, "ws": "none"}
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", **options))
    listener = Listener("127.0.0.1", 0, limits)
    port = listener.getsockname()[1]
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(20)


def from_address(port: int, address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 10, source_address=(address, 0))


def said_to(port: int, address: str, request: bytes) -> bytes:
    with from_address(port, address) as connection:
        connection.sendall(request)
        return connection.recv(4096)


ASK = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def test_an_address_that_holds_its_connections_keeps_nobody_else_out() -> None:
    with serving(make_proxy("127.0.0.1:1", False, Limits()), Limits(connections=5)) as port:
        held = [from_address(port, "127.0.0.2") for _ in range(5)]
        with from_address(port, "127.0.0.2") as beyond:
            assert beyond.recv(1) == b"", "closed when it is accepted"
        assert b"200 OK" in said_to(port, "127.0.0.3", ASK)
        for connection in held:
            connection.sendall(ASK)
            assert b"200 OK" in connection.recv(4096), "those within the limit are served"
            connection.close()
        until = time.monotonic() + 10
        while time.monotonic() < until:  # what was closed is free again
            with contextlib.suppress(ConnectionError):
                if b"200 OK" in said_to(port, "127.0.0.2", ASK):
                    return
        pytest.fail("a closed connection still counts")


@pytest.mark.parametrize("begun", [b"", b"POST /v1/fleet/x HTTP/1.1\r\nhost:"])
def test_a_connection_whose_request_does_not_come_is_closed(begun: bytes) -> None:
    gate = serving(make_proxy("127.0.0.1:1", False, Limits()), Limits(), 0.3)
    with gate as port, from_address(port, "127.0.0.2") as connection:
        connection.sendall(begun)
        assert connection.recv(1) == b""


def test_bodies_are_bounded_in_sum_and_a_slow_one_is_dropped() -> None:
    """Two of 60 bytes fit into the 130 of their address; the third waits, and nobody else does."""
    limits = Limits(largest=60, held=130, all_held=260, grace=1.0, slowest=1e9)
    with serving(make_proxy("127.0.0.1:1", False, limits), Limits()) as port:
        head = b"POST /v1/fleet/x HTTP/1.1\r\nhost: x\r\ncontent-length: 60\r\n\r\n"
        slow = [from_address(port, "127.0.0.2") for _ in range(2)]
        for connection in slow:
            connection.sendall(head + b"x" * 59)
        time.sleep(0.2)
        third = from_address(port, "127.0.0.2")
        third.sendall(head + b"x" * 60)
        other = said_to(port, "127.0.0.3", head + b"x" * 60)
        assert b"503" in other.splitlines()[0], "passed on, and nobody is behind the gate here"
        for connection in (*slow, third):
            said = connection.recv(4096)
            assert b"408" in said.splitlines()[0] or (connection is third and b"503" in said)
            connection.close()


def test_room_is_taken_whole_and_given_back() -> None:
    async def work() -> list[str]:
        room, order = Room(Limits(largest=10, held=10, all_held=15)), []

        async def hold(name: str, address: str, size: int, seconds: float) -> None:
            async with room.hold(address, size):
                order.append(name)
                await asyncio.sleep(seconds)

        first = [hold("a", "A", 10, 0.05), hold("a2", "A", 1, 0.0), hold("b", "B", 5, 0.2)]
        await asyncio.gather(*first, hold("c", "C", 10, 0.0))
        return order

    # a2 waits for a's address, c for the sum; b is another's and fits.
    assert asyncio.run(work())[:2] == ["a", "b"]


def test_an_answer_is_streamed_and_says_what_it_said() -> None:
    async def superlink(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/protobuf"), (b"x-more", b"1")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        for part in (b"one ", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": part == b"one "})

    with (
        serving(superlink, Limits()) as behind,
        TestClient(make_proxy(f"127.0.0.1:{behind}", False, Limits())) as client,
    ):
        assert client.get("/readyz").text == "ready"
        said = client.post("/v1/fleet/pull-messages", content=b"x")
    assert (said.status_code, said.content, said.headers["x-more"]) == (201, b"one two", "1")
    with TestClient(make_proxy("127.0.0.1:1", False, Limits())) as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 503


def test_an_ipv6_address_stands_for_its_network() -> None:
    assert (
        address_key("2001:db8::1") == address_key("2001:db8::2:3:4") != address_key("2001:db9::1")
    )
    assert address_key("::ffff:10.0.0.1") == "10.0.0.1"
