"""The Mills ratio of the normal distribution, and differences of it, without cancellation.

    R(x) = Φ(−x) / φ(x),        R'(x) = x·R(x) − 1 < 0

Every formula of the Gaussian mechanism that needs care with floating point is a
difference R(a) − R(a + μ).  Taken naively it loses all digits when μ is small or
a is large; `mills_gap` keeps a relative error below 1e-11 everywhere.
"""

from __future__ import annotations

import math

import numpy as np

_SQRT_2 = math.sqrt(2.0)
_SQRT_HALF_PI = math.sqrt(math.pi / 2.0)
_LARGE = 10.0  # from here the asymptotic series reaches full double precision
_SERIES_TERMS = 20
_NODES, _WEIGHTS = (row.tolist() for row in np.polynomial.legendre.leggauss(8))
_RULE = tuple(zip(_NODES, _WEIGHTS, strict=True))


def mills_ratio(x: float) -> float:
    """Return R(x) = Φ(−x)/φ(x) for x > −37; the result overflows below that.

    For x ≥ 10 the asymptotic series 1/x·(1 − 1/x² + 3/x⁴ − 15/x⁶ + …) is used.
    """
    if x < _LARGE:
        return _SQRT_HALF_PI * math.exp(0.5 * x * x) * math.erfc(x / _SQRT_2)
    return (1.0 - _series(x)) / x


def mills_slope(x: float) -> float:
    """Return −R'(x) = 1 − x·R(x), which is positive for every x."""
    if x < _LARGE:
        return 1.0 - x * mills_ratio(x)
    return _series(x)


def mills_gap(a: float, mu: float) -> float:
    """Return R(a) − R(a + mu) for a > −37 and mu > 0.

    Where the two terms are close (mu small beside max(1, a)) the equal integral
    of −R' over [a, a + mu] is taken with an 8-point Gauss-Legendre rule: all its
    terms are positive, so nothing cancels.
    """
    if mu >= 0.5 * max(1.0, a):
        return mills_ratio(a) - mills_ratio(a + mu)
    half = 0.5 * mu
    middle = a + half
    return half * math.fsum(w * mills_slope(middle + half * node) for node, w in _RULE)


def _series(x: float) -> float:
    """Return 1/x² − 3/x⁴ + 15/x⁶ − …, the asymptotic series of 1 − x·R(x)."""
    step = 1.0 / (x * x)
    term = total = step
    for k in range(1, _SERIES_TERMS):
        term *= -(2 * k + 1) * step
        total += term
        if abs(term) < 1e-17 * total:
            break
    return total
