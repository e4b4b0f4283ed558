"""A ledger that is not whole is not believed: not by a run, not by `show`, not by `export`."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledger_edits import edit

from fedquilt.privacy.ledger import Ledger, LedgerCorruptError, balances, csv_rows, store
from fedquilt.privacy.ledger.entries import Entry

CHARGE = 2.0**-6
USES: dict[str, Callable[[Ledger], Any]] = {
    "start": lambda ledger: ledger.population("p").start_run("new", epsilon=1.0),
    "resume": lambda ledger: ledger.population("p").start_run("one", epsilon=3.0),
    "show": lambda ledger: [one.summary() for one in ledger.populations()],
    "rows": lambda ledger: list(ledger.population("p").rows()),
    "export": lambda ledger: ledger.export(),
    "csv": lambda ledger: list(csv_rows(ledger.population("p"))),
}
EDITS = {
    "all charges": "UPDATE entries SET charges = zeroblob(length(charges)) WHERE kind='reserve'",
    "a kind": "UPDATE entries SET kind = 'settel' WHERE seq = 5",
    "another kind": "UPDATE entries SET kind = 'release' WHERE seq = 5",
    "a population": "UPDATE entries SET population = 1 WHERE seq = 5",
    "an allowance": "UPDATE entries SET body = replace(body, '6.0', '9.0') WHERE seq = 2",
    "a deletion": "DELETE FROM entries WHERE seq IN (4, 5)",
    "the newest": "DELETE FROM entries WHERE seq >= 8",
    "low balances": "UPDATE snapshots SET spent = zeroblob(length(spent))",
}


@pytest.fixture(params=["short", "long"])
def filled(request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger with charges and a snapshot; a long one has a mark beside it."""
    monkeypatch.setattr(balances, "_SNAPSHOT_FLOOR", 1)
    if request.param == "long":
        monkeypatch.setattr(store, "MARK_FROM", 1)
    with Ledger.open(path, create=True) as ledger:
        population = ledger.population("p", num_clients=4, epsilon=6.0, delta=1e-5)
        run = population.start_run("one", epsilon=3.0)
        for index in range(3):
            run.settle(run.reserve(index, [0, 1, 2], CHARGE), f"release {index}")
        run.finish()
        population.start_run("two", epsilon=1.0)
    assert store.mark_path(path).exists() == (request.param == "long")
    return path


@pytest.mark.parametrize("statement", EDITS)
def test_an_edited_ledger_is_refused_whatever_it_is_used_for(filled: Path, statement: str) -> None:
    edit(filled, EDITS[statement])
    for name, use in USES.items():
        with Ledger.open(filled) as ledger:
            problems = ledger.verify().problems
            before = ledger.head()
            with pytest.raises(LedgerCorruptError, match="NOT WHOLE") as refused:
                use(ledger)
            assert any(problem in str(refused.value) for problem in problems), (name, problems)
            assert ledger.head() == before, name
    with Ledger.open(filled, read_only=True) as ledger, pytest.raises(LedgerCorruptError):
        ledger.population("p").spent()


def test_one_bit_in_each_charge(filled: Path) -> None:
    connection = sqlite3.connect(filled)
    charges = [
        row[0] for row in connection.execute("SELECT seq FROM entries WHERE charges IS NOT NULL")
    ]
    connection.close()
    assert len(charges) == 3
    original = filled.read_bytes()
    for seq in charges:
        filled.write_bytes(original)
        connection = sqlite3.connect(filled)
        (blob,) = connection.execute("SELECT charges FROM entries WHERE seq=?", (seq,)).fetchone()
        flipped = bytes([blob[0] ^ 1, *blob[1:]])
        with connection:
            connection.execute("UPDATE entries SET charges=? WHERE seq=?", (flipped, seq))
        connection.close()
        for use in USES.values():
            with Ledger.open(filled) as ledger, pytest.raises(LedgerCorruptError) as refused:
                use(ledger)
            assert f"entry {seq} (reserve) was edited" in str(refused.value)


def test_an_edit_while_a_run_is_going_on(path: Path, ledger: Ledger) -> None:
    population = ledger.population("p", num_clients=4, epsilon=6.0, delta=1e-5)
    run = population.start_run("r", epsilon=3.0)
    with Ledger.open(path) as other:
        theirs = other.population("p").start_run("theirs", epsilon=3.0)
        theirs.reserve(0, [1], CHARGE)
    edit(path, "UPDATE entries SET charges = zeroblob(8) WHERE kind = 'reserve'")
    with pytest.raises(LedgerCorruptError, match="NOT WHOLE"):
        run.reserve(0, [1], run.budget_mu2)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the entries that were hashed to be checked."""
    seen: list[int] = []
    original = Entry.chained

    def chained(self: Entry, previous: bytes) -> bytes:
        seen.append(self.seq)
        return original(self, previous)

    monkeypatch.setattr(Entry, "chained", chained)
    return seen


@pytest.mark.parametrize("filled", ["long"], indirect=True)
def test_a_long_past_is_hashed_once(filled: Path, hashed: list[int]) -> None:
    with Ledger.open(filled) as ledger:
        spent = ledger.population("p").spent()
    assert hashed == []
    assert spent.tolist() == [3 * CHARGE] * 3 + [0]
    with Ledger.open(filled) as ledger:
        run = ledger.population("p").start_run("three", epsilon=1.0)
        run.settle(run.reserve(0, [3], CHARGE), "x")
    hashed.clear()
    with Ledger.open(filled) as ledger:
        assert ledger.population("p").spent().tolist() == [3 * CHARGE] * 3 + [CHARGE]
    assert hashed == [], "what this process wrote and checked needs no second look"
    assert stat.S_IMODE(store.mark_path(filled).stat().st_mode) == 0o600


@pytest.mark.parametrize("filled", ["long"], indirect=True)
@pytest.mark.parametrize("how", ["touched", "copied", "torn", "of another", "gone"])
def test_a_mark_that_does_not_fit_is_worth_nothing(
    filled: Path, hashed: list[int], how: str
) -> None:
    kept = store.mark_path(filled)
    if how == "touched":
        os.utime(filled)
    elif how == "copied":
        filled.write_bytes(filled.read_bytes())
    elif how == "torn":
        kept.write_bytes(kept.read_bytes()[:20])
    elif how == "of another":
        kept.write_text(kept.read_text().replace('"hash": "', '"hash": "0'))
    else:
        kept.unlink()
    with Ledger.open(filled) as ledger:
        entries = ledger._store.head()[0]
        hashed.clear()
        ledger.population("p").spent()
        assert hashed == list(range(1, entries + 1))


@pytest.mark.parametrize("filled", ["short"], indirect=True)
def test_a_short_ledger_is_hashed_every_time(filled: Path, hashed: list[int]) -> None:
    with Ledger.open(filled) as ledger:
        entries = ledger._store.head()[0]
        hashed.clear()
        ledger.population("p").spent()
        ledger.population("p").spent()
        assert hashed == list(range(1, entries + 1))


@pytest.mark.parametrize("filled", ["long"], indirect=True)
def test_balances_of_a_bit_that_the_disk_turned(filled: Path) -> None:
    """The file looks as it did, so only what is read is looked at: the balances."""
    edit(filled, EDITS["low balances"])
    said = store.mark_path(filled).read_text()
    before = store.read_mark(filled)
    assert before is None
    looks = list(store.looks(filled))
    start = said.index('"file": ') + len('"file": ')
    end = said.index("]", start) + 1
    store.mark_path(filled).write_text(said[:start] + str(looks) + said[end:])
    with Ledger.open(filled) as ledger, pytest.raises(LedgerCorruptError, match="add up to"):
        ledger.population("p").spent()


def hide(path: Path, index: str, where: str) -> None:
    """Leave entries out of an index, which still says that it has them all."""

    def rewrite(sql: str) -> None:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (sql, index))
        (version,) = connection.execute("PRAGMA schema_version").fetchone()
        connection.execute(f"PRAGMA schema_version = {version + 1}")
        connection.close()

    connection = sqlite3.connect(path)
    query = "SELECT sql FROM sqlite_master WHERE name = ?"
    (said,) = connection.execute(query, (index,)).fetchone()
    connection.close()
    rewrite(f"{said.split(' WHERE ')[0]} WHERE {where}")
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"REINDEX {index}")
    connection.close()
    rewrite(said)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(
    ("index", "where"),
    [
        ("entries_by_name", "name IS NOT NULL AND kind = 'run'"),
        ("entries_by_run", "kind <> 'settle'"),
        ("entries_by_population", "kind <> 'run'"),
    ],
)
def test_an_index_that_hides_entries_is_found(
    filled: Path, index: str, where: str, use: Callable[[Ledger], Any]
) -> None:
    hide(filled, index, where)
    with Ledger.open(filled) as ledger, pytest.raises(LedgerCorruptError, match="NOT WHOLE"):
        use(ledger)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_balances_of_no_population_are_found(filled: Path, use: Callable[[Ledger], Any]) -> None:
    edit(filled, "UPDATE snapshots SET population = 3")
    with Ledger.open(filled) as ledger, pytest.raises(LedgerCorruptError, match="population 3"):
        use(ledger)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("seq", value) for value in ("1e999", "NaN", str(2**80), "true", '"3"')],
        *(("file", "5"), ("snapshots", "[]"), ("hash", "null"), ("deep", "[" * 50_000)),
    ],
    ids=lambda value: value[:8],
)
def test_a_malformed_mark_is_no_mark(
    path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    monkeypatch.setattr(store, "MARK_FROM", 1)
    with Ledger.open(path, create=True) as ledger:
        ledger.population("p", num_clients=4, epsilon=6.0, delta=1e-5)
    said = json.loads(store.mark_path(path).read_text())
    fields = {**{name: json.dumps(field) for name, field in said.items()}, key: value}
    text = ", ".join(f'"{name}": {field}' for name, field in fields.items())
    store.mark_path(path).write_text(f"{{{text}}}")
    with Ledger.open(path, read_only=True) as ledger:
        assert ledger.population("p").info.num_clients == 4
