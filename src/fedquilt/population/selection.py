"""Who is picked among the available clients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedquilt.errors import InvalidValueError
from fedquilt.population.availability import Availability
from fedquilt.randomness import generator


def select_cohort(
    available: NDArray[np.int64],
    limit: int,
    rng: np.random.Generator,
    weights: NDArray[np.float64] | None = None,
) -> NDArray[np.int64]:
    """Pick at most `limit` of the available clients, without replacement.

    With weights the chance of each next pick is proportional to the weight of
    those left.  Drawing E_i ~ Exp(1) and keeping the smallest E_i / w_i gives
    exactly that law (Efraimidis and Spirakis 2006) in linear time.  The cohort
    is returned in ascending order, so sums over it do not depend on the draw.
    """
    if limit >= available.size:
        return available
    if weights is None:
        return np.sort(rng.choice(available, size=limit, replace=False, shuffle=False))
    if weights.shape != available.shape or not np.all(weights > 0):
        raise InvalidValueError("weights must be one positive number per available client")
    keys = rng.standard_exponential(available.size) / weights
    picked = np.argpartition(keys, limit - 1)[:limit]
    return np.sort(available[picked])


def poisson_cohort(
    available: NDArray[np.int64], probability: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Keep each available client with an independent coin; the cohort size varies."""
    return available[rng.random(available.size) < probability]


class CohortSelector:
    """Step 1 of a round: availability, then selection, from the run's seed.

    `uniform` and `weighted` pick at most `limit` clients, the latter in
    proportion to the clients' propensities; `poisson` keeps each available
    client with the coin limit / num_clients.
    """

    def __init__(
        self,
        availability: Availability,
        propensity: NDArray[np.float64],
        *,
        rule: str,
        limit: int,
        seed: int,
    ) -> None:
        self.availability = availability
        self.rule = rule
        self.limit = limit
        self.seed = seed
        # A weight of zero would bar a client for ever.
        self._weights = np.maximum(propensity, 1e-9)

    def select(
        self, round_index: int, allowed: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int64]:
        """Return the cohort of a round, ascending; `allowed` masks who may be picked."""
        rng = generator(self.seed, "select", round_index)
        available = self.availability.available(round_index, rng)
        if allowed is not None:
            available = available[allowed[available]]
        if self.rule == "poisson":
            return poisson_cohort(available, self.limit / self.availability.num_clients, rng)
        weights = self._weights[available] if self.rule == "weighted" else None
        return select_cohort(available, self.limit, rng, weights)
