"""Exact intervals and bounds, against scipy, printed figures and synthetic mechanisms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats

from fedquilt.audit.canary import (
    binomial_terms,
    clopper_pearson,
    distance,
    epsilon_lower_bound,
    epsilon_of_normals,
    epsilon_of_rates,
    fitted_epsilon,
    guessed,
    held_out_bound,
    one_run_epsilon,
    one_run_p_value,
)
from fedquilt.errors import InvalidValueError
from fedquilt.privacy.accounting import gaussian_epsilon

DELTA = 1e-5


@pytest.mark.parametrize(("n", "q"), [(0, 0.3), (1, 0.0), (7, 1.0), (40, 0.03), (900, 0.62)])
def test_binomial_terms_are_scipy_s(n: int, q: float) -> None:
    expected = stats.binom.pmf(np.arange(n + 1), n, q)
    assert binomial_terms(n, q) == pytest.approx(expected, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (3, 10), (250, 267), (1, 1000)])
def test_clopper_pearson_is_the_beta_quantile(k: int, n: int) -> None:
    low, high = clopper_pearson(k, n, 0.025)
    expected = stats.binomtest(k, n).proportion_ci(0.95, method="exact")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_epsilon_that_two_rates_prove() -> None:
    assert epsilon_of_rates(0.5, 0.25, 0.0) == pytest.approx(math.log(2))
    assert epsilon_of_rates(0.9, 0.5, 0.0) == pytest.approx(math.log(5)), "from the misses"
    assert epsilon_of_rates(0.3, 0.3, 0.0) == 0.0
    assert epsilon_of_rates(0.3, 0.0, 0.1) == math.inf
    assert epsilon_of_rates(0.3, 0.1, 0.25) == 0.0


def test_a_lower_bound_of_counts() -> None:
    # All 267 right: each rate has the one-sided end 1 - 0.025^(1/267) or its complement.
    end = 1 - 0.025 ** (1 / 267)
    expected = math.log((1 - end - DELTA) / end)
    assert epsilon_lower_bound(267, 267, 0, 267, DELTA) == pytest.approx(expected)
    assert epsilon_lower_bound(130, 267, 130, 267, DELTA) == 0.0
    with pytest.raises(InvalidValueError, match="successes=5 must be >= 0 and <= 4"):
        epsilon_lower_bound(5, 4, 0, 4, DELTA)


def reference_p_value(m: int, r: int, v: int, eps: float, delta: float) -> float:
    """The theorem written down once more, term by term."""
    law = stats.binom(r, 1 / (1 + math.exp(-eps)))
    worst = max(sum(law.pmf(v - j) for j in range(1, i + 1)) / i for i in range(1, v + 1))
    return min(1.0, law.sf(v - 1) + 2 * m * delta * worst)


@pytest.mark.parametrize(
    ("m", "r", "v", "eps", "delta"),
    [(100, 100, 75, math.log(3), 0.0), (1000, 100, 75, 0.5, 1e-4), (600, 240, 200, 1.2, 1e-5)],
)
def test_the_p_value_of_one_run(m: int, r: int, v: int, eps: float, delta: float) -> None:
    p = one_run_p_value(m, r, v, eps, delta)
    assert p == pytest.approx(reference_p_value(m, r, v, eps, delta), rel=1e-9)


def test_the_epsilon_of_one_run_is_where_the_p_value_is_the_error() -> None:
    epsilon = one_run_epsilon(1000, 100, 90, 1e-5, 0.05)
    assert one_run_p_value(1000, 100, 90, epsilon, 1e-5) == pytest.approx(0.05, rel=1e-6)
    assert one_run_epsilon(1000, 100, 50, 1e-5, 0.05) == 0.0
    # All of r right, delta 0: q^r = error.
    assert one_run_epsilon(100, 100, 100, 0.0, 0.05) == pytest.approx(
        -math.log(0.05 ** (-1 / 100) - 1)
    )


def test_more_right_guesses_prove_more() -> None:
    found = [one_run_epsilon(400, 160, v, 1e-5) for v in range(80, 161, 10)]
    assert found == sorted(found)
    assert found[-1] > 3


@pytest.mark.parametrize("mu", [0.1, 0.268, 1.31, 4.0])
def test_two_normal_laws_of_one_width_are_the_gaussian_mechanism(mu: float) -> None:
    found = epsilon_of_normals((0.0, 2.0), (2.0 * mu, 2.0), DELTA)
    assert found == pytest.approx(gaussian_epsilon(mu, DELTA), rel=1e-6)


@pytest.mark.parametrize(("mean", "std"), [(0.7, 1.3), (0.7, 0.6), (0.0, 1.5), (-2.0, 0.9)])
def test_normal_laws_of_different_width(mean: float, std: float) -> None:
    epsilon = epsilon_of_normals((0.0, 1.0), (mean, std), 1e-3)
    p, q = stats.norm(0, 1), stats.norm(mean, std)

    def delta(a: stats.rv_continuous, b: stats.rv_continuous) -> float:
        def excess(x: float) -> float:
            return max(0.0, a.pdf(x) - math.exp(epsilon) * b.pdf(x))

        edges = np.linspace(-12, 12, 25)
        pairs = itertools.pairwise(edges)
        return sum(integrate.quad(excess, low, high, limit=200)[0] for low, high in pairs)

    assert max(delta(p, q), delta(q, p)) == pytest.approx(1e-3, rel=1e-4)


def test_the_same_law_twice_costs_nothing() -> None:
    assert epsilon_of_normals((1.0, 2.0), (1.0, 2.0), DELTA) == 0.0


MU = 1.31  # epsilon 6 at 1e-5


def test_a_held_out_bound_lies_above_the_truth_at_most_once_in_twenty() -> None:
    """A Gaussian mechanism of epsilon 1 at a large delta, where bounds are tight."""
    random = np.random.default_rng(0)
    mu, delta = 0.5, 0.05
    truth = gaussian_epsilon(mu, delta)
    above = 0
    for _ in range(200):
        outside, inside = random.standard_normal(100), random.standard_normal(100) + mu
        above += held_out_bound(outside, inside, delta) > truth
    assert above <= 200 * 0.05 + 3 * math.sqrt(200 * 0.05 * 0.95)


def test_a_held_out_bound_is_worth_something() -> None:
    random = np.random.default_rng(1)
    outside, inside = random.standard_normal(2000), random.standard_normal(2000) + MU
    assert 1.0 < held_out_bound(outside, inside, DELTA) < 6.0
    assert held_out_bound(outside, outside + 50, DELTA) > 5.0


def test_the_distance_of_two_samples_and_its_error() -> None:
    random = np.random.default_rng(2)
    found = np.array(
        [distance(random.standard_normal(80), random.standard_normal(80) + MU) for _ in range(400)]
    )
    assert found[:, 0].mean() == pytest.approx(MU, abs=0.05)
    assert found[:, 1].mean() == pytest.approx(found[:, 0].std(), rel=0.15)


def synthetic_run(random: np.random.Generator, mu: float, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of m canaries whose scores do not touch one another: m Gaussian mechanisms."""
    inside = random.random(m) < 0.5
    return random.standard_normal(m) + mu * inside, inside


@pytest.mark.parametrize("mu", [0.268, MU])
def test_guesses_of_one_run_bound_the_truth(mu: float) -> None:
    random = np.random.default_rng(3)
    truth = gaussian_epsilon(mu, DELTA)
    found = np.array([guessed(*synthetic_run(random, mu, 400), DELTA) for _ in range(100)])
    assert (found > truth).sum() <= 5 + 3 * math.sqrt(5)
    if mu > 1:
        assert np.median(found) > 1.0, "and say something"


def test_guesses_bound_a_mechanism_that_is_as_bad_as_its_epsilon_allows() -> None:
    """Randomised response is where the theorem is tight: 5 % of bounds may lie above."""
    random = np.random.default_rng(4)
    epsilon, m = 1.0, 400
    above = 0
    for _ in range(200):
        inside = random.random(m) < 0.5
        says = inside ^ (random.random(m) > 1 / (1 + math.exp(-epsilon)))
        correct = int((says == inside).sum())
        above += one_run_epsilon(m, m, correct, 0.0) > epsilon
    assert 1 <= above <= 10 + 3 * math.sqrt(10)


def test_cosines_are_fitted_near_the_truth() -> None:
    random = np.random.default_rng(5)
    d = 10_000
    cosines = (random.standard_normal(4000) + MU) / math.sqrt(d)
    assert fitted_epsilon(cosines, d, DELTA) == pytest.approx(6.0, abs=0.8)
    small = (random.standard_normal(4000) + 0.268) / math.sqrt(d)
    assert fitted_epsilon(small, d, DELTA) == pytest.approx(1.0, abs=0.35)
