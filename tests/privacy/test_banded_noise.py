"""Correlated noise against the matrices it stands for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from fedquilt.privacy.noise import BandedNoise, SecretNoise, SeededNoise, toeplitz_coefficients

ROUNDS = 12


class Basis:
    """Noise Z = I: round t draws the t-th unit vector, so the draws are the rows of C^-1."""

    description = "unit vectors"

    def __init__(self, reproducible: bool = False) -> None:
        self.reproducible = reproducible

    def stream(self, *keys: int) -> Basis:
        self.index = keys[0]
        return self

    def normal(self, size: int) -> np.ndarray:
        return np.eye(size)[self.index]


def matrix(bands: int, size: int = ROUNDS) -> np.ndarray:
    """Return C, the prefix-sum matrix's square root cut to some bands."""
    ones = np.tril(np.ones((size, size)))
    root = np.eye(size)
    for _ in range(60):  # Newton's iteration for the square root of a triangular matrix
        root = 0.5 * (root + np.linalg.solve(root, ones))
    return np.tril(root) - np.tril(root, -bands)


def rows(noise: BandedNoise, rounds: list[int], size: int = ROUNDS) -> np.ndarray:
    return np.stack([noise.draw(index, size) for index in rounds])


@pytest.mark.parametrize("bands", [1, 2, 3, 4, 5])
def test_the_coefficients_are_those_of_the_square_root(bands: int) -> None:
    expected = [math.comb(2 * j, j) / 4**j for j in range(bands)]
    assert toeplitz_coefficients(bands).tolist() == pytest.approx(expected, rel=1e-14)
    np.testing.assert_allclose(matrix(bands)[:bands, 0], expected, atol=1e-10)


@pytest.mark.parametrize("bands", [1, 2, 3, 4, 5])
def test_the_noise_is_the_inverse_times_independent_noise(bands: int) -> None:
    drawn = rows(BandedNoise(Basis(), bands), list(range(ROUNDS)))
    inverse = np.linalg.inv(matrix(bands))
    np.testing.assert_allclose(drawn, inverse, atol=1e-9)
    np.testing.assert_allclose(drawn @ drawn.T, inverse @ inverse.T, atol=1e-9)


def test_the_covariance_of_secret_noise() -> None:
    """The same in a sample: entries are independent, rounds have the covariance of C^-1 Z."""
    size, bands, rounds = 20_000, 3, 5
    drawn = rows(BandedNoise(SecretNoise(), bands), list(range(rounds)), size)
    inverse = np.linalg.inv(matrix(bands, rounds))
    np.testing.assert_allclose(drawn @ drawn.T / size, inverse @ inverse.T, atol=0.06)
    assert abs(np.mean(drawn[:, 1:] * drawn[:, :-1])) < 0.03


@pytest.mark.parametrize("bands", [1, 2, 3, 4, 5])
def test_what_a_join_costs_is_a_column_of_the_matrix(bands: int) -> None:
    factor = BandedNoise(Basis(), bands).cost_factor
    assert factor == pytest.approx(float(np.sum(matrix(bands)[:, 0] ** 2)))


@settings(max_examples=examples(50))
@given(bands=st.integers(1, 5), gaps=st.lists(st.integers(0, 4), max_size=5), data=st.data())
def test_joins_far_enough_apart_add_up(bands: int, gaps: list[int], data: st.DataObject) -> None:
    """Sensitivity^2 of C x is at most cost_factor * sum c_t^2 when joins are b apart."""
    joins = [int(t) for t in np.cumsum([0, *(bands + gap for gap in gaps)]) if t < ROUNDS]
    moves = np.zeros((ROUNDS, 3))
    for t in joins:
        moves[t] = data.draw(st.lists(st.floats(-2, 2), min_size=3, max_size=3))
    moved = float(np.sum((matrix(bands) @ moves) ** 2))
    bound = BandedNoise(Basis(), bands).cost_factor * float(np.sum(moves**2))
    assert moved <= bound * (1 + 1e-9) + 1e-12


def test_joins_too_close_cost_more_than_their_sum() -> None:
    """Why the separation must be enforced."""
    moves = np.zeros((ROUNDS, 1))
    moves[[2, 4]] = 1.0
    moved = float(np.sum((matrix(3) @ moves) ** 2))
    assert moved > 2 * BandedNoise(Basis(), 3).cost_factor * 1.1


@pytest.mark.parametrize("bands", [2, 4])
def test_after_a_restart_the_matrix_is_block_diagonal(bands: int) -> None:
    before = rows(BandedNoise(Basis(), bands), list(range(5)))
    after = rows(BandedNoise(Basis(), bands), list(range(5, ROUNDS)))
    blocks = np.zeros((ROUNDS, ROUNDS))
    blocks[:5, :5], blocks[5:, 5:] = matrix(bands, 5), matrix(bands, ROUNDS - 5)
    np.testing.assert_allclose(np.vstack([before, after]), np.linalg.inv(blocks), atol=1e-9)
    assert np.all(np.sum(blocks**2, axis=0) <= np.sum(matrix(bands)[:, 0] ** 2) + 1e-9)


def test_a_round_that_is_left_out_is_a_restart() -> None:
    noise = BandedNoise(Basis(), 3)
    drawn = rows(noise, [0, 1, 2, 4, 5])
    np.testing.assert_array_equal(drawn[3], np.eye(ROUNDS)[4])
    np.testing.assert_allclose(drawn[4], np.eye(ROUNDS)[5] - 0.5 * np.eye(ROUNDS)[4])


def test_the_same_round_again_is_a_restart_too() -> None:
    noise = BandedNoise(Basis(), 2)
    rows(noise, [0, 1])
    np.testing.assert_array_equal(noise.draw(1, ROUNDS), np.eye(ROUNDS)[1])


@pytest.mark.parametrize("bands", [1, 3])
def test_reproducible_noise_goes_on_where_it_was(bands: int) -> None:
    whole = rows(BandedNoise(SeededNoise(4), bands), list(range(8)))
    resumed = rows(BandedNoise(SeededNoise(4), bands), list(range(5, 8)))
    np.testing.assert_array_equal(resumed, whole[5:])


@pytest.mark.parametrize("bands", [1, 3])
def test_changing_a_draw_changes_no_later_one(bands: int) -> None:
    noise, other = BandedNoise(SeededNoise(4), bands), BandedNoise(SeededNoise(4), bands)
    for index in range(5):
        drawn = noise.draw(index, 7)
        np.testing.assert_array_equal(drawn, other.draw(index, 7))
        drawn *= 1e6


def test_one_band_is_independent_noise() -> None:
    noise = BandedNoise(SeededNoise(9), 1)
    assert noise.cost_factor == 1.0
    for index in (0, 3, 1):
        np.testing.assert_array_equal(noise.draw(index, 6), SeededNoise(9).stream(index).normal(6))


@pytest.mark.parametrize(
    ("bands", "ratio"), [(2, 0.75), (3, 0.64), (5, 0.52), (10, 0.41), (20, 0.33), (50, 0.27)]
)
def test_how_much_less_noise_the_sum_over_200_rounds_has(bands: int, ratio: float) -> None:
    """RMSE of the prefix sums at equal privacy, against independent noise."""
    rounds = 200
    noise = BandedNoise(Basis(), bands)
    drawn = rows(noise, list(range(rounds)), rounds)
    sums = np.tril(np.ones((rounds, rounds)))
    toeplitz = sum(math.comb(2 * j, j) / 4**j * np.eye(rounds, k=-j) for j in range(bands))
    exact = np.linalg.norm(sums @ np.linalg.inv(toeplitz)) / np.linalg.norm(sums)
    measured = np.linalg.norm(np.cumsum(drawn, axis=0)) / np.linalg.norm(sums)
    assert measured == pytest.approx(exact, rel=1e-9)
    assert math.sqrt(noise.cost_factor) * measured == pytest.approx(ratio, abs=0.0061)
