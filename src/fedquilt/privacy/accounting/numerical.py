"""Rényi and privacy-loss-distribution accounting, through the dp-accounting package.

The package is imported on first use.  What is done here beyond calling it:

- Its Rényi accountant does not double the sensitivity of a Gaussian under
  REPLACE_ONE, its PLD accountant does.  The first is handed z/2, the second z.
- A Rényi divergence that rounding made negative would count as epsilon 0.
- The PLD grid is sized by the Rényi answer, so that a small noise multiplier
  takes tenths of a second and not minutes.  Its estimate stays an upper bound
  for any grid.
- Its warnings about orders that do not converge are silenced: such an order is
  left out, which keeps the bound valid.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedquilt.common import optional
from fedquilt.common.errors import InvalidValueError
from fedquilt.privacy.accounting.release import Adjacency, Release

if TYPE_CHECKING:
    from dp_accounting import DpEvent

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
        optional.load(f"dp_accounting.{part}", purpose)
    package: ModuleType = optional.load("dp_accounting", purpose)
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
