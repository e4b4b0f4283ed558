"""Who is picked: the laws of the rules, compared with enumeration."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from fedquilt.errors import InvalidValueError
from fedquilt.population import (
    Availability,
    CohortSelector,
    ParticipationTracker,
    poisson_cohort,
    secret_coins,
    select_cohort,
)

DRAWS = 20_000


def assert_follows(seen: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> None:
    """Chi-square test with a fixed seed; a wrong law gives p far below the threshold."""
    assert set(seen) <= set(law)
    total = sum(seen.values())
    observed = [seen[key] for key in law]
    expected = [total * probability for probability in law.values()]
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def successive_law(weights: dict[int, float], size: int) -> dict[tuple[int, ...], float]:
    """Enumerate picking one after the other, in proportion to the weights of those left."""
    law: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(weights, size):
        probability, left = 1.0, sum(weights.values())
        for client in order:
            probability *= weights[client] / left
            left -= weights[client]
        key = tuple(sorted(order))
        law[key] = law.get(key, 0.0) + probability
    return law


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weighted_picks_follow_their_law(size: int) -> None:
    weights = {3: 0.1, 5: 1.0, 6: 2.0, 8: 0.5}
    available, given = np.array(list(weights)), np.array(list(weights.values()))
    rng = np.random.default_rng(11)
    seen = Counter(tuple(select_cohort(available, size, rng, given).tolist()) for _ in range(DRAWS))
    assert_follows(seen, successive_law(weights, size))


def test_unweighted_picks_are_uniform_over_subsets() -> None:
    available = np.array([1, 4, 7, 9, 12])
    rng = np.random.default_rng(12)
    seen = Counter(tuple(select_cohort(available, 2, rng).tolist()) for _ in range(DRAWS))
    pairs = list(itertools.combinations(available.tolist(), 2))
    assert_follows(seen, {pair: 1 / len(pairs) for pair in pairs})


def test_poisson_picks_are_independent_coins() -> None:
    available = np.array([0, 3, 4])
    rng = np.random.default_rng(13)
    seen = Counter(tuple(poisson_cohort(available, 0.3, rng).tolist()) for _ in range(DRAWS))
    law = {
        subset: 0.3 ** len(subset) * 0.7 ** (3 - len(subset))
        for size in range(4)
        for subset in itertools.combinations([0, 3, 4], size)
    }
    assert_follows(seen, law)


def selector(rule: str, limit: int, **options: object) -> CohortSelector:
    draws = np.array([0.05, 0.4, 0.3, 0.8])
    return CohortSelector(Availability(4), draws, rule=rule, limit=limit, seed=7, **options)


def test_the_selectors_weights_are_the_propensities() -> None:
    chosen = selector("weighted", 2)
    seen = Counter(tuple(chosen.select(t).clients.tolist()) for t in range(5000))
    assert_follows(seen, successive_law({0: 0.05, 1: 0.4, 2: 0.3, 3: 0.8}, 2))


def test_a_client_of_weight_zero_is_still_picked_when_all_are_needed() -> None:
    chosen = CohortSelector(
        Availability(3), np.array([0.0, 0.5, 0.5]), rule="weighted", limit=2, seed=0
    )
    cohorts = [chosen.select(t).clients.tolist() for t in range(50)]
    assert all(len(cohort) == 2 for cohort in cohorts)


@pytest.mark.parametrize("rule", ["uniform", "weighted", "poisson"])
def test_a_round_depends_on_seed_and_number_alone(rule: str) -> None:
    availability = Availability(60, np.full(60, 0.5))
    draws = np.linspace(0.1, 0.9, 60)

    def fresh(seed: int) -> CohortSelector:
        return CohortSelector(availability, draws, rule=rule, limit=20, seed=seed)

    one, other = fresh(1), fresh(1)
    forwards = [one.select(t).clients for t in range(6)]
    backwards = [other.select(t).clients for t in reversed(range(6))][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert len({tuple(cohort.tolist()) for cohort in forwards}) == 6
    assert not np.array_equal(fresh(2).select(0).clients, forwards[0])
    for cohort in forwards:
        assert np.all(np.diff(cohort) > 0)
        assert rule == "poisson" or len(cohort) <= 20


def test_who_has_no_allowance_is_never_picked() -> None:
    allowed = np.array([True, False, True, False])
    for rule in ("uniform", "weighted", "poisson"):
        picked = {int(c) for t in range(60) for c in selector(rule, 2).select(t, allowed).clients}
        assert picked == {0, 2}
    assert selector("uniform", 2).select(0, np.zeros(4, dtype=bool)).clients.size == 0


def test_a_small_turnout_is_taken_whole_and_belongs_to_the_caller() -> None:
    trace = {0: np.array([1, 3])}
    chosen = CohortSelector(
        Availability(4, trace=trace), np.ones(4), rule="uniform", limit=3, seed=0
    )
    cohort = chosen.select(0).clients
    assert cohort.tolist() == [1, 3]
    cohort[:] = 0
    assert trace[0].tolist() == [1, 3]
    assert chosen.select(1).clients.size == 0


@pytest.mark.parametrize(
    "weights", [np.ones(2), np.array([1.0, 0.0, 1.0]), np.array([1.0, np.nan, 1.0])]
)
def test_bad_weights_are_refused(weights: np.ndarray) -> None:
    with pytest.raises(InvalidValueError, match="one positive number per available client"):
        select_cohort(np.arange(3), 1, np.random.default_rng(), weights)


def test_bad_rules_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"selection='unifrom' .*did you mean 'uniform'"):
        selector("unifrom", 2)
    with pytest.raises(InvalidValueError, match="must be 'poisson' for amplification"):
        selector("uniform", 2, secret=True)


def test_a_secret_coin_exposes_all_who_are_there_and_is_not_repeated() -> None:
    chosen = CohortSelector(
        Availability(400), np.ones(400), rule="poisson", limit=100, seed=0, secret=True
    )
    first, again = chosen.select(0), chosen.select(0)
    assert np.array_equal(first.exposed, np.arange(400))
    assert not np.array_equal(first.clients, again.clients)
    assert chosen.sampling_rate == 0.25
    assert selector("poisson", 2).sampling_rate == 1.0
    sizes = [chosen.select(t).clients.size for t in range(200)]
    # 80,000 coins of 1/4: five standard deviations are 612 heads.
    assert abs(sum(sizes) - 20_000) < 5 * np.sqrt(80_000 * 0.25 * 0.75)


def test_secret_coins_are_uniform() -> None:
    coins = secret_coins(50_000)
    assert coins.min() >= 0.0
    assert coins.max() < 1.0
    assert stats.kstest(coins, "uniform").pvalue > 1e-5
    assert secret_coins(0).size == 0


def test_expected_cohorts() -> None:
    half = Availability(100, np.full(100, 0.5))
    expected = {
        (rule, limit): CohortSelector(
            half, np.ones(100), rule=rule, limit=limit, seed=0
        ).expected_cohort
        for rule, limit in (("uniform", 10), ("uniform", 90), ("poisson", 50), ("poisson", 1))
    }
    present = 200 / 7
    assert expected == {
        ("uniform", 10): 10,
        ("uniform", 90): pytest.approx(present),
        ("poisson", 50): pytest.approx(present / 2),
        ("poisson", 1): 1.0,
    }


@pytest.mark.parametrize("rule", ["uniform", "weighted", "poisson"])
def test_a_million_clients_are_served(rule: str) -> None:
    size, rng = 1_000_000, np.random.default_rng(0)
    draws = rng.beta(2, 5, size)
    tracker = ParticipationTracker(size, ema=0.1)
    chosen = CohortSelector(Availability(size, draws), draws, rule=rule, limit=1000, seed=0)
    cohort = chosen.select(0).clients
    tracker.update(cohort)
    assert np.all(np.diff(cohort) > 0)
    assert tracker.get_statistics()["participating_clients"] == len(cohort)
    expected = 1000 if rule != "poisson" else 1000 * 2 / 7
    assert len(cohort) == pytest.approx(expected, abs=5 * np.sqrt(expected))
