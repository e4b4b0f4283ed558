"""The ledger's file: its tables, its durability and its rights; what lies beside it.

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

Ledgers are built under another name and appear under their own in one step.  A crash or a full
disk must leave no half a ledger behind, and of several processes that make one ledger at once
exactly one must win.  Whoever builds holds a lock beside the ledger,

    .ledger.sqlite.new-lock     held while somebody builds
    .ledger.sqlite.new          what is built, with SQLite's journal

so the next one knows that a draft without a holder was left by a kill, and removes it.  A hard
link gives the draft its name and never replaces a file.  FAT, exFAT, SMB and many FUSE mounts
have no hard links: there it is renamed, which would replace a ledger that has just appeared,
and the lock keeps everybody else from making one.

After a kill in the middle of a write `<ledger>-journal` holds the pages as they were, and whoever
opens the ledger next lets SQLite put them back.  SQLite knows a journal by its name only.  When
the ledger was taken elsewhere without its journal, used there and put back, or when another
ledger has got its place, those pages are put into a file that they are not of, and charges are
lost.  So what SQLite would do is tried here on a copy in memory first.  A journal is another's if

* the ledger has seen more transactions since than the one that the journal undoes: the journal
  has the first page as it was, and a counter on it grows by one with every transaction,
* it is of a ledger of more pages, or is itself longer than all pages of this one could make it:
  a ledger never shrinks,
* the ledger that would come out is not whole, or began with another entry.

A journal that is in use by a running process passes: at every moment it is what a kill at that
moment would leave.  Between reading the one file and the other it may change, so it is
another's only when both were found twice the same.

The format is that of "SQLite Database File Format", section 3 (sqlite.org/fileformat2.html).

Two files beside it are for its owner alone: names of clients, and notes on its entries.  A client's
account is its id, which stands in the ledger's chain: for a Flower node the fingerprint of its
first key, or a seat.  A name is how it is shown and asked for.  So names are no part of the chain:
a new name, or a new key, changes no entry, and an old ledger gets names by the next run on a
roster.  `LEDGER.names.json`: {id: name}.

`LEDGER.notes.jsonl` is what an account's owner was told with each entry.  The SHA-256 of a line is
the digest of its entry, so the chain of the account holds the lines as well: one that is changed
belongs to no entry.  A site writes down so in which of the server's runs a reply was sent, and the
hash of the model that it had received.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import itertools
import json
import os
import secrets
import sqlite3
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedquilt.common import storage
from fedquilt.common.errors import (
    FedquiltError,
    LedgerBusyError,
    LedgerCorruptError,
    LedgerError,
    LedgerFileError,
)
from fedquilt.common.schema import ANY_TEXT, COUNT, TEXT, MapOf, Object, check
from fedquilt.common.untrusted import parse_json, read_json, read_lines
from fedquilt.privacy.ledger.entries import COLUMNS, GENESIS, LEDGER, Entry, read_row

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
        storage.check_regular(own.with_name(own.name + end))  # SQLite would wait for a pipe
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
        return storage.has_locks(folder)
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


_MAGIC = bytes.fromhex("d9d505f920a163d7")
_HEADER = struct.Struct(">8sIIIII")  # magic, records, nonce, pages before, sector, page size
_END = struct.Struct(">II8s")
_BY_SIZE = 0xFFFFFFFF  # the number of records follows from the size of the file
_COUNTER = slice(24, 28)  # of the first page: the transactions so far
_CHECKED = 1000  # newest entries; a page of another ledger breaks the chain among them
_TRIES, _PAUSE_SECONDS = 10, 0.05
_SPARE_BYTES = 1 << 20  # a journal has each page once, and headers between them

# Closing a handle on a file drops the locks that SQLite holds on it for this process
# (POSIX), so these are kept: one for each ledger that was ever found beside a journal.
_handles: dict[tuple[int, int], int] = {}


def check_journal(path: Path) -> None:
    """Refuse a ledger beside a journal that is not its own; nothing is changed."""
    path = path.resolve()  # SQLite follows links, and looks for the journal there
    journal = path.with_name(f"{path.name}-journal")
    before = None
    _check_alone(path, journal)
    for _ in range(_TRIES):
        found = _read(path, journal)
        if found is None or not (problem := _problem(*found)):
            return
        if found == before:
            raise _not_its_own(path, journal, problem)
        before = found
        time.sleep(_PAUSE_SECONDS)


def _check_alone(path: Path, journal: Path) -> None:
    """Refuse a journal that ends with the name of a file, which SQLite would read and delete.

    So end journals of transactions over several files, which a ledger never has: length of the
    name, its checksum, and the mark of a journal again.
    """
    try:
        with open(storage.open_regular(journal, os.O_RDONLY), "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _END.size))
            end = stream.read(_END.size)
    except OSError:  # there is none; what else is wrong is said by who uses it
        return
    if len(end) == _END.size and _END.unpack(end)[0] and end.endswith(_MAGIC):
        raise LedgerFileError(
            f"{journal} lies beside ledger {path} and is not its own (it names another file, which "
            "SQLite would delete): move it away; nothing was changed"
        )


def _not_its_own(path: Path, journal: Path, problem: str) -> LedgerFileError:
    return LedgerFileError(
        f"{journal} lies beside ledger {path} and is not its own ({problem}): SQLite would "
        "put pages of another ledger, or of an older state, into it, and charges would be "
        "lost. Put the ledger back that it was left by, or, when you know that this one is "
        "the newest, move the journal away; nothing was changed"
    )


def _read(path: Path, journal: Path) -> tuple[bytes, bytes] | None:
    """Return the bytes of a ledger and its journal; None without one that SQLite would use."""
    try:
        with open(storage.open_regular(journal, os.O_RDONLY), "rb") as stream:
            length = os.fstat(stream.fileno()).st_size
            status = path.stat()  # later: a ledger that is being written has only grown
            if length > 2 * status.st_size + _SPARE_BYTES:
                raise _not_its_own(path, journal, f"its {length} bytes are more than it can have")
            pages = stream.read(length)
        if not pages.startswith(_MAGIC) or length < _HEADER.size:
            return None
        key = (status.st_dev, status.st_ino)
        if key not in _handles:
            _handles[key] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(_handles[key], os.fstat(_handles[key]).st_size, 0), pages
    except FedquiltError:
        raise
    except OSError:  # gone again, or SQLite says what is wrong
        return None


def _problem(database: bytes, journal: bytes) -> str:
    """Return why a journal is not this ledger's, "" when nothing speaks against it."""
    _, _, _, pages, _, size = _HEADER.unpack_from(journal)
    if pages * size > len(database):
        return f"it is of a ledger of {pages * size} bytes, and this one has {len(database)}"
    restored = bytearray(database)
    for number, page in _records(journal):
        if number > pages:  # made by the transaction that is undone
            continue
        start = (number - 1) * len(page)
        if number == 1:
            passed = _number(database[_COUNTER]) - _number(page[_COUNTER])
            if passed not in (0, 1):
                return f"{passed} transactions lie between them"
        restored[start : start + len(page)] = page
    del restored[pages * size :]
    first, problem = _first_entry(bytes(restored))
    there, _ = _first_entry(database)
    if not problem and there is not None and there != first:
        problem = "it is of another ledger"
    return problem


def _number(field: bytes) -> int:
    return int.from_bytes(field, "big")


def _records(journal: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers and old contents of pages, as SQLite reads them after a kill."""
    place = 0
    _, _, _, _, sector, size = _HEADER.unpack_from(journal)  # those of later headers do not count
    if not 512 <= size <= 65536 or not 32 <= sector <= 65536:
        return
    while place + _HEADER.size <= len(journal):
        magic, count, nonce, *_ = _HEADER.unpack_from(journal, place)
        if magic != _MAGIC:
            return
        place += sector
        left = (len(journal) - place) // (size + 8)
        for _ in range(left if count == _BY_SIZE else min(count, left)):
            page = journal[place + 4 : place + 4 + size]
            check = nonce + sum(page[at] for at in range(size - 200, 0, -200))
            if check & 0xFFFFFFFF != _number(journal[place + 4 + size : place + 8 + size]):
                return
            if not (number := _number(journal[place : place + 4])):
                return
            yield number, page
            place += size + 8
        place = -(-place // sector) * sector


def _first_entry(content: bytes) -> tuple[bytes | None, str]:
    """Return the hash of a ledger's first entry, None if unreadable, and what is wrong."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.deserialize(content)
            found = connection.execute("SELECT hash FROM entries WHERE seq = 1").fetchone()
            first = found[0] if found else None
            return first, _chain_problem(connection)
        except (sqlite3.Error, OverflowError, TypeError, IndexError) as error:
            return None, f"what would come out is damaged: {error}"


def _chain_problem(connection: sqlite3.Connection) -> str:
    query = f"SELECT {', '.join(COLUMNS)}, hash FROM entries ORDER BY seq DESC LIMIT ?"
    rows = connection.execute(query, (_CHECKED,)).fetchall()[::-1]
    for last, row in itertools.pairwise(rows):
        if read_row(row, last[0], last[-1])[1]:
            return "what would come out is not whole"
    head = connection.execute("SELECT seq, hash FROM head").fetchone()
    if not rows or head != (rows[-1][0], rows[-1][-1]):
        return "what would come out is not whole"
    intact = connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
    return "" if intact else "what would come out is damaged"


_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_FOREIGN_SECONDS = 24 * 3600.0  # older versions named drafts at random and held no lock


def no_locks(path: Path) -> LedgerFileError:
    """Return the error about a ledger where files cannot be locked."""
    return LedgerFileError(
        f"ledger {path}: {storage.NO_LOCKS}; without locks two runs could spend the same "
        "allowance. Put the ledger where there are some: ledger=... (--ledger FILE), or "
        "output_dir=... (--output-dir FOLDER) for a run with a ledger of its own"
    )


@contextlib.contextmanager
def drafting(path: Path, timeout: float = 30.0) -> Iterator[Path]:
    """Yield an empty file in which to build the ledger of `path`, for its owner only.

    Nobody else builds there meanwhile; nothing of the draft is left afterwards.
    """
    with _alone(path, timeout):
        _remove_drafts(path)
        draft = path.with_name(f".{path.name}.new")
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        try:
            yield draft
        finally:
            _remove_drafts(path)


def appear(draft: Path, path: Path) -> None:
    """Give a draft its name, durably; `FileExistsError` when the name is taken."""
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS or os.path.lexists(path):
            raise
        os.rename(draft, path)
    storage.sync_folder(path.parent)


def remove_drafts(path: Path) -> None:
    """Remove what a killed process left of building `path`, unless somebody builds it now."""
    if not _beside(path):
        return
    # In nobody's way: a ledger can be used beside it.
    with contextlib.suppress(OSError, LedgerBusyError, LedgerFileError), _alone(path, 0.0):
        _remove_drafts(path)


def _beside(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f".{glob.escape(path.name)}*.new*"))


def _remove_drafts(path: Path) -> None:
    ours = f".{path.name}.new"
    for file in _beside(path):
        if file.name in (ours, f"{ours}-journal") or _is_foreign(file, f"{ours}-lock"):
            file.unlink(missing_ok=True)


def _is_foreign(file: Path, lock: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return file.name != lock and time.time() - file.stat().st_mtime > _FOREIGN_SECONDS
    return False


@contextlib.contextmanager
def _alone(path: Path, timeout: float) -> Iterator[None]:
    """Hold the right to build `path`; the lock's file is removed by its holder only."""
    lock = path.with_name(f".{path.name}.new-lock")
    held = _hold(path, lock, time.monotonic() + timeout)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
        held.close()


def _hold(path: Path, lock: Path, deadline: float) -> io.FileIO:
    while True:
        try:
            held = storage.lock_file(lock, 0o600)
        except storage.NoLocksError as error:
            lock.unlink(missing_ok=True)  # nobody can hold it
            raise no_locks(path) from error
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise LedgerBusyError(
                    f"ledger {path} is being made by another process for too long. Try again"
                ) from None
            time.sleep(0.01)
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(held.fileno()), lock.lstat()):
                return held
        held.close()  # its last holder has removed it in between


_NAMES = MapOf(TEXT)
_MOST_BYTES = 1 << 26


def names_path(ledger: str | Path) -> Path:
    """Return where the names of a ledger's clients are."""
    return Path(f"{ledger}.names.json")


def read_names(ledger: str | Path) -> dict[str, str]:
    """Return the names of clients by their ids; nothing where nobody has a name."""
    path = names_path(ledger)
    if not path.exists():
        return {}
    record: dict[str, str] = read_json(path, LedgerFileError, _MOST_BYTES)
    check(record, _NAMES, path, LedgerFileError)
    return record


def write_names(ledger: str | Path, names: Mapping[str, str]) -> None:
    """Keep the names of clients; of those who are not named here, the earlier ones."""
    known = read_names(ledger)
    merged = {**known, **names}
    if merged != known:
        text = json.dumps(merged, indent=1, sort_keys=True) + "\n"
        storage.write_file(names_path(ledger), text.encode(), 0o600)


def id_of(names: Mapping[str, str], client: str) -> str:
    """Return the id of a client that is given by its name, or by its id; an id comes first.

    A name that two ids have is nobody's.
    """
    found = [value for value, name in names.items() if name == client]
    return client if client in names or len(found) != 1 else found[0]


_NOTE = Object({"run": ANY_TEXT, "round": COUNT, "received": ANY_TEXT, "reply": ANY_TEXT})


def notes_path(ledger: Path) -> Path:
    """Return where the notes of a ledger are."""
    return ledger.with_name(ledger.name + ".notes.jsonl")


def add_note(ledger: Path, note: Mapping[str, Any]) -> str:
    """Write down what belongs to an entry that is to come, durable; return its digest."""
    line = json.dumps(note, sort_keys=True)
    storage.append_line(notes_path(ledger), line, 0o600)
    storage.sync_file(notes_path(ledger))
    return hashlib.sha256(line.encode()).hexdigest()


def read_notes(ledger: Path) -> dict[str, dict[str, Any]]:
    """Return the notes of a ledger by the digests of their entries."""
    return notes_in(notes_path(ledger))


def notes_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return the notes in a file."""
    found = {}
    for line in read_lines(path, LedgerFileError):
        plain = line.rstrip(b"\n")
        note = parse_json(plain, path, LedgerFileError)
        check(note, _NOTE, path, LedgerFileError)
        found[hashlib.sha256(plain).hexdigest()] = note
    return found
