"""Copies of a ledger: whole whatever goes on, and never in the place of a newer one."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedquilt.privacy.ledger import (
    Ledger,
    LedgerCorruptError,
    LedgerError,
    LedgerFileError,
    Population,
)

Cli = Callable[..., Any]

KILLED_IN_A_WRITE = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE entries SET clients = zeroblob(20000)")
connection.execute("INSERT INTO entries (kind, time, hash, body) VALUES ('x', '', x'00', ?)",
                   ("x" * 200000,))
os.kill(os.getpid(), signal.SIGKILL)
"""


def charge(population: Population, run: str, rounds: int = 3) -> str:
    started = population.start_run(run, epsilon=1.0)
    for number in range(rounds):
        reserved = started.reserve(number, clients=[1, 2], charges_mu2=0.001)
        head = started.settle(reserved, release_digest=f"{run}{number}")
    started.finish()
    return head


def head_of(path: Path) -> str:
    with Ledger.open(path, read_only=True) as opened:
        assert opened.verify().ok
        return opened.head()


def test_a_backup_is_the_ledger_and_its_owners_alone(
    ledger: Ledger, population: Population, path: Path
) -> None:
    head = charge(population, "first")
    copy = path.with_name("copy.sqlite")
    report = ledger.backup(copy, known_heads=[head])
    assert (report.ok, report.head) == (True, ledger.head())
    assert head_of(copy) == ledger.head()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert sorted(one.name for one in path.parent.iterdir()) == ["copy.sqlite", "ledger.sqlite"]


def test_a_backup_while_somebody_writes(ledger: Ledger, population: Population, path: Path) -> None:
    charge(population, "first")
    before = ledger.head()
    with Ledger.open(path) as reader, ledger.transaction():
        population.start_run("second", epsilon=1.0)
        reader.backup(path.with_name("copy.sqlite"))
        with pytest.raises(LedgerError, match="middle of a transaction"):
            ledger.backup(path.with_name("mine.sqlite"))
    assert head_of(path.with_name("copy.sqlite")) == before != ledger.head()
    assert not path.with_name("mine.sqlite").exists()


def test_a_backup_after_a_kill_in_the_middle_of_a_write(
    ledger: Ledger, population: Population, path: Path, cli: Cli
) -> None:
    charge(population, "first", rounds=20)
    before = ledger.head()
    ledger.close()
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_A_WRITE, path], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.with_name("ledger.sqlite-journal").stat().st_size > 0
    alone = path.with_name("alone.sqlite")
    shutil.copy(path, alone)
    with pytest.raises(LedgerError), Ledger.open(alone) as torn:
        torn.backup(path.with_name("never.sqlite"))
    assert not path.with_name("never.sqlite").exists()
    assert cli("ledger", "backup", path, path.with_name("copy.sqlite")).code == 0
    assert head_of(path.with_name("copy.sqlite")) == before


def test_no_file_is_replaced_unasked_and_no_newer_ledger_ever(
    ledger: Ledger, population: Population, path: Path
) -> None:
    copy = path.with_name("copy.sqlite")
    ledger.backup(copy)
    first = copy.read_bytes()
    newest = charge(population, "first")
    with pytest.raises(LedgerFileError, match=r"copy\.sqlite exists"):
        ledger.backup(copy)
    with Ledger.open(copy) as old, pytest.raises(LedgerError, match="has 8 entries that the copy"):
        old.backup(path, replace=True)
    assert copy.read_bytes() == first
    assert ledger.missing_heads([newest]) == []
    ledger.backup(copy, replace=True)
    assert head_of(copy) == ledger.head()
    with pytest.raises(LedgerFileError, match="are one file"):
        ledger.backup(path, replace=True)


def test_what_cannot_be_compared_is_left(ledger: Ledger, path: Path) -> None:
    other = path.with_name("text.sqlite")
    other.write_text("not a ledger")
    with pytest.raises(LedgerFileError, match=r"whether .* is newer cannot be told"):
        ledger.backup(other, replace=True)
    assert other.read_text() == "not a ledger"
    path.with_name("gone.sqlite-journal").write_text("stale")
    with pytest.raises(LedgerFileError, match="would damage the copy"):
        ledger.backup(path.with_name("gone.sqlite"))
    assert not path.with_name("gone.sqlite").exists()


def test_a_ledger_that_is_not_whole_is_not_copied(
    ledger: Ledger, population: Population, path: Path
) -> None:
    charge(population, "first")
    with sqlite3.connect(path) as edited:
        edited.execute("UPDATE entries SET digest = 'other' WHERE kind = 'settle'")
    with pytest.raises(LedgerCorruptError, match="NOT WHOLE, and was not copied"):
        ledger.backup(path.with_name("copy.sqlite"))
    assert [one.name for one in path.parent.iterdir()] == ["ledger.sqlite"]


def test_file_systems_without_hard_links(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    ledger.backup(path.with_name("copy.sqlite"))
    assert head_of(path.with_name("copy.sqlite")) == ledger.head()


def test_who_waited_while_the_file_was_replaced_enters_nothing(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = path.with_name("copy.sqlite")
    ledger.backup(copy)
    store = ledger._store
    seen = [store._file]  # what a look at the file says before the lock is waited for
    replaced = copy.stat()
    answers = [*seen, (replaced.st_dev, replaced.st_ino)]
    monkeypatch.setattr(store, "_identity", lambda: answers.pop(0))
    with pytest.raises(LedgerCorruptError, match="moved or replaced"), ledger.transaction():
        pytest.fail("the lock of a file that is no longer there was used")


def test_backup_and_restore_from_the_command_line(
    ledger: Ledger, population: Population, path: Path, cli: Cli
) -> None:
    copy = path.with_name("copy.sqlite")
    charge(population, "first")
    said = cli("ledger", "backup", path, copy)
    assert (said.code, ledger.head() in said.out) == (0, True)
    assert cli("ledger", "backup", path, copy).code == 2
    assert cli("ledger", "restore", copy, path).code == 0
    kept = head_of(path)
    with Ledger.open(path) as newer:
        charge(newer.population("digits"), "second")
        newest = newer.head()
    said = cli("ledger", "restore", copy, path)
    assert said.code == 2
    assert "entries that the copy lacks" in said.words
    assert head_of(path) == newest
    path.unlink()
    assert cli("ledger", "restore", copy, path).code == 0
    assert head_of(path) == kept
