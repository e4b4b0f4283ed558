"""Skellam noise: an exact sampler, and the Gaussian that dominates it.

A Skellam number of variance v is the difference of two Poisson numbers of mean v/2.  Sums of
independent ones are Skellam again, so clients that each add a share make one noise whose variance
is the sum of theirs: what secure aggregation needs (Agarwal, Kairouz and Liu 2021).

**What it costs.**  Let X be Skellam of variance v on the integers and F its distribution function.
X is log-concave (a convolution of Poissons), so the best tests between X and X + 1 are thresholds:
the trade-off curve of the pair is the polygon through (P(X >= t), P(X + 1 < t)).  Between two
vertices a chord of the convex curve G_m(a) = Phi(Phi^-1(1 - a) - m) lies above that curve, so the
pair is m-GDP (Dong, Roth and Su 2022) if and only if it is at the vertices:

    m(v) = sup_t  Phi^-1(F(t)) - Phi^-1(F(t - 1)),        about (1 + 1/(6v)) / sqrt(v).

A shift by k is k shifts by one, hence (k m)-GDP (group privacy, Theorem 2.14 there); coordinates
have independent noise, hence a shift of a vector by integers x is |x|_2 m(v)-GDP (Corollary 3.3).
The ledger's unit of a release is thus |x|_2^2 m(v)^2: it is proved for the whole curve of
(epsilon, delta), not for some orders of Renyi, and sums with Gaussian releases exactly.

`skellam_mu` computes the supremum and proves it for every t.  Let S(t) = P(X > t), and let
z(t) = Phi^-1(F(t)).

1. |t| <= T about 5 v^(3/4): every step is computed.  I_t(v) solves the recurrence of Bessel
   functions between t = 0 and a t far out, a tridiagonal system, which damps errors (Olver 1967).
2. T < t < 8v: as the normal hazard is at least z, a step is at most ln(S(t-1) / S(t)) / z(t-1).
   With r_t = P(X = t) / P(X = t + 1) <= exp(asinh((t + 1) / v)) (Amos 1974), which grows with t,
   S(t) / P(X = t) >= R^-1 + .. + R^-J for R = exp(asinh((t + J + 1) / v)); and z(t - 1) is at least
   the normal quantile of Chernoff's bound exp(-t asinh(t/v) + sqrt(t^2 + v^2) - v).  Numerator
   and denominator both grow with t, so blocks of t are bounded by their ends.
3. t >= 8v: the same with J = 1 gives at most ln(2t/v + 6) / sqrt(t (ln(2t/v) - 1)), which falls
   with t and at t = 8v is below 1 / sqrt(v).

X is symmetric, so steps at -t are those at t.

**Sampling.**  `skellam` is exact: its numbers have the Skellam distribution itself, not one near
it, given independent fair bits.  It inverts the distribution function of the Poisson numbers on
integers: a word of 64 bits is the beginning of a uniform number, and the table has for every value
two integers between which the exact probability lies, with their distance proved.  A word that
falls between two such integers (one in 2^50 or so) is continued by another word, under a table of
twice the precision, and so on.  No floating point is involved.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError

Words = Callable[[int], NDArray[np.uint64]]
"""Draws so many independent words of 64 fair bits."""

LEAST_VARIANCE, MOST_VARIANCE = 16, 2**26
"""Of the noise of the fewest on a sum; that of all may have twice as much."""

_GUARD = 1e-8  # relative, far above the rounding errors of the steps
_WORD = 64


@dataclass(frozen=True, eq=False)
class _Table:
    """Bounds of 2^bits times the distribution function at `first`, `first` + 1, ..."""

    first: int
    below: list[int]
    above: list[int]


@functools.lru_cache(maxsize=16)
def _poisson_table(mean: Fraction, bits: int) -> _Table:
    """Enclose the distribution function of a Poisson number, in units of 2^-bits.

    Weights w_t = mean^t / t!, relative to that of the mode, are rounded down step by step away
    from it.  A step multiplies by at most 1 and loses at most one unit, so after K steps the
    true weight is at most K units above; a geometric series bounds what is left out.
    """
    over, under = mean.numerator, mean.denominator
    mode = over // under
    up, down = [1 << (bits + 2 * _WORD)], []
    while up[-1]:
        up.append(up[-1] * over // (under * (mode + len(up))))
    weight, value = up[0], mode
    while value and weight:
        weight = weight * under * value // over
        value -= 1
        down.append(weight)
    weights = down[::-1] + up
    steps, last = max(len(up), len(down)), mode + len(up) - 1
    left_out = steps * (value + 1) + steps * (last + 1) * under // ((last + 1) * under - over) + 1
    slack = steps * len(weights) + left_out
    total = sum(weights)
    below, above, done = [], [], 0
    for weight in weights:
        done += weight
        below.append((done << bits) // (total + slack))
        above.append(min(-((-(done + slack) << bits) // total), 1 << bits))
    return _Table(value, below, above)


def _continue(mean: Fraction, prefix: int, bits: int, draw: Words, word: int) -> int:
    """Return the Poisson number of the uniform number that begins with `prefix`."""
    while True:
        prefix, bits = prefix << word | int(draw(1)[0]) >> (_WORD - word), bits + word
        table = _poisson_table(mean, bits)
        place = bisect.bisect_right(table.below, prefix)
        least = table.above[place - 1] if place else table.first and 1 << bits
        if place < len(table.below) and prefix >= least:
            return table.first + place


def poisson(mean: Fraction, size: int, draw: Words, word: int = _WORD) -> NDArray[np.int64]:
    """Return exact Poisson numbers; `word` is how many bits are looked at first."""
    table = _poisson_table(mean, word)
    most = (1 << word) - 1
    known = sum(value <= most for value in table.above)
    below = np.array(table.below[:known], dtype=np.uint64)
    above = np.array(table.above[:known], dtype=np.uint64)
    drawn = draw(size) >> np.uint64(_WORD - word)
    places = np.searchsorted(below, drawn, side="right")
    sure = (places > 0) & (places < known)
    sure[sure] = drawn[sure] >= above[places[sure] - 1]
    if not table.first:  # nothing lies below the first value of the table
        sure |= (places == 0) & (known > 0)
    numbers = places.astype(np.int64) + table.first
    for unsure in np.flatnonzero(~sure):
        numbers[unsure] = _continue(mean, int(drawn[unsure]), word, draw, word)
    return numbers


def skellam(variance: Fraction, size: int, draw: Words) -> NDArray[np.int64]:
    """Return exact Skellam numbers of a variance: differences of two Poisson numbers."""
    numbers = poisson(variance / 2, 2 * size, draw)
    return numbers[:size] - numbers[size:]


@functools.lru_cache(maxsize=256)
def skellam_mu(variance: int) -> float:
    """Return an m, rounded up, with which Skellam noise under a shift by one is m-GDP.

    >>> round(skellam_mu(10_000) * 100, 6)
    1.000017
    """
    checks.integer("variance", variance, at_least=LEAST_VARIANCE, at_most=2 * MOST_VARIANCE)
    v = float(variance)
    reach = min(int(8 * v), max(64, int(5 * v**0.75)))
    found = _largest_step(v, reach)
    beyond = _largest_beyond(v, reach)
    if beyond > found:
        raise InvalidValueError(
            f"variance={variance} must have its largest step within {reach}: {beyond} > {found}"
        )
    return found * (1 + _GUARD)


def _largest_step(v: float, reach: int) -> float:
    """Return the largest Phi^-1(F(t)) - Phi^-1(F(t - 1)) for 0 <= t <= reach."""
    from scipy.linalg import solve_banded

    # Beyond the start, ratios are near Amos' bounds; the recurrence damps what they leave.
    start = reach + 64 + int(40 * v / reach)
    logs, ratios = _bessel(v, start)
    # tail[t] = S(t) / P(X = t + 1) = 1 + tail[t + 1] P(X = t + 2) / P(X = t + 1)
    bands = np.ones((2, start - 1))
    bands[0, 1:] = -1.0 / ratios[1:]
    tail = solve_banded((0, 1), bands, np.ones(start - 1), overwrite_ab=True, check_finite=False)
    log_tail = logs[1:] + np.log(tail)
    log_total = math.log1p(2.0 * math.exp(log_tail[0]))
    quantiles = _upper_quantile(log_tail[: reach + 1] - log_total)
    steps = np.diff(quantiles, prepend=-quantiles[0])
    return float(steps.max())


def _bessel(v: float, start: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ln(I_t(v) / I_0(v)) for t < `start`, and the ratios of each to the next.

    I_(t-1) = (2t / v) I_t + I_(t+1).  What is solved for is w_t = I_t / g_t, near 1, where
    ln g_t = -sum asinh((s + 1/2) / v) over s < t, with w_0 = w_start = 1.
    """
    from scipy.linalg import solve_banded

    falls = np.arcsinh((np.arange(start) + 0.5) / v)
    steps = np.exp(-falls)
    bands = np.zeros((3, start - 1))
    bands[0, 1:] = steps[1:-1]
    bands[1] = 2.0 * np.arange(1, start) / v
    bands[2, :-1] = -1.0 / steps[1:-1]
    ends = np.zeros(start - 1)
    ends[0], ends[-1] = 1.0 / steps[0], -steps[-1]
    inner = solve_banded((1, 1), bands, ends, overwrite_ab=True, check_finite=False)
    weights = np.concatenate([[1.0], inner])
    logs = np.log(weights)
    logs[1:] -= np.cumsum(falls[:-1])
    return logs, weights[:-1] / weights[1:] / steps[:-1]


def _largest_beyond(v: float, reach: int) -> float:
    """Return a bound of the steps at t > reach (see 2 and 3 above)."""
    if reach >= 8 * v:
        return 0.0
    share = 0.02 * (reach / v) ** 2  # of a block: below what is left between bound and 1/sqrt(v)
    count = int(math.log(8 * v / reach) / math.log1p(share)) + 2
    ends = reach * np.exp(np.linspace(0.0, math.log(8.01 * v / reach), count))
    low, high = ends[:-1], ends[1:]
    terms = np.ceil((3.0 + 0.6 * math.log(v)) / np.arcsinh(low / v))
    ratio = np.arcsinh((high + terms + 1) / v)
    drop = np.log1p(np.expm1(ratio) / -np.expm1(-terms * ratio))
    chernoff = low * np.arcsinh(low / v) - low * low / (np.sqrt(low * low + v * v) + v)
    z = _upper_quantile(-chernoff)
    return float((drop / z).max())


def _upper_quantile(log_tail: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return z with ln(1 - Phi(z)) = log_tail."""
    from scipy.special import ndtri_exp

    return np.asarray(-ndtri_exp(log_tail))
