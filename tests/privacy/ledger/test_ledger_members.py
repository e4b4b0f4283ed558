"""Clients that are known by id: whoever comes, in whatever order, finds its own account."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import multiprocessing
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.errors import InvalidValueError
from fedquilt.privacy.ledger import (
    BudgetExceededError,
    Ledger,
    LedgerConflictError,
    LedgerCorruptError,
    LedgerError,
    Population,
    csv_rows,
    roster_name,
    store,
)
from fedquilt.privacy.ledger import (
    balances as account,
)
from fedquilt.privacy.ledger.entries import COLUMNS, Entry
from fedquilt.privacy.ledger.population import append_members

fork = multiprocessing.get_context("fork")
CHARGE = 2.0**-8


def make(ledger: Ledger, *ids: str) -> Population:
    return ledger.population("clinics", client_ids=ids, epsilon=6.0, delta=1e-5)


def charge(population: Population, run_id: str, ids: list[str], who: list[int]) -> None:
    """Charge some of a run's clients, by their place in its own list."""
    run = population.start_run(run_id, epsilon=1.0, client_ids=ids)
    run.settle(run.reserve(0, run.places[who], CHARGE), run_id)
    run.finish()


def balances(population: Population) -> dict[str, float]:
    return dict(zip(population.ids(), population.spent().tolist(), strict=True))


def test_permuted_absent_and_new_clients_find_their_accounts(path: Path, ledger: Ledger) -> None:
    clinics = make(ledger, "a", "b", "c")
    charge(clinics, "first", ["a", "b", "c"], [0])
    charge(clinics, "permuted", ["c", "a", "b"], [1])
    charge(clinics, "fewer", ["b"], [0])
    charge(clinics, "grown", ["d", "a", "e"], [0, 1])
    expected = {"a": 3 * CHARGE, "b": CHARGE, "c": 0.0, "d": CHARGE, "e": 0.0}
    assert balances(clinics) == expected
    assert clinics.info.num_clients == 5
    assert [run.enrolled for run in clinics.runs()] == [3, 2, 1, 2]
    report = ledger.verify()
    assert report.ok, report.problems
    with Ledger.open(path, read_only=True) as reader:
        assert balances(reader.population("clinics")) == expected


def test_members_who_are_not_named_sit_out(ledger: Ledger) -> None:
    clinics = make(ledger, "a", "b", "c")
    run = clinics.start_run("r", epsilon=1.0, client_ids=["c", "d"])
    assert run.places.tolist() == [2, 3]
    assert (run.remaining() > 0).tolist() == [False, False, True, True]


def test_only_the_named_clients_must_be_able_to_pay(ledger: Ledger) -> None:
    clinics = make(ledger, "a", "b")
    run = clinics.start_run("all of a", epsilon=6.0, client_ids=["a"])
    run.settle(run.reserve(0, run.places, run.budget_mu2), "x")
    clinics.start_run("others", epsilon=6.0, client_ids=["new", "b"])
    with pytest.raises(BudgetExceededError, match=r"1 of 2 clients .* \(client 'a' has"):
        clinics.start_run("short", epsilon=5.0, client_ids=["newer", "a"])
    assert "newer" not in clinics.ids(), "a refusal changes nothing"
    late = clinics.start_run("late", epsilon=5.0, if_exhausted="sit_out", client_ids=["newer", "a"])
    assert (late.remaining()[late.places] > 0).tolist() == [True, False]


def test_a_run_resumes_with_its_own_clients_only(ledger: Ledger) -> None:
    clinics = make(ledger, "a", "b")
    clinics.start_run("r", epsilon=1.0, client_ids=["b", "a"])
    clinics.enrol(["c"])
    again = clinics.start_run("r", epsilon=1.0, client_ids=["b", "a"])
    assert again.places.tolist() == [1, 0]
    assert again.is_resumed
    for others in (["a", "b"], ["b"], ["b", "a", "c"], None):
        with pytest.raises(LedgerConflictError, match="started with other clients"):
            clinics.start_run("r", epsilon=1.0, client_ids=others)


def test_an_open_run_goes_on_while_the_population_grows(path: Path, ledger: Ledger) -> None:
    clinics = make(ledger, "a", "b")
    run = clinics.start_run("r", epsilon=1.0, client_ids=["a", "b"])
    reservation = run.reserve(0, [0], CHARGE)
    with Ledger.open(path) as other:
        charge(other.population("clinics"), "theirs", ["c", "b"], [0, 1])
    run.settle(reservation, "x")
    assert run.spent().tolist() == [CHARGE, 0.0, 0.0]
    assert run.joins().tolist() == [1, 0, 0]
    assert balances(clinics) == {"a": CHARGE, "b": CHARGE, "c": CHARGE}


def join(path: Path, number: int, start: Any) -> None:
    with Ledger.open(path) as ledger:
        clinics = ledger.population("clinics")
        start.wait()
        ids = [f"own {number}", "shared", f"second {number}", "a"]
        charge(clinics, f"run {number}", ids, [0, 1, 3])


def test_processes_join_at_once(path: Path, ledger: Ledger) -> None:
    make(ledger, "a")
    start = fork.Barrier(4)
    processes = [fork.Process(target=join, args=(path, k, start)) for k in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = balances(ledger.population("clinics"))
    own = {f"own {k}": CHARGE for k in range(4)} | {f"second {k}": 0.0 for k in range(4)}
    assert found == {"a": 4 * CHARGE, "shared": 4 * CHARGE, **own}
    assert ledger.verify().ok


def test_snapshots_of_a_growing_population(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "_SNAPSHOT_FLOOR", 1)
    monkeypatch.setattr(store, "MARK_FROM", 1)
    ids: list[str] = []
    for number in range(6):
        ids.insert(0, f"client {number}")
        with Ledger.open(path, create=True) as ledger:
            charge(make(ledger, *ids), f"run {number}", ids, [len(ids) - 1])
            assert ledger.verify().ok
    with Ledger.open(path) as ledger:
        found = balances(ledger.population("clinics"))
        assert ledger._store.first("SELECT count(*) FROM snapshots") == (1,)
    assert found == {"client 0": 6 * CHARGE, **{f"client {k}": 0.0 for k in range(1, 6)}}


def test_ids_are_shown_everywhere(ledger: Ledger) -> None:
    clinics = make(ledger, "a", "b")
    charge(clinics, "r", ["b", "c"], [0])
    assert [row.client_id for row in clinics.rows()] == ["a", "b", "c"]
    text = io.StringIO()
    csv.writer(text).writerows(csv_rows(clinics))
    read = list(csv.DictReader(io.StringIO(text.getvalue())))
    assert {row["client_id"]: float(row["mu2_spent"]) for row in read} == balances(clinics)
    (shown,) = json.loads(json.dumps(ledger.export()))["populations"]
    assert [row["client_id"] for row in shown["client_rows"]] == ["a", "b", "c"]
    assert shown["adjacency"] == "zero_out"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "b", "a"], "client id 'a' must be given only once"),
        (["a", " b"], "client id ' b' must be a text"),
        (["a", ""], "client id '' must be a text"),
        (["a", "\x1b[31m"], "must be a text"),
        (["a", 7], "client id 7 must be a text"),
        ([], "must name at least one"),
        ("abc", "must be a list of texts"),
    ],
)
def test_wrong_ids(ledger: Ledger, ids: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message.replace("[", r"\[")):
        make(ledger, *ids) if isinstance(ids, list) else ledger.population(
            "p", client_ids=ids, epsilon=1.0, delta=1e-5
        )
    assert ledger.populations() == []


def test_numbers_and_ids_are_not_mixed(ledger: Ledger, population: Population) -> None:
    with pytest.raises(LedgerConflictError, match=r"made without client ids.*adopt_ids"):
        population.start_run("r", epsilon=1.0, client_ids=["a"])
    with pytest.raises(LedgerConflictError, match="made without client ids"):
        ledger.population("digits", client_ids=["a"])
    with pytest.raises(LedgerConflictError, match="made without client ids"):
        population.enrol(["a"])
    clinics = make(ledger, "a", "b")
    with pytest.raises(LedgerConflictError, match="knows its 2 clients by id"):
        ledger.population("clinics", num_clients=2)
    assert clinics.start_run("all", epsilon=1.0).places.tolist() == [0, 1]


def test_a_population_by_number_adopts_ids_once(ledger: Ledger, population: Population) -> None:
    run = population.start_run("before", epsilon=1.0)
    run.settle(run.reserve(0, [3], CHARGE), "x")
    ids = [f"client {k}" for k in range(10)]
    with pytest.raises(LedgerConflictError, match="each needs one"):
        population.adopt_ids(ids[:9])
    population.adopt_ids(ids)
    charge(population, "after", ["new", "client 3"], [0, 1])
    assert balances(population)["client 3"] == 2 * CHARGE
    assert population.info.num_clients == 11
    with pytest.raises(LedgerConflictError, match="has ids already"):
        population.adopt_ids(ids)
    report = ledger.verify()
    assert report.ok, report.problems


def rewrite(path: Path, version: int, *statements: str) -> None:
    """Edit a ledger and make its hashes fit again."""
    connection = sqlite3.connect(path)
    previous = bytes(32)
    with connection:
        for statement in statements:
            connection.execute(statement)
        rows = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM entries ORDER BY seq")
        for entry in [Entry(*row) for row in rows.fetchall()]:
            previous = entry.chained(previous)
            connection.execute("UPDATE entries SET hash=? WHERE seq=?", (previous, entry.seq))
            connection.execute("UPDATE head SET seq=?, hash=?", (entry.seq, previous))
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


def make_older(path: Path) -> None:
    """Write a ledger as schema 1 has it: no adjacency, nothing about ids."""
    with Ledger.open(path, create=True) as ledger:
        run = ledger.population("p", num_clients=3, epsilon=6.0, delta=1e-5).start_run(
            "r", epsilon=1.0
        )
        run.settle(run.reserve(0, [1], CHARGE), "x")
    older = "replace(replace(body, '\"adjacency\":\"zero_out\",', ''), ',\"named\":false', '')"
    rewrite(path, 1, f"UPDATE entries SET body = {older} WHERE kind = 'population'")


def test_a_ledger_of_schema_1_is_read_verified_and_continued(path: Path) -> None:
    make_older(path)
    with Ledger.open(path) as ledger:
        assert "adjacency" not in str(ledger._store.first("SELECT body FROM entries WHERE seq=2"))
        assert ledger.verify().ok
        population = ledger.population("p", num_clients=3)
        assert (population.info.adjacency, population.info.named) == ("zero_out", False)
        run = population.start_run("r", epsilon=1.0)
        run.settle(run.reserve(1, [1], CHARGE), "y")
        assert population.spent().tolist() == [0, 2 * CHARGE, 0]
        assert ledger._store.first("PRAGMA user_version") == (1,), "an older one can go on too"
        population.adopt_ids(["a", "b", "c"])
        assert ledger._store.first("PRAGMA user_version") == (2,), "now it cannot"
        assert ledger.verify().ok


def test_members_that_the_rules_forbid(path: Path) -> None:
    with Ledger.open(path, create=True) as ledger:
        clinics = make(ledger, "a", "b")
        clinics.enrol(["c"])
    rewrite(path, 2, "UPDATE entries SET body = replace(body, '\"c\"', '\"a\"') WHERE seq = 4")
    with Ledger.open(path) as ledger:
        assert any("names a member a second time" in line for line in ledger.verify().problems)
        with pytest.raises(LedgerCorruptError, match="a second time"):
            ledger.population("clinics")


def test_the_adjacency_is_fixed_with_the_population(path: Path, ledger: Ledger) -> None:
    pair = {"num_clients": 2, "epsilon": 1.0, "delta": 1e-5}
    ledger.population("replaced", adjacency="replace_one", **pair)
    ledger.population("usual", **pair)
    assert ledger.population("replaced").info.adjacency == "replace_one"
    assert ledger.population("usual", adjacency="zero_out").info.adjacency == "zero_out"
    for name, other in (("replaced", "zero_out"), ("usual", "replace_one")):
        with pytest.raises(LedgerConflictError, match=f"has adjacency='.*', not '{other}'"):
            ledger.population(name, adjacency=other)
    with pytest.raises(InvalidValueError, match="adjacency='none'"):
        ledger.population("new", adjacency="none", **pair)
    shown = {p["population"]: p["adjacency"] for p in ledger.export()["populations"]}
    assert shown == {"replaced": "replace_one", "usual": "zero_out"}
    rewrite(path, 2, "UPDATE entries SET body = replace(body, 'replace_one', 'whatever')")
    with Ledger.open(path) as opened:
        assert any("is not a population" in line for line in opened.verify().problems)


@pytest.mark.parametrize("name", ["p ", " p", "\tp"])
def test_a_new_name_has_no_blanks_around_it(ledger: Ledger, name: str) -> None:
    with pytest.raises(InvalidValueError, match="population="):
        ledger.population(name, num_clients=2, epsilon=1.0, delta=1e-5)
    assert ledger.populations() == []


def test_an_older_name_with_blanks_is_still_read(path: Path) -> None:
    with Ledger.open(path, create=True) as ledger:
        ledger.population("p", num_clients=2, epsilon=1.0, delta=1e-5)
    rewrite(path, 1, "UPDATE entries SET name = 'p ' WHERE seq = 2")
    with Ledger.open(path) as ledger:
        assert [population.info.name for population in ledger.populations()] == ["p "]
        assert ledger.population("p ").info.num_clients == 2


def test_a_name_from_the_clients() -> None:
    name = roster_name("digits", ["a", "b", "c"])
    assert name == roster_name("digits", ["c", "a", "b"])
    others = {
        roster_name("mnist", ["a", "b", "c"]),
        roster_name("digits", ["a", "b"]),
        roster_name("digits", ["a", "b", "d"]),
        roster_name("digits", ["ab", "c"]),
    }
    assert len(others | {name}) == 5


def test_a_hundred_thousand_members(path: Path) -> None:
    ids = [f"client {number}" for number in range(100_000)]
    with Ledger.open(path, create=True) as ledger:
        everybody = make(ledger, *ids)
        run = everybody.start_run("r", epsilon=1.0, client_ids=ids[::-1])
        run.settle(run.reserve(0, run.places[:10], CHARGE), "x")
    with Ledger.open(path) as ledger:
        spent = ledger.population("clinics").spent()
        assert np.flatnonzero(spent).tolist() == list(range(99_990, 100_000))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Zu\u0308rich", "composed form"),
        ("B\u034fern", "prints nothing"),
        ("Bern\ufe0f", "prints nothing"),
        ("\u3164", "prints nothing"),
        ("Be\u200drn", "printable"),
        ("Be\u00adrn", "printable"),
    ],
)
def test_ids_read_one_way(ledger: Ledger, value: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make(ledger, "a", value)


@pytest.mark.parametrize("pair", [("Bern", "BERN"), ("ward 7", "ward7"), ("ward7", "ward\uff17")])
def test_no_two_ids_of_one_list_read_alike(ledger: Ledger, pair: tuple[str, str]) -> None:
    with pytest.raises(InvalidValueError, match=r"must differ in more than letter case"):
        make(ledger, *pair)
    clinics = make(ledger, pair[0])
    for join in (clinics.enrol, lambda ids: clinics.start_run("r", epsilon=1.0, client_ids=ids)):
        with pytest.raises(LedgerConflictError, match="differs in letter case"):
            join([pair[1]])
    assert clinics.ids() == [pair[0]]
    clinics.enrol([pair[1]], allow_alike=True)
    assert clinics.ids() == list(pair)


def test_numbers_are_texts(ledger: Ledger) -> None:
    assert make(ledger, "1", "01").ids() == ["1", "01"]


def test_members_that_an_older_fedquilt_let_pass_are_read(ledger: Ledger) -> None:
    clinics = make(ledger, "a")
    with ledger._store.writing():
        append_members(ledger._store, clinics.info.key, ["Zu\u0308rich", "A"])
    assert clinics.ids() == ["a", "Zu\u0308rich", "A"]
    assert ledger.verify().ok


def test_a_run_charges_whom_it_named(ledger: Ledger) -> None:
    clinics = make(ledger, "a", "b")
    run = clinics.start_run("r", epsilon=1.0, client_ids=["a"])
    clinics.enrol(["c"])
    for outside in (1, 2):
        for amount in (CHARGE, 0.0):
            with pytest.raises(InvalidValueError, match=f"client={outside} must be one of the"):
                run.reserve(0, [0, outside], amount)
    assert run.remaining().tolist() == [run.budget_mu2, 0.0, 0.0]
    everybody = clinics.start_run("all", epsilon=1.0)
    clinics.enrol(["d"])
    everybody.reserve(0, [0, 3], CHARGE)


def test_a_run_begun_by_number_goes_on_with_the_ids_of_its_numbers(ledger: Ledger) -> None:
    numbered = ledger.population("numbered", num_clients=2, epsilon=6.0, delta=1e-5)
    numbered.start_run("r", epsilon=1.0)
    numbered.adopt_ids(["a", "b"])
    numbered.enrol(["c"])
    for others in (["b", "a"], ["a", "c"]):
        with pytest.raises(LedgerConflictError, match="started with other clients"):
            numbered.start_run("r", epsilon=1.0, client_ids=others)
    assert numbered.start_run("r", epsilon=1.0, client_ids=["a", "b"]).places.tolist() == [0, 1]


# All together or nothing


def test_what_is_refused_together_leaves_nothing(ledger: Ledger) -> None:
    clinics = make(ledger, "a", "b")
    charge(clinics, "first", ["a", "b"], [0])
    before, spent = ledger.head(), clinics.spent().tolist()

    def refused() -> None:
        with ledger.transaction():
            wards = ledger.population("wards", client_ids=["x"], epsilon=3.0, delta=1e-5)
            clinics.enrol(["c"])
            charge(clinics, "second", ["c", "a"], [0, 1])
            wards.start_run("third", epsilon=4.0)

    with pytest.raises(InvalidValueError, match=r"epsilon=4.0 of a run must be <= 3.0"):
        refused()
    assert ledger.head() == before
    assert (clinics.ids(), clinics.spent().tolist()) == (["a", "b"], spent)
    # The numbers of what came to nothing are given again, and to others.
    other = ledger.population("other", client_ids=["y", "z"], epsilon=1.0, delta=1e-5)
    charge(clinics, "second", ["b"], [0])
    assert (other.ids(), clinics.spent().tolist()) == (["y", "z"], [CHARGE, CHARGE])
    assert [one.info.name for one in ledger.populations()] == ["clinics", "other"]
    assert ledger.verify().ok


def test_a_refusal_that_is_caught_inside_undoes_everything_too(ledger: Ledger) -> None:
    clinics = make(ledger, "a", "b")
    charge(clinics, "first", ["a", "b"], [0])
    before = ledger.head()

    def half() -> None:
        with ledger.transaction(), contextlib.suppress(BudgetExceededError):
            clinics.start_run("second", epsilon=6.0, client_ids=["a", "c"])

    with pytest.raises(LedgerError, match="a part of what was to be recorded together"):
        half()
    assert ledger.head() == before
    assert clinics.ids() == ["a", "b"]


def test_the_population_of_a_run(ledger: Ledger) -> None:
    charge(make(ledger, "a"), "first", ["a"], [0])
    found = ledger.population_of("first")
    assert found is not None
    assert found.info.name == "clinics"
    assert ledger.population_of("second") is None
