"""How much of its budget a client may spend on one join.

The policies of the mode `certified` keep the promise of a bound.  Everything is counted in
squared GDP units of zero-out adjacency: a client clipped at c under noise s spends
(c / s)^2; under replace-one the account hands out a quarter.  With a run's budget
B = mu^2 per client, T rounds and B_i left,

| policy | charge of a join | clip | noise |
|---|---|---|---|
| worst_case | B / T | the same for all | constant |
| cap | B / K, K = max_joins | the same for all | constant |
| adaptive | B_i / r_i, r_i = 1 + (T - t - 1) p_i | follows the charge | constant |
| paper | (epsilon_t / kappa)^2 with epsilon_t as below | the same for all | follows epsilon_t |

All of it is a function of the public participation history, so clip bounds and
charges may be published: both adjacencies fix it in both worlds.

`AdaptivePrivacyAllocator` is the class of the QuAP-FL API document: an epsilon that follows
participation.

    epsilon(p) = epsilon_base * (1 + alpha * exp(-beta * p))      (QuAP-FL paper, eq. 5)
    sigma      = C * sqrt(2 ln(1.25 / delta)) / epsilon            (classic Gaussian)

This budget is nominal: what it guarantees depends on what is clipped and noised,
and a run's statement says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.privacy.noise import NoiseStream, SecretNoise, normal_where

Vector = TypeVar("Vector", NDArray[Any], torch.Tensor)


class AdaptivePrivacyAllocator:
    """Give each participation rate its budget, and each budget its noise.

    Parameters
    ----------
    epsilon_base : float
        Budget of a round at full participation, epsilon_total / num_rounds.
    alpha : float
        Strength of the adaptation, any number >= 0.
    beta : float
        How fast the extra budget falls with the participation rate, > 0.
    delta : float
        Delta of each release, in (0, 1).
    noise : NoiseStream, optional
        Where noise comes from; the operating system's generator by default.
    """

    def __init__(
        self,
        epsilon_base: float = 0.015,
        alpha: float = 0.5,
        beta: float = 2.0,
        delta: float = 1e-5,
        noise: NoiseStream | None = None,
    ) -> None:
        self.epsilon_base = checks.number("epsilon_base", epsilon_base, above=0)
        self.alpha = checks.number("alpha", alpha, at_least=0)
        self.beta = checks.number("beta", beta, above=0)
        self.delta = checks.number("delta", delta, above=0, below=1)
        self.noise: NoiseStream = noise if noise is not None else SecretNoise()

    def compute_privacy_budget(self, participation_rate: float) -> float:
        """Return epsilon_base * (1 + alpha * exp(-beta * p)) for a rate p in [0, 1]."""
        rate = checks.number(
            "participation_rate", _scalar(participation_rate), at_least=0, at_most=1
        )
        return self.epsilon_base * (1.0 + self.alpha * math.exp(-self.beta * rate))

    def compute_noise_multiplier(
        self, epsilon: float, clip_norm: float, delta: float | None = None
    ) -> float:
        """Return the noise standard deviation C * sqrt(2 ln(1.25 / delta)) / epsilon.

        The QuAP-FL API document calls it a multiplier; it is a standard deviation.
        """
        epsilon = checks.number("epsilon", _scalar(epsilon), above=0)
        clip_norm = checks.number("clip_norm", _scalar(clip_norm), above=0)
        delta = self.delta if delta is None else _scalar(delta)
        delta = checks.number("delta", delta, above=0, below=1)
        return clip_norm * math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon

    def add_gaussian_noise(self, data: Vector, epsilon: float, clip_norm: float) -> Vector:
        """Return already clipped data plus noise of the standard deviation above."""
        noise_std = self.compute_noise_multiplier(epsilon, clip_norm)
        return add_noise(data, noise_std, self.noise)

    def compute_cumulative_privacy_loss(
        self, participation_rates: ArrayLike, participation_counts: ArrayLike
    ) -> NDArray[np.float64]:
        """Return budget(rate_i) * count_i for every client (basic composition)."""
        rates = np.asarray(participation_rates, dtype=np.float64)
        counts = np.asarray(participation_counts, dtype=np.float64)
        if rates.shape != counts.shape:
            raise InvalidValueError(
                f"participation_rates of shape {rates.shape} must have the shape of "
                f"participation_counts, {counts.shape}"
            )
        if not np.all(np.isfinite(counts) & (counts >= 0)):
            raise InvalidValueError("participation_counts must be finite and >= 0")
        budgets = np.asarray([self.compute_privacy_budget(rate) for rate in rates.ravel()])
        return np.asarray(budgets.reshape(rates.shape) * counts)

    def get_privacy_analysis(
        self, participation_rates: ArrayLike, participation_counts: ArrayLike
    ) -> dict[str, float]:
        """Compare the cumulative losses with their bound count * base * (1 + alpha)."""
        losses = self.compute_cumulative_privacy_loss(participation_rates, participation_counts)
        if losses.size == 0:
            raise InvalidValueError("participation_counts=[] must hold at least one client")
        bounds = np.asarray(participation_counts, dtype=np.float64)
        bounds = bounds * self.epsilon_base * (1.0 + self.alpha)
        mean_bound = float(bounds.mean())
        return {
            "mean_cumulative_loss": float(losses.mean()),
            "max_cumulative_loss": float(losses.max()),
            "min_cumulative_loss": float(losses.min()),
            "theoretical_upper_bound": float(bounds.max()),
            "privacy_efficiency": float(losses.mean()) / mean_bound if mean_bound else 0.0,
        }

    def get_accounting_method(self) -> str:
        """Name the composition rule of the QuAP-FL paper (section 4.1)."""
        return "Basic Composition (Conservative Upper Bound)"


def add_noise(data: Vector, noise_std: float, noise: NoiseStream) -> Vector:
    """Return data plus noise_std * N(0, 1), added in float64.

    The result has the data's own type; whole numbers, which could not hold the
    noise, become float64.
    """
    if isinstance(data, torch.Tensor):
        drawn = normal_where(data.device, data.numel(), noise).view(data.shape)
        noised = data.to(torch.float64) + noise_std * drawn
        return noised.to(data.dtype) if data.is_floating_point() else noised
    array = np.asarray(data)
    kind = array.dtype if array.dtype.kind == "f" else np.dtype(np.float64)
    noised_array = array.astype(np.float64) + noise_std * noise.normal(array.size).reshape(
        array.shape
    )
    return noised_array.astype(kind)


def _scalar(value: Any) -> Any:
    """Unwrap one-element numpy and torch values into Python numbers."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    if isinstance(value, np.generic | np.ndarray):
        return value.item() if value.size == 1 else value
    return value


FloatArray = NDArray[np.float64]
# Pseudo-rounds of the expected rate in the smoothed participation rate.
SMOOTHING = 7.0
# A ledger rounds charges up to its grid; the last of many even parts is a trifle smaller.
ROUNDING = 1e-4
# A join worth less than this share of an even one is not worth a round trip.
SMALLEST_SHARE = 1e-3


@dataclass(frozen=True, eq=False)
class JoinFacts:
    """The public facts a charge depends on, for some clients in round t.

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
    def expected_charge(self) -> float:
        """The charge of an ordinary join."""

    @property
    def min_charge(self) -> float:
        """A client with less left than this takes no part."""

    def charges(self, facts: JoinFacts) -> FloatArray:
        """Return what each of these clients may spend on joining this round."""

    def most(self, facts: JoinFacts) -> FloatArray:
        """Return what a join may cost at worst where that is known after it, at most what is left.

        Under secure aggregation a join costs more the fewer clients answer.
        """

    def reference_charge(self, charges: FloatArray) -> float:
        """Return the charge that is clipped at exactly C, which fixes the noise."""


@dataclass(frozen=True)
class EvenPolicy:
    """`worst_case` and `cap`: the budget in equal parts, for so many joins."""

    budget: float
    joins: int

    @property
    def expected_charge(self) -> float:
        """B / joins."""
        return self.budget / self.joins

    @property
    def min_charge(self) -> float:
        """A whole part, but for rounding."""
        return self.expected_charge * (1 - ROUNDING)

    def charges(self, facts: JoinFacts) -> FloatArray:
        """Return the even part for everybody, never more than is left."""
        return np.minimum(self.expected_charge, facts.remaining)

    def most(self, facts: JoinFacts) -> FloatArray:
        """Leave whole parts for the joins to come."""
        return _beside_later(facts, self.expected_charge, self.joins)

    def reference_charge(self, charges: FloatArray) -> float:
        """Return the even part: the noise is constant."""
        return self.expected_charge


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
    def expected_charge(self) -> float:
        """The charge of a client at the expected rate in round 0."""
        return self.budget / (1 + (self.num_rounds - 1) * self.expected_rate)

    @property
    def min_charge(self) -> float:
        """A small share of an even part."""
        return SMALLEST_SHARE * self.budget / self.num_rounds

    def charges(self, facts: JoinFacts) -> FloatArray:
        """Return B_i / r_i."""
        seen = facts.joins + SMOOTHING * self.expected_rate
        rate = np.minimum(1.0, seen / (facts.rounds_done + SMOOTHING))
        expected = 1 + max(0, self.num_rounds - facts.round_index - 1) * rate
        return np.asarray(facts.remaining / expected)

    def most(self, facts: JoinFacts) -> FloatArray:
        """Return all that is left: what a join takes beyond its part, later ones have less."""
        return facts.remaining

    def reference_charge(self, charges: FloatArray) -> float:
        """Return the typical charge: the noise is constant."""
        return self.expected_charge


class PaperPolicy:
    """`paper`: the QuAP-FL paper's schedule of budgets, calibrated to keep its promise.

    The paper (eq. 4 and 5) spends epsilon_t = base (1 + alpha exp(-beta p)) in a round
    whose cohort has mean rate p.  Its shape is kept: a join costs (epsilon_t / kappa)^2
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
        self._num_rounds = num_rounds
        largest = allocator.epsilon_base * (1 + allocator.alpha)
        self._kappa = largest * math.sqrt(num_rounds / budget)

    @property
    def expected_charge(self) -> float:
        """The cost of a join at the base budget, the smallest there is."""
        return (self._allocator.epsilon_base / self._kappa) ** 2

    @property
    def min_charge(self) -> float:
        """The cost of the dearest join, but for rounding."""
        return self.expected_charge * (1 + self._allocator.alpha) ** 2 * (1 - ROUNDING)

    def charges(self, facts: JoinFacts) -> FloatArray:
        """Return (epsilon_t / kappa)^2 for everybody in the cohort."""
        epsilon = self._allocator.epsilon_base
        if facts.round_index >= self._warmup_rounds and facts.joins.size:
            rates = np.minimum(1.0, (facts.joins + 1) / (facts.rounds_done + 1))
            epsilon = self._allocator.compute_privacy_budget(float(rates.mean()))
        return np.minimum((epsilon / self._kappa) ** 2, facts.remaining)

    def most(self, facts: JoinFacts) -> FloatArray:
        """Leave the dearest charge for each of the joins to come."""
        dearest = self.expected_charge * (1 + self._allocator.alpha) ** 2
        return _beside_later(facts, dearest, self._num_rounds)

    def reference_charge(self, charges: FloatArray) -> float:
        """Return what this round gives: the noise follows the schedule, the clip is C."""
        return float(charges.max(initial=self.expected_charge))


def _beside_later(facts: JoinFacts, charge: float, joins: int) -> FloatArray:
    """Return what is left beside a charge for each of `joins` joins but those before and this."""
    later = np.maximum(0.0, joins - 1 - facts.joins)
    return np.asarray(
        np.maximum(np.minimum(charge, facts.remaining), facts.remaining - later * charge)
    )


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
        joins = checks.integer("max_joins", max_joins, at_least=1)
        return EvenPolicy(budget, min(joins, num_rounds))
    return EvenPolicy(budget, num_rounds)
