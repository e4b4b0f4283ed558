"""The privacy of Gaussian noise, solved from its definition with SciPy."""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.stats import norm


def exact_epsilon(mu: float, delta: float) -> float:
    """Solve delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu).

    Balle and Wang 2018, Theorem 8; Dong, Roth and Su 2022.
    """

    def excess(epsilon: float) -> float:
        second = math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return float(norm.cdf(mu / 2 - epsilon / mu) - second - delta)

    return float(brentq(excess, 0.0, 200.0, xtol=1e-13, rtol=1e-13)) if excess(0.0) > 0 else 0.0
