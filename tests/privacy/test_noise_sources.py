"""Noise is standard normal, secret unless asked otherwise, and never drawn twice."""

from __future__ import annotations

import os

import numpy as np
import pytest
from scipy import stats

from fedquilt.errors import InvalidValueError
from fedquilt.privacy.noise import SecretNoise, SeededNoise, noise_source

SIZE = 400_001


@pytest.fixture(scope="module", params=["secret", "seeded"])
def drawn(request: pytest.FixtureRequest) -> np.ndarray:
    source = SecretNoise() if request.param == "secret" else SeededNoise(3)
    return source.stream(0).normal(SIZE)


def test_the_moments_are_those_of_the_normal_law(drawn: np.ndarray) -> None:
    """Six standard errors each: secret noise passes but once in some 10^8 runs."""
    root = np.sqrt(SIZE)
    assert abs(drawn.mean()) < 6 / root
    assert abs(drawn.var() - 1) < 6 * np.sqrt(2) / root
    assert abs(stats.skew(drawn)) < 6 * np.sqrt(6) / root
    assert abs(stats.kurtosis(drawn)) < 6 * np.sqrt(24) / root


def test_the_whole_law_and_its_tails_are_normal(drawn: np.ndarray) -> None:
    assert stats.kstest(drawn, "norm").pvalue > 1e-7
    for bound in (2.0, 3.0, 4.0):
        expected = 2 * SIZE * stats.norm.sf(bound)
        assert abs(np.sum(np.abs(drawn) > bound) - expected) < 6 * np.sqrt(expected) + 6


def test_neighbours_and_halves_are_uncorrelated(drawn: np.ndarray) -> None:
    """Box and Muller give two numbers per pair of uniforms; they must not know each other."""
    half = (SIZE + 1) // 2
    pairs = [(drawn[:-1], drawn[1:]), (drawn[: half - 1], drawn[half:])]
    for one, other in pairs:
        for a, b in ((one, other), (one**2, other**2)):
            assert abs(np.corrcoef(a, b)[0, 1]) < 6 / np.sqrt(len(a))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 10])
@pytest.mark.parametrize("source", [SecretNoise(), SeededNoise(0)])
def test_any_number_of_numbers(source: SecretNoise | SeededNoise, size: int) -> None:
    numbers = source.stream(1).normal(size)
    assert numbers.shape == (size,)
    assert numbers.dtype == np.float64
    assert np.all(np.isfinite(numbers))


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_extreme_bits_give_finite_numbers(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    """U1 = 0 would be an infinite radius; the grid begins at 2^-53 instead."""
    monkeypatch.setattr(os, "urandom", lambda size: bytes([byte]) * size)
    numbers = SecretNoise().normal(4)
    assert np.all(np.isfinite(numbers))
    largest = np.sqrt(2 * 53 * np.log(2))
    assert np.abs(numbers).max() == pytest.approx(largest if byte == 0 else 0.0, abs=1e-7)


def test_secret_noise_asks_the_operating_system_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    real = os.urandom

    def counting(size: int) -> bytes:
        asked.append(size)
        return real(size)

    monkeypatch.setattr(os, "urandom", counting)
    source = SecretNoise()
    np.random.seed(0)
    first = source.stream(0).normal(6)
    np.random.seed(0)
    second = source.stream(0).normal(6)
    assert not np.any(first == second)
    assert asked == [48, 48]  # eight bytes for each number
    assert not source.reproducible


def test_seeded_noise_is_a_function_of_seed_and_keys() -> None:
    def draw(seed: int, *keys: int) -> list[float]:
        return SeededNoise(seed).stream(*keys).normal(3).tolist()

    keys = [(0,), (1,), (0, 0), (0, 1), (1, 0), ()]
    assert draw(5, 2) == draw(5, 2)
    assert draw(5, 2) != draw(6, 2)
    assert len({tuple(draw(5, *key)) for key in keys}) == len(keys)
    stream = SeededNoise(5).stream(2)
    assert stream.normal(3).tolist() != stream.normal(3).tolist()
    assert SeededNoise(5).reproducible
    assert "seed 5" in SeededNoise(5).description
    assert "no privacy" in SeededNoise(5).description


def test_the_source_of_an_option() -> None:
    assert isinstance(noise_source(None), SecretNoise)
    assert isinstance(noise_source(0), SeededNoise)
    with pytest.raises(InvalidValueError, match="noise_seed=-1"):
        noise_source(-1)
