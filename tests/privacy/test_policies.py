"""What a join may cost under each policy, against the formulas and by adversaries."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from fedquilt.errors import InvalidValueError
from fedquilt.privacy.policies import (
    AdaptivePolicy,
    AdaptivePrivacyAllocator,
    EvenPolicy,
    JoinFacts,
    PaperPolicy,
    Policy,
    make_policy,
)

ROUNDS, BUDGET, RATE = 20, 1.7, 0.3


def facts(
    round_index: int, remaining: list[float], joins: list[float], rounds_done: int
) -> JoinFacts:
    return JoinFacts(round_index, np.asarray(remaining), np.asarray(joins), rounds_done)


def build(name: str, max_joins: int | None = 8, alpha: float = 0.5) -> Policy:
    return make_policy(
        name,
        BUDGET,
        ROUNDS,
        expected_rate=RATE,
        max_joins=max_joins,
        allocator=AdaptivePrivacyAllocator(6 / ROUNDS, alpha, 2.0, 1e-5),
        warmup_rounds=3,
    )


def test_an_even_part_is_the_same_for_everybody_in_every_round() -> None:
    policy = EvenPolicy(BUDGET, 8)
    for index in (0, 7, 19):
        given_out = policy.charges(facts(index, [BUDGET, 1.0, 0.5], [0, 3, 5], index))
        assert given_out.tolist() == [BUDGET / 8] * 3
        assert policy.reference_charge(given_out) == BUDGET / 8
    assert policy.expected_charge == BUDGET / 8


def test_an_even_part_is_never_more_than_what_is_left() -> None:
    policy = EvenPolicy(BUDGET, 8)
    left = BUDGET / 8 * (1 - 1e-5)
    assert policy.charges(facts(0, [left, 0.0], [7, 8], 8)).tolist() == [left, 0.0]
    assert left > policy.min_charge, "what rounding has eaten still is a whole part"
    assert policy.min_charge < policy.expected_charge


@pytest.mark.parametrize(
    ("index", "left", "joins", "done"),
    [(0, BUDGET, 0, 0), (5, 1.2, 1, 5), (5, 0.4, 5, 5), (19, 0.8, 3, 19), (12, 1.7, 0, 12)],
)
def test_adaptive_spreads_what_is_left_over_the_expected_joins(
    index: int, left: float, joins: int, done: int
) -> None:
    policy = AdaptivePolicy(BUDGET, ROUNDS, RATE)
    rate = min(1.0, (joins + 7 * RATE) / (done + 7))
    expected_joins = 1 + (ROUNDS - index - 1) * rate
    assert policy.charges(facts(index, [left], [joins], done))[0] == pytest.approx(
        left / expected_joins, rel=1e-14
    )


def test_adaptive_in_numbers() -> None:
    """T=10, p0=1/2: round 0 expects 5.5 joins; the last round spends everything."""
    policy = AdaptivePolicy(1.1, 10, 0.5)
    assert policy.expected_charge == pytest.approx(0.2)
    assert policy.charges(facts(0, [1.1], [0], 0))[0] == pytest.approx(0.2)
    assert policy.charges(facts(9, [0.37], [4], 9))[0] == pytest.approx(0.37)
    # after 3 absences the smoothed rate is 3.5/10: 1 + 6 * 0.35 = 3.1 joins expected
    assert policy.charges(facts(3, [1.1], [0], 3))[0] == pytest.approx(1.1 / 3.1)


def test_who_came_rarely_may_speak_louder() -> None:
    policy = AdaptivePolicy(BUDGET, ROUNDS, RATE)
    given_out = policy.charges(facts(10, [1.0] * 4, [0, 2, 5, 10], 10))
    assert np.all(np.diff(given_out) < 0)


def test_the_noise_of_adaptive_is_constant() -> None:
    policy = AdaptivePolicy(BUDGET, ROUNDS, RATE)
    assert policy.reference_charge(np.asarray([0.1, 9.0])) == policy.expected_charge
    assert policy.expected_charge == BUDGET / (1 + (ROUNDS - 1) * RATE)


@settings(max_examples=examples(60))
@given(
    name=st.sampled_from(["adaptive", "cap", "worst_case", "paper"]),
    joined=st.lists(st.booleans(), min_size=ROUNDS, max_size=ROUNDS),
)
def test_nobody_spends_more_than_its_budget_however_it_joins(name: str, joined: list[bool]) -> None:
    policy = build(name)
    spent, joins = 0.0, 0
    for index, there in enumerate(joined):
        left = BUDGET - spent
        if not there or left < policy.min_charge:
            continue
        cost = float(policy.charges(facts(index, [left], [joins], index))[0])
        assert 0 <= cost <= left
        spent, joins = spent + cost, joins + 1
    assert spent <= BUDGET * (1 + 1e-12)
    if name == "adaptive" and joined[-1] and joins:
        assert spent == pytest.approx(BUDGET), "the last join takes what is left"
    if name == "cap":
        assert joins <= 8


def test_the_papers_schedule_by_hand() -> None:
    allocator = AdaptivePrivacyAllocator(0.3, 0.5, 2.0, 1e-5)
    policy = PaperPolicy(BUDGET, ROUNDS, allocator, warmup_rounds=3)
    kappa = 0.3 * 1.5 * math.sqrt(ROUNDS / BUDGET)
    assert policy.expected_charge == pytest.approx((0.3 / kappa) ** 2)
    warm = policy.charges(facts(2, [BUDGET] * 2, [1, 0], 2))
    assert warm.tolist() == pytest.approx([(0.3 / kappa) ** 2] * 2)
    # the cohort's rates count this join: (2/4, 4/4), mean 3/4
    epsilon = 0.3 * (1 + 0.5 * math.exp(-2 * 0.75))
    adapted = policy.charges(facts(3, [BUDGET] * 2, [1, 3], 3))
    assert adapted.tolist() == pytest.approx([(epsilon / kappa) ** 2] * 2)
    assert policy.reference_charge(adapted) == pytest.approx((epsilon / kappa) ** 2)


def test_the_papers_schedule_keeps_its_promise_at_its_dearest() -> None:
    policy = build("paper")
    dearest = policy.min_charge / (1 - 1e-4)
    assert dearest * ROUNDS == pytest.approx(BUDGET)
    kinder = build("paper", alpha=0.0)
    assert kinder.expected_charge * ROUNDS == pytest.approx(BUDGET), "flat: the even parts"


def test_the_papers_schedule_follows_the_cohort_not_the_client() -> None:
    policy = build("paper")
    frequent = policy.charges(facts(10, [BUDGET] * 2, [10, 10], 10))
    rare = policy.charges(facts(10, [BUDGET] * 2, [0, 0], 10))
    mixed = policy.charges(facts(10, [BUDGET] * 2, [0, 10], 10))
    assert frequent[0] < mixed[0] < rare[0]
    assert mixed[0] == mixed[1]


def test_policies_by_name() -> None:
    assert build("worst_case").expected_charge == BUDGET / ROUNDS
    assert build("cap").expected_charge == BUDGET / 8
    assert build("cap", max_joins=500).expected_charge == BUDGET / ROUNDS, (
        "no more joins than rounds"
    )
    assert isinstance(build("adaptive"), AdaptivePolicy)
    with pytest.raises(InvalidValueError, match="max_joins=None must be a whole number"):
        build("cap", max_joins=None)
