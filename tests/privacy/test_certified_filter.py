"""However clients join and processes die, nobody passes (epsilon, delta).

Two runs share one ledger.  An adversary picks every cohort, lets either run die while
it trains or just after a release, and lets it go on from its last checkpoint.  What a
client has truly given away is summed up beside the ledger, from the clips and the
noise that were applied.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import get_epsilon_gaussian
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from certified_samples import (
    SIZE,
    joining,
    make_federation,
    make_problem,
    memory_folder,
    ones,
    plan_of,
    true_costs,
)
from examples import examples
from fedquilt.aggregation import ServerOptimizer
from fedquilt.federation import Federation
from fedquilt.privacy.ledger import BudgetExceededError
from fedquilt.round import run_round

CLIENTS, ROUNDS, ALLOWANCE, DELTA = 4, 8, 3.0, 1e-5
RUNS = ("a", "b")
KINDS: list[dict[str, Any]] = [
    {},
    {"policy": "worst_case"},
    {"policy": "cap", "max_joins": 3},
    {"policy": "paper"},
    {"clipping": "quantile"},
    {"clipping": "quantile", "noise_bands": 2, "normalise_updates": True},
    {"noise_bands": 3},
]
cohorts = st.lists(st.integers(0, CLIENTS - 1), unique=True)


class DeathError(Exception):
    """The process is gone."""


class MortalServer(ServerOptimizer):
    """Counts what is released as released, before it is used."""

    def __init__(self, run: CertifiedRun) -> None:
        super().__init__("sgd", 1.0)
        self.run = run

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        self.run.count_release()
        if self.run.dies == "after the release":
            raise DeathError
        return super().step(weights, update)


class CertifiedRun:
    """A run that can die, and its truth."""

    def __init__(self, path: Path, name: str, settings: dict[str, Any]) -> None:
        self.path, self.name = path, name
        self.config, self.problem = make_problem(
            CLIENTS, num_rounds=ROUNDS, epsilon=2.5, allowance=ALLOWANCE, **settings
        )
        self.true = np.zeros(CLIENTS)
        self.next_round = 0
        self.saved: tuple[int, dict[str, Any], torch.Tensor] | None = None
        self.dies = ""
        self.start()

    def start(self) -> None:
        """Start, or resume from the last checkpoint, as a new process does."""
        self.federation: Federation = make_federation(
            self.config, self.problem, self.path, self.name, self.update
        )
        self.federation.method.server = MortalServer(self)
        self.joined: dict[int, int] = {}
        if self.saved is not None:
            self.next_round, state, weights = self.saved
            self.federation.load_state(copy.deepcopy(state))
            self.federation.weights = weights.clone()

    def update(self, client: int, index: int) -> torch.Tensor:
        if self.dies == "in training":
            raise DeathError
        return ones(client, index)

    def count_release(self) -> None:
        costs = true_costs(self.federation)
        for client in plan_of(self.federation).clients.tolist():
            self.true[client] += costs[client]

    def step(self, cohort: list[int], dies: str) -> None:
        """Run one round, perhaps to its death; then come back."""
        if self.next_round == ROUNDS:
            return
        self.dies = dies
        joining(self.federation, lambda index: cohort)
        try:
            record = run_round(self.federation, self.next_round)
        except DeathError:
            assert self.federation.account is not None
            self.federation.account.close()
            self.dies = ""
            self.start()
            return
        self.check_separation(record.cohort)
        self.next_round += 1
        state = copy.deepcopy(self.federation.state())
        self.saved = (self.next_round, state, self.federation.weights.clone())

    def check_separation(self, cohort: list[int]) -> None:
        """Within the life of a process, which has one sequence of noise."""
        for client in cohort:
            before = self.joined.get(client, -ROUNDS)
            assert self.next_round - before >= self.config.noise_bands
            self.joined[client] = self.next_round

    @property
    def spent(self) -> np.ndarray:
        assert self.federation.account is not None
        return self.federation.account.spent()


class FilterMachine(RuleBasedStateMachine):
    """Two runs, one ledger, an adversary."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.path = self.stack.enter_context(memory_folder()) / "ledger"
        self.runs: dict[str, CertifiedRun] = {}
        self.worst = 0.0

    @initialize(first=st.sampled_from(KINDS), second=st.sampled_from(KINDS))
    def start(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        self.runs = {
            name: CertifiedRun(self.path, name, kind)
            for name, kind in zip(RUNS, (first, second), strict=True)
        }

    @rule(name=st.sampled_from(RUNS), cohort=cohorts)
    def round(self, name: str, cohort: list[int]) -> None:
        self.runs[name].step(cohort, "")

    @rule(
        name=st.sampled_from(RUNS),
        cohort=cohorts,
        moment=st.sampled_from(["in training", "after the release"]),
    )
    def death(self, name: str, cohort: list[int], moment: str) -> None:
        self.runs[name].step(cohort, moment)

    @invariant()
    def nobody_is_above_its_allowance(self) -> None:
        if not self.runs:
            return
        worst = float(sum(run.true for run in self.runs.values()).max())
        if worst > self.worst:
            assert get_epsilon_gaussian(worst**-0.5, DELTA) <= ALLOWANCE * (1 + 1e-9)
            self.worst = worst

    @invariant()
    def the_ledger_is_never_below_the_truth(self) -> None:
        for run in self.runs.values():
            assert np.all(run.spent >= run.true * (1 - 1e-12))
            assert run.federation.account is not None
            population = run.federation.account.population
            true = sum(other.true for other in self.runs.values())
            assert np.all(population.spent() >= true * (1 - 1e-12))

    def teardown(self) -> None:
        for run in self.runs.values():
            assert run.federation.account is not None
            assert run.federation.account.population.epsilons().max() <= ALLOWANCE
            report = run.federation.account.ledger.verify()
            run.federation.account.close()
            assert report.ok, report.problems
        self.stack.close()


class TestFilterMachine(FilterMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=examples(2), stateful_step_count=20, derandomize=True)


@pytest.mark.slow
class TestFilterMachineAtLength(FilterMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=examples(15), stateful_step_count=20, derandomize=True)


@settings(max_examples=examples(25))
@given(
    kind=st.sampled_from(KINDS),
    planned=st.lists(cohorts, min_size=ROUNDS, max_size=ROUNDS),
)
def test_the_ledger_says_exactly_what_was_given_away(
    kind: dict[str, Any], planned: list[list[int]]
) -> None:
    """Without deaths the two agree, to the rounding of the ledger's grid."""
    with memory_folder() as folder:
        run = CertifiedRun(folder / "ledger", "a", kind)
        for cohort in planned:
            run.step(cohort, "")
        np.testing.assert_allclose(run.spent, run.true, rtol=1e-9, atol=1e-12)
        assert run.federation.account is not None
        run.federation.account.close()


def test_a_run_plans_anew_when_another_takes_what_it_counted_on() -> None:
    with memory_folder() as folder:
        runs = [CertifiedRun(folder / "ledger", name, {}) for name in RUNS]
        mine, other = (run.federation for run in runs)
        reserve = mine.account.reserve
        calls = []

        def late(*given: Any) -> Any:
            if not calls:
                runs[1].next_round = ROUNDS - 1  # a last round takes all that is left
                runs[1].step([0, 1], "")
            calls.append(given)
            return reserve(*given)

        mine.account.reserve = late  # type: ignore[method-assign, union-attr]
        runs[0].next_round = ROUNDS - 1
        runs[0].step([0, 1, 2, 3], "")
        assert len(calls) == 2, "refused once, planned again"
        assert np.all(runs[0].true[:2] < runs[0].true[2:]), "with what the other run has left"
        true = runs[0].true + runs[1].true
        assert get_epsilon_gaussian(true.max() ** -0.5, DELTA) <= ALLOWANCE
        assert other.account is not None


def test_a_run_that_is_always_refused_says_so() -> None:
    with memory_folder() as folder:
        run = CertifiedRun(folder / "ledger", "a", {})
        assert run.federation.account is not None
        asked: list[int] = []

        def refuse(index: int, clients: Any, charges: Any) -> Any:
            asked.append(index)
            raise BudgetExceededError("somebody else was faster", clients, charges, charges)

        run.federation.account.reserve = refuse  # type: ignore[method-assign]
        with pytest.raises(BudgetExceededError, match="faster"):
            run.step([0], "")
        assert len(asked) == 20
        assert np.all(run.true == 0)


def test_updates_of_the_machine_are_far_above_every_clip() -> None:
    """Otherwise its truth would be less than what it counts."""
    assert float(ones(0, 0).norm()) > 100
    assert ones(0, 0).shape == (SIZE,)
