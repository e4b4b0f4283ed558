"""A ledger for its operator: sums, histories and plans agree with the ledger itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from command_line import Said
from fedquilt.common.errors import FedquiltError
from fedquilt.privacy.accounting import gaussian_mu
from fedquilt.privacy.ledger import BudgetExceededError, Ledger, entries
from fedquilt.privacy.ledger.entries import Entry, encode_clients
from fedquilt.report.views import client_history, ledger_view, planned_cost
from run_processes import environment
from tiers import rest_is_slow

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
    whole = gaussian_mu(4.0, 1e-5) ** 2
    shares = [amount / whole for amount in (0.06, 0.05, 0.17, 0.0)]
    assert people["shares"] == pytest.approx(shares, abs=1e-4), "of units that add up"
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


def test_rounds_count_from_one_everywhere(path: Path, cli: Callable[..., Said]) -> None:
    """Bob's last release is the second round of the first run: on the page, in all commands."""
    (people,) = ledger_view(path)["ledger"]["populations"]
    assert people["last"] == ["second, round 1", "first, round 2", "second, round 1", None]
    assert client_history(path, "people", 1)["rows"][-1]["round"] == 2
    assert "round 2 of first" in cli("ledger", "show", path, "--client", "bob").out
    rows = cli("ledger", "show", path).out
    assert re.search(r"bob .*\[\d\] 2\b", rows)
    assert re.search(r"cem .*\[\d\] 1\b", rows)


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


def claiming(path: Path, clients: int, who: list[int]) -> Path:
    """Make a ledger of so many clients by number, some of whom were in a release."""
    with Ledger.open(path, create=True) as ledger:
        entry = {"num_clients": clients, "epsilon": 6.0, "delta": 1e-5}
        ledger.population("many", **entry)  # type: ignore[arg-type]
        store = ledger._store
        body = json.dumps({"epsilon": 3.0, "budget_mu2": 1.0})
        with store.writing():
            run, _ = store.append(Entry(0, entries.RUN, "", 2, name="r", body=body))
            blob, paid = encode_clients(np.asarray(who)), np.asarray([0.25]).tobytes()
            held = Entry(0, entries.RESERVE, "", 2, run, 0, clients=blob, charges=paid)
            number, _ = store.append(held)
            store.append(Entry(0, entries.SETTLE, "", 2, run, 0, number, digest="d"))
    return path


@pytest.mark.parametrize("who", rest_is_slow([[1, 4], [1, 10**8 - 1]], [[1, 10**8 - 1]]))
def test_clients_that_are_only_claimed_cost_no_memory(tmp_path: Path, who: list[int]) -> None:
    """A hundred million of them, of whom the second case names the very last."""
    path = claiming(tmp_path / "many.sqlite", 10**8, who)
    code = (
        "import json, resource, sys; from fedquilt.report.views import ledger_view, planned_cost\n"
        "used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "plan = planned_cost(sys.argv[1], 'many', 5.9); view = ledger_view(sys.argv[1])\n"
        "more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used\n"
        "print(json.dumps([more, plan, view['ledger']['populations'][0]['left']]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    more, plan, left = json.loads(ended.stdout)
    assert more < 200_000  # kB; one balance of each would be 800,000
    assert (plan["can_pay"], plan["cannot"], plan["who"]) == (10**8 - 2, 2, [str(i) for i in who])
    assert plan["left_after"] > 0
    assert plan["runs"] == 1
    assert left[0] == left[1] == plan["payable"] < 5.9


def test_plans_for_untouched_clients_and_for_nobody(tmp_path: Path) -> None:
    path = claiming(tmp_path / "many.sqlite", 30, [3])
    assert planned_cost(path, "many", 6.0)["can_pay"] == 29
    beyond = planned_cost(path, "many", 6.1)
    assert (beyond["can_pay"], beyond["cannot"], beyond["runs"]) == (0, 30, 0)
    assert beyond["who"] == [str(i) for i in range(20)]
    assert beyond["left_after"] is None
