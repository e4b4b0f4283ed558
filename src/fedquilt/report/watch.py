"""Looking on while something runs: a page on this machine that follows runs or a ledger.

Its web server is for one pair of eyes: loopback only, behind a random address.
Who may look is decided by three things, all of them needed:

1. the socket is bound to 127.0.0.1, so that nobody beyond this machine reaches it;
2. the address holds 256 random bits, compared in constant time: other users of the machine, and
   pages in the same browser, do not know it.  Any other address gets an empty 404;
3. the Host header names the loopback address: a foreign name that was made to point here
   (DNS rebinding) gets an empty 403, and so does a request that another site's page makes.

Other users of the machine can connect all the same.  Of connections that have not shown the
token only a few are kept: the oldest makes room for the next, so that nobody holds them all.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from fedquilt.common.errors import FedquiltError, InvalidValueError, StorageError
from fedquilt.common.formatting import printable
from fedquilt.privacy.ledger import is_ledger
from fedquilt.record.folder import RunFolder
from fedquilt.report.html_page import embedded, html_page, with_comparison
from fedquilt.report.views import client_history, ledger_view, page_view, planned_cost
from fedquilt.report.views.page import empty_view, find_runs, runs_inside
from fedquilt.report.views.run import resume_command

LOOPBACK = "127.0.0.1"
_EVERY = 0.3  # seconds between two looks at the files
_REST = 5.0  # times as long as a reading took: who reads a ledger keeps a run from writing to it
_HEARTBEAT = 15.0
_MOST_LISTENERS = 24
_MOST_STRANGERS = 32
_HTML, _JSON, _TEXT = (
    f"{kind}; charset=utf-8" for kind in ("text/html", "application/json", "text/plain")
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class WatchServer:
    """Serves the page of a source until it is closed; a context manager.

    Parameters
    ----------
    source : Source
        What is shown.
    port : int
        0 takes one that is free.
    """

    def __init__(self, source: Source, port: int = 0) -> None:
        self.source = source
        self.token = secrets.token_urlsafe(32)
        self.closing = threading.Event()
        self.listeners = threading.BoundedSemaphore(_MOST_LISTENERS)
        handler = type("Handler", (_Handler,), {"watch": self})
        try:
            self._http = _Http((LOOPBACK, port), handler)
        except OSError as error:
            raise StorageError(f"port={port} cannot be listened on: {error.strerror}") from error
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), daemon=True)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._http.server_address[1])

    @property
    def address(self) -> str:
        """The whole address, token included."""
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"

    def allows_host(self, name: str | None) -> bool:
        """Tell whether a Host header names this server on the loopback."""
        return name in (f"{LOOPBACK}:{self.port}", f"localhost:{self.port}")

    def allows_origin(self, origin: str | None) -> bool:
        """Tell whether a request comes from the page itself, or from no page at all."""
        own = (f"http://{LOOPBACK}:{self.port}", f"http://localhost:{self.port}")
        return origin is None or origin in own

    def inside(self, path: str) -> str | None:
        """Return what of a path stands behind the token, None for a wrong one."""
        given, slash, rest = path.removeprefix("/").partition("/")
        right = hmac.compare_digest(given.encode(), self.token.encode())
        return rest if right and slash else None

    def page(self) -> str:
        """Return the page, with the data of this moment in it."""
        base = f"/{self.token}"
        live = {"data": f"{base}/data", "events": f"{base}/events"}
        live |= {name: f"{base}/{name}" for name in self.source.questions()}
        return html_page({**self.source.data(), "live": live}, title=self.source.title, live=True)

    def __enter__(self) -> WatchServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening."""
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()


class _Http(ThreadingHTTPServer):
    """A thread a connection, and few connections of those who have not shown the token."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *given: Any) -> None:
        self._strangers: dict[Any, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread; where there are too many strangers, the first of them has to go."""
        with self._lock:
            self._strangers[request] = None
            if len(self._strangers) > _MOST_STRANGERS:
                first = next(iter(self._strangers))
                del self._strangers[first]
                with contextlib.suppress(OSError):
                    first.shutdown(socket.SHUT_RDWR)  # its thread then ends
        super().process_request(request, client_address)

    def recognise(self, request: Any) -> None:
        """Take a connection for the owner's."""
        with self._lock:
            self._strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.recognise(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet: whoever asked has gone away."""


class _Handler(BaseHTTPRequestHandler):
    watch: WatchServer
    server: _Http
    server_version = "fedquilt"
    sys_version = ""
    timeout = 20

    def do_GET(self) -> None:
        """Answer the page, its data, its events and its questions."""
        fetched_by = self.headers.get("Sec-Fetch-Site", "none")
        own = self.watch.allows_origin(self.headers.get("Origin"))
        if not self.watch.allows_host(self.headers.get("Host")) or not own:
            return self._nothing(HTTPStatus.FORBIDDEN)
        if fetched_by not in ("none", "same-origin"):
            return self._nothing(HTTPStatus.FORBIDDEN)
        try:
            parts = urlsplit(self.path)
        except ValueError:  # http://[
            return self._nothing(HTTPStatus.BAD_REQUEST)
        wanted = self.watch.inside(parts.path)
        if wanted is None:
            return self._nothing(HTTPStatus.NOT_FOUND)
        self.server.recognise(self.connection)
        if wanted == "events":
            return self._events()
        status, kind, text = self._found(wanted, dict(parse_qsl(parts.query)))
        body = text.encode()
        self._begin(status, kind, len(body))
        self.wfile.write(body)
        return None

    def _found(self, wanted: str, asked: Mapping[str, str]) -> tuple[HTTPStatus, str, str]:
        """Return what is answered, or why there is nothing to show: files come and go."""
        source = self.watch.source
        try:
            if wanted == "":
                return HTTPStatus.OK, _HTML, self.watch.page()
            if wanted == "data":
                return HTTPStatus.OK, _JSON, embedded(source.data())
            questions = source.questions()
            if wanted in questions:
                return HTTPStatus.OK, _JSON, embedded(questions[wanted](asked))
            return HTTPStatus.NOT_FOUND, _TEXT, ""
        except Exception as error:
            words = printable(f"cannot be shown now: {error}" if wanted in ("", "data") else error)
            said = (_TEXT, words) if wanted == "" else (_JSON, embedded({"error": words}))
            return _status(error), *said

    def _nothing(self, status: HTTPStatus) -> None:
        """Answer without a word; what is wrong is nobody's business who does not know."""
        self._begin(status, "text/plain", 0)

    def _begin(self, status: HTTPStatus, kind: str, length: int | None) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def _events(self) -> None:
        """Say `changed` whenever the files have changed, until the listener goes away."""
        if not self.watch.listeners.acquire(blocking=False):
            return self._nothing(HTTPStatus.TOO_MANY_REQUESTS)
        try:
            # Looked at before the listener hears anything: whatever changes from then on is told.
            seen = self.watch.source.stamp()
            self._begin(HTTPStatus.OK, "text/event-stream", None)
            self._say("retry: 1000\n\n")
            self._listen(seen)
        except OSError:
            return None  # the listener has gone away
        finally:
            self.watch.listeners.release()
        return None

    def _listen(self, seen: Stamp) -> None:
        spoke = time.monotonic()
        while not self.watch.closing.wait(max(_EVERY, _REST * self.watch.source.cost)):
            now = self.watch.source.stamp()
            if now != seen:
                seen, spoke = now, time.monotonic()
                self._say(f"event: changed\ndata: {json.dumps(len(now))}\n\n")
            elif time.monotonic() - spoke > _HEARTBEAT:
                spoke = time.monotonic()
                self._say(": still here\n\n")

    def _say(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def log_message(self, *said: Any) -> None:
        """Keep quiet: the address would be in the log."""


def _status(error: Exception) -> HTTPStatus:
    """Return whose fault it was: the question's, the files', or the server's."""
    if isinstance(error, InvalidValueError):
        return HTTPStatus.BAD_REQUEST
    if isinstance(error, FedquiltError | OSError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.INTERNAL_SERVER_ERROR


_FILES = ("config.toml", "rounds.jsonl", "checkpoint.safetensors", "result.json")

Stamp = tuple[Any, ...]
N = TypeVar("N", int, float)


class Source:
    """Something to watch; `cost` is how many seconds the last reading took."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.cost = 0.0
        self._lock = threading.Lock()
        self._last: tuple[Stamp, dict[str, Any]] | None = None

    def stamp(self) -> Stamp:
        """Return what differs as soon as there is something new."""
        raise NotImplementedError

    def _read(self) -> dict[str, Any]:
        raise NotImplementedError

    def data(self) -> dict[str, Any]:
        """Return what the page shows now, read once for all who look."""
        with self._lock:
            now, began = self.stamp(), time.monotonic()
            if self._last is None or self._last[0] != now:
                self._last = now, self._read()
                self.cost = time.monotonic() - began
            return self._last[1]

    def questions(self) -> Mapping[str, Callable[[Mapping[str, str]], dict[str, Any]]]:
        """Return what else the page may ask, by the name in the address."""
        return {}


class RunsSource(Source):
    """Run folders, or folders in which runs appear; they may come, die and be resumed.

    A file that is being replaced at this moment may not be readable: what was read before
    is shown until the next look.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        private: bool = False,
        ledgers: Sequence[str | Path] = (),
    ) -> None:
        self.paths = [Path(path) for path in paths]
        self.ledgers = [Path(path) for path in ledgers]
        self.private = private
        named = [path.name or str(path) for path in (*self.paths, *self.ledgers)]
        super().__init__(f"Watching {', '.join(named)}")

    def _folders(self) -> list[Path]:
        try:
            begun = [p for p in self.paths if (p / "config.toml").exists() or runs_inside(p)]
            return find_runs(begun)
        except FedquiltError:
            return []

    def stamp(self) -> Stamp:
        """Return size and time of every file that a round touches, and who is at work."""
        folders = self._folders()
        ledgers = [stamp for path in self.ledgers for stamp in _ledger_stamp(path)]
        alive = [_is_alive(folder) for folder in folders]
        files = [_stamp(folder / name) for folder in folders for name in _FILES]
        return *files, *ledgers, *alive

    def data(self) -> dict[str, Any]:
        """Return the runs as they stand."""
        try:
            return super().data()
        except (FedquiltError, OSError):
            last = self._last
            return self._compared(None) if last is None else last[1]

    def _compared(self, view: dict[str, Any] | None) -> dict[str, Any]:
        return with_comparison(view or empty_view(private=self.private))

    def _read(self) -> dict[str, Any]:
        folders = self._folders()
        view = page_view(folders, private=self.private, look=False) if folders else None
        data = self._compared(view)
        for run, folder in zip(data["runs"], folders, strict=True):
            run |= {"alive": _is_alive(folder), "touched": _touched(folder)}
            if run["resume"]:  # who watches sits at this machine
                config = RunFolder.open(folder).read_config()
                run["resume"] = resume_command(config, str(folder))
        data["ledgers"] = [_populations(path) for path in self.ledgers]
        return data


class LedgerSource(Source):
    """A ledger, for its operator."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        super().__init__(f"Ledger {self.path.name}")

    def stamp(self) -> Stamp:
        """Return size and time of the file and of the journal beside it."""
        return _ledger_stamp(self.path)

    def _read(self) -> dict[str, Any]:
        return ledger_view(self.path)

    def questions(self) -> Mapping[str, Callable[[Mapping[str, str]], dict[str, Any]]]:
        """A client's history, and what a planned run would cost."""
        return {"history": self._history, "plan": self._plan}

    def _history(self, asked: Mapping[str, str]) -> dict[str, Any]:
        with self._lock:
            return client_history(
                self.path, _text(asked, "population"), _number(asked, "client", int)
            )

    def _plan(self, asked: Mapping[str, str]) -> dict[str, Any]:
        with self._lock:
            return planned_cost(
                self.path, _text(asked, "population"), _number(asked, "epsilon", float)
            )


def source_of(paths: Sequence[str], *, private: bool = False) -> Source:
    """Return what paths mean: runs, with ledgers beside them, or one ledger alone."""
    ledgers = [path for path in paths if Path(path).is_file() and is_ledger(Path(path))]
    runs = [path for path in paths if path not in ledgers]
    wrong = [path for path in runs if not Path(path).is_dir()]
    if wrong or not paths:
        listed = ", ".join(repr(path) for path in wrong) or "nothing"
        raise InvalidValueError(f"{listed} must be a ledger, or a folder of runs")
    if runs:
        return RunsSource(runs, private=private, ledgers=ledgers)
    if len(ledgers) > 1:
        raise InvalidValueError("of ledgers without runs one must be watched at a time")
    return LedgerSource(ledgers[0])


def _populations(path: Path) -> dict[str, Any]:
    """Return the populations of a ledger at a glance: nobody by name, and no client alone."""
    ledger = ledger_view(path)["ledger"]
    found = [
        {key: value for key, value in one.items() if not isinstance(value, list | dict)}
        for one in ledger["populations"]
    ]
    return {**ledger, "populations": found}


def _is_alive(folder: Path) -> bool | None:
    """Tell whether a process works on a run that has not ended; None where that is not known.

    It holds the folder's lock (`RunFolder`).  Where the kernel lists no such lock, the lock is
    tried, shared and for a moment: a run that is at work elsewhere, on the same disk, refuses it.
    """
    if (folder / "result.json").exists():
        return None
    try:
        number = str((folder / ".lock").stat().st_ino)
        with contextlib.suppress(OSError):
            held = Path("/proc/locks").read_text().splitlines()
            if any(line.split()[5].endswith(f":{number}") for line in held if "->" not in line):
                return True
        import fcntl

        with (folder / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except (ImportError, OSError, IndexError):
        return None


def _touched(folder: Path) -> float | None:
    """Return when a file of the run last changed, in seconds since 1970."""
    stamps = [_stamp(folder / name) for name in _FILES]
    return max((stamp[1] / 1e9 for stamp in stamps if stamp is not None), default=None)


def _ledger_stamp(path: Path) -> Stamp:
    return _stamp(path), _stamp(path.with_name(f"{path.name}-journal"))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _text(asked: Mapping[str, str], name: str) -> str:
    if name not in asked:
        raise InvalidValueError(f"{name} must be given")
    return asked[name]


def _number(asked: Mapping[str, str], name: str, kind: type[N]) -> N:
    given = _text(asked, name)
    try:
        return kind(given)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InvalidValueError(f"{name}={given!r:.40} must be {what}") from None
