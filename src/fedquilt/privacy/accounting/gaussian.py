"""A release and its adjacency; the exact privacy of a Gaussian one: epsilon, delta and mu.

A vector of L2 sensitivity Δ released with Gaussian noise of standard deviation s
is described by one number, μ = Δ/s.  With a = ε/μ − μ/2 and b = ε/μ + μ/2,

    δ(ε) = Φ(−a) − e^ε·Φ(−b)                      Balle & Wang 2018, Theorem 8
         = φ(a)·(R(a) − R(b)),   R = Mills ratio, because b² − a² = 2ε

and the second form neither overflows nor cancels.  Releases compose exactly as
μ² = Σ μ_t² (Dong, Roth & Su 2022, Corollary 3.3), so this module is all the
accounting that noise without sampling needs.

Results are on the safe side: epsilon and delta are rounded up, mu is rounded
down, by about 1e-10 of delta.  Only `math` and `numpy` are used.

>>> round(1 / gaussian_mu(6.0, 1e-5), 4)
0.7636
>>> round(gaussian_epsilon(200**0.5 / 10.8, 1e-5), 2)
6.0

The Mills ratio of the normal distribution is

    R(x) = Φ(−x) / φ(x),        R'(x) = x·R(x) − 1 < 0

and every formula here that needs care with floating point is a difference
R(a) − R(a + μ).  Taken naively it loses all digits when μ is small or
a is large; `mills_gap` keeps a relative error below 1e-11 everywhere.

Adjacency says which two populations a guarantee makes hard to tell apart.  The unit is
always one client with everything it holds.  What changes with the adjacency is what
counts as its absence, and with that what may be public and how far one client can move a
sum.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError

if TYPE_CHECKING:
    from dp_accounting import NeighboringRelation

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


_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
_SLACK = 1e-10  # relative, on delta; far above the rounding error of `_log_delta`
_TOLERANCE = 1e-13  # relative, at which a bisection stops
_NEAR_STEP = 0.0009  # knots mu0·(1 + step·k²), dense where epsilon leaves zero
_NEAR_KNOTS = 34  # up to mu0·2
_FAR_RATIO = 1.04  # from there on


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the smallest delta for which a `mu` release is (epsilon, delta)-DP."""
    epsilon = checks.number("epsilon", epsilon, at_least=0)
    mu = checks.number("mu", mu, at_least=0)
    if mu == 0:
        return 0.0
    return min(1.0, math.nextafter(math.exp(_log_delta_above(epsilon, mu)), math.inf))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon for which a `mu` release is (epsilon, delta)-DP.

    The search starts below ε = μ²/2 + μ·√(2 ln 1/δ), which is enough because
    δ(ε) ≤ Φ(−a) ≤ e^(−a²/2).
    """
    mu = checks.number("mu", mu, at_least=0)
    delta = _delta(delta)
    if mu == 0:
        return 0.0
    return _epsilon_above(mu, delta)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu = sensitivity / noise_std that is (epsilon, delta)-DP.

    `1 / gaussian_mu(epsilon, delta)` is the analytic Gaussian mechanism's noise
    standard deviation for sensitivity 1 (Balle & Wang 2018, Algorithm 1).
    """
    epsilon = checks.number("epsilon", epsilon, at_least=0)
    return _mu_below(epsilon, _delta(delta), slack=2 * _SLACK)


def gaussian_epsilon_many(mu_squared: npt.ArrayLike, delta: float) -> npt.NDArray[np.float64]:
    """Return `gaussian_epsilon` of the root of every value, a million in about a second.

    The result is never below the exact epsilon, and at most 0.1 % (plus 1e-9)
    above it.  It is read from the chords of a table, and chords lie above the
    curve because epsilon is convex in mu at fixed delta: along the curve

        dε/dμ = 1/R(b),     db/dμ = 1 + (1/R(b) − b)/μ > 0

    (R(b) < 1/b), and 1/R increases, so the slope does.  Up to mu0 with
    δ(0, mu0) = delta, epsilon is exactly zero.  An infinite value gives infinity.
    """
    delta = _delta(delta)
    values = np.asarray(mu_squared, dtype=np.float64)
    if not np.all(values >= 0):
        worst = float(values[~(values >= 0)].flat[0])
        raise InvalidValueError(f"mu_squared={worst!r} must be >= 0 in every entry")
    mu = np.sqrt(values) * (1 + 1e-15)
    finite = mu[np.isfinite(mu)]
    if finite.size == 0:
        return np.full(mu.shape, np.inf)
    knots = _knots(float(finite.min()), float(finite.max()), delta)
    table = np.array([_knot_epsilon(knot, delta) for knot in knots.tolist()])
    result = np.interp(mu, knots, table, right=np.inf) * (1 + 1e-12)
    return np.asarray(result, dtype=np.float64)


def classic_sigma(
    epsilon: float, delta: float, sensitivity: float, *, beyond_validity: bool = False
) -> float:
    """Return the classic noise standard deviation Δ·√(2 ln(1.25/δ))/ε.

    Dwork & Roth 2014, Theorem A.1, proves it for epsilon <= 1 only.  It wastes
    noise there, and from about epsilon = 8.5 (at delta = 1e-5) it gives too
    little: at epsilon = 9 the true delta is 1.36e-5.  `beyond_validity=True`
    computes the number all the same, for comparison with systems that use it.
    """
    epsilon = checks.number("epsilon", epsilon, above=0)
    delta = _delta(delta)
    sensitivity = checks.number("sensitivity", sensitivity, above=0)
    if epsilon > 1 and not beyond_validity:
        raise InvalidValueError(
            f"epsilon={epsilon!r} must be <= 1: the classic formula is not proven above it; "
            "use sensitivity / gaussian_mu(epsilon, delta), or pass beyond_validity=True"
        )
    return sensitivity * math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon


def _delta(delta: float) -> float:
    return checks.number("delta", delta, above=0, below=1)


def _log_delta(epsilon: float, mu: float) -> float:
    """Return ln δ(epsilon) of a `mu` release."""
    a = epsilon / mu - 0.5 * mu
    if a > 1e150:
        return -math.inf
    if a < 0 and mu >= 0.5:
        density = math.exp(-0.5 * a * a - _LOG_SQRT_2PI)
        missed = 0.5 * math.erfc(-a / math.sqrt(2.0)) + density * mills_ratio(a + mu)
        return math.log1p(-missed)
    return math.log(mills_gap(a, mu)) - 0.5 * a * a - _LOG_SQRT_2PI


def _log_delta_above(epsilon: float, mu: float, slack: float = _SLACK) -> float:
    """Return ln δ plus more than its rounding error, the larger part of which is a's."""
    reach = epsilon / mu + 0.5 * mu
    rounding = 1e-15 * reach * (1.0 + abs(reach - mu))
    return _log_delta(epsilon, mu) + slack + (rounding if math.isfinite(rounding) else 0.0)


@functools.lru_cache(maxsize=4096)  # from round to round most clients have spent the same
def _epsilon_above(mu: float, delta: float) -> float:
    """Bisect for the epsilon of a `mu` release; the upper end of the bracket is returned."""
    log_delta = math.log(delta)
    if _log_delta_above(0.0, mu) <= log_delta:
        return 0.0
    low, high = 0.0, (0.5 * mu * mu + mu * math.sqrt(-2.0 * log_delta)) * (1 + 1e-9)
    while _log_delta_above(high, mu) > log_delta:
        low, high = high, 2.0 * high
    while high - low > _TOLERANCE * high:
        middle = 0.5 * (low + high)
        if _log_delta_above(middle, mu) <= log_delta:
            high = middle
        else:
            low = middle
    return high


def _mu_below(epsilon: float, delta: float, slack: float) -> float:
    """Bisect for the mu of (epsilon, delta); the lower end of the bracket is returned.

    With more slack than `_epsilon_above` uses, the epsilon of the result is at
    most `epsilon`, whatever the last digit does.
    """
    log_delta = math.log(delta)

    def allowed(mu: float) -> bool:
        return _log_delta_above(epsilon, mu, slack) <= log_delta

    low = high = 1.0
    while allowed(high):
        low, high = high, 2.0 * high
    while not allowed(low):
        low, high = 0.5 * low, low
    while high - low > _TOLERANCE * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low


@functools.lru_cache(maxsize=16384)
def _knot_epsilon(mu: float, delta: float) -> float:
    return _epsilon_above(mu, delta) if mu > 0 else 0.0


def _knots(lowest: float, highest: float, delta: float) -> npt.NDArray[np.float64]:
    """Return the table's values of mu that enclose [lowest, highest].

    The grid hangs on delta alone, so that later calls find their knots in the
    cache.  Its first knots are 0 and mu0, between which epsilon is zero.
    """
    start = _mu_below(0.0, delta, _SLACK)
    near = start * (1.0 + _NEAR_STEP * np.arange(_NEAR_KNOTS) ** 2)
    steps = math.log(max(1.0, highest / near[-1])) / math.log(_FAR_RATIO)
    far = near[-1] * _FAR_RATIO ** np.arange(1, math.ceil(steps) + 2)
    grid = np.concatenate([[0.0], near, far])
    first = int(np.searchsorted(grid, lowest, side="right")) - 1
    last = int(np.searchsorted(grid, highest, side="left"))
    return grid[first : max(last, first) + 1]


class Adjacency(Enum):
    """The neighbouring relation of a guarantee, for a sum of vectors clipped at C.

    ZERO_OUT
        The client's data are replaced by nothing: it answers with the zero
        vector, while the roster and who joins which round stay as they are
        (Kairouz et al. 2021, Definition 1.1).  Public: roster, participation
        history, device tiers, cohort sizes.  The sum moves by at most C, and so
        may be divided by the actual cohort size; a public participation history
        may set noise and clip bounds.  This is the default.  Two worlds with data
        of the client in both are not neighbours: only by way of nothing.
    ADD_REMOVE
        The client is not in the population at all.  Nothing about membership is
        public: not the roster, not the participation history, not the cohort
        size.  The sum moves by at most C, but it may only be divided by a
        constant fixed beforehand.
    REPLACE_ONE
        The client's data are exchanged for any others, or for nothing, while the
        roster and who joins which round stay as they are.  Public: the same as
        under ZERO_OUT.  The sum moves by up to 2·C, from C in one direction to C in
        the opposite.
    """

    ZERO_OUT = "zero_out"
    ADD_REMOVE = "add_remove"
    REPLACE_ONE = "replace_one"

    @property
    def sensitivity_factor(self) -> float:
        """The L2 sensitivity of a sum of clipped vectors, in units of the clip bound."""
        return 2.0 if self is Adjacency.REPLACE_ONE else 1.0

    @property
    def words(self) -> str:
        """The relation's name in a sentence."""
        return self.value.replace("_", "-")

    @classmethod
    def of(cls, value: object) -> Adjacency:
        """Return the relation itself or the one named by `value`, or raise."""
        if isinstance(value, cls):
            return value
        return cls(checks.choice("adjacency", value, [member.value for member in cls]))

    def relation(self) -> NeighboringRelation:
        """Return dp-accounting's name for this relation."""
        from dp_accounting import NeighboringRelation

        return {
            Adjacency.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
            Adjacency.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
            Adjacency.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
        }[self]


_NOT_POISSON = {
    "without_replacement": (
        "a cohort of fixed size is only bounded under REPLACE_ONE and by a bound so loose "
        "(epsilon 38.4 where Poisson sampling has 6.0) that it hides more than it says"
    ),
    "shuffle": "shuffled cohorts do not have the amplification of Poisson sampling",
    "availability": (
        "a device that is online is no coin of the server: it is chosen by the device, "
        "observable and correlated over time"
    ),
}


@dataclass(frozen=True)
class Release:
    """`count` Gaussian releases of a sum of vectors clipped at C, as one client sees them.

    Noise of standard deviation s is added to the sum; `noise_multiplier` = s/C,
    in units of the clip bound whatever the adjacency.  Zero means no noise.

    `sampling_rate` q < 1 claims amplification: before each of the `count`
    releases the server tosses a secret coin of known probability q for the
    client (Poisson sampling).  `count` is then the number of tosses, not of
    joins.  Other kinds of `sampling` are refused; count the joins themselves
    with `sampling_rate=1`, which is right for any way of choosing a cohort.
    """

    noise_multiplier: float
    count: int = 1
    sampling_rate: float = 1.0
    sampling: str = "poisson"

    def __post_init__(self) -> None:
        checks.number("noise_multiplier", self.noise_multiplier, at_least=0, at_most=1e100)
        checks.integer("count", self.count, at_least=0)
        checks.number("sampling_rate", self.sampling_rate, above=0, at_most=1)
        if self.sampling in _NOT_POISSON:
            raise InvalidValueError(
                f"sampling={self.sampling!r} must be 'poisson': {_NOT_POISSON[self.sampling]}. "
                "Count every join at sampling_rate=1 instead"
            )
        checks.choice("sampling", self.sampling, ["poisson"])


@dataclass(frozen=True)
class PrivacyBound:
    """What has been shown: (epsilon, delta) under `adjacency`, computed by `method`.

    `epsilon` is infinite where nothing can be promised.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    method: str


def merged(releases: Iterable[Release]) -> tuple[Release, ...]:
    """Return the same releases in the fewest records, in an order of their own.

    Releases without sampling become a single one, exactly: μ² = Σ count/z² is
    what every method but the basic ones keeps of them.  Equal sampled releases
    are counted together.
    """
    groups: Counter[tuple[float, float]] = Counter()
    for release in releases:
        if release.count:
            groups[float(release.sampling_rate), float(release.noise_multiplier)] += release.count
    sampled = [Release(z, n, q) for (q, z), n in sorted(groups.items()) if q < 1]
    plain = math.fsum(n / z**2 if z > 0 else math.inf for (q, z), n in groups.items() if q == 1)
    return (Release(1 / math.sqrt(plain)), *sampled) if plain else tuple(sampled)
