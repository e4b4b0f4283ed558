"""Forms posted to an HTTP server by a thread of their own, in order.

Whoever puts a form never waits for the network.  A form that cannot be delivered
stays first in line and is tried again, so an outage loses nothing until the
queue is full; what is lost in the end is counted.

`logging.handlers.QueueHandler` and `QueueListener` with an `HTTPHandler` would be shorter,
and lose what this is for: they drop a record that meets an outage, count nothing, wait
without a limit for a server that hangs when they are stopped, and are silent in a
forked child.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from fedquilt.common.errors import InvalidValueError

CAPACITY = 10_000
CLOSE_SECONDS = 2.0
CONNECT_SECONDS = 3.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
RETRIED_STATUSES = (408, 425, 429)


@dataclass(frozen=True)
class Address:
    """Where an HTTP server listens; `port` None is the default of the scheme."""

    scheme: str
    host: str
    port: int | None

    @classmethod
    def parse(cls, text: object) -> Address:
        """Read `127.0.0.1:5000`, `[::1]:5000`, `https://logs.example.org`; raise otherwise."""
        allowed = "must be 'host:port', optionally with http:// or https:// before it"
        if not isinstance(text, str) or not text or any(sign.isspace() for sign in text):
            raise InvalidValueError(f"host={text!r} {allowed}")
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidValueError(f"host={text!r} {allowed} ({error})") from None
        foreign = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
        if parts.scheme not in ("http", "https") or not host or port == 0 or foreign:
            raise InvalidValueError(f"host={text!r} {allowed}")
        return cls(parts.scheme, host, port)

    def connection(self, timeout: float) -> http.client.HTTPConnection:
        """Return a connection that is opened by its first request."""
        secure = self.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + ("" if self.port is None else f":{self.port}")


def post_fields(
    record: logging.LogRecord, identifier: str, *, simple: bool
) -> tuple[str, dict[str, Any]]:
    """Return where a record is posted, and as which fields.

    `simple`: the message alone, to `/simple_log`; otherwise the whole record to `/log`, its
    message and its exception as text.
    """
    message = record.getMessage()
    if simple:
        return "/simple_log", {"identifier": identifier, "message": message}
    fields = {**vars(record), "identifier": identifier, "msg": message, "message": message}
    if record.exc_info and not record.exc_text:
        fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
    # The objects behind the text mean nothing on another machine.
    del fields["args"], fields["exc_info"]
    return "/log", fields


class Delivery:
    """A queue of forms and the thread that posts them.

    Delivery is at least once: when a server takes a form but its answer is lost,
    the form is posted again.

    Parameters
    ----------
    address : Address
        The server.
    on_trouble : callable, optional
        Called with one line of text when an outage begins, from the thread.
    capacity : int
        How many forms may wait; more are dropped and counted.
    """

    def __init__(
        self,
        address: Address,
        on_trouble: Callable[[str], None] | None = None,
        *,
        capacity: int = CAPACITY,
    ) -> None:
        self.address = address
        self._on_trouble = on_trouble
        self._capacity = capacity
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._thread: threading.Thread | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._give_up_at: float | None = None
        self._lost = 0
        self.last_error: str | None = None

    def _reset_in_a_fork(self) -> None:
        """Begin anew in a forked child: it has the queue and not the thread, its parent both."""
        if os.getpid() != self._owner:
            self._reset()

    @property
    def undelivered(self) -> int:
        """Forms dropped, refused or still waiting."""
        with self._changed:
            return self._lost + len(self._waiting)

    def put(self, path: str, fields: Mapping[str, object]) -> None:
        """Post `fields` to `path` soon; returns at once."""
        self._reset_in_a_fork()
        body = urlencode({name: str(value) for name, value in fields.items()}).encode()
        with self._changed:
            if self._give_up_at is not None or len(self._waiting) >= self._capacity:
                self._lost += 1
                self.last_error = self.last_error or "the queue of undelivered forms is full"
                return
            self._waiting.append((path, body))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._deliver, name="fedquilt-delivery", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def close(self, grace: float) -> None:
        """Deliver what waits, for at most `grace` seconds, and end the thread."""
        self._reset_in_a_fork()
        with self._changed:
            self._give_up_at = time.monotonic() + grace
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(grace)
        if self._thread.is_alive():
            # Wake it from a server that took the request and says nothing.
            sock = self._connection.sock if self._connection is not None else None
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self._thread.join(0.1)

    def _deliver(self) -> None:
        pause = 0.0
        while (form := self._next(pause)) is not None:
            try:
                self._post(*form)
                pause = 0.0
            except (OSError, http.client.HTTPException) as error:
                self.last_error = f"{type(error).__name__}: {error}"
                if self._give_up_at is not None:
                    return
                if pause == 0.0 and self._on_trouble is not None:
                    self._on_trouble(f"cannot deliver to {self.address}: {self.last_error}")
                pause = min(max(2 * pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
                continue
            with self._changed:
                self._waiting.popleft()

    def _next(self, pause: float) -> tuple[str, bytes] | None:
        """Wait for a form, and out a pause; None: closed, and none is left or no time is."""
        with self._changed:
            self._changed.wait_for(lambda: self._give_up_at is not None, timeout=pause)
            self._changed.wait_for(lambda: bool(self._waiting) or self._give_up_at is not None)
            late = self._give_up_at is not None and time.monotonic() > self._give_up_at
            return self._waiting[0] if self._waiting and not late else None

    def _post(self, path: str, body: bytes) -> None:
        """Post one form; raise when it is worth another try."""
        self._connection = connection = self.address.connection(CONNECT_SECONDS)
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Connection": "close"}
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
        finally:
            connection.close()
        if 200 <= answer.status < 300:
            return
        message = f"POST {path}: status {answer.status} {answer.reason}"
        if answer.status >= 500 or answer.status in RETRIED_STATUSES:
            raise OSError(message)
        with self._changed:
            self._lost += 1
        self.last_error = message
