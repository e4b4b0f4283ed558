"""The package's logger, and where its records go: console, file, HTTP server.

Importing adds no handler and changes no level, as a library should: until
`configure` is called, records go where the application's own logging sends them.

>>> from fedquilt.log import configure, log, logger, reset
>>> logger.name
'fedquilt'
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import TextIO

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError, StorageError
from fedquilt.observe.delivery import CLOSE_SECONDS, Address, Delivery, post_fields

__all__ = ["configure", "log", "logger", "reset"]

FORMAT = "%(levelname)s %(name)s %(asctime)s | %(filename)s:%(lineno)d | %(message)s"

logger = logging.getLogger("fedquilt")
log = logger.log

_lock = threading.Lock()
_handlers: list[logging.Handler] = []
_before: list[tuple[int, bool]] = []  # level and propagation before the first `configure`


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever standard output is when a record comes."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Standard output as it is now, also when it was redirected since."""
        return sys.stdout


class HttpHandler(logging.Handler):
    """Posts records to a server without making the program wait for it."""

    def __init__(self, address: Address, identifier: str, *, simple: bool) -> None:
        super().__init__()
        self._identifier = identifier
        self._simple = simple
        self._delivery = Delivery(address, _report)
        self._closed_before = False

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record."""
        try:
            self._delivery.put(*post_fields(record, self._identifier, simple=self._simple))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Deliver what waits, for at most two seconds, and say what could not be."""
        self._delivery.close(CLOSE_SECONDS)
        lost = self._delivery.undelivered
        # logging closes every handler once more when the interpreter ends.
        if lost and not self._closed_before:
            address, reason = self._delivery.address, self._delivery.last_error
            _report(f"{lost} log records were not delivered to {address}: {reason}")
        self._closed_before = True
        super().close()


def _report(text: str) -> None:
    """Report trouble of the logging itself where logging's own trouble goes."""
    if logging.raiseExceptions and sys.stderr is not None:
        print(f"fedquilt.log: {text}", file=sys.stderr)


def configure(
    identifier: str,
    file: str | os.PathLike[str] | None = None,
    host: str | None = None,
    simple: bool | None = None,
    *,
    level: int | str = logging.DEBUG,
    console: bool = True,
) -> None:
    """Send the package's records to the console, a file and an HTTP server.

    A second call replaces what the first one set up.  From then on the records go
    to these places and nowhere else: they are not handed to the root logger too,
    so no line appears twice.  `reset` undoes everything.

    Parameters
    ----------
    identifier : str
        Who writes, for instance "client-A"; stands before every line.
    file : path, optional
        Lines are appended to this file; its folder is made when missing.
    host : str, optional
        Records are posted to this server, "127.0.0.1:5000".  The program never
        waits for it.
    simple : bool, optional
        True posts only the message, to `/simple_log`; else the whole record, to
        `/log`.  Means nothing without `host`.
    level : int or str
        The lowest level that is written.
    console : bool
        Whether to write to standard output.
    """
    _check(identifier, file, simple, level, console)
    if simple is not None and host is None:
        warnings.warn(f"simple={simple} means nothing without host", UserWarning, stacklevel=2)
    address = None if host is None else Address.parse(host)
    handlers: list[logging.Handler] = [ConsoleHandler()] if console else []
    if file is not None:
        handlers.append(_file_handler(Path(file)))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(f"{identifier.replace('%', '%%')} | {FORMAT}"))
    if address is not None:
        handlers.append(HttpHandler(address, identifier, simple=bool(simple)))
    with _lock:
        if not _before:
            _before.append((logger.level, logger.propagate))
        _replace(handlers)
        logger.setLevel(level)
        logger.propagate = False


def reset() -> None:
    """Take back what `configure` did; files are closed, waiting records delivered."""
    with _lock:
        _replace([])
        if _before:
            level, logger.propagate = _before.pop()
            logger.setLevel(level)


def _replace(handlers: list[logging.Handler]) -> None:
    old, _handlers[:] = list(_handlers), handlers
    for handler in handlers:
        logger.addHandler(handler)
    for handler in old:
        logger.removeHandler(handler)
        handler.close()


def _file_handler(file: Path) -> logging.FileHandler:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"file={str(file)!r} cannot be written: {error}") from error


def _check(
    identifier: object, file: object, simple: object, level: object, console: object
) -> None:
    checks.text("identifier", identifier)
    if file is not None:
        checks.path("file", file)
    if simple is not None:
        checks.flag("simple", simple)
    checks.flag("console", console)
    known = isinstance(level, str) and level in logging.getLevelNamesMapping()
    if not known and (isinstance(level, bool) or not isinstance(level, int)):
        raise InvalidValueError(f"level={level!r} must be a level of the module logging")
