"""The reverse proxy: outsiders reach the paths of nodes (Fleet), and nothing else.

One port of a SuperLink serves nodes, operators (Control) and apps (Runtime), and Control
asks for no login: whoever reaches it runs code on every node.  So the SuperLink listens on
loopback, and this stands before it:

- only POST to `/v1/fleet/...` is passed on; everything else is answered with 403,
- a request body above `largest` bytes is answered with 413, before it is passed on whole,
- more than `rate` requests a second from one address are answered with 429.

Run it as `python -m fedquilt.flower.gate --help` says.
"""

from __future__ import annotations

import argparse
import contextlib
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

FLEET = "/v1/fleet/"
# Headers that belong to one of the two connections.
_HOP = frozenset(
    {
        *("host", "connection", "keep-alive", "transfer-encoding", "upgrade", "te"),
        *("content-length", "content-encoding", "proxy-authorization", "proxy-authenticate"),
        *("x-forwarded-for", "forwarded", "date", "server"),
    }
)
_ADDRESSES = 4096


@dataclass(frozen=True)
class Limits:
    """What a single address may ask for."""

    largest: int = 64 * 2**20
    rate: float = 200.0
    burst: float = 400.0


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


class TooLargeError(Exception):
    """A body went past the limit while it came in."""


def make_proxy(superlink: str, verify: ssl.SSLContext | bool, limits: Limits) -> Starlette:
    """Return the proxy before the SuperLink at an address (`127.0.0.1:8000`)."""
    scheme = "http" if verify is False else "https"
    client = httpx.AsyncClient(base_url=f"{scheme}://{superlink}", verify=verify, timeout=60.0)
    buckets = Buckets(limits)

    async def forward(request: Request) -> Response:
        address = request.client.host if request.client else ""
        if not buckets.take(address, time.monotonic()):
            return PlainTextResponse("too many requests", 429)
        # The raw path: what is decoded later must not lead elsewhere.
        path = request.scope.get("raw_path", b"").split(b"?")[0].decode("latin-1")
        if request.method != "POST" or not path.startswith(FLEET) or _winds(path):
            return PlainTextResponse("not for you", 403)
        try:
            body = await _body(request, limits.largest)
        except TooLargeError:
            return PlainTextResponse(f"at most {limits.largest} bytes", 413)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        try:
            answer = await client.post(path, content=body, headers=headers)
        except httpx.HTTPError:
            return PlainTextResponse("the SuperLink does not answer", 503)
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP}
        return Response(answer.content, answer.status_code, kept)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await client.aclose()

    methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", forward, methods=methods)], lifespan=lifespan)


def _winds(path: str) -> bool:
    """Tell whether a path may mean another one once it is decoded."""
    return ".." in path or "%" in path or "\\" in path or "//" in path


async def _body(request: Request, largest: int) -> bytes:
    """Read a body, no further than the limit."""
    announced = request.headers.get("content-length")
    if announced is not None and (not announced.isdigit() or int(announced) > largest):
        raise TooLargeError
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
    return command


def main() -> None:
    """Run the proxy."""
    given = parser().parse_args()
    context = ssl.create_default_context(cafile=given.root_certificates)
    proxy = make_proxy(given.superlink, context, Limits(given.largest, given.rate, given.burst))
    uvicorn.run(
        proxy,
        host=given.host,
        port=given.port,
        ssl_certfile=given.ssl_certfile,
        ssl_keyfile=given.ssl_keyfile,
        access_log=False,
        log_level="warning",
        limit_concurrency=512,
        timeout_keep_alive=75,
        server_header=False,
    )


if __name__ == "__main__":
    main()
