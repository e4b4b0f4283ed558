"""Any order of joins, crashes, resumes and parallel runs keeps everybody at (epsilon, delta).

The model beside the ledger is a few dictionaries of exact fractions.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from examples import examples
from fedquilt.privacy.ledger import BudgetExceededError, Ledger, Reservation, Run

CLIENTS, EPSILON, DELTA = 3, 2.0, 1e-5
NAMES = ("a", "b", "c")
EPSILONS = {"a": 2.0, "b": 1.0, "c": 0.4}

names = st.sampled_from(NAMES)
rounds = st.integers(0, 2)
cohorts = st.lists(st.integers(0, CLIENTS - 1), min_size=1, unique=True)
shares = st.sampled_from([0.0, 1e-18, 0.01, 1 / 3, 0.5, 1.0, 1.01]) | st.floats(0, 1)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(dir=memory))
        # Two connections, as two processes would have.
        self.ledgers = [Ledger.open(self.folder / "l", create=True) for _ in range(2)]
        self.runs: dict[str, Run] = {}
        self.budgets: dict[str, Fraction] = {}
        self.spent = [Fraction(0)] * CLIENTS
        self.in_run = {name: [Fraction(0)] * CLIENTS for name in NAMES}
        self.open: dict[tuple[str, int], Reservation] = {}
        self.used: dict[tuple[str, int, str], Reservation] = {}
        self.heads: list[str] = []
        self.fresh = 0
        self.allowance = Fraction(self.population(0).info.allowance_mu2)

    def population(self, which: int):  # type: ignore[no-untyped-def]
        return self.ledgers[which].population(
            "p", num_clients=CLIENTS, epsilon=EPSILON, delta=DELTA
        )

    def reserved(self, client: int, skip: tuple[str, int], only: str | None = None) -> Fraction:
        total = Fraction(0)
        for key, reservation in self.open.items():
            if key != skip and only in (None, key[0]):
                for who, charge in zip(reservation.clients, reservation.charges_mu2, strict=True):
                    total += Fraction(float(charge)) if who == client else 0
        return total

    @rule(name=names, which=st.integers(0, 1))
    def start_or_resume(self, name: str, which: int) -> None:
        """Whoever held the run before is shut out; what it had reserved is dropped."""
        short = not all(
            self.allowance - self.spent[c] - self.reserved(c, ("", 0))
            >= Fraction(self.population(0)._budget(EPSILONS[name]))
            for c in range(CLIENTS)
        )
        try:
            run = self.population(which).start_run(name, epsilon=EPSILONS[name])
        except BudgetExceededError:
            assert short
            assert name not in self.budgets
            return
        assert name in self.budgets or not short
        self.runs[name] = run
        self.budgets[name] = Fraction(run.budget_mu2)
        self.open = {key: value for key, value in self.open.items() if key[0] != name}

    @precondition(lambda self: self.runs)
    @rule(name=names, index=rounds, cohort=cohorts, share=shares)
    def reserve(self, name: str, index: int, cohort: list[int], share: float) -> None:
        if name not in self.runs:
            return
        asked = share * float(self.budgets[name])
        key = (name, index)
        left = min(
            min(
                self.allowance - self.spent[c] - self.reserved(c, key),
                self.budgets[name] - self.in_run[name][c] - self.reserved(c, key, only=name),
            )
            for c in cohort
        )
        try:
            reservation = self.runs[name].reserve(index, cohort, asked)
        except BudgetExceededError:
            assert Fraction(asked) > left
            return
        assert Fraction(asked) <= left * (1 + Fraction(1, 10**6))
        assert all(Fraction(charge) <= left for charge in reservation.charges_mu2)
        assert np.all(reservation.charges_mu2 >= asked * (1 - 1e-6))
        self.open[key] = reservation

    def pick(self, name: str) -> tuple[str, int] | None:
        return next((key for key in self.open if key[0] == name and name in self.runs), None)

    @precondition(lambda self: self.open)
    @rule(name=names)
    def settle_a_fresh_release(self, name: str) -> None:
        key = self.pick(name)
        if key is None:
            return
        self.fresh += 1
        reservation = self.open.pop(key)
        self.heads.append(self.runs[name].settle(reservation, str(self.fresh)))
        self.used[(*key, str(self.fresh))] = reservation
        for client, charge in zip(reservation.clients, reservation.charges_mu2, strict=True):
            self.spent[client] += Fraction(float(charge))
            self.in_run[name][client] += Fraction(float(charge))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def settle_the_same_release_again(self, data: st.DataObject) -> None:
        name, index, digest = data.draw(st.sampled_from(sorted(self.used)))
        if name in self.runs:
            self.runs[name].settle(self.used[name, index, digest], digest)

    @precondition(lambda self: self.open)
    @rule(name=names)
    def release(self, name: str) -> None:
        key = self.pick(name)
        if key is not None:
            self.runs[name].release(self.open.pop(key))

    @rule(name=names)
    def finish(self, name: str) -> None:
        if name in self.runs:
            self.runs.pop(name).finish()
            self.open = {key: value for key, value in self.open.items() if key[0] != name}

    @rule(which=st.integers(0, 1))
    def crash(self, which: int) -> None:
        """A process dies: its handles are gone, its reservations stay."""
        store = self.ledgers[which]._store
        self.runs = {name: run for name, run in self.runs.items() if run._store is not store}
        self.ledgers[which].close()
        self.ledgers[which] = Ledger.open(self.folder / "l")

    @invariant()
    def balances_are_the_exact_sums(self) -> None:
        for which in (0, 1):
            population = self.population(which)
            assert [Fraction(value) for value in population.spent()] == self.spent
            reserved = [self.reserved(client, ("", 0)) for client in range(CLIENTS)]
            assert [Fraction(value) for value in population.reserved()] == reserved
            assert max(s + r for s, r in zip(self.spent, reserved, strict=True)) <= self.allowance
        assert np.all(population.epsilons() <= EPSILON)

    def teardown(self) -> None:
        report = self.ledgers[0].verify(self.heads)
        for ledger in self.ledgers:
            ledger.close()
        shutil.rmtree(self.folder)
        assert report.ok, report.problems


class TestLedgerMachine(LedgerMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=examples(4), stateful_step_count=30, derandomize=True)


@pytest.mark.slow
class TestLedgerMachineAtLength(LedgerMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=examples(20), stateful_step_count=30, derandomize=True)
