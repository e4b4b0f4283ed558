"""Who is picked among the available clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator, secret_bytes
from fedquilt.config.choices import SELECTIONS
from fedquilt.population.availability import Availability


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
        return available.copy()
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


@dataclass(frozen=True, eq=False)
class Cohort:
    """Who trains in a round, and who is publicly known to have been exposed.

    The two are the same unless the server's coin is secret: then `exposed` are the
    available clients, and who of them trained is nobody's business.
    """

    clients: NDArray[np.int64]
    exposed: NDArray[np.int64]

    @property
    def is_secret(self) -> bool:
        """Whether who trains is nobody's business; by the arrays, never by what is in them."""
        return self.clients is not self.exposed


class CohortSelector:
    """Step 1 of a round: availability, then selection, from the run's seed.

    `uniform` and `weighted` pick at most `limit` clients, the latter in
    proportion to the clients' propensities; `poisson` keeps each available
    client with the coin limit / num_clients.  A `secret` coin is drawn from the
    operating system, not from the seed, and is the only thing that amplifies
    privacy: `sampling_rate` says by how much, so that whoever accounts for a run
    asks its sampler.
    """

    def __init__(
        self,
        availability: Availability,
        propensity: NDArray[np.float64],
        *,
        rule: str,
        limit: int,
        seed: int,
        secret: bool = False,
    ) -> None:
        if secret and rule != "poisson":
            raise InvalidValueError(
                f"selection={rule!r} must be 'poisson' for amplification: "
                "no other rule is an independent coin"
            )
        self.availability = availability
        self.rule = checks.choice("selection", rule, SELECTIONS)
        self.limit = limit
        self.seed = seed
        self.secret = secret
        # A weight of zero would bar a client for ever.
        self._weights = np.maximum(propensity, 1e-9) if rule == "weighted" else None

    @property
    def sampling_rate(self) -> float:
        """The probability of the secret coin; 1 when nothing amplifies."""
        return self._coin if self.secret else 1.0

    @property
    def _coin(self) -> float:
        return self.limit / self.availability.num_clients

    @property
    def expected_cohort(self) -> float:
        """How many clients a round has on average, from public knowledge alone."""
        present = self.availability.expected_rate * self.availability.num_clients
        if self.rule == "poisson":
            return max(1.0, present * self._coin)
        return max(1.0, min(present, float(self.limit)))

    @property
    def mean_cohort(self) -> float:
        """How many clients a simulated round has on average: see `Availability.mean_present`.

        Unlike `expected_cohort` it knows the drawn probabilities, which no server does, and
        that a limit only ever takes away; it is for people to read.
        """
        if self.rule == "poisson":
            return self.availability.mean_present(self.availability.num_clients) * self._coin
        return self.availability.mean_present(self.limit)

    def available(self, round_index: int) -> NDArray[np.int64]:
        """Return who is there in a round, picked or not."""
        rng = generator(self.seed, "select", round_index)
        return self.availability.available(round_index, rng)

    def select(self, round_index: int, allowed: NDArray[np.bool_] | None = None) -> Cohort:
        """Return the cohort of a round, ascending; `allowed` masks who may be picked."""
        rng = generator(self.seed, "select", round_index)
        available = self.availability.available(round_index, rng)
        if allowed is not None:
            available = available[allowed[available]]
        if self.secret:
            return Cohort(available[secret_coins(available.size) < self._coin], available)
        if self.rule == "poisson":
            picked = poisson_cohort(available, self._coin, rng)
        else:
            weights = None if self._weights is None else self._weights[available]
            picked = select_cohort(available, self.limit, rng, weights)
        return Cohort(picked, picked)


def secret_coins(size: int) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1) from the operating system's generator."""
    bits = np.frombuffer(secret_bytes(8 * size), dtype=np.uint64) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
