"""A real HTTP server that keeps the forms posted to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs


class Receiver:
    """Listens on 127.0.0.1; `statuses` are its next answers, then 200 for ever."""

    def __init__(self, port: int = 0) -> None:
        self.forms: list[tuple[str, dict[str, str]]] = []
        self.statuses: list[int] = []
        self.pause = threading.Event()
        self.pause.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                receiver.pause.wait(10)
                status = receiver.statuses.pop(0) if receiver.statuses else 200
                if status == 200:
                    fields = parse_qs(body, keep_blank_values=True, strict_parsing=True)
                    receiver.forms.append((self.path, {k: v[0] for k, v in fields.items()}))
                try:
                    self.send_response(status)
                    self.end_headers()
                except OSError:
                    pass

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.pause.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def wait_until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait for a condition, and fail when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)
