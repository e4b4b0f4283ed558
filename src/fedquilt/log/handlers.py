"""The handlers that `configure` puts on the logger."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any, TextIO

from fedquilt.errors import StorageError
from fedquilt.log.address import Address
from fedquilt.log.delivery import Delivery

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
