"""A release, its privacy bound, and the adjacency under which the bound holds.

Adjacency says which two populations a guarantee makes hard to tell apart.  The unit is
always one client with everything it holds.  What changes with the adjacency is what
counts as its absence, and with that what may be public and how far one client can move a
sum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError

if TYPE_CHECKING:
    from dp_accounting import NeighboringRelation


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
