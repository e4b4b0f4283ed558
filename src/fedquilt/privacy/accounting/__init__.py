"""What Gaussian noise costs a client: exact figures, composition, calibration.

The epsilon of many Gaussian releases to one client, and the noise for an epsilon.

| method   | what it is                                        | sampling | above the truth |
|----------|---------------------------------------------------|----------|-----------------|
| basic    | sum of the epsilons, delta shared equally         | yes      | many times      |
| advanced | Dwork, Rothblum & Vadhan 2010                     | yes      | several times   |
| gdp      | μ² = Σ μ_t², Dong, Roth & Su 2022                 | no       | exact           |
| rdp      | Rényi, through dp-accounting                      | yes      | about 8 %       |
| pld      | privacy loss distributions, through dp-accounting | yes      | below 0.1 %     |

A schedule that reacts to earlier releases keeps the bounds of `gdp` (without
sampling) and `rdp`; `pld` holds for a schedule fixed in advance.

dp-accounting is imported on first use.  What is done here beyond calling it:

- Its Rényi accountant does not double the sensitivity of a Gaussian under
  REPLACE_ONE, its PLD accountant does.  The first is handed z/2, the second z.
- A Rényi divergence that rounding made negative would count as epsilon 0.
- The PLD grid is sized by the Rényi answer, so that a small noise multiplier
  takes tenths of a second and not minutes.  Its estimate stays an upper bound
  for any grid.
- Its warnings about orders that do not converge are silenced: such an order is
  left out, which keeps the bound valid.

>>> round(epsilon([Release(10.8, count=200)], 1e-5, method="gdp").epsilon, 2)
6.0
>>> round(calibrate(6.0, 1e-5, rounds=60, method="gdp"), 2)
5.92
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedquilt.common import checks, optional
from fedquilt.common.errors import InvalidValueError
from fedquilt.privacy.accounting.gaussian import (
    Adjacency,
    PrivacyBound,
    Release,
    classic_sigma,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_epsilon_many,
    gaussian_mu,
    merged,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent

__all__ = [
    "METHODS",
    "Adjacency",
    "PrivacyBound",
    "Release",
    "calibrate",
    "classic_sigma",
    "epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_epsilon_many",
    "gaussian_mu",
]


_TINY = 1e-12
_LEAST = 1e-6


def smallest_with(
    spent: Callable[[float], float], target: float, *, start: float, step: float, precision: float
) -> float:
    """Return an x > 0 with spent(x) <= target that is the smallest to a relative `precision`.

    `spent` must not increase.  In logarithms it is nearly a straight line, so
    false position (with the Illinois rule, which halves the weight of an end that
    stays twice) ends after a few evaluations; each aims a little above the root, where
    the answer must lie.  The search also ends when `spent` is within `precision`
    of the target.
    """

    def excess(log_x: float) -> float:
        return math.log(max(spent(math.exp(log_x)), _TINY) / target)

    low, low_weight, high, high_weight = _bracket(excess, math.log(start), math.log(step))
    missing, side = -high_weight, 0
    while high - low > precision and missing > precision:
        aim = low + (high - low) * low_weight / (low_weight - high_weight) + 0.5 * precision
        middle = min(max(aim, low + 0.2 * precision), high - 0.2 * precision)
        value = excess(middle)
        if value <= 0:
            low_weight *= 0.5 if side == -1 else 1.0
            high, high_weight, missing, side = middle, value, -value, -1
        else:
            high_weight *= 0.5 if side == 1 else 1.0
            low, low_weight, side = middle, value, 1
    return math.exp(high)


def _bracket(
    excess: Callable[[float], float], start: float, step: float
) -> tuple[float, float, float, float]:
    """Walk from `start` until the root lies between two neighbouring points."""
    high, high_excess = start, excess(start)
    if high_excess > 0:
        while high_excess > 0:
            low, low_excess = high, high_excess
            high += step
            high_excess = excess(high)
        return low, low_excess, high, high_excess
    while True:
        low = high - step
        if low < math.log(_LEAST):
            raise InvalidValueError(
                f"target_epsilon must be lower: it is met without noise (below {_LEAST:g})"
            )
        low_excess = excess(low)
        if low_excess > 0:
            return low, low_excess, high, high_excess
        high, high_excess = low, low_excess


_PRECISION = 1e-5  # relative, of a calibrated noise multiplier
_NO_NOISE = 1e-100


def epsilon(
    releases: Iterable[Release],
    delta: float,
    *,
    method: str,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> PrivacyBound:
    """Return the epsilon at `delta` of all `releases` together.

    The order of the releases does not matter.  One release without noise makes
    epsilon infinite.
    """
    checks.choice("method", method, METHODS)
    delta = checks.number("delta", delta, above=0, below=1)
    adjacency = Adjacency.of(adjacency)
    counted = [release for release in map(_checked, releases) if release.count]
    if any(release.noise_multiplier < _NO_NOISE for release in counted):
        return PrivacyBound(math.inf, delta, adjacency, method)
    total = METHODS[method](counted, delta, adjacency) if counted else 0.0
    return PrivacyBound(total, delta, adjacency, method)


def calibrate(
    target_epsilon: float,
    delta: float,
    *,
    rounds: int,
    sampling_rate: float = 1.0,
    method: str,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> float:
    """Return the noise multiplier with which `rounds` releases cost `target_epsilon`.

    It is the smallest one to a relative 1e-5, and always on the safe side: the
    epsilon of the result is at most the target.
    """
    target = checks.number("target_epsilon", target_epsilon, above=0)
    delta = checks.number("delta", delta, above=0, below=1)
    checks.integer("rounds", rounds, at_least=1)
    checks.choice("method", method, METHODS)
    adjacency = Adjacency.of(adjacency)
    _refuse_free(Release(1.0, rounds, sampling_rate), delta)

    def spent(noise_multiplier: float) -> float:
        release = Release(noise_multiplier, rounds, sampling_rate)
        return epsilon([release], delta, method=method, adjacency=adjacency).epsilon

    start, step = adjacency.sensitivity_factor * math.sqrt(rounds) / gaussian_mu(target, delta), 2.0
    if method == "gdp" and sampling_rate == 1:
        return start
    if method == "pld" and sampling_rate < 1 and adjacency is not Adjacency.REPLACE_ONE:
        # Far below its answer the PLD is slow; the Rényi answer is 0 to 20 % above it.
        start, step = _rdp_start(target, delta, rounds, sampling_rate, adjacency), 1.1
    return smallest_with(spent, target, start=start, step=step, precision=_PRECISION)


def _checked(release: object) -> Release:
    if not isinstance(release, Release):
        raise InvalidValueError(f"releases must hold Release records, not {release!r}")
    return release


def _refuse_free(release: Release, delta: float) -> None:
    """Refuse a delta at which even a release without noise would be allowed."""
    if release.sampling_rate == 1:
        return
    sampled = -math.expm1(release.count * math.log1p(-release.sampling_rate))
    if delta >= sampled:
        raise InvalidValueError(
            f"delta={delta!r} must be < {sampled:.3g}, the chance that a client is sampled at all "
            f"in {release.count} rounds at sampling_rate={release.sampling_rate!r}"
        )


def _rdp_start(
    target: float, delta: float, rounds: int, sampling_rate: float, adjacency: Adjacency
) -> float:
    return calibrate(
        target, delta, rounds=rounds, sampling_rate=sampling_rate, method="rdp", adjacency=adjacency
    )


def _basic(releases: Sequence[Release], delta: float, adjacency: Adjacency) -> float:
    """Return Σ ε_t, each release at an equal share of delta (Dwork & Roth 2014, Theorem 3.16)."""
    share = delta / sum(release.count for release in releases)
    return math.fsum(r.count * _one_epsilon(r, share, adjacency) for r in releases)


def _advanced(releases: Sequence[Release], delta: float, adjacency: Adjacency) -> float:
    """Return √(2 ln(1/δ')·Σ ε_t²) + Σ ε_t·(e^(ε_t) − 1), or Σ ε_t where that is less.

    Dwork, Rothblum & Vadhan 2010, Theorem III.3, with δ' = δ/2 and the other half
    of delta shared equally by the releases.  For unequal releases it follows from
    the smaller bound of Kairouz, Oh & Viswanath 2015, Theorem 3.5.
    """
    share = 0.5 * delta / sum(release.count for release in releases)
    costs = [(r.count, _one_epsilon(r, share, adjacency)) for r in releases]
    total = math.fsum(n * cost for n, cost in costs)
    if max(cost for _, cost in costs) > 100:
        return total
    spread = math.sqrt(2 * math.log(2 / delta) * math.fsum(n * cost**2 for n, cost in costs))
    return min(total, spread + math.fsum(n * cost * math.expm1(cost) for n, cost in costs))


def _one_epsilon(release: Release, delta: float, adjacency: Adjacency) -> float:
    """Return the epsilon at `delta` of a single release.

    Sampling with rate q turns (ε, δ) into (ln(1 + q(e^ε − 1)), qδ): Balle, Barthe
    & Gaboardi 2018, Theorem 8, for relations that remove the client.
    """
    mu = adjacency.sensitivity_factor / release.noise_multiplier
    rate = release.sampling_rate
    if rate == 1:
        return gaussian_epsilon(mu, delta)
    if adjacency is Adjacency.REPLACE_ONE:
        raise InvalidValueError(
            f"adjacency={adjacency} with sampling_rate={rate!r} must use method='pld'"
        )
    if delta >= rate:
        return 0.0
    alone = gaussian_epsilon(mu, delta / rate)
    return alone + math.log1p((1 - rate) * math.expm1(-alone))


def _gdp(releases: Sequence[Release], delta: float, adjacency: Adjacency) -> float:
    """Return the exact epsilon of μ² = Σ μ_t² (Dong, Roth & Su 2022, Corollary 3.3)."""
    for release in releases:
        if release.sampling_rate < 1:
            raise InvalidValueError(
                f"sampling_rate={release.sampling_rate!r} must be 1 for method='gdp': a sampled "
                "Gaussian is no Gaussian; use method='rdp' or 'pld'"
            )
    (total,) = merged(releases)
    return gaussian_epsilon(adjacency.sensitivity_factor / total.noise_multiplier, delta)


_ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)
_GRID = 4e-5  # PLD interval, in units of the Rényi epsilon
_LEAST_PLD_DELTA = 1e-10  # the rounding of a convolution is of the order of 1e-13
_RDP_ROUNDING = 1e-12  # of one sampled release: the series stops at e^-30


@functools.lru_cache(maxsize=1024)
def rdp_epsilon(releases: tuple[Release, ...], delta: float, adjacency: Adjacency) -> float:
    """Return the epsilon of `releases` by Rényi composition (Mironov 2017)."""
    if adjacency is Adjacency.REPLACE_ONE and any(r.sampling_rate < 1 for r in releases):
        raise InvalidValueError(
            f"adjacency={adjacency} with sampling_rate < 1 must use method='pld': "
            "there is no Rényi bound of Poisson sampling for it here"
        )
    package = _package("rdp")
    divergence = np.zeros(len(_ORDERS))
    for release in releases:
        divergence += release.count * _divergence(
            release.noise_multiplier, release.sampling_rate, adjacency
        )
    with _quiet():
        return float(package.rdp.compute_epsilon(_ORDERS, divergence, delta)[0])


@functools.lru_cache(maxsize=1024)
def _divergence(
    noise_multiplier: float, sampling_rate: float, adjacency: Adjacency
) -> npt.NDArray[np.float64]:
    """Return the Rényi divergence of a single release at each order, rounded up."""
    package = _package("rdp")
    release = Release(noise_multiplier, 1, sampling_rate)
    with _quiet():
        accountant = package.rdp.RdpAccountant(_ORDERS, adjacency.relation())
        accountant.compose(_event(package, release, adjacency.sensitivity_factor))
    divergence: npt.NDArray[np.float64] = np.maximum(accountant.rdp, 0.0)
    if sampling_rate < 1:
        divergence += _RDP_ROUNDING / (np.array(_ORDERS) - 1)
    return divergence


@functools.lru_cache(maxsize=1024)
def pld_epsilon(releases: tuple[Release, ...], delta: float, adjacency: Adjacency) -> float:
    """Return the epsilon of `releases` from their privacy loss distribution.

    Doroshenko et al. 2022 ("Connect the Dots"), a pessimistic estimate.  Valid
    for a schedule fixed in advance: under full adaptivity these bounds fail
    (Honkela et al. 2026), where Rényi and GDP bounds hold.
    """
    if delta < _LEAST_PLD_DELTA:
        raise InvalidValueError(
            f"delta={delta!r} must be >= {_LEAST_PLD_DELTA:g} for method='pld', whose numerical "
            "error is not small beside it; use method='rdp', or 'gdp' without sampling"
        )
    package = _package("pld")
    with _quiet():
        accountant = package.pld.PLDAccountant(
            neighboring_relation=adjacency.relation(),
            value_discretization_interval=_interval(releases, delta, adjacency),
        )
        for release in releases:
            accountant.compose(_event(package, release, 1.0), release.count)
        return float(accountant.get_epsilon(delta))


def _interval(releases: tuple[Release, ...], delta: float, adjacency: Adjacency) -> float:
    """Return a PLD grid that resolves the epsilon to come, without being finer than needed."""
    factor = adjacency.sensitivity_factor
    halved = tuple(Release(r.noise_multiplier / factor, r.count, r.sampling_rate) for r in releases)
    scale = rdp_epsilon(halved, delta, Adjacency.ZERO_OUT)
    return max(_GRID * scale, 1e-9) if math.isfinite(scale) else 1e-2


def _event(package: ModuleType, release: Release, factor: float) -> DpEvent:
    """Return one release as the package's event, for sensitivity `factor`·C."""
    gaussian = package.GaussianDpEvent(release.noise_multiplier / factor)
    if release.sampling_rate == 1:
        return gaussian
    return package.PoissonSampledDpEvent(release.sampling_rate, gaussian)


def _package(method: str) -> ModuleType:
    purpose = f"method={method!r} (unlike 'gdp', for releases without sampling)"
    for part in ("pld", "rdp"):  # becomes an attribute of the whole
        optional.require(f"dp_accounting.{part}", purpose)
    package: ModuleType = optional.require("dp_accounting", purpose)
    return package


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the package's warnings, and numpy's about overflow to infinity."""
    from absl import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logging.set_verbosity(before)


METHODS: dict[str, Callable[[Sequence[Release], float, Adjacency], float]] = {
    "basic": _basic,
    "advanced": _advanced,
    "gdp": _gdp,
    "rdp": lambda releases, *relation: rdp_epsilon(merged(releases), *relation),
    "pld": lambda releases, *relation: pld_epsilon(merged(releases), *relation),
}
