"""What must hold for every input of the accounting, drawn at random."""

from __future__ import annotations

import math
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from fedquilt.privacy.accounting import (
    Adjacency,
    Release,
    calibrate,
    epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_epsilon_many,
    gaussian_mu,
)

mus = st.floats(-6, 3).map(lambda x: 10.0**x)
deltas = st.floats(-30, -0.001).map(lambda x: 10.0**x)
epsilons = st.one_of(st.just(0.0), st.floats(-6, 4).map(lambda x: 10.0**x))
releases = st.lists(
    st.builds(Release, st.floats(0.5, 300), st.integers(0, 500)), min_size=1, max_size=8
)
many_examples = settings(max_examples=examples(60))


@many_examples
@given(mus, mus, deltas)
def test_epsilon_grows_with_mu(one, other, delta):
    low, high = sorted((one, other))
    assert gaussian_epsilon(low, delta) <= gaussian_epsilon(high, delta) * (1 + 1e-9)


@many_examples
@given(mus, deltas, deltas)
def test_epsilon_falls_with_delta(mu, one, other):
    low, high = sorted((one, other))
    assert gaussian_epsilon(mu, high) <= gaussian_epsilon(mu, low) * (1 + 1e-9)


@many_examples
@given(epsilons, epsilons, mus)
def test_delta_falls_with_epsilon(one, other, mu):
    low, high = sorted((one, other))
    assert gaussian_delta(high, mu) <= gaussian_delta(low, mu) * (1 + 1e-9)


@many_examples
@given(epsilons, deltas)
def test_the_largest_mu_is_allowed(target, delta):
    mu = gaussian_mu(target, delta)
    assert gaussian_epsilon(mu, delta) <= target * (1 + 1e-9)
    assert gaussian_delta(target, mu) <= delta
    assert gaussian_delta(target, mu * (1 + 1e-6)) > delta


@many_examples
@given(mus, deltas)
def test_epsilon_and_delta_are_inverse(mu, delta):
    target = gaussian_epsilon(mu, delta)
    assert gaussian_delta(target, mu) <= delta * (1 + 1e-9)


@settings(max_examples=examples(10))
@given(st.lists(st.floats(-14, 6), min_size=1, max_size=6), st.floats(-7, 2), deltas)
def test_many_is_never_below_and_close(exponents, beyond, delta):
    """Anywhere, and just past the point where epsilon leaves zero."""
    threshold = gaussian_mu(0.0, delta)
    values = np.array([10.0**x for x in exponents] + [(threshold * (1 + 10.0**beyond)) ** 2])
    fast = gaussian_epsilon_many(values, delta)
    exact = np.array([gaussian_epsilon(math.sqrt(value), delta) for value in values])
    assert (fast >= exact).all()
    assert (fast <= exact * 1.001 + 1e-9).all()


@settings(max_examples=examples(30))
@given(releases, st.randoms(use_true_random=False), st.sampled_from(["basic", "advanced", "gdp"]))
def test_order_does_not_matter(schedule, rng: random.Random, method):
    shuffled = list(schedule)
    rng.shuffle(shuffled)
    first = epsilon(schedule, 1e-6, method=method).epsilon
    assert epsilon(shuffled, 1e-6, method=method).epsilon == first


@settings(max_examples=examples(10))
@given(releases, st.randoms(use_true_random=False))
def test_order_does_not_matter_to_rdp(schedule, rng: random.Random):
    mixed = [*schedule, Release(2.0, 3, 0.2), Release(3.0, 1, 0.1), Release(2.0, 4, 0.2)]
    shuffled = list(mixed)
    rng.shuffle(shuffled)
    first = epsilon(mixed, 1e-6, method="rdp").epsilon
    assert epsilon(shuffled, 1e-6, method="rdp").epsilon == first


@settings(max_examples=examples(30))
@given(releases, st.floats(0.5, 300))
def test_a_further_release_never_lowers_the_cost(schedule, noise):
    for method in ("basic", "advanced", "gdp", "rdp"):
        before = epsilon(schedule, 1e-6, method=method).epsilon
        after = epsilon([*schedule, Release(noise)], 1e-6, method=method).epsilon
        assert after >= before * (1 - 1e-9)


@settings(max_examples=examples(30))
@given(releases)
def test_exact_is_below_the_bounds(schedule):
    exact = epsilon(schedule, 1e-6, method="gdp").epsilon
    for method in ("basic", "advanced", "rdp"):
        assert exact <= epsilon(schedule, 1e-6, method=method).epsilon * (1 + 1e-9)


@settings(max_examples=examples(30))
@given(
    st.floats(-3, 3).map(lambda x: 10.0**x),
    st.floats(-20, -1).map(lambda x: 10.0**x),
    st.integers(1, 5000),
    st.sampled_from(list(Adjacency)),
)
def test_calibrated_noise_meets_its_target(target, delta, rounds, adjacency):
    z = calibrate(target, delta, rounds=rounds, method="gdp", adjacency=adjacency)
    reached = epsilon([Release(z, rounds)], delta, method="gdp", adjacency=adjacency).epsilon
    assert reached <= target * (1 + 1e-12)
    assert reached >= target * (1 - 1e-6)
