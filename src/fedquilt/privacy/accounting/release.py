"""What was released, and what that costs: the two records of privacy accounting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.privacy.accounting.adjacency import Adjacency

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
        validate.number("noise_multiplier", self.noise_multiplier, at_least=0, at_most=1e100)
        validate.integer("count", self.count, at_least=0)
        validate.number("sampling_rate", self.sampling_rate, above=0, at_most=1)
        if self.sampling in _NOT_POISSON:
            raise InvalidValueError(
                f"sampling={self.sampling!r} must be 'poisson': {_NOT_POISSON[self.sampling]}. "
                "Count every join at sampling_rate=1 instead"
            )
        validate.choice("sampling", self.sampling, ["poisson"])


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
