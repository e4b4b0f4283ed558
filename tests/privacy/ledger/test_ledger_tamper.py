"""Every way to touch the file behind the ledger's back, and what finds it."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ledger_edits import edit

from fedquilt.privacy.ledger import (
    Ledger,
    LedgerCorruptError,
    LedgerFileError,
    VerifyReport,
    balances,
)
from fedquilt.privacy.ledger.entries import COLUMNS, Entry

Heads = list[str]


@pytest.fixture
def heads(path: Path, monkeypatch: pytest.MonkeyPatch) -> Heads:
    """Fill a ledger at `path`; return the heads its runs have kept."""
    monkeypatch.setattr(balances, "_SNAPSHOT_FLOOR", 1)
    kept = []
    with Ledger.open(path, create=True) as ledger:
        population = ledger.population("p", num_clients=4, epsilon=6.0, delta=1e-5)
        run = population.start_run("one", epsilon=3.0)
        for index in range(3):
            reservation = run.reserve(index, [0, 1, 2], [0.01, 0.02, 0.03])
            kept.append(run.settle(reservation, f"release {index}"))
        population.start_run("two", epsilon=1.0).reserve(0, [3], 0.01)
        assert ledger.verify(kept).ok
    return kept


def verify(path: Path, heads: Heads) -> VerifyReport:
    with Ledger.open(path) as ledger:
        return ledger.verify(heads)


def rewrite_chain(path: Path) -> None:
    """Make all hashes fit again, as somebody who knows the format would."""
    connection = sqlite3.connect(path)
    previous = bytes(32)
    with connection:
        rows = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM entries ORDER BY seq")
        for entry in [Entry(*row) for row in rows.fetchall()]:
            previous = entry.chained(previous)
            connection.execute("UPDATE entries SET hash=? WHERE seq=?", (previous, entry.seq))
            connection.execute("UPDATE head SET seq=?, hash=?", (entry.seq, previous))
    connection.close()


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE entries SET clients = x'010001' WHERE seq = 4", r"entry 4 .*was edited"),
        ("UPDATE entries SET charges = zeroblob(24) WHERE seq = 4", r"entry 4 .*was edited"),
        ("UPDATE entries SET charges = NULL WHERE seq = 4", r"entry 4 .*was edited"),
        ("UPDATE entries SET round = 7 WHERE seq = 5", r"entry 5 .*was edited"),
        ("UPDATE entries SET round = 'no' WHERE seq = 5", r"entry 5 is damaged: round='no'"),
        ("UPDATE entries SET digest = x'ff' WHERE seq = 5", r"entry 5 is damaged: digest="),
        ("UPDATE entries SET digest = CAST(x'ff' AS TEXT) WHERE seq = 5", r"decode"),
        ("UPDATE entries SET digest = 'x' WHERE seq = 5", r"entry 5 .*was edited"),
        ("UPDATE entries SET kind = 'release' WHERE seq = 5", r"entry 5 .*was edited"),
        ("UPDATE entries SET time = '' WHERE seq = 5", r"entry 5 .*was edited"),
        ("UPDATE entries SET hash = zeroblob(32) WHERE seq = 5", r"entry 5 .*was edited"),
        ("UPDATE entries SET hash = 'text' WHERE seq = 5", r"entry 5 .*was edited"),
        ("UPDATE entries SET body = replace(body, '6.0', '9.0') WHERE seq = 2", r"entry 2 .*edit"),
        ("DELETE FROM entries WHERE seq = 5", r"entry 5 is missing"),
        ("DELETE FROM entries WHERE seq = 1", r"entry 1 is missing"),
        ("DELETE FROM entries WHERE seq >= 8", r"newest entries are missing"),
        ("DELETE FROM head", r"no head"),
        ("UPDATE head SET seq = 5", r"newest entries are missing"),
        ("UPDATE snapshots SET spent = zeroblob(32)", r"not what its entries add up to"),
        ("UPDATE snapshots SET joins = zeroblob(16)", r"not what its entries add up to"),
        ("UPDATE snapshots SET open = '[4]'", r"not what its entries add up to"),
        ("UPDATE snapshots SET seq = 5", r"not what its entries add up to"),
        ("UPDATE snapshots SET seq = 500", r"entry 500, which is not there"),
        (
            "INSERT INTO entries (seq, kind, time, population, run, round, reservation, hash) "
            "VALUES (12, 'release', '', 2, 10, 0, 11, zeroblob(32))",
            r"entry 12 .*does not follow",
        ),
    ],
)
def test_an_edit_is_found_without_any_known_head(
    path: Path, heads: Heads, statement: str, problem: str
) -> None:
    edit(path, statement)
    report = verify(path, [])
    assert not report.ok
    assert any(re.search(problem, line) for line in report.problems), report.problems


def test_exchanged_entries_are_found(path: Path, heads: Heads) -> None:
    edit(
        path,
        "UPDATE entries SET seq = 99 WHERE seq = 5",
        "UPDATE entries SET seq = 5 WHERE seq = 7",
        "UPDATE entries SET seq = 7 WHERE seq = 99",
    )
    report = verify(path, [])
    assert {"entry 5", "entry 7"} <= {line[:7] for line in report.problems}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET charges = zeroblob(24) WHERE seq = 4",
        "UPDATE entries SET digest = 'other' WHERE seq = 5",
        "DELETE FROM entries WHERE seq >= 8",
    ],
)
def test_a_rewritten_chain_is_found_by_the_heads_that_runs_keep(
    path: Path, heads: Heads, statement: str
) -> None:
    edit(path, statement, "DELETE FROM snapshots")
    rewrite_chain(path)
    assert verify(path, []).ok
    report = verify(path, heads)
    assert not report.ok
    assert all("rolled back, exchanged or rewritten" in line for line in report.problems)


def test_a_rewritten_chain_must_still_keep_the_rules(path: Path, heads: Heads) -> None:
    charges = np.array([5.0, 5.0, 5.0]).tobytes().hex()
    edit(path, f"UPDATE entries SET charges = x'{charges}' WHERE seq = 4")
    rewrite_chain(path)
    problems = " ".join(verify(path, []).problems)
    assert "entry 4 takes a client above its allowance" in problems
    assert "run 'one' spent more of client 0 than it was allowed" in problems


def test_a_rewritten_allowance_must_still_be_worth_its_epsilon(path: Path, heads: Heads) -> None:
    edit(path, "UPDATE entries SET body = replace(body, '6.0', '5.0') WHERE seq = 2")
    rewrite_chain(path)
    problems = " ".join(verify(path, []).problems)
    assert "entry 2 allows" in problems
    assert "epsilon=5.0" in problems


def test_a_release_charged_twice_is_found(path: Path, heads: Heads) -> None:
    edit(path, "UPDATE entries SET round = 0, digest = 'release 0' WHERE seq = 7")
    rewrite_chain(path)
    assert "entry 7 charges a release a second time" in verify(path, []).problems


def test_an_older_copy_is_found(path: Path, tmp_path: Path, heads: Heads) -> None:
    older = tmp_path / "older"
    shutil.copy(path, older)
    with Ledger.open(path) as ledger:
        run = ledger.population("p").start_run("one", epsilon=3.0)
        heads.append(run.settle(run.reserve(9, [0], 0.01), "release 9"))
        assert ledger.missing_heads(heads) == []
    shutil.copy(older, path)
    assert verify(path, []).ok
    (problem,) = verify(path, heads).problems
    assert heads[-1] in problem
    with Ledger.open(path) as ledger:
        assert ledger.missing_heads(heads) == [heads[-1]]


def test_a_ledger_rolled_back_under_a_run_stops_it(
    path: Path, tmp_path: Path, heads: Heads
) -> None:
    older = tmp_path / "older"
    shutil.copy(path, older)
    with Ledger.open(path) as ledger:
        population = ledger.population("p")
        run = population.start_run("one", epsilon=3.0)
        run.settle(run.reserve(9, [0], 0.01), "release 9")
        population.spent()
        path.write_bytes(older.read_bytes())
        with pytest.raises(LedgerCorruptError, match="rolled back or edited while it was open"):
            population.spent()
        with pytest.raises(LedgerCorruptError):
            run.remaining()


def passes(path: Path, heads: Heads) -> bool:
    try:
        return verify(path, heads).ok
    except LedgerFileError:
        return False


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 5000])


def scribble(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for start in range(4096, len(content), 4096):
        content[start : start + 64] = b"\xff" * 64
    path.write_bytes(content)


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


@pytest.mark.parametrize("damage", [cut, scribble, cut_header])
def test_a_damaged_file_is_found(path: Path, heads: Heads, damage: Callable[[Path], None]) -> None:
    damage(path)
    assert not passes(path, heads)


def content_of(path: Path) -> list[object]:
    connection = sqlite3.connect(path)
    tables = ("entries", "head", "snapshots")
    rows = [connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables]
    connection.close()
    return [*rows]


def test_no_byte_that_matters_can_change_unseen(path: Path, heads: Heads) -> None:
    original, said = path.read_bytes(), content_of(path)
    used = [k for k in range(len(original)) if original[k] != 0]
    found = 0
    for place in np.random.default_rng(0).choice(used, 200, replace=False):
        changed = bytearray(original)
        changed[place] ^= 0x15
        path.write_bytes(changed)
        if passes(path, heads):
            assert content_of(path) == said, f"byte {place} of {len(original)}"
        else:
            found += 1
    assert found > 150
