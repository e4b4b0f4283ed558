"""The private quantile: sign, sensitivity, cost, and where it settles."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.privacy.clip import PrivateQuantile
from fedquilt.privacy.noise import SeededNoise

COHORT = 200


class Fixed:
    """A noise stream that yields one number."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def normal(self, size: int) -> np.ndarray:
        return np.full(size, self.value)


def quantile(bound: float = 1.0, **changes: float) -> PrivateQuantile:
    values = {"target": 0.5, "learning_rate": 0.2, "bit_noise_std": 2.0, "expected_cohort": 10.0}
    return PrivateQuantile(bound, **{**values, **changes})


def one_round(q: PrivateQuantile, norms: np.ndarray | list[float], noise: float = 0.0) -> float:
    return q.close_round(sum(q.bit(float(length)) for length in norms), Fixed(noise))


def test_the_fraction_and_the_step_by_hand() -> None:
    q = quantile(2.0)
    # three updates inside, one outside: (3/2 - 1/2 + 2 * 0.7) / 10 + 1/2 = 0.74
    assert one_round(q, [0.1, 1.0, 2.0, 2.1], noise=0.7) == pytest.approx(0.74)
    assert q.bound == pytest.approx(2.0 * math.exp(-0.2 * (0.74 - 0.5)))


def test_a_round_without_bits_has_no_bits_of_another() -> None:
    q = quantile()
    one_round(q, [9.0] * 5)
    assert one_round(q, []) == 0.5


def test_the_bound_of_a_round_does_not_see_the_round() -> None:
    q = quantile()
    for length in (0.1, 50.0, 1e9):
        q.bit(length)
        assert q.bound == 1.0


norms = st.floats(0, 1e12) | st.just(math.inf)


@given(others=st.lists(norms, max_size=6), length=norms, noise=st.floats(-3, 3))
def test_a_client_moves_the_fraction_by_half_of_one_at_most(
    others: list[float], length: float, noise: float
) -> None:
    """Against the same round in which the client has nothing, so that its update is zero."""
    whole = one_round(quantile(), [*others, length], noise)
    without = one_round(quantile(), [*others, 0.0], noise)
    assert abs(whole - without) <= 0.5 / 10 + 1e-12


@given(st.floats(0.01, 1e4))
def test_what_a_bit_costs(bit_noise_std: float) -> None:
    """(sensitivity / noise)^2 with the sensitivity 1/2."""
    assert quantile(bit_noise_std=bit_noise_std).cost == pytest.approx((0.5 / bit_noise_std) ** 2)


@pytest.mark.parametrize(("noise_multiplier", "factor"), [(3.37, 2.0), (10.8, 2.0), (5.0, 1.0)])
def test_update_and_bit_together_cost_one_join(noise_multiplier: float, factor: float) -> None:
    """z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2); 3.3 % more noise at sigma_b = 2z, 15.5 % at z."""
    q = quantile(bit_noise_std=factor * noise_multiplier)
    z_delta = (noise_multiplier**-2 - (2 * q.bit_noise_std) ** -2) ** -0.5
    assert z_delta**-2 + q.cost == pytest.approx(noise_multiplier**-2)
    assert z_delta / noise_multiplier == pytest.approx({2.0: 1.0328, 1.0: 1.1547}[factor], abs=1e-4)


def test_a_bit_noise_of_half_the_multiplier_leaves_nothing_for_the_update() -> None:
    """Andrew et al. need z < 2 sigma_b."""
    assert quantile(bit_noise_std=3.0 / 2).cost == pytest.approx(3.0**-2)


def draws() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize("start", [0.1, 3.0])
@pytest.mark.parametrize("target", [0.5, 0.8])
def test_it_settles_at_the_quantile_from_below_and_from_above(start: float, target: float) -> None:
    truth = math.exp(0.3 * NormalDist().inv_cdf(target))
    q = quantile(start, target=target, bit_noise_std=3.0, expected_cohort=COHORT)
    rng, noise = draws(), SeededNoise(3)
    bounds = []
    for index in range(120):
        bits = sum(q.bit(float(length)) for length in rng.lognormal(0, 0.3, COHORT))
        q.close_round(bits, noise.stream(index, 1))
        bounds.append(q.bound)
    assert np.mean(bounds[-40:]) == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize(
    ("start", "after"),
    [(0.1, {10: 0.037, 30: 0.005, 60: 0.0002}), (3.0, {60: 1210})],
)
def test_the_wrong_sign_runs_away(start: float, after: dict[int, float]) -> None:
    """Counting the clipped instead of the unclipped turns the feedback round."""

    class Clipped(PrivateQuantile):
        def bit(self, length: float) -> float:
            return 0.5 if length > self.bound else -0.5

    wrong = Clipped(start, 0.5, 0.2, 1.0, COHORT)
    right = quantile(start, expected_cohort=COHORT)
    rng = draws()
    for index in range(1, 61):
        lengths = rng.lognormal(0, 0.3, COHORT)
        one_round(wrong, lengths)
        one_round(right, lengths)
        if index in after:
            assert wrong.bound == pytest.approx(after[index], rel=0.3)
    assert right.bound == pytest.approx(1.0, rel=0.06)


@pytest.mark.parametrize(("noise", "factor"), [(1e9, 1 / 4), (-1e9, 4.0)])
def test_one_draw_of_the_noise_cannot_ruin_the_bound(noise: float, factor: float) -> None:
    q = quantile()
    one_round(q, [1.0], noise)
    assert q.bound == pytest.approx(factor)


def test_its_state_is_the_released_bound_alone() -> None:
    q = quantile(1.0)
    one_round(q, [0.2, 5.0, 7.0], noise=0.3)
    state = q.state()
    assert set(state) == {"quantile_bound"}
    other = quantile(1.0)
    other.load_state(state)
    assert other.bound == q.bound
