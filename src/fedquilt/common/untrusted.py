"""Files that somebody else may have written: all of them are read here, within limits.

Run folders, ledgers, configurations and data sets are handed around.  What is read from one
may be torn, of another kind, or made to harm: nested a hundred thousand deep, a number of a
million digits, a file without an end.  Here every such file is bounded before it is read and
looked at before it is used, and whatever is wrong with it is one message that names the file.

What the values mean is checked by whoever knows (`schema`); what of them is printed goes
through `printable`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fedquilt.common.errors import DataError, FedquiltError, IrregularFileError
from fedquilt.common.formatting import printable
from fedquilt.common.schema import Schema, fits
from fedquilt.common.storage import check_regular, open_regular, os_reason

JSON_BYTES = 1 << 30
"""The largest record of a run: 20 million joins take a third of it."""

NOTE_BYTES = 1 << 20
"""The largest file that only says where something is."""

TOML_BYTES = 1 << 16
"""The largest configuration: ten times every option, and small enough to be read at once."""

TABLE_BYTES = 1 << 28
"""The largest table of clients (CSV)."""

MOST_DEPTH = 32
"""How deep lists and objects may be nested; no file of fedquilt has more than eight levels."""

MOST_CONTAINERS = 1 << 21
"""How many lists and objects a file may hold: those of 200,000 rounds, or of two million clients.

An empty list is two letters in a file and some seventy bytes in memory, a number four and thirty:
with this limit what is read takes at most about ten times the room of its file.
"""

MOST_DIGITS = 300
"""How long a whole number may be: every such number is also a float."""

PATIENCE_SECONDS = 5.0
"""How long somebody may take before writing the first byte into a pipe."""

MOST_TENSORS = 100_000
LONGEST_NAME = 1_000

_LARGEST = 10**MOST_DIGITS
_CONTAINERS = (dict, list)


def read_bytes(path: Path, most: int, error: type[FedquiltError] = DataError) -> bytes:
    """Return all of a regular file of at most `most` bytes.

    Raises
    ------
    IrregularFileError
        A link, a pipe, a folder or a device lies there.
    error
        It cannot be read, or is larger.
    """
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as stream:
            # One that says it is larger is not read: a file of holes takes room only here.
            small = os.fstat(stream.fileno()).st_size <= most
            content = stream.read(most + 1) if small else None
    except IrregularFileError:
        raise
    except OSError as cause:
        raise error(f"{str(path)!r} cannot be read: {os_reason(cause)}") from cause
    if content is None or len(content) > most:
        raise error(f"{str(path)!r} must be a file of at most {most} bytes; it is larger")
    return content


def read_named(path: str | os.PathLike[str], most: int) -> bytes:
    """Return what is at a path that the user has typed, at most `most` bytes of it.

    Links and pipes are what the user means, as long as somebody writes to the pipe.  Raises
    `OSError` when it cannot be read, and `ValueError` when it is larger or no path at all.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as stream:
        if stat.S_ISFIFO(os.fstat(handle).st_mode):
            if not select.select([handle], [], [], PATIENCE_SECONDS)[0]:
                raise ValueError("it is a pipe that nobody writes to")
            os.set_blocking(handle, True)
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is larger than {most} bytes")
    return content


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(
    text: bytes | str,
    where: object,
    error: type[FedquiltError] = DataError,
    what: str = "a JSON value",
) -> Any:
    """Return the value in a JSON text (UTF-8), within the limits of size, depth and digits.

    `where` is the file, or the place in it, for the message, and `what` must be there.
    """
    try:
        plain = text.decode("utf-8") if isinstance(text, bytes) else text
        _check_containers(plain.count("[") + plain.count("{"))
        content = json.loads(plain, parse_constant=_no_constant)
        check_limits(content)
        if _SURROGATE.search(plain):  # half a character, which no file or digest can take
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as cause:
        raise error(f"{printable(where)} must be {what}: {_reason(cause)}") from cause
    return content


def _check_containers(count: int) -> None:
    if count > MOST_CONTAINERS:
        raise ValueError(f"it holds more than {MOST_CONTAINERS} lists and objects")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _reason(cause: Exception) -> str:
    deep = isinstance(cause, RecursionError)
    return f"it is nested deeper than {MOST_DEPTH}" if deep else printable(cause)[:300]


def check_limits(content: Any) -> None:
    """Raise `ValueError` for a value that is nested too deep or holds too long a number."""
    level, depth = [[content]], 0
    while level:
        if depth > MOST_DEPTH:
            raise ValueError(f"it is nested deeper than {MOST_DEPTH}")
        depth += 1
        inner: list[Any] = []
        for values in level:
            kinds = set(map(type, values))
            if int in kinds:
                whole = values if len(kinds) == 1 else [v for v in values if type(v) is int]
                if max(whole) >= _LARGEST or min(whole) <= -_LARGEST:
                    raise ValueError(f"it holds a number of more than {MOST_DIGITS} digits")
            if kinds & {dict, list}:
                inner += [v for v in values if isinstance(v, _CONTAINERS)]
        level = [list(v.values()) if isinstance(v, dict) else v for v in inner]


def read_json(
    path: Path, error: type[FedquiltError] = DataError, most: int = JSON_BYTES
) -> dict[str, Any]:
    """Return the JSON object in a file, or raise `error` with the name of the file."""
    content = parse_json(read_bytes(path, most, error), path, error, "a JSON object")
    if not isinstance(content, dict):
        raise error(f"{path} must be a JSON object; it is a {type(content).__name__}")
    return content


def read_lines(path: Path, error: type[FedquiltError] = DataError) -> list[bytes]:
    """Return the lines of a file with their ends; none of a file that is not there."""
    check_regular(path)  # also a link to nothing
    if not path.exists():
        return []
    content = read_bytes(path, JSON_BYTES, error)
    try:
        _check_containers(content.count(b"[") + content.count(b"{"))
    except ValueError as cause:
        raise error(f"{printable(path)} must be lines of JSON: {cause}") from cause
    return content.splitlines(keepends=True)


def records(lines: Iterable[bytes], schema: Schema) -> list[dict[str, Any]]:
    """Return lines that are JSON objects of a schema; what is none is left out.

    For whoever looks at a file that another process may be writing.
    """
    found = []
    for line in lines:
        with contextlib.suppress(DataError):
            found.append(parse_json(line, "a line"))
    return [record for record in found if isinstance(record, dict) and fits(schema, record)]


def parse_toml(content: bytes) -> dict[str, Any]:
    """Return the table in a TOML file; `ValueError` says what is wrong with it."""
    try:
        table = tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH}") from None
    check_limits(table)
    return table


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor in a file, as the file states them (`F32`, `I64`, ...)."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorFile:
    """An open file of tensors: what it says of itself, and what it holds."""

    metadata: Mapping[str, str]
    specs: Mapping[str, TensorSpec]
    get: Callable[[str], Any]


@contextlib.contextmanager
def opened_tensors(
    path: Path, wrong: str, error: type[FedquiltError] = DataError, *, framework: str = "pt"
) -> Iterator[TensorFile]:
    """Open a safetensors file: names, types and shapes are known before a tensor is loaded.

    Parameters
    ----------
    path
        The file.
    wrong
        What to say of a file that is none: "is not a checkpoint".
    error
        Raised for whatever is wrong with it.
    framework
        What `get` returns: "pt" tensors of torch, "np" arrays.
    """
    import safetensors

    if not path.is_file():  # the library would wait for a pipe
        raise error(f"{path} {wrong}: it is no file")
    try:
        with safetensors.safe_open(path, framework=framework) as stream:
            names = list(stream.keys())
            long = [name for name in names if len(name) > LONGEST_NAME]
            if len(names) > MOST_TENSORS or long:
                raise error(
                    f"{path} must hold at most {MOST_TENSORS} tensors with names of at most "
                    f"{LONGEST_NAME} characters"
                )
            parts = {name: stream.get_slice(name) for name in names}
            specs = {
                name: TensorSpec(str(part.get_dtype()), tuple(part.get_shape()))
                for name, part in parts.items()
            }
            yield TensorFile(stream.metadata() or {}, specs, stream.get_tensor)
    except (safetensors.SafetensorError, OSError) as cause:
        if isinstance(cause, FedquiltError):
            raise
        raise error(f"{path} {wrong}: {printable(cause)[:300]}") from cause
