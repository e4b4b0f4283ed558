from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedquilt.errors import FedquiltError, InvalidValueError
from fedquilt.privacy.ledger import (
    Ledger,
    LedgerBusyError,
    LedgerCorruptError,
    LedgerError,
    LedgerFileError,
    Population,
    balances,
    store,
)
from fedquilt.privacy.ledger.entries import Entry

fork = multiprocessing.get_context("fork")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter, with a ledger in it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    Ledger.open(folder / "ledger.sqlite", create=True).close()
    (folder / "ledger.sqlite").chmod(0o666)
    yield folder
    shutil.rmtree(folder)


def as_ordinary_user(call: Callable[[], str]) -> str:
    """Return what `call` returns to somebody without the superuser's rights."""
    if os.geteuid() != 0:
        return call()
    receiver, sender = fork.Pipe(duplex=False)

    def child() -> None:
        os.setuid(65534)
        sender.send(call())

    process = fork.Process(target=child)
    process.start()
    assert receiver.poll(20)
    answer = str(receiver.recv())
    process.join()
    return answer


def refusal(path: Path, **options: bool) -> str:
    try:
        Ledger.open(path, **options).close()  # type: ignore[arg-type]
    except LedgerError as error:
        return str(error)
    return "opened"


def test_a_new_file_belongs_to_its_owner_and_stands_alone(path: Path) -> None:
    Ledger.open(path, create=True).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_settling_is_durable(ledger: Ledger) -> None:
    assert ledger._store.first("PRAGMA synchronous") == (3,)  # EXTRA
    assert ledger._store.first("PRAGMA journal_mode") == ("delete",)


def test_a_missing_file_is_not_made_unasked(path: Path) -> None:
    with pytest.raises(LedgerFileError, match="does not exist; a run with that ledger makes it"):
        Ledger.open(path)
    with pytest.raises(LedgerFileError, match=r"the folder .* does not exist"):
        Ledger.open(path.parent / "gone" / "ledger.sqlite", create=True)
    assert list(path.parent.iterdir()) == []


def test_a_folder_is_not_a_ledger(path: Path) -> None:
    with pytest.raises(LedgerFileError, match="is a folder"):
        Ledger.open(path.parent, create=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is an empty file"), (b"hello\n" * 400, "is not a ledger: file is not a database")],
)
def test_a_foreign_file_is_left_alone(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(LedgerCorruptError, match=message):
        Ledger.open(path, create=True)
    assert path.read_bytes() == content
    assert len(list(path.parent.iterdir())) == 1


def test_another_database_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (a)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(LedgerFileError, match="not a fedquilt ledger"):
        Ledger.open(path, create=True)
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused(path: Path) -> None:
    Ledger.open(path, create=True).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    with pytest.raises(LedgerFileError, match="schema version 3; this fedquilt reads up to 2"):
        Ledger.open(path)


def test_a_text_that_is_none_is_refused(path: Path) -> None:
    Ledger.open(path, create=True).close()
    content = path.read_bytes()
    assert b"CREATE TABLE" in content
    path.write_bytes(content.replace(b"CREATE TABLE", b"CREATE\xe2TABLE", 1))
    with pytest.raises(LedgerCorruptError):
        Ledger.open(path)


def test_altered_tables_are_refused(path: Path) -> None:
    Ledger.open(path, create=True).close()
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TRIGGER thief AFTER INSERT ON entries BEGIN DELETE FROM entries; END"
    )
    connection.close()
    with pytest.raises(LedgerCorruptError, match="tables were altered"):
        Ledger.open(path)


def test_a_read_only_file_is_refused_for_writing_only(open_folder: Path) -> None:
    path = open_folder / "ledger.sqlite"
    path.chmod(0o444)
    assert "the file is read-only" in as_ordinary_user(lambda: refusal(path))
    assert as_ordinary_user(lambda: refusal(path, read_only=True)) == "opened"


def test_a_read_only_folder_is_refused_for_writing_only(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    path = open_folder / "ledger.sqlite"
    assert "its folder is read-only" in as_ordinary_user(lambda: refusal(path))
    assert as_ordinary_user(lambda: refusal(path, read_only=True)) == "opened"
    new = open_folder / "new.sqlite"
    assert "Permission denied" in as_ordinary_user(lambda: refusal(new, create=True))
    assert len(list(open_folder.iterdir())) == 1


def test_an_unreadable_file_is_refused(open_folder: Path) -> None:
    path = open_folder / "ledger.sqlite"
    path.chmod(0o000)
    answer = as_ordinary_user(lambda: refusal(path, read_only=True))
    assert "cannot be used: unable to open" in answer


def test_a_reader_cannot_write(path: Path, ledger: Ledger) -> None:
    with (
        Ledger.open(path, read_only=True) as reader,
        pytest.raises(LedgerError, match="opened for reading only"),
    ):
        reader.population("new", num_clients=1, epsilon=1.0, delta=1e-5)
    with pytest.raises(InvalidValueError, match="exclude each other"):
        Ledger.open(path, create=True, read_only=True)


def test_a_lock_held_too_long_is_refused_and_nothing_is_lost(path: Path) -> None:
    with Ledger.open(path, create=True, timeout=0.05) as ledger:
        population = ledger.population("p", num_clients=2, epsilon=1.0, delta=1e-5)
        run = population.start_run("r", epsilon=1.0)
        reservation = run.reserve(0, [0], 2.0**-12)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LedgerBusyError, match="locked by another process for too long"):
            run.settle(reservation, "a")
        with pytest.raises(LedgerBusyError):
            Ledger.open(path, timeout=0.05)
        other.execute("ROLLBACK")
        other.close()
        run.settle(reservation, "a")
        assert population.spent()[0] == 2.0**-12


def test_an_interrupted_write_is_undone(path: Path, tmp_path: Path) -> None:
    with Ledger.open(path, create=True) as ledger:
        ledger.population("p", num_clients=2, epsilon=1.0, delta=1e-5)
        head = ledger.head()
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA cache_size = 1")
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("UPDATE head SET seq = 99")
    writer.executemany(
        "INSERT INTO entries (kind, time, hash, clients) VALUES ('x', '', x'00', zeroblob(9999))",
        [()] * 50,
    )
    folder = tmp_path / "after the crash"
    folder.mkdir()
    for file in (path, path.with_name(path.name + "-journal")):
        shutil.copy(file, folder)
    writer.close()
    torn = folder / path.name
    assert torn.stat().st_size > path.stat().st_size
    with Ledger.open(torn) as ledger:
        assert ledger.head() == head
        assert ledger.verify(known_heads=[head]).ok


def test_a_full_disk_records_nothing(ledger: Ledger, population: Population) -> None:
    run = population.start_run("r", epsilon=1.0)
    pages = ledger._store.first("PRAGMA page_count")
    assert pages is not None
    ledger._store.execute(f"PRAGMA max_page_count = {pages[0]}")
    heads = [run.head]

    def fill() -> None:
        for index in range(1000):
            run.reserve(index, range(10), [k * 2.0**-30 for k in range(10)])
            heads.append(run.head)

    with pytest.raises(LedgerFileError, match="the disk is full; nothing was recorded"):
        fill()
    assert len(heads) > 1
    assert run.head == heads[-1]
    ledger._store.execute("PRAGMA max_page_count = 100000")
    run.settle(run.reserve(len(heads), [0], 2.0**-12), "a")
    assert ledger.verify(known_heads=heads).ok


def test_a_file_that_was_exchanged_takes_no_charges(path: Path, population: Population) -> None:
    run = population.start_run("r", epsilon=1.0)
    shutil.copy(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)
    with pytest.raises(LedgerCorruptError, match="moved or replaced while it was open"):
        run.reserve(0, [0], 2.0**-12)
    path.unlink()
    with pytest.raises(LedgerCorruptError, match="moved or replaced"):
        run.reserve(0, [0], 2.0**-12)


def test_a_ledger_belongs_to_one_process_and_thread(path: Path, ledger: Ledger) -> None:
    receiver, sender = fork.Pipe(duplex=False)

    def use() -> None:
        try:
            ledger.head()
        except FedquiltError as error:
            sender.send(str(error))

    process = fork.Process(target=use)
    process.start()
    process.join()
    assert "opened by another process" in receiver.recv()
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert "belongs to the thread that opened it" in receiver.recv()
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="is closed"):
        ledger.head()


def test_many_processes_may_create_at_once(path: Path) -> None:
    barrier = fork.Barrier(4)
    queue = fork.Queue()

    def create() -> None:
        barrier.wait()
        with Ledger.open(path, create=True) as ledger:
            ledger.population("p", num_clients=2, epsilon=1.0, delta=1e-5)
            queue.put(ledger.export()["entries"][0]["digest"])

    processes = [fork.Process(target=create) for _ in range(4)]
    for process in processes:
        process.start()
    identities = {queue.get(timeout=20) for _ in processes}
    for process in processes:
        process.join()
    assert len(identities) == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with Ledger.open(path) as ledger:
        assert len(ledger.populations()) == 1
        assert ledger.verify().ok


def test_entries_that_were_read_half_are_read_again(
    path: Path, population: Population, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = population.start_run("r", epsilon=1.0)
    for index in range(3):
        run.settle(run.reserve(index, [0], 2.0**-12), f"{index}")
    original = balances.Balances.apply

    def interrupted(self: balances.Balances, entry: Entry) -> None:
        if entry.kind == "settle" and entry.round == 1:
            raise KeyboardInterrupt
        original(self, entry)

    with Ledger.open(path) as ledger:
        monkeypatch.setattr(balances.Balances, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.population("digits")
        monkeypatch.setattr(balances.Balances, "apply", original)
        theirs = ledger.population("digits")
        assert theirs.spent()[0] == 3 * 2.0**-12
        assert theirs.reserved()[0] == 0


def test_a_snapshot_saves_reading_the_past(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balances, "_SNAPSHOT_FLOOR", 1)
    monkeypatch.setattr(store, "MARK_FROM", 1)
    with Ledger.open(path, create=True) as ledger:
        population = ledger.population("p", num_clients=3, epsilon=1.0, delta=1e-5)
        run = population.start_run("r", epsilon=1.0)
        run.settle(run.reserve(0, [0, 2], 2.0**-12), "a")
        pending = run.reserve(1, [1], 2.0**-13)
        other = population.start_run("other", epsilon=0.5)
        run.settle(pending, "b")
        other.reserve(0, [2], 2.0**-14)
        spent, reserved = population.spent(), population.reserved()
        assert ledger.verify().ok
    applied: list[int] = []
    original = balances.Balances.apply
    monkeypatch.setattr(
        balances.Balances, "apply", lambda self, e: (applied.append(e.seq), original(self, e))
    )
    with Ledger.open(path) as ledger:
        population = ledger.population("p")
        assert population.spent().tolist() == spent.tolist()
        assert population.reserved().tolist() == reserved.tolist()
        assert population.joins().tolist() == [1, 1, 1]
    assert applied == [7, 8, 9]
