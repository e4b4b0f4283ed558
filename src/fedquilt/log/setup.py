"""`configure`: one call says where the package's records go."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from fedquilt.errors import InvalidValueError
from fedquilt.log.address import Address
from fedquilt.log.handlers import ConsoleHandler, HttpHandler, PrefixFormatter, file_handler

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
