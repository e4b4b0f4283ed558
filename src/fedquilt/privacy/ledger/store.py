"""Transactions on the file, the questions asked of its entries, and how far it was checked.

The mark of verification: a long past is hashed once.  Whoever opens a ledger for its
balances hashes every entry first.  That takes about half a second for ten thousand entries
and is always done up to there.  A longer ledger gets a mark when it is closed: the newest
entry that was checked, digests of the snapshots that were found to be what the entries add
up to, and what the file looked like then (inode, size, times of change).  The next one who
opens it believes the mark only while the file looks exactly so; any write by anybody else,
through SQLite or around it, is a reason to hash everything again.  Entries after the mark
are hashed in any case.

The mark lies beside the ledger (`ledger.sqlite.verified`, for its owner only), not in the
user's own folder.  A mark elsewhere would be safer against somebody who may write where
the ledger lies and not in the home of its owner; but the chain carries no secret, so such
a person can rewrite the ledger itself, and only heads kept elsewhere tell.  The mark is
there to save time and not to add protection, and beside the file it is seen, moved and
deleted together with it.  The mark itself is believed: whoever edits the ledger and writes
a mark to match is not found by runs.  What it cannot see is a bit that the disk turned by
itself in an entry that is read no more; `ledger verify` never uses it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedquilt.common.errors import DataError, LedgerCorruptError, LedgerError, StorageError
from fedquilt.common.storage import write_file
from fedquilt.common.untrusted import read_json
from fedquilt.privacy.ledger import entries, files
from fedquilt.privacy.ledger.entries import COLUMNS, FINISH, POPULATION, RESUME, RUN, Entry

_ENTRY = ", ".join(COLUMNS)
# Entries that an older fedquilt would misread: with one of them a file of schema 1 becomes
# one of schema 2, which that one refuses.
_NEWER_KINDS = (POPULATION, entries.MEMBERS)


def now() -> str:
    """Return the time of an entry: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Store:
    """One open connection to a ledger file.

    It belongs to the process and the thread that opened it: a copy made by a fork
    is refused, because two processes must not share one SQLite connection.
    """

    def __init__(self, path: Path, *, read_only: bool, timeout: float) -> None:
        self.path = path
        self.read_only = read_only
        self._connection = files.connect(path, read_only=read_only, timeout=timeout)
        self._file = self._identity()
        self._process = os.getpid()
        self._closed = False
        self._cursors: list[sqlite3.Cursor] = []
        self._checked = (0, entries.GENESIS)
        self._snapshots: dict[int, str] = {}
        self._writes = False
        self._refused = False

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if not self._closed and self._process == os.getpid():
            self._leave_mark()
            self._connection.close()
        self._closed = True

    def check(self) -> None:
        """Refuse a ledger whose entries are not what was written; call it in a transaction.

        The first call hashes every entry, or those after the mark; later
        ones hash what was appended since.  Whether charges keep the rules is for
        `verify`; that nobody changed them is found here.  Entries are found by SQLite's
        indexes, which no hash covers: where everything is hashed, these are compared too.
        """
        seq, previous = self._checked
        if seq and self.hash_of(seq) != previous:
            raise LedgerCorruptError(
                f"ledger {self.path} was rolled back or edited while it was open: entry "
                f"{seq} is not what it was"
            )
        if not seq:
            seq, previous = self._take_mark()
            if not seq:
                self._check_indexes()
            self._check_snapshot_keys()
        head = self.head()
        query = f"SELECT {_ENTRY}, hash FROM entries WHERE seq > ? ORDER BY seq"
        for row in self.select(query, seq):
            _, problems = entries.read_row(row, seq, previous)
            if problems:
                raise self._not_whole(problems[0])
            seq, previous = row[0], row[-1]
        if head != (seq, previous):
            raise self._not_whole("the newest entries are missing: the stored head is another")
        self._checked = (seq, previous)

    def _check_indexes(self) -> None:
        """Refuse a file whose indexes leave entries out, or that is damaged otherwise."""
        found = self.first("PRAGMA integrity_check(1)")
        if found != ("ok",):
            raise self._not_whole(f"the file is damaged: {found[0] if found else 'unreadable'}")

    def _check_snapshot_keys(self) -> None:
        """Refuse balances of what is not a population; entries are looked up by number."""
        found = self.first(
            "SELECT s.population FROM snapshots s WHERE NOT EXISTS "
            "(SELECT 1 FROM entries e WHERE e.seq = s.population AND +e.kind = ?)",
            POPULATION,
        )
        if found is not None:
            raise self._not_whole(f"there are balances of population {found[0]}, which is not one")

    def _not_whole(self, problem: str) -> LedgerCorruptError:
        return LedgerCorruptError(
            f"ledger {self.path} is NOT WHOLE: {problem}. Its balances cannot be trusted and "
            'nothing was recorded; "fedquilt ledger verify" says all that is wrong with it'
        )

    def refuse_snapshot(self, population: int) -> LedgerCorruptError:
        """Return the error about balances in the file that its entries do not add up to."""
        return self._not_whole(
            f"the balances of population {population} are not what its entries add up to"
        )

    def knows_snapshot(self, population: int, row: tuple[Any, ...]) -> bool:
        """Tell whether this row was checked before, here or when the mark was made."""
        return self._snapshots.get(population) == snapshot_digest(row)

    def note_snapshot(self, population: int, row: tuple[Any, ...]) -> None:
        """Remember that this row is what the entries add up to."""
        self._snapshots[population] = snapshot_digest(row)

    def _take_mark(self) -> tuple[int, bytes]:
        """Return how far the ledger was checked before, if that can still be believed."""
        found = read_mark(self.path)
        if found is not None:
            digest = self.hash_of(found.seq)
            if isinstance(digest, bytes) and digest.hex() == found.hash:
                self._snapshots |= found.snapshots
                return found.seq, digest
        return 0, entries.GENESIS

    def _leave_mark(self) -> None:
        """Note how far a long ledger is checked; a reader leaves everything as it is."""
        if self.read_only or self._checked[0] < MARK_FROM or self._connection.in_transaction:
            return
        # Whatever is wrong now is found, and said, by the next one who opens the ledger.
        with contextlib.suppress(LedgerError, OSError), self.reading():
            self.check()
            columns = "population, seq, spent, joins, last_entry, open"
            rows = list(self.select(f"SELECT {columns} FROM snapshots"))
            there = {row[0]: snapshot_digest(row[1:]) for row in rows}
            kept = {key: v for key, v in there.items() if self._snapshots.get(key) == v}
            seq, digest = self._checked
            written = Mark(seq, digest.hex(), looks(self.path), kept)
            write_mark(self.path, written)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Show one consistent state of the file for as long as the block lasts.

        Inside another transaction it is part of that one.
        """
        if not self._closed and self._connection.in_transaction:
            yield
            return
        with self._transaction("BEGIN"):
            yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the only right to write; all of the block reaches the disk, or nothing.

        Inside another such block it is part of that one, which then comes to nothing when
        anything in it was refused.
        """
        if self.read_only:
            raise LedgerError(f"ledger {self.path} was opened for reading only")
        if self._writes:
            try:
                yield
            except BaseException:
                self._refused = True
                raise
            return
        before = self._checked, dict(self._snapshots)
        self._writes, self._refused = True, False
        try:
            with self._transaction("BEGIN IMMEDIATE"):
                yield
                if self._refused:
                    raise LedgerError(
                        f"ledger {self.path}: nothing was recorded, because a part of what was "
                        "to be recorded together was refused"
                    )
        except BaseException:
            # What was read of a transaction that came to nothing is not in the file.
            self._checked, self._snapshots = before
            raise
        finally:
            self._writes = False

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        self._check_usable()
        with files.translated(self.path):
            self._connection.execute(begin)
            try:
                self._check_usable()  # again: who held the lock may have replaced the file
                yield
                self._close_cursors()
                self._connection.execute("COMMIT")
            except BaseException:
                self._close_cursors()
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _close_cursors(self) -> None:
        """A query that was left half-way would keep its lock beyond the transaction."""
        while self._cursors:
            self._cursors.pop().close()

    def _check_usable(self) -> None:
        if self._closed:
            raise LedgerError(f"ledger {self.path} is closed")
        if self._process != os.getpid():
            raise LedgerError(f"ledger {self.path} was opened by another process; open it again")
        if self._identity() != self._file:
            raise LedgerCorruptError(
                f"ledger {self.path} was moved or replaced while it was open; open it again"
            )

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def select(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Return the rows of a query; call it inside a transaction, and use it up there."""
        self._cursors.append(self._connection.execute(sql, values))
        return self._cursors[-1]

    def first(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        """Return the first row of a query, or None."""
        with contextlib.closing(self._connection.execute(sql, values)) as cursor:
            row: tuple[Any, ...] | None = cursor.fetchone()
            return row

    def copy_to(self, path: Path) -> None:
        """Copy the ledger as it is now into the empty file at `path`; others may go on."""
        if self._writes:
            raise LedgerError(f"ledger {self.path} cannot be copied in the middle of a transaction")
        with self.reading():
            self.head()  # takes the lock, so that SQLite's copy does not have to wait for it
            files.copy_content(self._connection, path)

    def execute(self, sql: str, *values: object) -> None:
        """Change something; call it inside `writing`."""
        self._connection.execute(sql, values)

    def append(self, entry: Entry) -> tuple[int, str]:
        """Chain `entry` to the head; return its number and hash.  Its `seq` is set here.

        The entries that make a population or a run belong to what they make.
        """
        seq, previous = self.head()
        numbered = replace(entry, seq=seq + 1)
        if entry.kind == POPULATION:
            numbered = replace(numbered, population=numbered.seq)
        elif entry.kind == RUN:
            numbered = replace(numbered, run=numbered.seq)
        if entry.kind in _NEWER_KINDS:
            self.execute(f"PRAGMA user_version = {files.SCHEMA_VERSION}")
        digest = files.insert_entry(self._connection, numbered, previous)
        return numbered.seq, digest.hex()

    def head(self) -> tuple[int, bytes]:
        """Return the number and hash of the newest entry."""
        row = self.first("SELECT seq, hash FROM head")
        if row is None or not isinstance(row[0], int) or not isinstance(row[1], bytes):
            raise LedgerCorruptError(f"ledger {self.path} is damaged: it has no head")
        return row[0], row[1]

    def hash_of(self, seq: int) -> object:
        """Return the hash of entry `seq`, or None when there is no such entry."""
        row = self.first("SELECT hash FROM entries WHERE seq = ?", seq)
        return None if row is None else row[0]

    def entries(self, where: str, *values: object) -> Iterator[Entry]:
        """Yield the entries that a condition selects, in order."""
        for row in self.select(f"SELECT {_ENTRY} FROM entries WHERE {where} ORDER BY seq", *values):
            yield Entry.of(row)

    def named(self, kind: str, name: str) -> Entry | None:
        """Return the population or run of that name, or None."""
        return next(self.entries("kind = ? AND name = ?", kind, name), None)

    def session(self, run: int) -> Entry:
        """Return the newest of the run's start, resume and finish entries."""
        found = self.first(
            "SELECT max(seq) FROM entries WHERE run = ? AND kind IN (?, ?, ?)",
            *(run, RUN, RESUME, FINISH),
        )
        newest = next(self.entries("seq = ?", found[0] if found else None), None)
        if newest is None:
            raise LedgerCorruptError(f"ledger {self.path}: there is no run {run}")
        return newest


MARK_FROM = 10_000
"""Entries from which on a mark is kept."""


MARK_VERSION = 1


_MARK_BYTES = 1 << 24


_LARGEST = 2**63 - 1  # of SQLite's whole numbers


@dataclass(frozen=True)
class Mark:
    """A ledger's newest checked entry, its checked snapshots, and its file at that time."""

    seq: int
    hash: str
    file: tuple[int, ...]
    snapshots: dict[int, str]


def mark_path(ledger: Path) -> Path:
    """Return where the mark of a ledger is."""
    return ledger.with_name(f"{ledger.name}.verified")


def looks(ledger: Path) -> tuple[int, ...]:
    """Return what changes whenever anybody writes the file."""
    found = ledger.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def snapshot_digest(row: Sequence[Any]) -> str:
    """Return what stands for a row of the snapshots: its entry, balances and open numbers."""
    digest = hashlib.sha256()
    for value in row:
        blob = value if isinstance(value, bytes) else str(value).encode()
        digest.update(len(blob).to_bytes(8, "big") + blob)
    return digest.hexdigest()


def read_mark(ledger: Path) -> Mark | None:
    """Return the mark if there is one and the file still looks as it did then."""
    try:
        saved = read_json(mark_path(ledger), most=_MARK_BYTES)
        if saved.pop("schema_version") != MARK_VERSION:
            return None
        snapshots = {int(key): str(value) for key, value in saved["snapshots"].items()}
        mark = Mark(saved["seq"], str(saved["hash"]), tuple(saved["file"]), snapshots)
        fits = mark.file == looks(ledger)
    except (DataError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # a mark that cannot be read saves no time, and that is all it is for
    whole = type(mark.seq) is int and 0 < mark.seq <= _LARGEST
    return mark if fits and whole else None


def write_mark(ledger: Path, mark: Mark) -> None:
    """Replace the mark; where it cannot be written the next check starts from the beginning."""
    text = json.dumps({"schema_version": MARK_VERSION, **asdict(mark)})
    with contextlib.suppress(StorageError):
        write_file(mark_path(ledger), text.encode(), 0o600)
