"""Several seeds in few numbers: mean, deviation, interval of the mean, paired differences.

With n values of sample mean m and sample deviation s (divisor n - 1) the interval of the mean is

    m ± t_{n-1, 0.975} s / √n,

Student's, which holds exactly where seeds scatter normally and is honest about few of them.
Compared runs that share seeds share data, split and cohorts: their difference is taken seed by
seed, and the same formula applies to the differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Mean, sample deviation and interval of the mean; None where too few values say nothing."""

    count: int
    mean: float | None
    sd: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Paired:
    """A difference on the seeds that two sides share; `p` is of the two-sided t test."""

    seeds: tuple[int, ...]
    spread: Spread
    p: float | None


def spread(values: Sequence[float | None], confidence: float = CONFIDENCE) -> Spread:
    """Return what finite values say about their mean; others are not in it.

    >>> found = spread([0.5, 0.7, 0.9])
    >>> round(found.mean, 6), round(found.sd, 6), round(found.low, 6), round(found.high, 6)
    (0.7, 0.2, 0.203172, 1.196828)
    """
    finite = np.asarray([v for v in values if v is not None and math.isfinite(v)])
    if not finite.size:
        return Spread(0, None, None, None, None)
    mean = float(finite.mean())
    if finite.size < 2:
        return Spread(1, mean, None, None, None)
    sd = float(finite.std(ddof=1))
    half = student_quantile((1 + confidence) / 2, finite.size - 1) * sd / math.sqrt(finite.size)
    return Spread(int(finite.size), mean, sd, mean - half, mean + half)


def paired(first: Mapping[int, float | None], second: Mapping[int, float | None]) -> Paired:
    """Compare two sides, seed by seed: first minus second on the seeds both have."""
    shared = sorted(seed for seed in first if _finite(first[seed]) and _finite(second.get(seed)))
    differences = [float(first[s] or 0.0) - float(second[s] or 0.0) for s in shared]
    found = spread(differences)
    return Paired(tuple(shared), found, _p_value(found))


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _p_value(found: Spread) -> float | None:
    if found.mean is None or found.sd is None:
        return None
    if found.sd == 0:
        return 1.0 if found.mean == 0 else 0.0
    t = abs(found.mean) / (found.sd / math.sqrt(found.count))
    return 2 * (1 - student_probability(t, found.count - 1))


def student_probability(t: float, degrees: int) -> float:
    """Return P(T <= t) of Student's distribution, by its finite sums (Abramowitz, Stegun 26.7).

    With θ = atan(t/√ν) the probability of |T| <= t is, for odd ν,
    (2/π)(θ + sin θ (cos θ + 2/3 cos³ θ + ...)), and for even ν
    sin θ (1 + 1/2 cos² θ + 1·3/(2·4) cos⁴ θ + ...), both up to the power ν - 2.
    """
    angle = math.atan(abs(t) / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2 == 1
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for power in range(3 if odd else 2, degrees - 1, 2):
        term *= cosine**2 * (power - 1) / power
        total += term
    if odd:
        inner = angle + sine * total if degrees > 1 else angle
        between = 2 / math.pi * inner
    else:
        between = sine * total
    return 0.5 + math.copysign(between / 2, t)


def student_quantile(probability: float, degrees: int) -> float:
    """Return the t below which Student's distribution has this probability, at least one half.

    >>> round(student_quantile(0.975, 2), 6)
    4.302653
    """
    low, high = 0.0, 1.0
    while student_probability(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if student_probability(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high
