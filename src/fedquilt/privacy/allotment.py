"""How much of its budget a client may spend on one join: the policies of `certified`.

Everything is counted in squared GDP units of zero-out adjacency: a client clipped at c
under noise s spends (c / s)^2; under replace-one the account hands out a quarter.  With a run's
budget B = mu^2 per client, T rounds and B_i left,

| policy | allotment of a join | clip | noise |
|---|---|---|---|
| worst_case | B / T | the same for all | constant |
| cap | B / K, K = max_joins | the same for all | constant |
| adaptive | B_i / r_i, r_i = 1 + (T - t - 1) p_i | follows the allotment | constant |
| paper | (epsilon_t / kappa)^2 with the seed's epsilon_t | the same for all | follows epsilon_t |

All of it is a function of the public participation history, so clip bounds and
charges may be published: both adjacencies fix it in both worlds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedquilt import validate
from fedquilt.privacy.budget import AdaptivePrivacyAllocator

FloatArray = NDArray[np.float64]
# Pseudo-rounds of the expected rate in the smoothed participation rate.
SMOOTHING = 7.0
# A ledger rounds charges up to its grid; the last of many even parts is a trifle smaller.
ROUNDING = 1e-4
# A join worth less than this share of an even one is not worth a round trip.
SMALLEST_SHARE = 1e-3


@dataclass(frozen=True, eq=False)
class JoinFacts:
    """The public facts an allotment depends on, for some clients in round t.

    `remaining` is what each may still spend in this run, `joins` how often it
    joined in the `rounds_done` rounds so far.
    """

    round_index: int
    remaining: FloatArray
    joins: FloatArray
    rounds_done: int


class Policy(Protocol):
    """Decides what each join may cost."""

    @property
    def typical(self) -> float:
        """The allotment of an ordinary join."""

    @property
    def smallest(self) -> float:
        """A client with less left than this takes no part."""

    def allotments(self, facts: JoinFacts) -> FloatArray:
        """Return what each of these clients may spend on joining this round."""

    def reference(self, allotments: FloatArray) -> float:
        """Return the allotment that is clipped at exactly C, which fixes the noise."""


@dataclass(frozen=True)
class EvenPolicy:
    """`worst_case` and `cap`: the budget in equal parts, for so many joins."""

    budget: float
    joins: int

    @property
    def typical(self) -> float:
        """B / joins."""
        return self.budget / self.joins

    @property
    def smallest(self) -> float:
        """A whole part, but for rounding."""
        return self.typical * (1 - ROUNDING)

    def allotments(self, facts: JoinFacts) -> FloatArray:
        """Return the even part for everybody, never more than is left."""
        return np.minimum(self.typical, facts.remaining)

    def reference(self, allotments: FloatArray) -> float:
        """Return the even part: the noise is constant."""
        return self.typical


@dataclass(frozen=True)
class AdaptivePolicy:
    """`adaptive`: what is left, spread evenly over the joins that are still expected.

    With the smoothed public rate p_i = (joins + n0 p0) / (rounds + n0), where p0
    is the expected rate and n0 = 7 pseudo-rounds, client i may spend
    B_i / (1 + (T - t - 1) p_i).  Rare clients speak louder when they do appear,
    and nobody exceeds B.
    """

    budget: float
    num_rounds: int
    expected_rate: float

    @property
    def typical(self) -> float:
        """The allotment of a client at the expected rate in round 0."""
        return self.budget / (1 + (self.num_rounds - 1) * self.expected_rate)

    @property
    def smallest(self) -> float:
        """A small share of an even part."""
        return SMALLEST_SHARE * self.budget / self.num_rounds

    def allotments(self, facts: JoinFacts) -> FloatArray:
        """Return B_i / r_i."""
        seen = facts.joins + SMOOTHING * self.expected_rate
        rate = np.minimum(1.0, seen / (facts.rounds_done + SMOOTHING))
        expected = 1 + max(0, self.num_rounds - facts.round_index - 1) * rate
        return np.asarray(facts.remaining / expected)

    def reference(self, allotments: FloatArray) -> float:
        """Return the typical allotment: the noise is constant."""
        return self.typical


class PaperPolicy:
    """`paper`: the seed's schedule of budgets, calibrated so that it keeps its promise.

    The seed spends epsilon_t = base (1 + alpha exp(-beta p)) in a round whose
    cohort has mean rate p.  Its shape is kept: a join costs (epsilon_t / kappa)^2
    with kappa = base (1 + alpha) sqrt(T / B), so that even a client that joins
    every round at the largest epsilon_t stays within B.
    """

    def __init__(
        self,
        budget: float,
        num_rounds: int,
        allocator: AdaptivePrivacyAllocator,
        warmup_rounds: int = 0,
    ) -> None:
        self._allocator = allocator
        self._warmup_rounds = warmup_rounds
        largest = allocator.epsilon_base * (1 + allocator.alpha)
        self._kappa = largest * math.sqrt(num_rounds / budget)

    @property
    def typical(self) -> float:
        """The cost of a join at the base budget, the smallest there is."""
        return (self._allocator.epsilon_base / self._kappa) ** 2

    @property
    def smallest(self) -> float:
        """The cost of the dearest join, but for rounding."""
        return self.typical * (1 + self._allocator.alpha) ** 2 * (1 - ROUNDING)

    def allotments(self, facts: JoinFacts) -> FloatArray:
        """Return (epsilon_t / kappa)^2 for everybody in the cohort."""
        epsilon = self._allocator.epsilon_base
        if facts.round_index >= self._warmup_rounds and facts.joins.size:
            rates = np.minimum(1.0, (facts.joins + 1) / (facts.rounds_done + 1))
            epsilon = self._allocator.compute_privacy_budget(float(rates.mean()))
        return np.minimum((epsilon / self._kappa) ** 2, facts.remaining)

    def reference(self, allotments: FloatArray) -> float:
        """Return what this round gives: the noise follows the schedule, the clip is C."""
        return float(allotments.max(initial=self.typical))


def make_policy(
    name: str,
    budget: float,
    num_rounds: int,
    *,
    expected_rate: float,
    max_joins: int | None,
    allocator: AdaptivePrivacyAllocator,
    warmup_rounds: int,
) -> Policy:
    """Return the policy of a name for a budget in squared GDP units."""
    if name == "adaptive":
        return AdaptivePolicy(budget, num_rounds, expected_rate)
    if name == "paper":
        return PaperPolicy(budget, num_rounds, allocator, warmup_rounds)
    if name == "cap":
        joins = validate.integer("max_joins", max_joins, at_least=1)
        return EvenPolicy(budget, min(joins, num_rounds))
    return EvenPolicy(budget, num_rounds)
