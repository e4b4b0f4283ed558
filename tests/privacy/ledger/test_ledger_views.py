from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian

from fedquilt.errors import InvalidValueError
from fedquilt.privacy.ledger import (
    Ledger,
    LedgerConflictError,
    Population,
    csv_rows,
    population_name,
)
from fedquilt.report.ledger import ledger_tables

CHARGE = 2.0**-4


@pytest.fixture
def used(population: Population) -> Population:
    """Client 0 joined twice, 1 is nearly and 2 quite through, 3 is reserved, 4 unbounded."""
    run = population.start_run("first", epsilon=6.0)
    run.settle(run.reserve(0, [0, 1, 2], [CHARGE, 0.95 * run.budget_mu2, run.budget_mu2]), "a")
    run.settle(run.reserve(7, [0], CHARGE), "b")
    population.start_run("open", epsilon=None).record_unbounded(3, [4], "c")
    run.reserve(8, [3], CHARGE)
    return population


def test_rows(used: Population) -> None:
    rows = list(used.rows())
    assert [row.client for row in rows] == list(range(10))
    zero = rows[0]
    assert (zero.joins, zero.last_run, zero.last_round) == (2, "first", 7)
    assert zero.mu2_spent == 2 * CHARGE
    exact = get_epsilon_gaussian(1 / math.sqrt(2 * CHARGE), 1e-5)
    assert zero.epsilon_spent == pytest.approx(exact, rel=1e-6)
    rest = get_epsilon_gaussian(1 / math.sqrt(used.info.allowance_mu2 - 2 * CHARGE), 1e-5)
    assert zero.epsilon_left == pytest.approx(rest, rel=1e-6)
    assert zero.mu2_spent + zero.mu2_left == used.info.allowance_mu2
    assert (rows[3].mu2_reserved, rows[3].joins, rows[3].last_round) == (CHARGE, 0, None)
    assert (rows[4].epsilon_spent, rows[4].last_run) == (math.inf, "open")
    assert rows[9].epsilon_left == pytest.approx(6.0, rel=1e-8)
    assert rows[2].epsilon_spent <= 6.0
    assert rows[2].epsilon_left == 0


def test_epsilons_of_many_stay_within_the_allowance(ledger: Ledger) -> None:
    many = ledger.population("many", num_clients=2000, epsilon=6.0, delta=1e-5)
    run = many.start_run("all", epsilon=5.0)
    charges = run.budget_mu2 * np.linspace(0.99, 1.0, 2000)
    run.settle(run.reserve(0, range(2000), charges), "a")
    assert run.epsilons().max() <= 5.0
    rest = many.start_run("rest", epsilon=many.largest_run_epsilon())
    rest.settle(rest.reserve(0, range(2000), rest.remaining()), "b")
    assert many.epsilons().max() <= 6.0
    assert many.epsilons().max() > 5.99


def test_rows_are_of_the_moment_they_were_asked_for(used: Population) -> None:
    rows = used.rows()
    run = used.start_run("late", epsilon=1.0, if_exhausted="sit_out")
    run.settle(run.reserve(0, [9], CHARGE / 8), "x")
    assert list(rows)[9].mu2_spent == 0
    assert list(used.rows())[9].mu2_spent == CHARGE / 8


def test_summary(used: Population) -> None:
    summary = used.summary()
    assert (summary.clients, summary.joined) == (10, 4)
    assert (summary.exhausted, summary.near_end, summary.unbounded) == (2, 1, 1)
    assert (summary.reserved, summary.open_reservations) == (1, 1)
    assert (summary.epsilon_max, summary.epsilon_median) == (math.inf, 0.0)
    assert summary.largest_run_epsilon == 0


def test_the_median_may_be_infinite(population: Population) -> None:
    run = population.start_run("open", epsilon=None)
    run.record_unbounded(0, range(4), "a")
    assert population.summary().epsilon_median == 0
    run.record_unbounded(1, range(5), "b")
    assert population.summary().epsilon_median == math.inf


def test_export_is_plain_json(ledger: Ledger, used: Population) -> None:
    data = json.loads(json.dumps(ledger.export(), allow_nan=False))
    assert data["head"] == ledger.head() == data["entries"][-1]["hash"]
    (population,) = data["populations"]
    assert population["client_rows"][4]["epsilon_spent"] == "inf"
    assert population["client_rows"][0]["mu2_spent"] == 2 * CHARGE
    assert [run["run"] for run in population["runs"]] == ["first", "open"]
    kinds = [entry["kind"] for entry in data["entries"]]
    assert kinds[:5] == ["ledger", "population", "run", "reserve", "settle"]
    assert "client_rows" not in ledger.export(clients=False)["populations"][0]


def test_csv_rows_can_be_read_back(used: Population) -> None:
    text = io.StringIO()
    csv.writer(text).writerows(csv_rows(used))
    read = list(csv.DictReader(io.StringIO(text.getvalue())))
    rows = list(used.rows())
    assert list(read[0]) == [field.name for field in dataclasses.fields(rows[0])]
    assert [float(row["mu2_spent"]) for row in read] == [row.mu2_spent for row in rows]
    assert (read[0]["last_run"], read[5]["last_run"]) == ("first", "")


def test_populations_are_separate(ledger: Ledger, used: Population) -> None:
    other = ledger.population("other", num_clients=4, epsilon=1.0, delta=1e-6)
    assert other.spent().tolist() == [0] * 4
    run = other.start_run("theirs", epsilon=1.0)
    run.settle(run.reserve(0, [0], 2.0**-12), "a")
    assert used.spent()[0] == 2 * CHARGE
    assert [p.info.name for p in ledger.populations()] == ["digits", "other"]
    assert ledger.verify().ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_clients": 11}, r"num_clients=10, not 11"),
        ({"epsilon": 7.0}, r"epsilon=6.0, not 7.0"),
        ({"delta": 1e-6}, r"delta=1e-05, not 1e-06"),
    ],
)
def test_an_allowance_cannot_be_changed(
    ledger: Ledger, population: Population, change: dict[str, float], message: str
) -> None:
    head = ledger.head()
    with pytest.raises(LedgerConflictError, match=message):
        ledger.population("digits", **change)  # type: ignore[arg-type]
    assert ledger.head() == head


def test_a_population_is_opened_with_what_is_there(ledger: Ledger, population: Population) -> None:
    assert ledger.population("digits") is population
    assert ledger.population("digits", num_clients=10, epsilon=6, delta=1e-5) is population
    with pytest.raises(LedgerConflictError, match="to make it, give num_clients, delta"):
        ledger.population("letters", epsilon=1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_clients": 0},
        {"num_clients": 10**9},
        {"num_clients": 2.5},
        {"epsilon": 0.0},
        {"epsilon": math.inf},
        {"delta": 0.0},
        {"delta": 1.0},
    ],
)
def test_wrong_populations(ledger: Ledger, wrong: dict[str, float]) -> None:
    values = {"num_clients": 3, "epsilon": 1.0, "delta": 1e-5, **wrong}
    with pytest.raises(InvalidValueError, match=next(iter(wrong))):
        ledger.population("new", **values)  # type: ignore[arg-type]
    assert ledger.populations() == []


def test_numbers_of_numpy_are_numbers(ledger: Ledger) -> None:
    population = ledger.population(
        "new", num_clients=np.int64(3), epsilon=np.float64(2), delta=np.float64(1e-5)
    )
    run = population.start_run("r", epsilon=np.float32(1))
    run.reserve(np.int32(0), np.array([1], dtype=np.uint8), np.float32(0.001))
    assert ledger.verify().ok


def test_a_name_from_the_split() -> None:
    name = population_name("mnist", {"alpha": 0.5, "kind": "dirichlet"}, 42, 100)
    assert name == population_name("mnist", {"kind": "dirichlet", "alpha": 0.5}, 42, 100)
    others = {
        population_name("fmnist", {"alpha": 0.5, "kind": "dirichlet"}, 42, 100),
        population_name("mnist", {"alpha": 0.1, "kind": "dirichlet"}, 42, 100),
        population_name("mnist", {"alpha": 0.5, "kind": "dirichlet"}, 43, 100),
        population_name("mnist", {"alpha": 0.5, "kind": "dirichlet"}, 42, 101),
    }
    assert len(others | {name}) == 5
    with pytest.raises(InvalidValueError, match="plain data"):
        population_name("mnist", {"split": object()}, 42, 100)


def test_another_connection_sees_what_is_settled(path: Path, used: Population) -> None:
    with Ledger.open(path, read_only=True) as reader:
        theirs = reader.population("digits")
        assert theirs.spent().tolist() == used.spent().tolist()
        run = used.start_run("more", epsilon=1.0, if_exhausted="sit_out")
        run.settle(run.reserve(0, [9], CHARGE / 8), "x")
        assert theirs.spent()[9] == CHARGE / 8


def test_who_was_never_charged_can_pay_the_whole_allowance(ledger: Ledger) -> None:
    fresh = ledger.population("fresh", client_ids=["a", "b"], epsilon=3.0, delta=1e-5)
    assert fresh.largest_run_epsilon() == fresh.summary().largest_run_epsilon == 3.0
    assert [row.epsilon_left for row in fresh.rows()] == fresh.epsilon_left().tolist() == [3.0, 3.0]
    assert fresh.start_run("all of it", epsilon=3.0).budget_mu2 <= fresh.info.allowance_mu2
    table = ledger_tables([fresh.summary()], {"fresh": list(fresh.rows())})
    assert "2.99" not in table
    run = fresh.start_run("all but nothing", epsilon=3.0)
    run.settle(run.reserve(0, [0], 2.0**-40), "x")
    assert fresh.largest_run_epsilon() < 3.0


def test_an_allowance_is_not_shown_smaller_than_it_is(ledger: Ledger) -> None:
    odd = ledger.population("odd", num_clients=2, epsilon=5.0000049, delta=1.0000049e-5)
    assert "5.00001 at 1.00001e-05" in ledger_tables([odd.summary()], {"odd": list(odd.rows())})


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(1e-200, 1e-200), (1e-160, 1e-150), (1e308, 1e-5), (1e-300, 1e-300)]
)
def test_an_allowance_that_cannot_be_counted_is_refused(
    ledger: Ledger, epsilon: float, delta: float
) -> None:
    before = ledger.head()
    with pytest.raises(InvalidValueError, match="an amount that can be counted"):
        ledger.population("p", num_clients=2, epsilon=epsilon, delta=delta)
    assert ledger.head() == before
    assert ledger.populations() == []


def test_a_run_that_cannot_be_counted_beside_the_allowance_is_refused(ledger: Ledger) -> None:
    large = ledger.population("large", num_clients=2, epsilon=1e100, delta=1e-5)
    before = ledger.head()
    with pytest.raises(InvalidValueError, match="counted beside"):
        large.start_run("r", epsilon=1.0)
    assert ledger.head() == before


def test_nothing_is_charged_to_a_client_without_a_bound(ledger: Ledger) -> None:
    """A charge of zero takes nobody above an allowance, at infinity neither."""
    wards = ledger.population("wards", client_ids=["a", "b"], epsilon=3.0, delta=1e-5)
    wards.start_run("open", epsilon=None).record_unbounded(0, [0], "x")
    run = wards.start_run("bounded", epsilon=1.0, if_exhausted="sit_out")
    run.settle(run.reserve(0, [0, 1], [0.0, CHARGE / 2]), "y")
    report = ledger.verify()
    assert report.ok, report.problems
