from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.privacy.ledger import entries as units

LIMIT = units.allowance_mu2(6.0, 1e-5)


@pytest.mark.parametrize(("epsilon", "noise_std"), [(6.0, 0.7636), (3.0, 1.3906), (1.0, 3.7306)])
def test_an_allowance_is_the_analytic_gaussian_mechanism(epsilon: float, noise_std: float) -> None:
    # Noise for sensitivity 1 at delta = 1e-5, from dp_accounting.get_sigma_gaussian.
    assert math.sqrt(1 / units.allowance_mu2(epsilon, 1e-5)) == pytest.approx(noise_std, abs=6e-5)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 6.0, 30.0])
def test_an_allowance_is_on_the_safe_side(epsilon: float, delta: float) -> None:
    from scipy.stats import norm

    mu = math.sqrt(units.allowance_mu2(epsilon, delta))
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    true_delta = norm.sf(a) - math.exp(epsilon + norm.logsf(b))
    assert true_delta <= delta
    assert true_delta == pytest.approx(delta, rel=1e-6)


@given(
    st.lists(st.floats(0, LIMIT / 64), min_size=1, max_size=60),
    st.randoms(use_true_random=False),
)
def test_sums_are_exact_in_any_order(amounts: list[float], random: object) -> None:
    unit = units.grid_unit(LIMIT)
    charges = units.round_up(np.array(amounts), unit)
    assert np.all(charges >= amounts)
    assert np.all(charges - amounts <= unit)
    shuffled = charges.tolist()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    total = 0.0
    for charge in shuffled:
        total += charge
    assert Fraction(total) == sum(map(Fraction, charges.tolist()))
    for charge in shuffled:
        total -= charge
    assert total == 0


@pytest.mark.parametrize("count", [1, 3, 7, 10, 49, 200, 999, 10_000])
@pytest.mark.parametrize("allowance", [LIMIT, units.gaussian_mu(6.0, 1e-5) ** 2])
def test_equal_shares_of_the_whole_allowance_pass(count: int, allowance: float) -> None:
    left = np.array([LIMIT])
    true_sum = Fraction(0)
    for _ in range(count):
        charge = units.granted(np.array([allowance / count]), left, LIMIT)
        assert charge[0] == pytest.approx(allowance / count, rel=1e-6)
        left -= charge
        true_sum += Fraction(float(charge[0]))
    assert left[0] >= 0
    assert true_sum <= Fraction(LIMIT)
    assert np.isnan(units.granted(np.array([allowance / count]), left, LIMIT)[0])


@pytest.mark.parametrize("charge", [5e-324, 1e-300, 1e-20, 1e-12 * LIMIT, LIMIT, 1e300])
def test_with_nothing_left_no_charge_is_too_small_to_refuse(charge: float) -> None:
    assert np.isnan(units.granted(np.array([charge]), np.array([0.0]), LIMIT)[0])
    assert units.granted(np.array([0.0]), np.array([0.0]), LIMIT)[0] == 0


def test_a_charge_that_is_really_too_large_is_refused() -> None:
    asked = np.array([LIMIT * (1 + 1e-9), LIMIT / 2, LIMIT / 2 * (1 + 1e-9)])
    left = np.array([LIMIT, LIMIT / 2, LIMIT / 2])
    assert np.isnan(units.granted(asked, left, LIMIT)).tolist() == [True, False, True]


@pytest.mark.parametrize("size", [5, 2000])
def test_epsilon_is_above_the_exact_value_when_spent_and_below_it_when_left(size: int) -> None:
    from dp_accounting import get_epsilon_gaussian

    mu2 = np.random.default_rng(0).uniform(0, LIMIT, size)
    some = np.linspace(0, size - 1, 5).astype(int)
    exact = [get_epsilon_gaussian(1 / math.sqrt(value), 1e-5) for value in mu2[some]]
    spent, left = units.epsilon_spent(mu2, 1e-5)[some], units.epsilon_left(mu2, 1e-5)[some]
    assert np.all(spent >= np.array(exact) * (1 - 1e-8))
    assert np.all(left <= np.array(exact) * (1 + 1e-8))
    assert spent == pytest.approx(exact, rel=2e-3)
    assert left == pytest.approx(exact, rel=2e-3)


def test_what_is_left_can_be_asked_for() -> None:
    for share in (1e-6, 0.01, 0.3, 0.999, 1.0):
        epsilon = float(units.epsilon_left(np.array([share * LIMIT]), 1e-5)[0])
        assert units.allowance_mu2(epsilon, 1e-5) <= share * LIMIT


def test_epsilons_of_nothing_and_of_infinity() -> None:
    assert units.epsilon_spent(np.array([0.0, np.inf]), 1e-5).tolist() == [0.0, np.inf]
    many = np.concatenate([np.linspace(0, LIMIT, 1000), [np.inf]])
    assert units.epsilon_spent(many, 1e-5)[[0, -1]].tolist() == [0.0, np.inf]


def test_the_figure_in_the_text() -> None:
    left = LIMIT - units.allowance_mu2(3.0, 1e-5)
    assert units.epsilon_left(np.array([left]), 1e-5)[0] == pytest.approx(4.86, abs=0.005)
