"""The reverse proxy: outsiders reach the paths of nodes (Fleet), and nothing else.

One port of a SuperLink serves nodes, operators (Control) and apps (Runtime), and Control
asks for no login: whoever reaches it runs code on every node.  So the SuperLink listens on
loopback, for its own user (`fedquilt.flower.superlink`), and this stands before it:

- only POST to `/v1/fleet/...` is passed on; everything else is answered with 403,
- `/healthz` says that this process lives, `/readyz` that the SuperLink behind it answers, and
  `/metrics` the public figures of its runs where it was told where they are,
- one address cannot use up what others need: a body is held
  until it is there whole, within bounds of bytes and seconds, and an answer is streamed.

Run it as `python -m fedquilt.flower.gate --help` says.

What one address can use up:

| what | limit | beyond it |
|---|---|---|
| connections of one address, and of all | `connections`, `all_connections` | closed when accepted |
| a request's head, from the first moment of its connection on | `head_seconds` | closed |
| requests a second | `rate`, `burst` | 429 |
| a body | `largest` bytes | 413 |
| bodies that are held at once, of one address and of all | `held`, `all_held` bytes | they wait |
| a body, and an answer | `grace` seconds, and one for `slowest` bytes | 408, closed |

So whoever comes from another address finds room, whatever one address does.  A network behind
one address shares its limits; an IPv6 address stands for its /64.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import resource
import socket
import ssl
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Any

import h11
import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedquilt.common.errors import InvalidValueError
from fedquilt.flower.metrics import Kept, ServerFigures

FLEET = "/v1/fleet/"
HEALTH, READY, METRICS = "/healthz", "/readyz", "/metrics"
# Headers that belong to one of the two connections.
_HOP = frozenset(
    {
        *("host", "connection", "keep-alive", "transfer-encoding", "upgrade", "te"),
        *("proxy-authorization", "proxy-authenticate"),
        *("x-forwarded-for", "forwarded", "date", "server"),
    }
)
_OF_A_BODY = frozenset({"content-length", "content-encoding"})


_ADDRESSES = 4096


@dataclass(frozen=True)
class Limits:
    """What a single address may ask for, and all together."""

    largest: int = 64 * 2**20
    rate: float = 200.0
    burst: float = 400.0
    connections: int = 64
    all_connections: int = 2048
    held: int = 128 * 2**20
    all_held: int = 512 * 2**20
    head_seconds: float = 10.0
    grace: float = 20.0
    slowest: float = 2**16

    def __post_init__(self) -> None:
        if not self.largest <= self.held <= self.all_held:
            raise InvalidValueError(
                f"largest={self.largest}, held={self.held} and all_held={self.all_held} bytes must "
                "not fall: a body fits into what its address may have"
            )

    def seconds_for(self, size: int) -> float:
        """Return how long so many bytes may take."""
        return self.grace + size / self.slowest


def address_key(host: str) -> str:
    """Return what an address is counted as."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return str(IPv6Network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


class Buckets:
    """A bucket of tokens for each address: `rate` drip in every second, `burst` fit in."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str, now: float) -> bool:
        """Take a token; False when there is none."""
        left, then = self._left.get(address, (self._limits.burst, now))
        left = min(self._limits.burst, left + (now - then) * self._limits.rate)
        allowed = left >= 1
        self._left[address] = (left - 1 if allowed else left, now)
        self._left.move_to_end(address)
        if len(self._left) > _ADDRESSES:
            self._left.popitem(last=False)
        return allowed


class Room:
    """Bytes of bodies that are held at once; taken whole before the first byte is read."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def hold(self, address: str, size: int) -> AsyncIterator[None]:
        """Wait until so many bytes fit, and keep them while inside."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._held[address] + size <= self._limits.held
                    and self._held.total() + size <= self._limits.all_held
                )
            )
            self._held[address] += size
        try:
            yield
        finally:
            self._held[address] -= size
            self._held += Counter()  # forgets who holds nothing
            async with self._changed:
                self._changed.notify_all()


class _Counted(socket.socket):
    """A connection that says when it is closed."""

    closes: Callable[[], object] | None = None

    def close(self) -> None:
        super().close()
        closes, self.closes = self.closes, None
        if closes is not None:
            closes()


class Listener(socket.socket):
    """A listening socket; a connection beyond the limits is closed as soon as it is accepted."""

    def __init__(self, host: str, port: int, limits: Limits) -> None:
        super().__init__(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self.limits = limits
        self.open: Counter[str] = Counter()
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind((host, port))
        self.listen(1024)
        self.setblocking(False)

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection that is within the limits."""
        while True:
            taken, address = super().accept()
            key = address_key(address[0])
            full = self.open.total() >= self.limits.all_connections
            if full or self.open[key] >= self.limits.connections:
                taken.close()
                continue
            counted = _Counted(self.family, self.type, self.proto, fileno=taken.detach())
            self.open[key] += 1
            counted.closes = partial(self._forget, key)
            return counted, address

    def _forget(self, key: str) -> None:
        self.open[key] -= 1
        if not self.open[key]:
            del self.open[key]


class PatientProtocol(H11Protocol):
    """HTTP of uvicorn; a connection whose request does not come is closed."""

    head_seconds = Limits.head_seconds
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what came; from the first byte of a head on, the rest must follow."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._late is None:
            self._late = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class TooLargeError(Exception):
    """A body went past the limit while it came in."""


class Gate:
    """The ASGI app before the SuperLink of a client."""

    def __init__(
        self, client: httpx.AsyncClient, limits: Limits, metrics: Callable[[], str] | None = None
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._limits = limits
        self._buckets = Buckets(limits)
        self._room = Room(limits)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or pass it on."""
        request = Request(scope, receive)
        said = await self._said(request)
        if said is None:
            try:
                said = await self._passed_on(request, send)
            except ClientDisconnect:
                return
        if said is not None:
            said.headers["connection"] = "close" if said.status_code >= 400 else "keep-alive"
            await said(scope, receive, send)

    async def _said(self, request: Request) -> Response | None:
        """Return what is answered here; None for what is the SuperLink's."""
        if not self._buckets.take(_address(request), time.monotonic()):
            return PlainTextResponse("too many requests", 429)
        # The raw path: what is decoded later must not lead elsewhere.
        path = _path(request)
        if request.method == "GET" and path == HEALTH:
            return PlainTextResponse("ok")
        if request.method == "GET" and path == READY:
            return await self._ready()
        if request.method == "GET" and path == METRICS and self._metrics is not None:
            figures = await asyncio.to_thread(self._metrics)  # files are read: not in this loop
            return PlainTextResponse(figures)
        if request.method != "POST" or not path.startswith(FLEET) or _winds(path):
            return PlainTextResponse("not for you", 403)
        return None

    async def _ready(self) -> Response:
        try:
            await self._client.get("/", timeout=2.0)
        except httpx.HTTPError:
            return PlainTextResponse("the SuperLink does not answer", 503)
        return PlainTextResponse("ready")

    async def _passed_on(self, request: Request, send: Any) -> Response | None:
        """Pass a request on; return what to say of one that is not."""
        limits, announced = self._limits, request.headers.get("content-length")
        if announced is not None and not announced.isdigit():
            return PlainTextResponse("content-length must be a number", 400)
        size = limits.largest if announced is None else int(announced)
        if size > limits.largest:
            return PlainTextResponse(f"at most {limits.largest} bytes", 413)
        try:
            async with contextlib.AsyncExitStack() as held:
                async with asyncio.timeout(limits.seconds_for(size)):
                    if size:
                        await held.enter_async_context(self._room.hold(_address(request), size))
                    body = await _body(request, limits.largest)
                return await self._forwarded(request, body, send)
        except TooLargeError:
            return PlainTextResponse(f"at most {limits.largest} bytes", 413)
        except httpx.HTTPError:
            return PlainTextResponse("the SuperLink does not answer", 503)
        except TimeoutError:
            return PlainTextResponse("too slow, or no room in time", 408)

    async def _forwarded(self, request: Request, body: bytes, send: Any) -> Response | None:
        skipped = _HOP | _OF_A_BODY
        headers = {k: v for k, v in request.headers.items() if k.lower() not in skipped}
        path = _path(request)
        async with self._client.stream("POST", path, content=body, headers=headers) as answer:
            kept = [
                (k, v) for k, v in answer.headers.raw if k.lower().decode("latin-1") not in _HOP
            ]
            start = {"type": "http.response.start", "status": answer.status_code, "headers": kept}
            size = int(answer.headers.get("content-length") or self._limits.largest)
            with contextlib.suppress(TimeoutError, httpx.HTTPError):  # half an answer: cut off
                async with asyncio.timeout(self._limits.seconds_for(size)):
                    await send(start)
                    async for part in answer.aiter_raw():
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
        return None


def make_proxy(
    superlink: str,
    verify: ssl.SSLContext | bool,
    limits: Limits,
    metrics: Callable[[], str] | None = None,
) -> Starlette:
    """Return the proxy before the SuperLink at an address (`127.0.0.1:8000`)."""
    scheme = "http" if verify is False else "https"
    client = httpx.AsyncClient(
        base_url=f"{scheme}://{superlink}",
        verify=verify,
        timeout=60.0,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await client.aclose()

    gate = Gate(client, limits, metrics)
    return Starlette(routes=[Route("/{path:path}", gate)], lifespan=lifespan)


def _address(request: Request) -> str:
    return address_key(request.client.host if request.client else "")


def _path(request: Request) -> str:
    raw: bytes = request.scope.get("raw_path", b"")
    return raw.split(b"?")[0].decode("latin-1")


def _winds(path: str) -> bool:
    """Tell whether a path may mean another one once it is decoded."""
    return ".." in path or "%" in path or "\\" in path or "//" in path


async def _body(request: Request, largest: int) -> bytes:
    """Read a body, no further than the limit."""
    parts, size = [], 0
    stream: AsyncIterator[bytes] = request.stream()
    async for part in stream:
        size += len(part)
        if size > largest:
            raise TooLargeError
        parts.append(part)
    return b"".join(parts)


def parser() -> argparse.ArgumentParser:
    """Return the command line of the proxy."""
    usual = Limits()
    command = argparse.ArgumentParser(
        prog="python -m fedquilt.flower.gate", description="Let outsiders reach Fleet paths only."
    )
    command.add_argument("--host", default="127.0.0.1", help="where nodes connect to")
    command.add_argument("--port", type=int, required=True)
    command.add_argument("--ssl-certfile", required=True, help="shown to nodes")
    command.add_argument("--ssl-keyfile", required=True)
    command.add_argument("--superlink", required=True, help="its address, on loopback")
    command.add_argument("--root-certificates", required=True, help="what it is verified by")
    command.add_argument("--largest", type=int, default=usual.largest, help="bytes of a request")
    command.add_argument("--rate", type=float, default=usual.rate, help="requests a second")
    command.add_argument("--burst", type=float, default=usual.burst, help="requests at once")
    command.add_argument("--metrics", type=Path, metavar="RESULTS", help="serve /metrics of runs")
    text = "connections of one address"
    command.add_argument("--connections", type=int, default=usual.connections, help=text)
    return command


def main() -> None:
    """Run the proxy."""
    given = parser().parse_args()
    context = ssl.create_default_context(cafile=given.root_certificates)
    named = {field.name for field in dataclasses.fields(Limits)} & set(vars(given))
    limits = Limits(**{name: getattr(given, name) for name in named})
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    metrics = None
    if given.metrics is not None:
        metrics = Kept(ServerFigures(given.metrics))
    config = uvicorn.Config(
        make_proxy(given.superlink, context, limits, metrics),
        loop="asyncio",  # its listener may be one of ours
        http=PatientProtocol,
        ws="none",
        ssl_certfile=given.ssl_certfile,
        ssl_keyfile=given.ssl_keyfile,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=75,
        server_header=False,
        proxy_headers=False,
    )
    uvicorn.Server(config).run(sockets=[Listener(given.host, given.port, limits)])


if __name__ == "__main__":
    main()
