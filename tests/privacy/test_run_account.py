"""A run's account: quantiles of epsilon, and who is the run's."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fedquilt.errors import InvalidValueError
from fedquilt.privacy.ledger import Ledger
from fedquilt.privacy.run_account import RunAccount, _ranked

LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize("paid", [0, 1, 3, 7, 8])
def test_amounts_at_ranks_are_those_of_a_sorted_list(paid: int) -> None:
    rng = np.random.default_rng(paid)
    amounts = np.zeros(8)
    amounts[rng.choice(8, size=paid, replace=False)] = rng.integers(1, 4, paid)
    if paid == 7:
        amounts[amounts.argmax()] = math.inf
    ranks = np.array([0, 7, 3, 3, 5])
    assert _ranked(amounts, ranks).tolist() == np.sort(amounts)[ranks].tolist()


def test_quantiles_of_epsilon_are_epsilons_of_clients(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.sqlite", create=True) as ledger:
        population = ledger.population("p", num_clients=9, epsilon=6.0, delta=1e-5)
        run = population.start_run("run", epsilon=3.0)
        account = RunAccount(ledger, population, run)
        assert account.epsilon_at(LEVELS) == [0.0] * 5
        for index, clients in enumerate([[2, 5, 7], [2, 5], [5], [0, 5]]):
            run.settle(run.reserve(index, clients, 0.05 + 0.01 * index), f"release {index}")
        everybody = account.epsilons()
        assert everybody is not None
        ordered = sorted(everybody.tolist())
        assert account.epsilon_at(LEVELS) == [ordered[rank] for rank in (0, 2, 4, 6, 8)]


def test_who_joins_later_is_not_the_runs(tmp_path: Path) -> None:
    """Also after the run has asked who is its own."""
    with Ledger.open(tmp_path / "ledger.sqlite", create=True) as ledger:
        population = ledger.population("p", epsilon=6.0, delta=1e-5, client_ids=["a", "b", "c"])
        run = population.start_run("run", epsilon=3.0, client_ids=["b", "a", "c"])
        before = run.remaining()
        assert before.size == 3
        assert (before > 0).all()
        population.start_run("other", epsilon=3.0, client_ids=["d", "a"])
        assert (run.remaining() > 0).tolist() == [True, True, True, False]
        with pytest.raises(InvalidValueError, match="client=3 must be one of the clients that run"):
            run.reserve(0, [3], 0.1)


def test_a_deferred_release_is_settled_before_the_next_reservation(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.sqlite", create=True) as ledger:
        population = ledger.population("p", num_clients=3, epsilon=6.0, delta=1e-5)
        account = RunAccount(ledger, population, population.start_run("run", epsilon=3.0))
        who, release = np.array([0, 2]), torch.ones(4)
        account.reserve(0, who, np.full(2, 0.1))
        account.defers = True
        account.settle(release)
        release.zero_()  # as a server's step may: what is settled is the release as it was
        assert account.run.settled() == {}
        left = account.remaining(1)
        with pytest.raises(RuntimeError, match="settled before the next reservation"):
            account.reserve(1, who, np.full(2, 0.1))
        account.settle_deferred()
        assert account.remaining(1).tolist() == left.tolist(), "it counted already"
        digest = hashlib.sha256(torch.ones(4).numpy().tobytes()).hexdigest()
        assert account.run.settled() == {0: [digest]}
        assert account.joins().tolist() == [1, 0, 1]


def test_nothing_waits_after_a_deferral_without_a_release(tmp_path: Path) -> None:
    """Nobody may have sent anything; what is settled next, an evaluation, must not wait."""
    with Ledger.open(tmp_path / "ledger.sqlite", create=True) as ledger:
        population = ledger.population("p", num_clients=3, epsilon=6.0, delta=1e-5)
        account = RunAccount(ledger, population, population.start_run("run", epsilon=3.0))
        account.defers = True
        account.settle_deferred()
        account.reserve(0, np.array([1]), np.full(1, 0.1))
        account.settle(torch.ones(2))
        assert list(account.run.settled()) == [0]
