from __future__ import annotations

import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from fedquilt.errors import FedquiltError, InvalidValueError
from fedquilt.privacy.ledger import (
    BudgetExceededError,
    Ledger,
    LedgerConflictError,
    Population,
    ReservationError,
    Run,
)

CHARGE = 2.0**-10  # on the grid of every allowance used here, so balances are exact


@pytest.fixture
def run(population: Population) -> Run:
    return population.start_run("first", epsilon=3.0)


def test_a_round_moves_from_reserved_to_spent(population: Population, run: Run) -> None:
    reservation = run.reserve(0, [7, 2], [CHARGE, 3 * CHARGE])
    assert reservation.clients.tolist() == [7, 2]
    assert reservation.charges_mu2.tolist() == [CHARGE, 3 * CHARGE]
    assert population.reserved()[[2, 7]].tolist() == [3 * CHARGE, CHARGE]
    assert population.spent().sum() == 0
    run.settle(reservation, "a")
    assert population.reserved().sum() == 0
    assert population.spent()[[2, 7]].tolist() == [3 * CHARGE, CHARGE]
    assert population.joins().tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    assert run.spent([2]).tolist() == [3 * CHARGE]
    assert run.settled() == {0: ["a"]}


def test_remaining_is_the_smaller_of_the_run_and_the_lifetime(
    population: Population, run: Run
) -> None:
    whole, budget = population.info.allowance_mu2, run.budget_mu2
    other = population.start_run("other", epsilon=6.0)
    other.settle(other.reserve(0, [0, 1], [whole - CHARGE, CHARGE]), "x")
    other.reserve(1, [2], whole - 2 * CHARGE)
    own = run.reserve(0, [3], CHARGE)
    assert run.remaining([0, 1, 2, 3]).tolist() == [CHARGE, budget, 2 * CHARGE, budget]
    run.settle(own, "y")
    assert run.remaining([3, 9]).tolist() == [budget - CHARGE, budget]
    assert run.remaining().size == 10


def test_a_round_that_asks_too_much_changes_nothing(population: Population, run: Run) -> None:
    run.settle(run.reserve(0, [4], run.budget_mu2 - CHARGE), "a")
    head = run.head
    with pytest.raises(BudgetExceededError, match=r"1 client has less left.*client 4") as error:
        run.reserve(1, [3, 4], 2 * CHARGE)
    assert error.value.clients.tolist() == [4]
    assert error.value.left_mu2.tolist() == [CHARGE]
    assert error.value.asked_mu2.tolist() == [2 * CHARGE]
    copied = pickle.loads(pickle.dumps(error.value))
    assert str(copied) == str(error.value)
    assert copied.clients.tolist() == [4]
    assert run.head == head
    assert population.reserved().sum() == 0


def test_two_runs_cannot_overspend_together(population: Population) -> None:
    one = population.start_run("one", epsilon=6.0)
    two = population.start_run("two", epsilon=6.0)
    held = one.reserve(0, [0], one.budget_mu2)
    with pytest.raises(BudgetExceededError):
        two.reserve(0, [0], CHARGE)
    one.release(held)
    two.settle(two.reserve(0, [0], two.budget_mu2), "b")
    with pytest.raises(BudgetExceededError):
        one.reserve(0, [0], CHARGE)
    assert population.epsilons()[0] <= 6.0


def test_the_whole_budget_in_equal_parts(population: Population) -> None:
    run = population.start_run("whole", epsilon=6.0)
    for index in range(49):
        run.settle(run.reserve(index, [0], run.budget_mu2 / 49), f"{index}")
    assert population.spent()[0] <= population.info.allowance_mu2
    assert population.epsilons()[0] <= 6.0
    assert population.epsilons()[0] == pytest.approx(6.0, rel=1e-9)
    with pytest.raises(BudgetExceededError):
        run.reserve(49, [0], 1e-300)


def test_the_same_release_is_charged_once_and_another_again(
    population: Population, run: Run
) -> None:
    reservation = run.reserve(5, [1], CHARGE)
    run.settle(reservation, "same")
    run.settle(reservation, "same")
    assert population.spent()[1] == CHARGE
    again = run.reserve(5, [1], CHARGE)
    run.settle(again, "same")
    assert (population.spent()[1], population.reserved()[1]) == (CHARGE, 0)
    run.settle(run.reserve(5, [1], CHARGE), "fresh noise")
    assert population.spent()[1] == 2 * CHARGE
    run.settle(run.reserve(6, [1], CHARGE), "same")
    assert population.spent()[1] == 3 * CHARGE
    assert run.settled() == {5: ["same", "fresh noise"], 6: ["same"]}


def test_one_digest_cannot_stand_for_two_cohorts(population: Population, run: Run) -> None:
    run.settle(run.reserve(0, [1], CHARGE), "a")
    other = run.reserve(0, [2], CHARGE)
    with pytest.raises(LedgerConflictError, match="one digest is one release"):
        run.settle(other, "a")
    assert population.reserved()[2] == CHARGE


def test_reserving_a_round_again_replaces_its_reservation(population: Population, run: Run) -> None:
    first = run.reserve(0, [1, 2], run.budget_mu2)
    second = run.reserve(0, [2, 3], run.budget_mu2)
    assert population.reserved()[[1, 2, 3]].tolist() == [0, run.budget_mu2, run.budget_mu2]
    with pytest.raises(ReservationError, match="released or replaced"):
        run.settle(first, "a")
    with pytest.raises(BudgetExceededError):
        run.reserve(1, [2], CHARGE)
    run.settle(second, "b")


def test_a_round_does_not_stand_in_its_own_way(population: Population) -> None:
    run = population.start_run("whole", epsilon=6.0)
    whole = population.info.allowance_mu2
    run.reserve(0, [1], whole)
    assert run.remaining([1]).tolist() == [whole]
    run.settle(run.reserve(0, [1], whole), "a")
    assert population.spent()[1] == whole


def test_release_takes_back_only_what_was_not_settled(population: Population, run: Run) -> None:
    reservation = run.reserve(0, [1], CHARGE)
    run.release(reservation)
    run.release(reservation)
    assert population.left()[1] == population.info.allowance_mu2
    with pytest.raises(ReservationError):
        run.settle(reservation, "late")
    settled = run.reserve(0, [1], CHARGE)
    run.settle(settled, "a")
    with pytest.raises(ReservationError, match="cannot be taken back"):
        run.release(settled)


def test_a_reservation_belongs_to_its_run(population: Population, run: Run) -> None:
    other = population.start_run("other", epsilon=1.0)
    reservation = other.reserve(0, [1], CHARGE)
    with pytest.raises(ReservationError, match="another run"):
        run.settle(reservation, "a")
    assert population.reserved()[1] == CHARGE


def test_a_dead_run_stays_counted_until_it_resumes(path: Path) -> None:
    with Ledger.open(path, create=True) as ledger:
        population = ledger.population("p", num_clients=3, epsilon=2.0, delta=1e-5)
        dead = population.start_run("dead", epsilon=2.0)
        dead.settle(dead.reserve(0, [0], CHARGE), "a")
        dead.reserve(1, [0], CHARGE)
    with Ledger.open(path) as ledger:
        population = ledger.population("p")
        assert population.reserved()[0] == CHARGE
        alive = population.start_run("dead", epsilon=2.0)
        assert population.reserved()[0] == 0
        assert alive.spent([0])[0] == CHARGE
        alive.settle(alive.reserve(1, [0], CHARGE), "b")
        assert population.spent()[0] == 2 * CHARGE
        assert ledger.verify().ok


def test_a_resumed_run_shuts_out_its_older_handle(population: Population, run: Run) -> None:
    reservation = run.reserve(0, [0], CHARGE)
    resumed = population.start_run("first", epsilon=3.0)
    with pytest.raises(ReservationError, match="resumed by another process; this one must stop"):
        run.settle(reservation, "a")
    with pytest.raises(ReservationError, match="must stop"):
        run.reserve(1, [0], CHARGE)
    resumed.settle(resumed.reserve(0, [0], CHARGE), "b")
    assert population.spent()[0] == CHARGE


def test_a_finished_run_is_closed_and_can_be_opened_again(population: Population, run: Run) -> None:
    run.reserve(0, [0], CHARGE)
    run.finish()
    assert population.reserved()[0] == 0
    with pytest.raises(ReservationError, match="is finished"):
        run.reserve(1, [0], CHARGE)
    population.start_run("first", epsilon=3.0).reserve(1, [0], CHARGE)


def test_a_run_keeps_its_epsilon(ledger: Ledger, population: Population, run: Run) -> None:
    with pytest.raises(LedgerConflictError, match=r"started with epsilon=3.0 .* epsilon=2.0"):
        population.start_run("first", epsilon=2.0)
    other = ledger.population("others", num_clients=2, epsilon=6.0, delta=1e-5)
    with pytest.raises(LedgerConflictError, match="another population"):
        other.start_run("first", epsilon=3.0)
    with pytest.raises(InvalidValueError, match=r"must be <= 6.0, the lifetime allowance"):
        population.start_run("greedy", epsilon=6.5)


def test_a_run_that_asks_more_than_is_left_is_refused_or_people_sit_out(
    population: Population, run: Run
) -> None:
    run.settle(run.reserve(0, [1, 8], run.budget_mu2), "a")
    head = run.head
    with pytest.raises(BudgetExceededError, match=r"2 of 10 clients .* is 4\.86") as error:
        population.start_run("second", epsilon=5.0)
    assert error.value.clients.tolist() == [1, 8]
    assert run.head == head
    second = population.start_run("second", epsilon=5.0, if_exhausted="sit_out")
    assert second.remaining([1, 8]).tolist() == [0, 0]
    assert np.all(second.remaining([0, 2, 9]) == second.budget_mu2)
    with pytest.raises(BudgetExceededError):
        second.reserve(0, [1], CHARGE)
    resumed = population.start_run("second", epsilon=5.0, if_exhausted="sit_out")
    assert np.flatnonzero(resumed.remaining() == 0).tolist() == [1, 8]


def test_the_largest_epsilon_is_accepted_and_a_larger_one_is_not(
    population: Population, run: Run
) -> None:
    run.settle(run.reserve(0, [3], run.budget_mu2), "a")
    largest = population.largest_run_epsilon()
    assert largest == pytest.approx(4.86, abs=0.005)
    assert population.epsilon_left()[3] == largest
    with pytest.raises(BudgetExceededError):
        population.start_run("more", epsilon=largest * 1.0001)
    population.start_run("most", epsilon=largest)


def test_a_run_nobody_can_join_is_refused(population: Population) -> None:
    whole = population.start_run("whole", epsilon=6.0)
    whole.settle(whole.reserve(0, range(10), whole.budget_mu2), "a")
    assert population.largest_run_epsilon() == 0
    with pytest.raises(BudgetExceededError, match="more than any client of"):
        population.start_run("late", epsilon=0.1, if_exhausted="sit_out")


def test_a_release_without_a_bound_is_infinite_for_ever(population: Population) -> None:
    run = population.start_run("fedavg", epsilon=None)
    with pytest.raises(BudgetExceededError):
        run.reserve(0, [2], CHARGE)
    head = run.record_unbounded(0, [2, 5], "a")
    assert run.record_unbounded(0, [2, 5], "a") == head
    assert population.joins()[[2, 5]].tolist() == [1, 1]
    assert np.flatnonzero(np.isinf(population.epsilons())).tolist() == [2, 5]
    assert np.flatnonzero(np.isinf(run.epsilons())).tolist() == [2, 5]
    certified = population.start_run("certified", epsilon=1.0, if_exhausted="sit_out")
    assert np.flatnonzero(certified.remaining() == 0).tolist() == [2, 5]
    with pytest.raises(BudgetExceededError):
        population.start_run("refused", epsilon=1.0)


def test_an_empty_cohort_is_a_release_too(ledger: Ledger, run: Run) -> None:
    run.settle(run.reserve(0, [], 0.1), "noise only")
    assert run.settled() == {0: ["noise only"]}
    assert ledger.verify().ok


@pytest.mark.parametrize("digest", ["", None, 3, "x" * 257, "a\nb"])
def test_wrong_digests(run: Run, digest: object) -> None:
    reservation = run.reserve(0, [0], CHARGE)
    with pytest.raises(InvalidValueError, match="digest"):
        run.settle(reservation, digest)  # type: ignore[arg-type]


@pytest.mark.parametrize("round_index", [-1, 1.5, True, 2**40])
def test_wrong_rounds(run: Run, round_index: object) -> None:
    with pytest.raises(InvalidValueError, match="round_index"):
        run.reserve(round_index, [0], CHARGE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        {"run_id": "", "epsilon": 1.0},
        {"run_id": "r", "epsilon": 0.0},
        {"run_id": "r", "epsilon": float("nan")},
        {"run_id": "r", "epsilon": 1.0, "if_exhausted": "sitout"},
    ],
)
def test_wrong_runs(population: Population, arguments: dict[str, object]) -> None:
    with pytest.raises(FedquiltError):
        population.start_run(**arguments)  # type: ignore[arg-type]
    assert population.runs() == []


def test_a_million_clients(path: Path) -> None:
    """The promised times, some twenty times what the processor usually needs."""
    rng = np.random.default_rng(0)
    with Ledger.open(path, create=True) as ledger:
        population = ledger.population("all", num_clients=1_000_000, epsilon=6.0, delta=1e-5)
        run = population.start_run("one", epsilon=6.0)
        charges = rng.uniform(0, run.budget_mu2 / 2, 1_000_000)
        run.settle(run.reserve(0, np.arange(1_000_000), charges), "everybody")
        cohort = rng.choice(1_000_000, 10_000, replace=False)
        size = path.stat().st_size

        start = time.process_time()
        reservation = run.reserve(1, cohort, charges[cohort])
        reserved = time.process_time()
        run.settle(reservation, "cohort")
        settled = time.process_time()
        assert reserved - start < 0.5
        assert settled - reserved < 0.5
        assert path.stat().st_size - size < 120_000

        start = time.process_time()
        epsilons = population.epsilons()
        assert time.process_time() - start < 2.0
        assert epsilons.max() <= 6.0
        assert run.finish() == ledger.head()
        assert ledger.verify().ok
    with Ledger.open(path) as ledger:
        np.testing.assert_array_equal(ledger.population("all").epsilons(), epsilons)
