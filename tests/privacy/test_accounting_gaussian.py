"""The Gaussian mechanism against high-precision arithmetic and published figures."""

from __future__ import annotations

import doctest
import math
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import mpmath
import numpy as np
import pytest

from fedquilt.errors import InvalidValueError
from fedquilt.privacy.accounting import (
    classic_sigma,
    gaussian,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_epsilon_many,
    gaussian_mu,
)

GOLDEN = tomllib.loads((Path(__file__).parents[1] / "golden" / "privacy.toml").read_text())
EXTREMES = [
    (mu, a)
    for mu in (1e-6, 1e-3, 0.1, 0.49, 0.51, 1.3, 7.0, 60.0, 1e3)
    for a in (-20.0, -3.0, -0.1, 0.0, 0.3, 4.3, 9.99, 10.01, 11.7)
    if a + mu / 2 >= 0
]


def reference_delta(epsilon: float, mu: float) -> mpmath.mpf:
    """Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) with 60 digits."""
    with mpmath.workdps(60):
        epsilon, mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
        lost = mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
        return mpmath.ncdf(mu / 2 - epsilon / mu) - lost


@pytest.mark.parametrize("x", [-8.0, -1.0, 0.0, 0.5, 3.0, 9.999, 10.0, 25.0, 1e4])
def test_mills_ratio_and_its_slope(x):
    with mpmath.workdps(60):
        exact = mpmath.ncdf(-mpmath.mpf(x)) / mpmath.npdf(mpmath.mpf(x))
        slope = 1 - x * exact
    assert gaussian.mills_ratio(x) == pytest.approx(float(exact), rel=2e-14)
    assert gaussian.mills_slope(x) == pytest.approx(float(slope), rel=5e-12)


@pytest.mark.parametrize(("mu", "a"), EXTREMES)
def test_delta_is_exact_and_never_below(mu, a):
    epsilon = mu * (a + mu / 2)
    exact = reference_delta(epsilon, mu)
    ours = gaussian_delta(epsilon, mu)
    assert ours >= exact
    assert ours == pytest.approx(float(exact), rel=3e-10)


@pytest.mark.parametrize("delta", [1e-30, 1e-12, 1e-5, 0.3])
@pytest.mark.parametrize("mu", [1e-6, 1e-2, 1.0, 30.0, 1e3])
def test_epsilon_is_the_smallest_that_holds(mu, delta):
    ours = gaussian_epsilon(mu, delta)
    assert reference_delta(ours, mu) <= delta
    if ours > 0:
        assert reference_delta(ours * (1 - 1e-8), mu) > delta
    else:
        assert reference_delta(0, mu) <= delta


@pytest.mark.parametrize("delta", [1e-30, 1e-5, 0.3])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4, 1.0, 6.0, 1e4])
def test_mu_is_the_largest_that_holds(epsilon, delta):
    ours = gaussian_mu(epsilon, delta)
    assert reference_delta(epsilon, ours) <= delta
    assert reference_delta(epsilon, ours * (1 + 1e-8)) > delta


@pytest.mark.parametrize(("epsilon", "noise_std"), GOLDEN["analytic"]["rows"])
def test_golden_analytic_noise(epsilon, noise_std):
    delta = GOLDEN["analytic"]["delta"]
    assert 1 / gaussian_mu(epsilon, delta) == pytest.approx(noise_std, abs=5e-5)


def test_golden_classic_formula():
    golden = GOLDEN["classic"]
    delta = golden["delta"]

    def sigma(epsilon):
        return classic_sigma(epsilon, delta, 1.0, beyond_validity=True)

    for epsilon, ratio in golden["over_noise"]:
        assert sigma(epsilon) * gaussian_mu(epsilon, delta) == pytest.approx(ratio, abs=0.005)
    for epsilon, true in golden["true_delta"]:
        assert gaussian_delta(epsilon, 1 / sigma(epsilon)) == pytest.approx(true, rel=0.03)
    for epsilon, true in golden["true_epsilon"]:
        assert gaussian_epsilon(1 / sigma(epsilon), delta) == pytest.approx(true, abs=0.005)
    turn = golden["fails_from"]
    assert gaussian_delta(turn - 0.2, 1 / sigma(turn - 0.2)) < delta
    assert gaussian_delta(turn + 0.2, 1 / sigma(turn + 0.2)) > delta


def test_classic_formula_is_refused_beyond_its_proof():
    assert classic_sigma(1.0, 1e-5, 2.0) == pytest.approx(2 * math.sqrt(2 * math.log(1.25e5)))
    with pytest.raises(InvalidValueError, match=r"epsilon=6.0 must be <= 1.*beyond_validity"):
        classic_sigma(6, 1e-5, 1.0)


def test_no_release_costs_nothing():
    assert gaussian_delta(1.0, 0.0) == 0.0
    assert gaussian_epsilon(0.0, 1e-5) == 0.0


def test_underflowing_delta_stays_above_zero():
    assert 0 < gaussian_delta(1e4, 1e-6) < 1e-300


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gaussian_delta(-1.0, 1.0), r"epsilon=-1.0 must be >= 0"),
        (lambda: gaussian_delta(1.0, math.nan), r"mu=nan must be >= 0"),
        (lambda: gaussian_epsilon(1.0, 0.0), r"delta=0.0 must be > 0 and < 1"),
        (lambda: gaussian_mu(1.0, 1.0), r"delta=1.0 must be > 0 and < 1"),
        (lambda: gaussian_epsilon_many([1.0, -2.0], 1e-5), r"mu_squared=-2.0 must be >= 0"),
        (lambda: gaussian_epsilon_many([math.nan], 1e-5), r"mu_squared=nan must be >= 0"),
        (lambda: classic_sigma(0.5, 1e-5, 0.0), r"sensitivity=0.0 must be > 0"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(InvalidValueError, match=message):
        call()


def test_many_keeps_shape_and_handles_the_ends():
    values = np.array([[0.0, 1.7, np.inf], [1e-30, 1e6, 1e300]])
    result = gaussian_epsilon_many(values, 1e-5)
    assert result.shape == (2, 3)
    assert result[0, 0] == result[1, 0] == 0.0
    assert result[0, 1] == pytest.approx(gaussian_epsilon(math.sqrt(1.7), 1e-5), rel=1e-3)
    assert result[0, 2] == np.inf
    assert result[1, 2] == pytest.approx(0.5e300, rel=1e-3)
    assert gaussian_epsilon_many([], 1e-5).shape == (0,)
    assert gaussian_epsilon_many([np.inf], 1e-5).tolist() == [np.inf]


def test_many_takes_a_million_in_under_two_seconds():
    rng = np.random.default_rng(3)
    values = 10 ** rng.uniform(-12, 6, 1_000_000)
    begin = time.process_time()
    result = gaussian_epsilon_many(values, 3e-7)
    assert time.process_time() - begin < 2.0
    for index in range(0, 1_000_000, 50_000):
        exact = gaussian_epsilon(math.sqrt(values[index]), 3e-7)
        assert exact <= result[index] <= exact * 1.001 + 1e-9


def test_documented_examples():
    assert doctest.testmod(gaussian).attempted == 2
    assert doctest.testmod(gaussian).failed == 0


def test_needs_neither_scipy_nor_dp_accounting():
    code = (
        "import sys\n"
        "for name in ('scipy', 'dp_accounting', 'absl', 'torch', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "from fedquilt.privacy.accounting import Release, calibrate, epsilon\n"
        "from fedquilt.privacy.feasibility import plan_privacy as plan\n"
        "z = calibrate(6.0, 1e-5, rounds=200, method='gdp')\n"
        "print(epsilon([Release(z, 200)], 1e-5, method='gdp').epsilon)\n"
        "print(plan(100, 200, 6.0, 1e-5, 1_200_000, None, 100).workable)\n"
    )
    source = str(Path(gaussian.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": source},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    spent, workable = done.stdout.split()
    assert float(spent) == pytest.approx(6.0, abs=1e-6)
    assert workable == "False"
