"""Skellam noise: the sampler against exact probabilities, the unit against other libraries."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import signal, special, stats

from fedquilt.common.errors import InvalidValueError
from fedquilt.privacy import secure as module
from fedquilt.privacy.accounting.gaussian import gaussian_delta, gaussian_epsilon
from fedquilt.privacy.secure import poisson, skellam, skellam_mu


def seeded(seed: int) -> module.Words:
    generator = np.random.Generator(np.random.Philox(seed))

    def draw(size: int) -> NDArray[np.uint64]:
        return generator.integers(0, 2**64, size, dtype=np.uint64)

    return draw


def probability(v: float, t: int) -> mpmath.mpf:
    return mpmath.exp(-v) * mpmath.besseli(t, v)


@pytest.mark.parametrize("mean", [Fraction(1, 3), Fraction(7), Fraction(12345, 7)])
@pytest.mark.parametrize("bits", [8, 64, 128])
def test_the_table_encloses_the_exact_distribution_function(mean: Fraction, bits: int) -> None:
    table = module._poisson_table(mean, bits)
    with mpmath.workprec(bits + 128):
        lam, unit = mpmath.mpf(mean.numerator) / mean.denominator, mpmath.mpf(2) ** bits
        for place in {0, 1, len(table.below) // 3, len(table.below) // 2, len(table.below) - 1}:
            below, above = table.below[place], table.above[place]
            tail = mpmath.gammainc(table.first + place + 1, a=lam, regularized=True)
            assert below <= tail * unit <= above
            assert above - below <= 2


def test_words_of_few_bits_give_the_same_distribution_as_long_ones() -> None:
    # Of eight bits nearly every word must be continued: the exactness is in the continuation.
    mean = Fraction(5, 2)
    short = poisson(mean, 20_000, seeded(1), word=8)
    long = poisson(mean, 20_000, seeded(2))
    values = np.arange(9)
    expected = np.append(stats.poisson.pmf(values, 2.5), stats.poisson.sf(8, 2.5)) * 20_000
    for drawn in (short, long):
        counts = np.append([(drawn == value).sum() for value in values], (drawn > 8).sum())
        assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_a_continued_word_is_the_number_of_the_whole_uniform_one() -> None:
    # One uniform number, looked at in words of 4, 8 and 64 bits, has one Poisson number.
    for seed in range(200):
        whole = int(seeded(seed)(1)[0])
        found = []
        for word in (4, 8, 64):
            rest = whole

            def draw(size: int, word: int = word) -> NDArray[np.uint64]:
                nonlocal rest
                assert size == 1
                head, rest = rest, rest << word & 2**64 - 1
                return np.array([head], dtype=np.uint64)

            found.append(int(poisson(Fraction(40), 1, draw, word)[0]))
        assert found[0] == found[1] == found[2] == int(stats.poisson.ppf(whole / 2**64, 40))


def fits_skellam(drawn: NDArray[np.int64], variance: float) -> float:
    """Return the p-value of a chi-square test against the exact distribution."""
    half = variance / 2
    edges = np.unique(stats.skellam.ppf(np.linspace(0.05, 0.95, 19), half, half))
    observed = np.histogram(drawn, [-np.inf, *(edges + 0.5), np.inf])[0]
    cdf = np.concatenate([[0.0], stats.skellam.cdf(edges, half, half), [1.0]])
    return float(stats.chisquare(observed, np.diff(cdf) * drawn.size).pvalue)


@pytest.mark.parametrize("variance", [Fraction(3, 7), Fraction(50), Fraction(10**6, 3)])
def test_skellam_numbers_have_their_distribution(variance: Fraction) -> None:
    drawn = skellam(variance, 40_000, seeded(3))
    assert fits_skellam(drawn, float(variance)) > 1e-4
    assert fits_skellam(drawn, 1.1 * float(variance)) < 1e-6, "the test has power"


def test_shares_sum_to_the_noise_of_the_whole() -> None:
    shares = np.stack([skellam(Fraction(10), 20_000, seeded(seed)) for seed in range(9)])
    assert fits_skellam(shares.sum(axis=0), 90.0) > 1e-4


@pytest.mark.parametrize("variance", [16, 40, 1000])
def test_the_unit_is_the_largest_step_in_high_precision(variance: int) -> None:
    with mpmath.workdps(60):
        reach = int(12 * math.sqrt(variance))
        masses = {t: probability(variance, t) for t in range(4 * reach)}
        tail = mpmath.fsum(masses[t] for t in range(reach + 1, 4 * reach))
        quantiles = []
        for t in range(reach, -1, -1):
            start = mpmath.sqrt(-2 * mpmath.log(2 * tail)) if tail < 0.49 else mpmath.mpf("0.05")
            z = mpmath.findroot(
                lambda x, tail=tail: mpmath.log(mpmath.erfc(x / mpmath.sqrt(2)) / 2 / tail), start
            )
            quantiles.append(z)
            tail += masses[t]
        quantiles = quantiles[::-1]
        steps = [2 * quantiles[0], *(b - a for a, b in itertools.pairwise(quantiles))]
        largest = max(steps)
    assert largest <= skellam_mu(variance) <= largest * (1 + 2e-8)


def hockey_stick(shifts: tuple[int, ...], variance: int, epsilon: float) -> float:
    """Delta of a vector of Skellam numbers under a shift, from its privacy-loss distribution.

    Losses are rounded up to a grid and convolved: an independent upper bound, near the truth.
    """
    unit, support = 1e-4, np.arange(-14 * int(math.sqrt(variance)), 14 * int(math.sqrt(variance)))
    half = variance / 2
    losses: NDArray[np.float64] = np.array([1.0])
    start = 0
    for shift in shifts:
        mass = stats.skellam.pmf(support, half, half)
        loss = stats.skellam.logpmf(support, half, half)
        loss = loss - stats.skellam.logpmf(support - shift, half, half)
        good = np.isfinite(loss) & (mass > 1e-30)
        places = np.ceil(loss[good] / unit).astype(int)
        pld = np.bincount(places - places.min(), weights=mass[good])
        losses, start = signal.fftconvolve(losses, pld), start + int(places.min())
    grid = (np.arange(losses.size) + start) * unit
    above = grid > epsilon
    return float(np.sum(losses[above] * -np.expm1(epsilon - grid[above])))


@pytest.mark.parametrize("shifts", [(1,), (7,), (3, -4), (5, 1, -2)])
@pytest.mark.parametrize("variance", [25, 400])
def test_the_gaussian_dominates_the_privacy_loss_of_vectors(
    shifts: tuple[int, ...], variance: int
) -> None:
    mu = skellam_mu(variance) * math.hypot(*shifts)
    for epsilon in np.linspace(0.0, 4 * mu, 9):
        claimed = gaussian_delta(float(epsilon), mu)
        truth = hockey_stick(shifts, variance, float(epsilon))
        assert truth <= claimed * (1 + 1e-3) + 2e-4 * mu  # the grid rounds losses up by 1e-4
        if claimed > 1e-3:
            assert truth > 0.5 * claimed, "not far from tight"


@pytest.mark.parametrize("variance", [16, 17, 25, 100])
@pytest.mark.parametrize("shift", [1, 2, 9, 30, 50])
def test_no_point_of_the_exact_curve_of_one_coordinate_is_above_the_claim(
    shift: int, variance: int
) -> None:
    # Shifts of many standard deviations, too, and no tolerance but that of the sums.
    reach = np.arange(-40 * math.isqrt(variance) - 60, 40 * math.isqrt(variance) + 61)
    mass = special.ive(np.abs(reach), variance)
    mu = skellam_mu(variance) * shift
    for epsilon in np.linspace(0.0, mu * mu / 2 + 6 * mu, 80):
        truth = np.clip(mass[shift:] - math.exp(epsilon) * mass[:-shift], 0, None).sum()
        assert truth <= gaussian_delta(float(epsilon), mu) * (1 + 1e-12) + 1e-15


def test_the_unit_is_below_the_renyi_bound_of_the_paper() -> None:
    # Agarwal, Kairouz and Liu 2021, Theorem 3.5, one release at the best integer order.
    variance, norm2, norm1 = 10_000, 40.0, 400.0

    def renyi(order: int) -> float:
        first = ((2 * order - 1) * norm2**2 + 6 * norm1) / (4 * variance**2)
        return order * norm2**2 / (2 * variance) + min(first, 3 * norm1 / (2 * variance))

    delta = 1e-5
    paper = min(
        renyi(a) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in range(2, 200)
    )
    ours = gaussian_epsilon(norm2 * skellam_mu(variance), delta)
    gaussian = gaussian_epsilon(norm2 / math.sqrt(variance), delta)
    assert gaussian <= ours <= gaussian * 1.0001
    assert ours < paper < 1.25 * ours


@pytest.mark.parametrize("variance", [16, 33, 250, 10**4, 10**6])
def test_steps_beyond_those_computed_are_proved_smaller(variance: int) -> None:
    v = float(variance)
    reach = min(int(8 * v), max(64, int(5 * v**0.75)))
    assert module._largest_beyond(v, reach) < module._largest_step(v, reach)
    unit = skellam_mu(variance) * math.sqrt(v)
    assert unit == pytest.approx(1 + 1 / (6 * v), rel=1.5e-8 + 2 / v**2)


def test_amos_bound_of_the_proof_holds() -> None:
    for v in (16, 300, 1000):
        for t in (0, 1, 7, 100, 400):
            ratio = mpmath.besseli(t, v) / mpmath.besseli(t + 1, v)
            assert ratio <= mpmath.exp(mpmath.asinh((t + 1) / mpmath.mpf(v)))


@pytest.mark.parametrize("variance", [15, 2**27 + 1])
def test_noise_of_other_variances_is_refused(variance: int) -> None:
    with pytest.raises(InvalidValueError, match=f"variance={variance} must be"):
        skellam_mu(variance)


def test_a_unit_without_its_margin_would_be_found_too_small() -> None:
    # The power of the comparison: at a tenth less, the Gaussian no longer dominates.
    mu = 0.9 * skellam_mu(25) * 7
    worst = max(hockey_stick((7,), 25, e) - gaussian_delta(e, mu) for e in (0.0, 1.0, 2.0))
    assert worst > 2e-3
