"""The address of an HTTP server, as users write it."""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from urllib.parse import urlsplit

from fedquilt.errors import InvalidValueError

ALLOWED = "'host:port', optionally with http:// or https:// before it"


@dataclass(frozen=True)
class Address:
    """Where an HTTP server listens; `port` None is the default of the scheme."""

    scheme: str
    host: str
    port: int | None

    @classmethod
    def parse(cls, text: object) -> Address:
        """Read `127.0.0.1:5000`, `[::1]:5000`, `https://logs.example.org`; raise otherwise."""
        if not isinstance(text, str) or not text or any(sign.isspace() for sign in text):
            raise InvalidValueError(f"host={text!r} must be {ALLOWED}")
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidValueError(f"host={text!r} must be {ALLOWED} ({error})") from None
        foreign = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
        if parts.scheme not in ("http", "https") or not host or port == 0 or foreign:
            raise InvalidValueError(f"host={text!r} must be {ALLOWED}")
        return cls(parts.scheme, host, port)

    def connection(self, timeout: float) -> http.client.HTTPConnection:
        """Return a connection that is opened by its first request."""
        if self.scheme == "https":
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + ("" if self.port is None else f":{self.port}")
