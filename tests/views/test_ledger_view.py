"""A ledger for its operator: sums, histories and plans agree with the ledger itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedquilt.common.errors import FedquiltError
from fedquilt.privacy.ledger import BudgetExceededError, Ledger
from fedquilt.views import client_history, ledger_view, planned_cost

NAMES = ["ann", "bob", "cem", "dee"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two runs of four named clients; cem has spent most, dee nothing."""
    place = tmp_path / "clients.sqlite"
    with Ledger.open(place, create=True) as ledger:
        people = ledger.population("people", client_ids=NAMES, epsilon=4.0, delta=1e-5)
        first = people.start_run("first", epsilon=2.0, client_ids=NAMES)
        for index, cohort in enumerate(([0, 2], [1, 2], [2])):
            reserved = first.reserve(index, cohort, np.full(len(cohort), 0.05))
            first.settle(reserved, release_digest=f"{index:08x}")
        first.finish()
        second = people.start_run("second", epsilon=1.0, client_ids=NAMES)
        reserved = second.reserve(0, [0, 2], np.asarray([0.01, 0.02]))
        second.settle(reserved, release_digest="ffff")
    return place


def test_the_populations_are_the_ledger_s(path: Path) -> None:
    (people,) = ledger_view(path)["ledger"]["populations"]
    with Ledger.open(path) as ledger:
        own = ledger.population("people")
        assert people["joins"] == own.joins().tolist() == [2, 1, 4, 0]
        np.testing.assert_allclose(people["epsilons"], own.epsilons(), rtol=1e-4)
        assert np.all(np.asarray(people["epsilons"]) >= own.epsilons())
        assert np.all(np.asarray(people["left"]) <= own.epsilon_left() * (1 + 1e-3))
    assert people["ids"] == NAMES
    assert [(run["name"], run["releases"], run["clients"]) for run in people["runs"]] == [
        ("second", 1, 2),
        ("first", 3, 3),
    ]


def test_a_client_s_history_adds_up(path: Path) -> None:
    found = client_history(path, "people", 2)
    assert [(row["run"], row["round"]) for row in found["rows"]] == [
        ("first", 1),
        ("first", 2),
        ("first", 3),
        ("second", 1),
    ]
    assert sum(row["charge"] for row in found["rows"]) == pytest.approx(0.17, rel=1e-3)
    with Ledger.open(path) as ledger:
        spent = ledger.population("people").epsilons()[2]
    assert found["rows"][-1]["epsilon"] == pytest.approx(spent, rel=1e-4)
    assert client_history(path, "people", 3)["rows"] == []
    with pytest.raises(FedquiltError, match="client"):
        client_history(path, "people", 4)
    with pytest.raises(FedquiltError, match="nobody"):
        client_history(path, "nobody", 0)


def test_a_plan_says_what_the_ledger_would_do(path: Path) -> None:
    with Ledger.open(path) as ledger:
        people = ledger.population("people")
        most = people.largest_run_epsilon()
        fits, not_ = (
            planned_cost(path, "people", 0.99 * most),
            planned_cost(path, "people", 1.01 * most),
        )
        people.start_run("third", epsilon=0.99 * most, client_ids=NAMES).finish()
        with pytest.raises(BudgetExceededError):
            people.start_run("fourth", epsilon=1.01 * most, client_ids=NAMES)
    assert (fits["can_pay"], fits["cannot"]) == (4, 0)
    assert (not_["can_pay"], not_["cannot"], not_["who"]) == (3, 1, ["cem"])
    assert fits["payable"] == pytest.approx(most, rel=1e-3)
    assert fits["runs"] == 1
    assert planned_cost(path, "people", 0.5)["runs"] > 1
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(FedquiltError, match="epsilon"):
            planned_cost(path, "people", wrong)
