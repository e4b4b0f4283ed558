"""What guesses prove about epsilon: exact intervals and lower bounds, numbers only.

Nothing here knows of rounds or models.  Tails of the binomial law are summed term by
term from logarithms of factorials, so that torch and numpy are all that is needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError

_STEPS = 60  # of a bisection: more than float64 can tell apart


def binomial_terms(trials: int, chance: float) -> NDArray[np.float64]:
    """Return P[Binomial(n, q) = k] for k = 0 .. n."""
    if chance in (0.0, 1.0):
        terms = np.zeros(trials + 1)
        terms[trials if chance else 0] = 1.0
        return terms
    k = np.arange(trials + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    ways = factorials[-1] - factorials - factorials[::-1]
    return np.asarray(np.exp(ways + k * math.log(chance) + (trials - k) * math.log1p(-chance)))


@functools.cache
def clopper_pearson(successes: int, trials: int, error: float) -> tuple[float, float]:
    """Return an interval for a chance, each end of which is wrong with at most `error`.

    Clopper and Pearson 1934: the lower end is the p at which so many successes or more
    have probability `error`, the upper one that at which so many or fewer have.
    """
    _check_count("successes", successes, trials)

    def at_least(chance: float) -> float:
        return float(binomial_terms(trials, chance)[successes:].sum())

    def at_most(chance: float) -> float:
        return float(binomial_terms(trials, chance)[: successes + 1].sum())

    low = 0.0 if successes == 0 else _last_below(at_least, error, 0.0, 1.0)
    high = 1.0
    if successes < trials:
        high = 1.0 - _last_below(lambda away: at_most(1.0 - away), error, 0.0, 1.0)
    return low, high


def epsilon_of_rates(true_positive: float, false_positive: float, delta: float) -> float:
    """Return the smallest epsilon that allows a test these two rates.

    (epsilon, delta) allows TPR <= e^eps FPR + delta, and the same of the test that
    answers the other way (Kairouz, Oh and Viswanath 2015).
    """
    ratios = [0.0]
    for hit, false in ((true_positive, false_positive), (1 - false_positive, 1 - true_positive)):
        if hit - delta > false:
            ratios.append(math.log((hit - delta) / false) if false > 0 else math.inf)
    return max(ratios)


def epsilon_lower_bound(
    hits: int, positives: int, false: int, negatives: int, delta: float, error: float = 0.05
) -> float:
    """Return an epsilon that the truth lies below with probability at most `error`.

    `hits` of `positives` runs with the canary and `false` of `negatives` runs without it
    were called positive, by a rule fixed beforehand.  Each of the two rates gets half of
    the error: the true positive rate its lower Clopper-Pearson end, the other its upper
    (the standard reading: Jagielski et al. 2020, arXiv:2006.07709).
    """
    error = checks.number("error", error, above=0, below=1)
    rate, _ = clopper_pearson(hits, positives, error / 2)
    _, alarm = clopper_pearson(false, negatives, error / 2)
    return epsilon_of_rates(rate, alarm, delta)


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return how likely so many correct guesses are under (epsilon, delta), at most.

    Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), theorem 5.2 and appendix D: m
    canaries are in or out of one run by independent fair coins, r guesses are made and v
    are right.  With q = e^eps / (1 + e^eps),

        p <= P[B >= v] + 2 m delta max_i P[v > B >= v - i] / i,   B ~ Binomial(r, q).
    """
    _check_count("guesses", guesses, canaries)
    _check_count("correct", correct, guesses)
    terms = binomial_terms(guesses, 1.0 / (1.0 + math.exp(-epsilon)))
    below = np.cumsum(terms[:correct][::-1])
    worst = float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(1.0, float(terms[correct:].sum()) + 2 * canaries * delta * worst)


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, error: float = 0.05
) -> float:
    """Return the largest epsilon that `correct` guesses rule out at confidence 1 - error."""
    error = checks.number("error", error, above=0, below=1)

    def p_value(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta)

    if p_value(0.0) >= error:
        return 0.0
    high = 1.0
    while p_value(high) < error:
        high *= 2
        if high > 700:
            return math.inf  # delta 0 and no guess wrong out of none at all
    return _last_below(p_value, error, 0.0, high)


def epsilon_of_normals(
    first: tuple[float, float], second: tuple[float, float], delta: float
) -> float:
    """Return the epsilon at `delta` between two normal laws (mean, standard deviation).

    The larger of the two directions of

        delta(eps) = P[L > eps] - e^eps Q[L > eps],   L = log p/q,

    where L is a quadratic of the observation, so that L > eps on an interval, outside one,
    or on a half line.
    """
    for _, std in (first, second):
        checks.number("standard deviation", std, above=0)
    delta = checks.number("delta", delta, above=0, below=1)

    def largest(epsilon: float) -> float:
        return max(_hockey_stick(first, second, epsilon), _hockey_stick(second, first, epsilon))

    if largest(0.0) <= delta:
        return 0.0
    high = 1.0
    while largest(high) > delta:
        high *= 2
        if high > 1e6:
            return math.inf
    return high - _last_below(lambda lower: largest(high - lower), delta, 0.0, high)


def _hockey_stick(p: tuple[float, float], q: tuple[float, float], epsilon: float) -> float:
    """Return sup_A P(A) - e^eps Q(A): the set where log p/q > eps."""
    (mean, std), (other, width) = p, q
    square = 0.5 / width**2 - 0.5 / std**2
    slope = mean / std**2 - other / width**2
    level = math.log(width / std) - mean**2 / (2 * std**2) + other**2 / (2 * width**2) - epsilon
    if abs(square) < 1e-12 / std**2:
        if slope == 0:
            return max(0.0, 1 - math.exp(epsilon)) if level > 0 else 0.0
        return _gain(p, q, epsilon, [_half_line(-level / slope, slope > 0)])
    inside = slope**2 - 4 * square * level
    if inside <= 0:
        return _gain(p, q, epsilon, [(-math.inf, math.inf)]) if square > 0 else 0.0
    ends = sorted((-slope + sign * math.sqrt(inside)) / (2 * square) for sign in (-1.0, 1.0))
    if square < 0:
        return _gain(p, q, epsilon, [(ends[0], ends[1])])
    return _gain(p, q, epsilon, [(-math.inf, ends[0]), (ends[1], math.inf)])


def _half_line(end: float, upwards: bool) -> tuple[float, float]:
    return (end, math.inf) if upwards else (-math.inf, end)


def _gain(
    p: tuple[float, float], q: tuple[float, float], epsilon: float, parts: list[tuple[float, float]]
) -> float:
    ours = sum(_mass(*p, *part) for part in parts)
    theirs = sum(_mass(*q, *part) for part in parts)
    if theirs <= 0:
        return ours
    return max(0.0, ours - math.exp(min(700.0, epsilon + math.log(theirs))))


def _mass(mean: float, std: float, low: float, high: float) -> float:
    """Return the probability of an interval, from the tail in which it lies."""
    a, b = (low - mean) / std / math.sqrt(2), (high - mean) / std / math.sqrt(2)
    if a > 0:
        return 0.5 * (math.erfc(a) - math.erfc(b))
    if b < 0:
        return 0.5 * (math.erfc(-b) - math.erfc(-a))
    return 0.5 * (math.erf(b) - math.erf(a))


def _last_below(rising: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Return the largest argument at which an increasing function is below `level`."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if rising(middle) < level:
            low = middle
        else:
            high = middle
    return low


def _check_count(name: str, value: int, largest: int) -> None:
    if not 0 <= value <= largest:
        raise InvalidValueError(f"{name}={value} must be >= 0 and <= {largest}")
