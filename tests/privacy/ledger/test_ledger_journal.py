"""A ledger beside a journal: its own is used, any other is refused and changes nothing."""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import struct
import threading
import tracemalloc
from pathlib import Path

import pytest

from fedquilt.privacy.ledger import Ledger, LedgerFileError

MAGIC = bytes.fromhex("d9d505f920a163d7")
ALLOWANCE = {"num_clients": 10, "epsilon": 6.0, "delta": 1e-5}


def make(path: Path, releases: int) -> str:
    """Make a ledger with some releases in it, or add a run of them; return its head."""
    with Ledger.open(path, create=True) as ledger:
        population = ledger.population("p", **ALLOWANCE)  # type: ignore[arg-type]
        run = population.start_run(f"run {len(population.runs())}", epsilon=1.0)
        for number in range(releases):
            run.settle(run.reserve(number, [1, 2], 0.001), f"{number}")
        return ledger.head()


def leave_half_a_write(path: Path, *, written: bool) -> Path:
    """Leave what a kill in the middle of an entry leaves; return the journal's path.

    `written` says whether the ledger's pages were changed by then, or only saved.
    """
    journal = path.with_name(f"{path.name}-journal")
    before = path.read_bytes()
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("PRAGMA synchronous = EXTRA")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE head SET seq = 99")
        connection.execute(
            "INSERT INTO entries (kind, time, hash, body) VALUES ('x', '', x'00', ?)",
            ("x" * 200_000,),
        )
        kept = {path: path.read_bytes() if written else before, journal: journal.read_bytes()}
        connection.execute("ROLLBACK")
    connection.close()
    for file, content in kept.items():
        file.write_bytes(content)
    return journal


@pytest.mark.parametrize("written", [True, False])
def test_its_own_journal_mends_a_ledger(path: Path, written: bool) -> None:
    head = make(path, 5)
    journal = leave_half_a_write(path, written=written)
    with Ledger.open(path) as ledger:
        assert ledger.head() == head
        assert ledger.verify(known_heads=[head]).ok
        ledger.population("another", num_clients=2, epsilon=1.0, delta=1e-5)
    assert not journal.exists()


@pytest.mark.parametrize("releases", [1, 40])
def test_a_ledger_that_was_used_elsewhere_does_not_take_the_old_journal(
    path: Path, releases: int
) -> None:
    """SQLite would put the older pages back, and the newer charges would be gone."""
    make(path, 5)
    journal = leave_half_a_write(path, written=False)
    elsewhere = path.with_name("elsewhere.sqlite")
    shutil.copy(path, elsewhere)
    head = make(elsewhere, releases)
    shutil.copy(elsewhere, path)
    before = path.read_bytes(), journal.read_bytes()
    with pytest.raises(LedgerFileError, match=r"journal lies beside .* is not its own"):
        Ledger.open(path)
    assert (path.read_bytes(), journal.read_bytes()) == before
    journal.unlink()
    with Ledger.open(path) as ledger:
        assert ledger.verify(known_heads=[head]).ok


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("releases", [2, 5, 9])
def test_another_ledger_does_not_take_the_journal(path: Path, written: bool, releases: int) -> None:
    """Also one of as many transactions, whose counter fits."""
    make(path, 5)
    other = path.with_name("other.sqlite")
    head = make(other, releases)
    leave_half_a_write(path, written=written)
    shutil.copy(other, path)
    with pytest.raises(LedgerFileError, match="is not its own"):
        Ledger.open(path)
    assert path.read_bytes() == other.read_bytes()
    with Ledger.open(other, read_only=True) as ledger:
        assert ledger.verify(known_heads=[head]).ok


def test_an_empty_journal_and_a_used_up_one_are_nothing(path: Path) -> None:
    head = make(path, 2)
    journal = path.with_name(f"{path.name}-journal")
    for content in (b"", bytes(600)):
        journal.write_bytes(content)
        with Ledger.open(path) as ledger:
            assert ledger.head() == head


@pytest.mark.parametrize("first", [MAGIC, b"anything"])
def test_a_journal_that_names_another_file_deletes_nothing(path: Path, first: bytes) -> None:
    """SQLite takes the name for that of a transaction over several files, and cleans up."""
    head = make(path, 2)
    victim = path.with_name("victim.txt")
    victim.write_text("mine")
    name = str(victim.absolute()).encode()
    end = struct.pack(">II", len(name), sum(name)) + MAGIC
    journal = path.with_name(f"{path.name}-journal")
    journal.write_bytes(first.ljust(512, b"\0") + struct.pack(">I", 1) + name + end)
    with pytest.raises(LedgerFileError, match="names another file, which SQLite would delete"):
        Ledger.open(path)
    assert victim.read_text() == "mine"
    journal.unlink()
    with Ledger.open(path) as ledger:
        assert ledger.head() == head


def test_a_journal_in_use_is_no_reason_to_refuse(path: Path) -> None:
    make(path, 2)
    enough = threading.Event()
    written: list[int] = []

    def write() -> None:
        with Ledger.open(path) as ledger:
            run = ledger.population("p").start_run("busy", epsilon=1.0)
            for number in itertools.takewhile(lambda _: not enough.is_set(), itertools.count()):
                run.settle(run.reserve(number, [3], 1e-9), f"{number}")
                written.append(number)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        opened = 0
        while opened < 8 or len(written) < 8:
            with Ledger.open(path) as ledger:
                assert ledger.populations()[0].info.num_clients == 10
            opened += 1
    finally:
        enough.set()
        thread.join()


HEADER = struct.Struct(">8sIIIII")  # magic, records, nonce, pages before, sector, page size


def journal_of(pages: int, *records: tuple[int, bytes], sector: int = 512) -> bytes:
    """Return a journal as SQLite would write it, from the description of its format."""
    size = len(records[0][1])
    head = HEADER.pack(bytes.fromhex("d9d505f920a163d7"), len(records), 0, pages, sector, size)
    content = head.ljust(sector, b"\0")
    for number, page in records:
        check = sum(page[at] for at in range(size - 200, 0, -200))
        content += number.to_bytes(4, "big") + page + check.to_bytes(4, "big")
    return content


@pytest.mark.parametrize("number", [0, 6_000_000, 2**31])
@pytest.mark.parametrize("pages", [1, 2**31])
def test_a_page_number_far_beyond_the_ledger_asks_for_no_memory(
    path: Path, number: int, pages: int
) -> None:
    """1,032 bytes that would put a page a long way behind the end of the file."""
    make(path, 2)
    before = path.read_bytes()
    path.with_name(f"{path.name}-journal").write_bytes(journal_of(pages, (number, bytes(512))))
    tracemalloc.start()
    try:
        with pytest.raises(LedgerFileError, match="is not its own"):
            Ledger.open(path)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(before) + 1_000_000
    finally:
        tracemalloc.stop()
    assert path.read_bytes() == before


def test_a_journal_without_an_end_is_not_read(path: Path) -> None:
    make(path, 2)
    journal = path.with_name(f"{path.name}-journal")
    with open(journal, "wb") as stream:
        stream.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(LedgerFileError, match=r"its 1099511627776 bytes are more than it can have"):
        Ledger.open(path)


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("end", ["-journal", "-wal", "-shm"])
@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_what_lies_beside_a_ledger_and_is_no_file_is_never_opened(
    path: Path, end: str, kind: str, linked: bool, read_only: bool
) -> None:
    """Somebody who reads a pipe that nobody writes to waits for ever."""
    make(path, 2)
    beside = path.with_name(path.name + end)
    if kind == "pipe":
        os.mkfifo(beside)
    else:
        beside.symlink_to("/dev/zero" if kind == "device" else path)
    name = path.with_name("name.sqlite") if linked else path
    if linked:
        name.symlink_to(path)
    with pytest.raises(LedgerFileError, match="must be a regular file; it is a"):
        Ledger.open(name, read_only=read_only)


@pytest.mark.parametrize("length", [8, 27])
def test_a_journal_that_ends_within_its_header_is_nothing(path: Path, length: int) -> None:
    head = make(path, 2)
    path.with_name(f"{path.name}-journal").write_bytes(journal_of(1, (1, bytes(512)))[:length])
    with Ledger.open(path) as ledger:
        assert ledger.head() == head
