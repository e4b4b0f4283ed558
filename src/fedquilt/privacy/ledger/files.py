"""The ledger's file: its tables, its durability and its rights.

Durability: a rollback journal (DELETE) with `synchronous=EXTRA`.  COMMIT returns
after the database, the journal and the folder have been synced, so a settled
charge survives a power cut.  Write-ahead logging would commit a little faster, but
its newest charges live in a second file: a copy of the ledger alone would then be
an older ledger, which is the one thing a ledger must not become, and it cannot be
opened from a read-only archive or shared over a network folder.

Rights: a new file is readable and writable by its owner only (0600).  Under
zero-out adjacency participation and charges are public, so it may be published,
but publishing is the owner's decision (`export`), and whoever can write to the
file can rewrite it.  Change the mode at will; it is not touched again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from fedquilt.common.errors import (
    LedgerBusyError,
    LedgerCorruptError,
    LedgerError,
    LedgerFileError,
)
from fedquilt.common.storage import check_regular, has_locks
from fedquilt.privacy.ledger.beside import appear, check_journal, drafting, no_locks
from fedquilt.privacy.ledger.entries import COLUMNS, GENESIS, LEDGER, Entry

SCHEMA_VERSION = 2
"""2 since populations may have members and an adjacency; 1 is read and continued."""

_APPLICATION_ID = 0x46514C31  # "FQL1": marks the file as ours in its SQLite header
_BESIDE = ("-journal", "-wal", "-shm")  # what SQLite opens by name, as a file's header asks

_TABLES = (
    "CREATE TABLE entries (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, time TEXT NOT NULL, "
    "population INTEGER, run INTEGER, round INTEGER, reservation INTEGER, name TEXT, "
    "digest TEXT, body TEXT, hash BLOB NOT NULL, clients BLOB, charges BLOB)",
    "CREATE INDEX entries_by_population ON entries (population, seq)",
    "CREATE INDEX entries_by_run ON entries (run, kind, round)",
    "CREATE UNIQUE INDEX entries_by_name ON entries (kind, name) WHERE name IS NOT NULL",
    "CREATE TABLE head (id INTEGER PRIMARY KEY CHECK (id = 1), seq INTEGER NOT NULL, "
    "hash BLOB NOT NULL)",
    "CREATE TABLE snapshots (population INTEGER PRIMARY KEY, seq INTEGER NOT NULL, "
    "spent BLOB NOT NULL, joins BLOB NOT NULL, last_entry BLOB NOT NULL, open TEXT NOT NULL)",
)


def insert_entry(connection: sqlite3.Connection, entry: Entry, previous: bytes) -> bytes:
    """Write `entry` and move the head to it; return its hash."""
    places = ", ".join("?" * (len(COLUMNS) + 1))
    digest = entry.chained(previous)
    connection.execute(
        f"INSERT INTO entries ({', '.join(COLUMNS)}, hash) VALUES ({places})",
        (*entry.values(), digest),
    )
    connection.execute("REPLACE INTO head VALUES (1, ?, ?)", (entry.seq, digest))
    return digest


def is_ledger(path: Path) -> bool:
    """Tell whether a file is a fedquilt ledger, whole or not."""
    try:
        # Only the header is asked for: a lock, or a journal left by a kill, does not matter.
        uri = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            row = connection.execute("PRAGMA application_id").fetchone()
            return bool(row is not None and row[0] == _APPLICATION_ID)
    except sqlite3.Error:
        return False


def create_file(path: Path, time: str) -> None:
    """Make an empty ledger at `path`; when somebody else was faster, leave theirs."""
    if not path.parent.is_dir():
        raise LedgerFileError(f"ledger {path}: the folder {path.parent} does not exist")
    with translated(path), drafting(path) as draft:
        if os.path.lexists(path):
            return
        _fill(draft, Entry(1, LEDGER, time, digest=secrets.token_hex(16)))
        with contextlib.suppress(FileExistsError):
            appear(draft, path)


def _fill(draft: Path, first: Entry) -> None:
    with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
        _make_durable(connection)
        connection.execute("BEGIN EXCLUSIVE")
        for statement in _TABLES:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        insert_entry(connection, first, GENESIS)
        connection.execute("COMMIT")


def copy_content(source: sqlite3.Connection, path: Path) -> None:
    """Copy what an open ledger holds into the empty file at `path`, durably."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        _make_durable(connection)
        source.backup(connection)


def connect(path: Path, *, read_only: bool, timeout: float) -> sqlite3.Connection:
    """Open the ledger at `path`, or say why it cannot be used; nothing is ever created.

    The file is not read but through SQLite: closing any other handle on it would
    drop the locks this process may hold on it (POSIX).
    """
    with translated(path):
        _check_path(path, read_only=read_only)
    if not read_only:
        check_journal(path)
    mode = "ro" if read_only else "rw"
    uri = f"file:{quote(str(path.absolute()))}?mode={mode}"
    with translated(path):
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=timeout)
        try:
            _check_content(connection, path)
            if not read_only:
                _make_durable(connection)
                connection.execute("BEGIN IMMEDIATE")  # refused here when read-only
                connection.execute("ROLLBACK")
        except BaseException:
            connection.close()
            raise
    return connection


def _check_path(path: Path, *, read_only: bool) -> None:
    if path.is_dir():
        raise LedgerFileError(f"ledger {path} is a folder; a ledger is one file")
    if not path.exists():
        raise LedgerFileError(f"ledger {path} does not exist; a run with that ledger makes it")
    if path.stat().st_size == 0:
        raise LedgerCorruptError(f"ledger {path} is an empty file, not a ledger")
    own = path.resolve()
    for end in _BESIDE:
        check_regular(own.with_name(own.name + end))  # SQLite would wait for a pipe
    if read_only:
        return
    for place, what in ((path, "the file"), (own.parent, "its folder")):
        if not os.access(place, os.W_OK):
            raise LedgerFileError(
                f"ledger {path}: {what} is read-only; charges could not be written "
                "(it can be opened for reading only)"
            )


def _check_content(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA trusted_schema = OFF")
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != _APPLICATION_ID:
        raise LedgerFileError(f"ledger {path} is a SQLite file, but not a fedquilt ledger")
    if version > SCHEMA_VERSION:
        raise LedgerFileError(
            f"ledger {path} has schema version {version}; this fedquilt reads up to "
            f"{SCHEMA_VERSION}. Use the fedquilt that wrote it, or a newer one"
        )
    found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
    if sorted(row[0] for row in found) != sorted(_TABLES):
        raise LedgerCorruptError(f"ledger {path}: its tables were altered")


def _make_durable(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("PRAGMA synchronous = EXTRA")
    connection.execute("PRAGMA fullfsync = ON")  # macOS: reach the disk, not its cache


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what SQLite and the system raise into a `LedgerError` that says what to do."""
    try:
        yield
    except LedgerError:
        raise
    except sqlite3.Error as error:
        raise _in_words(path, error) from error
    except UnicodeDecodeError as error:  # a text of the file is none
        raise LedgerCorruptError(f"ledger {path} is damaged: {error.reason}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise LedgerFileError(f"ledger {path} cannot be used: {reason}") from error


_LOCK_FAILED = ("SQLITE_IOERR_LOCK", "SQLITE_IOERR_RDLOCK", "SQLITE_IOERR_CHECKRESERVEDLOCK")


def _has_locks(folder: Path) -> bool:
    """SQLite takes "no locks available" for a lock of somebody else, and waits."""
    try:
        return has_locks(folder)
    except OSError:  # nothing can be tried there
        return True


def _in_words(path: Path, error: sqlite3.Error) -> LedgerError:
    name: str = getattr(error, "sqlite_errorname", "")
    if name in _LOCK_FAILED or (name == "SQLITE_BUSY" and not _has_locks(path.parent)):
        return no_locks(path)
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return LedgerBusyError(
            f"ledger {path} was locked by another process for too long; nothing was "
            "recorded. Try again, or open it with a longer timeout"
        )
    if name in ("SQLITE_READONLY_ROLLBACK", "SQLITE_READONLY_RECOVERY"):
        return LedgerFileError(
            f"ledger {path} was left in the middle of a write; open it once for writing to mend it"
        )
    if name.startswith("SQLITE_READONLY"):
        return LedgerFileError(f"ledger {path} is read-only; nothing was recorded")
    if name == "SQLITE_FULL":
        return LedgerFileError(f"ledger {path}: the disk is full; nothing was recorded")
    if name == "SQLITE_NOTADB":
        return LedgerCorruptError(f"ledger {path} is not a ledger: {error}")
    if name.startswith("SQLITE_CORRUPT") or name == "SQLITE_ERROR" or "decode" in str(error):
        return LedgerCorruptError(f"ledger {path} is damaged: {error}")
    if isinstance(error, sqlite3.ProgrammingError) and "thread" in str(error):
        return LedgerError(f"ledger {path} belongs to the thread that opened it; open it there")
    return LedgerFileError(f"ledger {path} cannot be used: {error}")
