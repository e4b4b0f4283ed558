"""The audit log of a federation: who started, stopped, enrolled, revoked, and who was refused.

One line of JSON an event, for its owner alone.  Each line has the hash of the line before it, so
that a line that was changed or taken out is found (`broken`); one that was cut off at the end is
found by whoever has kept a later line's hash.  There is no secret in the chain: whoever may write
the file can compute all of it anew, which only a hash that others have kept shows.  A long log is
continued in a new file, whose first line has the hash of the last one of `audit.jsonl.NUMBER`.

| file | what stands in it |
|---|---|
| `audit.jsonl` by a roster | `up`, `down`, `enrolled`, `joined`, `left`, `rotated`, `revoked` ... |
| the same by results | `started`, `resumed`, `finished`, `failed`, `stop`, `stopped`, `refused` |

Refusals name their client and their reason, as `nodes.jsonl` does: the log is as private.

Other logs grow: they are cut while their writers have them open, and followed over the cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import hashlib
import io
import json
import logging
import os
import pwd
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedquilt.common.errors import DataError, FedquiltError
from fedquilt.common.formatting import printable
from fedquilt.common.schema import Object
from fedquilt.common.storage import (
    append_line,
    check_regular,
    lock_file,
    open_regular,
    storage_errors,
    sync_file,
    write_file,
)
from fedquilt.common.untrusted import parse_json, read_lines, records
from fedquilt.flower.run_notes import StoppedError

log = logging.getLogger(__name__)

FILE = "audit.jsonl"
_FIRST = "0" * 64
_LONGEST = 1 << 16
_LARGEST = 1 << 24
_PATIENCE_SECONDS = 5.0
_NO_LOGIN = 2**32 - 1  # of a process that nobody's login began


def note(folder: str | Path, event: str, **facts: Any) -> None:
    """Add an event to the audit log of a folder; one that cannot be written ends nothing."""
    path = Path(folder) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with storage_errors(path), _locked(path.with_suffix(".lock")):
            before = _last_line(path)
            if before is not None and path.stat().st_size > _LARGEST:
                path.rename(f"{path}.{len(_parts(folder))}")
            record = {
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "by": _user(),
                "event": event,
                **{name: _plain(value) for name, value in facts.items()},
                "previous": _FIRST if before is None else _hash(before),
            }
            append_line(path, json.dumps(record, allow_nan=False), 0o600)
            sync_file(path)
    except (FedquiltError, OSError) as error:
        log.error("the audit log lacks %r: %s", event, printable(error))


@contextlib.contextmanager
def noting(folder: str | Path, event: str, run: int, **facts: Any) -> Iterator[None]:
    """Note that a run begins, and how it ended; `run` is its number at the SuperLink."""
    note(folder, event, run=run, **facts)
    try:
        yield
    except StoppedError as error:
        note(folder, "stopped", run=run, why=str(error))
        raise
    except BaseException as error:
        note(folder, "failed", run=run, why=type(error).__name__)
        raise
    note(folder, "finished", run=run)


def events(folder: str | Path) -> list[dict[str, Any]]:
    """Return the events of a folder's audit log; those that cannot be read are left out."""
    return records(lines_of(folder), Object({}))


def broken(folder: str | Path) -> list[int]:
    """Return the numbers of lines, from 1, that do not follow from the line before them."""
    wanted, found = _FIRST, []
    for number, line in enumerate(lines_of(folder), start=1):
        try:
            told = parse_json(line, FILE)["previous"]
        except (DataError, KeyError, TypeError):
            told = None
        if told != wanted:
            found.append(number)
        wanted = _hash(line)
    return found


def head(folder: str | Path) -> str:
    """Return the hash of the last line: kept elsewhere, it shows that the log was made anew."""
    lines = lines_of(folder)
    return _hash(lines[-1]) if lines else _FIRST


def lines_of(folder: str | Path) -> list[bytes]:
    """Return all lines of a folder's audit log, the oldest first."""
    return [line for path in _parts(folder) if path.exists() for line in read_lines(path)]


def _parts(folder: str | Path) -> list[Path]:
    """Return the files of a log, the one that is written last."""
    path = Path(folder) / FILE
    older = [part for part in path.parent.glob(f"{FILE}.*") if part.suffix[1:].isdecimal()]
    return [*sorted(older, key=lambda part: int(part.suffix[1:])), path]


def _locked(path: Path) -> io.FileIO:
    """Wait for the lock of a log, which others hold for a moment."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return lock_file(path, 0o600)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)


def _last_line(path: Path) -> bytes | None:
    """Return the last line, without the rest of a long file."""
    if not path.exists():
        return None
    check_regular(path)
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _LONGEST))
        lines = stream.read().splitlines()
    return lines[-1] if lines else None


def _hash(line: bytes) -> str:
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def _user() -> str:
    """Return who acts, as the kernel says: the user of this process, and whoever logged in.

    The environment can say anything, so it is not asked: `LOGNAME` and `SUDO_USER` are nobody's
    word.  Behind sudo the login's user stays (`/proc/self/loginuid`), where the system keeps one.
    """
    name = _name_of(os.getuid())
    try:
        login = int(Path("/proc/self/loginuid").read_text())
    except (OSError, ValueError):
        return name
    return name if login in (os.getuid(), _NO_LOGIN) else f"{_name_of(login)} as {name}"


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | bool | None) else printable(value)[:300]


_LOG_BYTES = 1 << 24
_MOST_AT_ONCE = 1 << 26  # of a file that says it is larger
_COLLAPSE_RANGE = 0x08  # of fallocate(2), on Linux


def older_part(path: Path) -> Path:
    """Return where the part of a log is that was cut off last."""
    return path.with_name(path.name + ".1")


def cut_logs(folder: Path, largest: int = _LOG_BYTES) -> None:
    """Begin large logs anew, in place: their writers append, and have them open."""
    for path in folder.glob("*.log"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size > largest:
            _cut(path)


def _cut(path: Path) -> None:
    """Move what a log holds to `older_part`; what is added meanwhile is in one of the two.

    A file system that takes whole blocks off the head of a file (ext4, XFS) does so in one step.
    On others what came in between is copied as well, and then an instant is left in which a line
    can be lost.
    """
    with open(open_regular(path, os.O_RDWR), "r+b", buffering=0) as log:
        size = os.fstat(log.fileno()).st_size
        whole = size - size % os.fstatvfs(log.fileno()).f_bsize
        write_file(older_part(path), log.read(whole), 0o600)
        if whole and _took_off_head(log.fileno(), whole):
            return
        with open(older_part(path), "ab", buffering=0) as kept:
            while rest := log.read():
                kept.write(rest)
            log.truncate(0)


def _took_off_head(handle: int, size: int) -> bool:
    """Let a file begin so many bytes later, whatever is added to it; False where that cannot be."""
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is None:
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(fallocate(handle, _COLLAPSE_RANGE, 0, size) == 0)


class GrowingFile:
    """Whole lines of a file that others add to, each returned once.

    `was_replaced` tells of the last look: the file had been begun anew, and its lines come again.
    """

    def __init__(self, path: Path, last: int | None = None) -> None:
        self.path = path
        self.was_replaced = False
        self._at, self._inode, self._cut = 0, 0, 0
        if last is not None:  # only so many of the lines that are there
            lines = self.new()
            self._at -= sum(map(len, lines[max(0, len(lines) - last) :]))

    def new(self) -> list[bytes]:
        """Return the lines that were added since the last look, also over a cut of `cut_logs`."""
        self.was_replaced = False
        if not self.path.exists():
            return []
        with open(open_regular(self.path, os.O_RDONLY), "rb") as stream:
            older = self._find(os.fstat(stream.fileno()))
            stream.seek(max(0, self._at))
            content = older + stream.read(_MOST_AT_ONCE)
        whole = content[: content.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.splitlines(keepends=True)

    def _find(self, found: os.stat_result) -> bytes:
        """Set where to go on, negative in the part that was cut off; return the rest of that."""
        older = older_part(self.path)
        cut = os.stat(older) if older.exists() else found
        anew = self._inode not in (0, found.st_ino)
        if not self._inode:
            self._cut = cut.st_ino
        elif cut.st_ino != self._cut and found.st_size < cut.st_size and not anew:
            self._at, self._cut = self._at - cut.st_size, cut.st_ino
        elif found.st_size < self._at or anew:
            self._at, self.was_replaced = 0, True
        self._inode = found.st_ino
        return older.read_bytes()[self._at :] if self._at < 0 else b""
