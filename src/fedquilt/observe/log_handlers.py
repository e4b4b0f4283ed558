"""The package's logger and its handlers."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from fedquilt.common.errors import InvalidValueError, StorageError
from fedquilt.observe.delivery import Address, Delivery

FORMAT = "%(levelname)s %(name)s %(asctime)s | %(filename)s:%(lineno)d | %(message)s"
CLOSE_SECONDS = 2.0


class PrefixFormatter(logging.Formatter):
    """The package's line, with the identifier before it."""

    def __init__(self, identifier: str) -> None:
        super().__init__(FORMAT)
        self._identifier = identifier

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return f"{self._identifier} | {super().format(record)}"


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever standard output is when a record comes."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Standard output as it is now, also when it was redirected since."""
        return sys.stdout


def file_handler(file: Path) -> logging.FileHandler:
    """Open `file` for appending, and make its folder."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"file={str(file)!r} cannot be written: {error}") from error


class HttpHandler(logging.Handler):
    """Posts records to a server without making the program wait for it.

    `simple` sends the message alone to `/simple_log`, otherwise the whole record
    goes to `/log`; both as a url-encoded form with the field `identifier`.
    """

    def __init__(self, address: Address, identifier: str, *, simple: bool) -> None:
        super().__init__()
        self._identifier = identifier
        self._simple = simple
        self.delivery = Delivery(address, _say)
        self._closed_before = False

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record."""
        try:
            if self._simple:
                fields = {"identifier": self._identifier, "message": record.getMessage()}
                self.delivery.put("/simple_log", fields)
            else:
                self.delivery.put("/log", record_fields(record, self._identifier))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Deliver what waits, for at most two seconds, and say what could not be."""
        self.delivery.close(CLOSE_SECONDS)
        lost = self.delivery.undelivered
        # logging closes every handler once more when the interpreter ends.
        if lost and not self._closed_before:
            address, reason = self.delivery.address, self.delivery.last_error
            _say(f"{lost} log records were not delivered to {address}: {reason}")
        self._closed_before = True
        super().close()


def record_fields(record: logging.LogRecord, identifier: str) -> dict[str, Any]:
    """Return a record as form fields, its message and its exception as text."""
    fields = dict(vars(record))
    message = record.getMessage()
    fields.update(identifier=identifier, msg=message, message=message)
    if record.exc_info and not record.exc_text:
        fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
    # The objects behind the text mean nothing on another machine.
    for name in ("args", "exc_info"):
        fields.pop(name, None)
    return fields


def _say(text: str) -> None:
    """Report trouble of the logging itself where logging's own trouble goes."""
    if logging.raiseExceptions and sys.stderr is not None:
        print(f"fedquilt.log: {text}", file=sys.stderr)


logger = logging.getLogger("fedquilt")
log = logger.log


@dataclass
class _Installed:
    """What `configure` put on the logger, and (level, propagate) as they were before."""

    handlers: list[logging.Handler] = field(default_factory=list)
    before: tuple[int, bool] | None = None


_lock = threading.Lock()
_installed = _Installed()


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
        handlers.append(file_handler(Path(file)))
    for handler in handlers:
        handler.setFormatter(PrefixFormatter(identifier))
    if address is not None:
        handlers.append(HttpHandler(address, identifier, simple=bool(simple)))
    with _lock:
        if _installed.before is None:
            _installed.before = (logger.level, logger.propagate)
        _replace(handlers)
        logger.setLevel(level)
        logger.propagate = False


def reset() -> None:
    """Take back what `configure` did; files are closed, waiting records delivered."""
    with _lock:
        _replace([])
        if _installed.before is not None:
            level, logger.propagate = _installed.before
            logger.setLevel(level)
            _installed.before = None


def _replace(handlers: list[logging.Handler]) -> None:
    old, _installed.handlers = _installed.handlers, handlers
    for handler in handlers:
        logger.addHandler(handler)
    for handler in old:
        logger.removeHandler(handler)
        handler.close()


def _check(
    identifier: object, file: object, simple: object, level: object, console: object
) -> None:
    if not isinstance(identifier, str) or not identifier:
        raise InvalidValueError(f"identifier={identifier!r} must be a text that is not empty")
    if file is not None and not isinstance(file, (str, os.PathLike)):
        raise InvalidValueError(f"file={file!r} must be a path")
    if simple is not None and not isinstance(simple, bool):
        raise InvalidValueError(f"simple={simple!r} must be True, False or None")
    if not isinstance(console, bool):
        raise InvalidValueError(f"console={console!r} must be True or False")
    known = isinstance(level, str) and level in logging.getLevelNamesMapping()
    if not known and (isinstance(level, bool) or not isinstance(level, int)):
        raise InvalidValueError(f"level={level!r} must be a level of the module logging")
