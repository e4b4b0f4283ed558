"""The mechanisms of QuAP-FL, faithfully, with what they can and cannot claim.

`LayerNoise` is the QuAP-FL paper's algorithm (sections 3.3 to 3.5; with a fixed clip and a
flat budget its baseline Fixed-DP, section 5.2): the covered slice of
(local - global) / learning rate is clipped, averaged and noised once.  `ClientNoise` is
the loop of the QuAP-FL architecture document with the classes of the QuAP-FL API document:
every client's whole delta is clipped and noised before the mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common import checks
from fedquilt.common.errors import BudgetExceededError, InvalidValueError
from fedquilt.common.formatting import format_bound
from fedquilt.common.vectors import is_finite, norm
from fedquilt.privacy.accounting.gaussian import Adjacency, gaussian_epsilon, gaussian_epsilon_many
from fedquilt.privacy.clip import QuantileClipper
from fedquilt.privacy.mechanism import (
    Contribution,
    NoiseReport,
    RoundPlan,
    RoundTally,
    Summed,
    Unbounded,
)
from fedquilt.privacy.noise import NoiseSource
from fedquilt.privacy.policies import AdaptivePrivacyAllocator
from fedquilt.privacy.statement import NOT_COVERED, Coverage, Statement, cautions


class Clipper(Protocol):
    """A rule for the clip bound, with the methods of the QuAP-FL API document's clipper."""

    def update_clip_value(self, gradients_list: Sequence[Any]) -> float:
        """Update the bound from the round's updates and return it."""

    def clip_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return one update inside the current bound."""

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what must survive a restart."""

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Restore what `state` returned."""


class QuapMechanism(Unbounded):
    """What the two mechanisms share: budget, clip rule, bookkeeping of the spend.

    `adjacency` is what a claim is about, if there is one; noise does not follow it,
    only what the noise costs.  `notes` are what else such a claim should say.
    """

    def __init__(
        self,
        allocator: AdaptivePrivacyAllocator,
        clipper: Clipper,
        coverage: Coverage,
        noise: NoiseSource,
        *,
        num_clients: int,
        warmup_rounds: int = 0,
        max_agg_norm: float = math.inf,
        clip_is_public: bool = False,
        adjacency: Adjacency = Adjacency.ZERO_OUT,
        notes: Sequence[str] = (),
    ) -> None:
        self.allocator = allocator
        self.clipper = clipper
        self.coverage = coverage
        self.noise = noise
        self.warmup_rounds = warmup_rounds
        self.max_agg_norm = max_agg_norm
        self.clip_is_public = clip_is_public
        self.adjacency = adjacency
        self.notes = tuple(notes)
        self.nominal_epsilon = np.zeros(num_clients)
        self.squared_gdp = np.zeros(num_clients)
        self._bound = math.nan

    @property
    def needs_whole_cohort(self) -> bool:
        """A bound chosen in advance needs nobody's update."""
        return not self.clip_is_public

    def open_round(self, plan: RoundPlan) -> None:
        """Open the round's noise stream; seeded streams depend on the round alone."""
        self.allocator.noise = self.noise.stream(plan.round_index)

    def clip_bound(self, plan: RoundPlan, received: Iterable[Contribution]) -> float:
        """Return the bound of the clip rule, computed from the finite updates only.

        Where nobody sent one it stays as it was.  See the QuAP-FL architecture document, section
        on version 1.1.1.
        """
        parts = (
            [self.coverage.take(c.vector) for c in received if c.finite]
            if self.needs_whole_cohort
            else []
        )
        if parts or self.clip_is_public:
            bound = float(self.clipper.update_clip_value(parts))
            self._bound = checks.number("clip value", bound, above=0)
            if isinstance(self.clipper, QuantileClipper):
                # A subclass that only returns its bound shall clip by it too.
                self.clipper.clip_value = self._bound
        elif math.isnan(self._bound):
            current = getattr(self.clipper, "clip_value", None)
            self._bound = getattr(self.clipper, "min_clip", 1.0) if current is None else current
        return self._bound

    def clip(self, plan: RoundPlan, contribution: Contribution, tally: RoundTally) -> Contribution:
        """Clip the covered coordinates; the others pass as they are."""
        if contribution.finite:
            part = self.coverage.take(contribution.vector)
            clipped = self.clipper.clip_gradient(part)
            if clipped is not part or len(self.coverage.ranges) > 1:
                self.coverage.put(contribution.vector, clipped)
        return contribution

    def budget(self, plan: RoundPlan, rate: float) -> float:
        """Return the budget of a participation rate; the base budget in the warm-up."""
        if plan.round_index < self.warmup_rounds:
            return self.allocator.epsilon_base
        return self.allocator.compute_privacy_budget(min(rate, 1.0))

    def _limit(self, mean: torch.Tensor, report: NoiseReport) -> tuple[torch.Tensor, NoiseReport]:
        """Scale a noised mean above max_agg_norm down to it, and the report of its noise too.

        See the QuAP-FL architecture document, section on version 1.1.2.  A mean that is not
        finite, which only tensors without a clip can cause, moves nothing.
        """
        length = norm(mean)
        if not math.isfinite(length):
            finite = dataclasses.replace(report, noise_std=0.0, noise_norm=0.0, signal_norm=0.0)
            return torch.zeros_like(mean), finite.scaled(0.0)
        if length <= self.max_agg_norm:
            return mean, report
        factor = self.max_agg_norm / length
        return mean * factor, report.scaled(factor)

    @property
    def _own_noise(self) -> bool:
        """Whether a subclass of the allocator draws its noise by a rule of its own."""
        kind = type(self.allocator)
        return kind.add_gaussian_noise is not AdaptivePrivacyAllocator.add_gaussian_noise

    def _noised(
        self, plan: RoundPlan, part: torch.Tensor, epsilon: float, sensitivity: float
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return a clipped part with the allocator's noise, that noise, and its deviation.

        The deviation is the formula's; of noise by a rule of its own, the root mean square of
        what was drawn, and no finite charge would be true.
        """
        if not self._own_noise:
            noised = self.allocator.add_gaussian_noise(part, epsilon, sensitivity)
            noise = noised.to(torch.float64) - part
            return noised, noise, self.allocator.compute_noise_multiplier(epsilon, sensitivity)
        given = self.allocator.add_gaussian_noise(part.clone(), epsilon, sensitivity)
        noised = torch.as_tensor(given).to(part.device, part.dtype)
        if noised.shape != part.shape:
            raise InvalidValueError(
                f"add_gaussian_noise must return what it is given with noise, of shape "
                f"{tuple(part.shape)}, not {tuple(noised.shape)}"
            )
        noise = noised.to(torch.float64) - part
        self.squared_gdp[plan.clients] = math.inf
        return noised, noise, norm(noise) / math.sqrt(max(1, noise.numel()))

    def _excuses(self) -> list[str]:
        """Say why the released model has no bound; empty when it has one."""
        notes = []
        if self.coverage.uncovered:
            notes.append(
                f"{len(self.coverage.uncovered)} tensors leave without clip or noise: "
                + ", ".join(self.coverage.uncovered)
            )
        if not self.clip_is_public:
            notes.append("the clip bound is this round's raw percentile, a statistic of the data")
        if self.noise.reproducible:
            notes.append("reproducible noise: no privacy")
        if self._own_noise or np.isinf(self.squared_gdp).any():
            notes.append("an allocator adds noise by a rule of its own: nothing is known of it")
        return notes

    def _slice_note(self, counts: NDArray[np.float64]) -> str:
        who = int(np.argmax(self.squared_gdp))
        worst = float(self._cost()[who])
        epsilon = gaussian_epsilon(math.sqrt(worst), self.allocator.delta) if worst else 0.0
        return (
            "if the clip bounds had been fixed in advance and nothing but the covered tensors had "
            f"been released: epsilon {format_bound(epsilon)} at delta {self.allocator.delta:g} "
            f"for the client that spent most (in {int(counts[who])} joins)"
        )

    def statement(
        self, counts: NDArray[np.float64], epsilons: NDArray[np.float64] | None
    ) -> Statement:
        """Say what may be claimed: a bound only if nothing escapes clip and noise."""
        excuses = self._excuses()
        nominal = (
            f"nominal budgets summed per client (the QuAP-FL paper's accounting, eq. 8): "
            f"at most {format_bound(float(self.nominal_epsilon.max()))}"
        )
        if excuses:
            excuses.append(nominal)
            if np.isfinite(self.squared_gdp).all():
                excuses.append(self._slice_note(counts))
            return Statement.without_bound(
                delta=self.allocator.delta,
                covered=self.coverage.covered,
                uncovered=self.coverage.uncovered,
                noise_source=self.noise.description,
                notes=excuses,
                adjacency=self.adjacency.words,
            )
        if epsilons is None:
            # Charges of rounds that ran twice are in a ledger only; without one, none is lost.
            epsilons = gaussian_epsilon_many(self._cost(), self.allocator.delta)
        worst = float(epsilons.max())
        return Statement(
            delta=self.allocator.delta,
            epsilon_max=worst,
            epsilon_median=float(np.median(epsilons)),
            covered=self.coverage.covered,
            uncovered=(),
            noise_source=self.noise.description,
            notes=(
                *cautions(worst, self.allocator.delta, len(self.squared_gdp)),
                "the claim covers every released version of the model, all rounds together",
                "exact composition of Gaussian releases over the rounds each client joined",
                "public by this adjacency: who joined when, the clip bound, noise levels, charges, "
                "cohort sizes, which divide the mean",
                NOT_COVERED,
                *self.notes,
                nominal,
            ),
            adjacency=self.adjacency.words,
        )

    def _cost(self) -> NDArray[np.float64]:
        """Return what each client has spent under the claim's adjacency."""
        return np.asarray(self.squared_gdp * self.adjacency.sensitivity_factor**2)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return clip state and spend."""
        return {
            "nominal_epsilon": self.nominal_epsilon.copy(),
            "squared_gdp": self.squared_gdp.copy(),
            "bound": np.asarray([self._bound]),
            **{f"clipper.{key}": value for key, value in self.clipper.state().items()},
        }

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Restore what `state` returned."""
        self.nominal_epsilon = np.array(state["nominal_epsilon"], dtype=np.float64)
        self.squared_gdp = np.array(state["squared_gdp"], dtype=np.float64)
        self._bound = float(state["bound"][0])
        prefix = "clipper."
        self.clipper.load_state(
            {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
        )


class LayerNoise(QuapMechanism):
    """The paper: clip the covered slice, average, noise the mean of the slice once.

        g_i = (local - global) / lr_t,   C_t from the clip rule on the slices' norms
        mean = 1/m sum g_i,   sigma = (C_t / m) sqrt(2 ln(1.25/delta)) / epsilon_t
        epsilon_t = base * (1 + alpha exp(-beta * mean rate of the cohort))  (eq. 4, 5)
        update = lr_t * (mean + [0, N(0, sigma^2 I)])                        (eq. 7)

    One release at noise multiplier z_t = sigma / (C_t / m) costs a client of the
    cohort mu^2 = 1 / z_t^2 in squared GDP units under zero-out adjacency (four times
    that under replace-one, by the account), and nothing to the others.
    """

    @property
    def is_bounded(self) -> bool:
        """Charges are known in advance wherever a bound may be claimed."""
        return self.claims

    @property
    def claims(self) -> bool:
        """A bound may be claimed when nothing escapes a clip chosen in advance."""
        return not self._excuses()

    def plan_round(
        self,
        round_index: int,
        clients: NDArray[np.int64],
        remaining: NDArray[np.float64],
        joins: NDArray[np.float64],
        rounds_done: int,
    ) -> RoundPlan:
        """Charge 1 / z_t^2 where a bound may be claimed (a flat budget is known in advance)."""
        cost = self._fixed_cost()
        charges = None if cost is None else np.full(len(clients), cost)
        return RoundPlan(round_index, clients, charges)

    def _fixed_cost(self) -> float | None:
        if not self.claims or self.allocator.alpha:
            return None
        multiplier = self.allocator.compute_noise_multiplier(self.allocator.epsilon_base, 1.0)
        return float(multiplier**-2)

    def has_allowance(self, remaining: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell who can pay the fixed cost of a round."""
        cost = self._fixed_cost()
        return super().has_allowance(remaining) if cost is None else remaining >= cost

    def eligible(
        self, round_index: int, remaining: NDArray[np.float64]
    ) -> NDArray[np.bool_] | None:
        """Where a bound may be claimed, only who can pay may join."""
        return self.has_allowance(remaining) if self.claims else None

    def shrink_to(self, plan: RoundPlan, granted: NDArray[np.float64] | None) -> RoundPlan:
        """Refuse to go on with less than the fixed cost, which cannot be lowered."""
        if granted is not None and plan.charges is not None and np.any(granted < plan.charges):
            short = int(plan.clients[np.argmin(granted)])
            raise BudgetExceededError(
                f"client {short} has less left than the fixed cost of one round",
                plan.clients,
                plan.charges,
                granted,
            )
        return plan

    def receive(
        self, plan: RoundPlan, client: int, delta: torch.Tensor, num_examples: int
    ) -> Contribution:
        """Divide by the learning rate, which may overflow; every client weighs the same."""
        gradient = delta.div_(plan.learning_rate)
        if not is_finite(gradient):
            return Contribution(client, torch.zeros_like(gradient), 1.0, finite=False)
        return Contribution(client, gradient, 1.0)

    def noise_client(
        self, plan: RoundPlan, contribution: Contribution, tally: RoundTally
    ) -> Contribution:
        """Noise comes once, on the mean."""
        return contribution

    def release(
        self, plan: RoundPlan, summed: Summed, tally: RoundTally
    ) -> tuple[torch.Tensor, NoiseReport]:
        """Average, noise the covered slice, and return to the units of the weights."""
        mean, sensitivity = summed.total / summed.weight, _bound_of(plan) / summed.weight
        epsilon = self.budget(plan, float(plan.rates.mean()))
        signal_norm = norm(mean)
        part = self.coverage.take(mean)
        noised, noise, noise_std = self._noised(plan, part, epsilon, sensitivity)
        self.coverage.put(mean, noised)
        self._charge(plan, epsilon, noise_std / sensitivity)
        report = NoiseReport(epsilon, noise_std, norm(noise), signal_norm)
        limited, report = self._limit(mean, report)
        return limited * plan.learning_rate, report

    def _charge(self, plan: RoundPlan, epsilon: float, noise_multiplier: float) -> None:
        self.nominal_epsilon[plan.clients] += epsilon
        if noise_multiplier > 0:  # zero only by a rule of its own, whose charge is infinite
            self.squared_gdp[plan.clients] += noise_multiplier**-2


class ClientNoise(QuapMechanism):
    """The QuAP-FL API document: clip and noise every client's whole delta, then average.

        sigma_i = C_t sqrt(2 ln(1.25/delta)) / epsilon_i,
        epsilon_i = base * (1 + alpha exp(-beta * rate_i))

    The noise on the mean has standard deviation sqrt(sum sigma_i^2) / m.
    """

    def receive(
        self, plan: RoundPlan, client: int, delta: torch.Tensor, num_examples: int
    ) -> Contribution:
        """Keep the plain delta; every client weighs the same."""
        finite = is_finite(delta)
        return Contribution(client, delta if finite else torch.zeros_like(delta), 1.0, finite)

    def noise_client(
        self, plan: RoundPlan, contribution: Contribution, tally: RoundTally
    ) -> Contribution:
        """Noise the client's vector by its own budget."""
        client = contribution.client
        place = int(np.flatnonzero(plan.clients == client)[0])
        epsilon = self.budget(plan, float(plan.rates[place]))
        bound = _bound_of(plan)
        noised, added, noise_std = self._noised(plan, contribution.vector, epsilon, bound)
        tally.noise = added if tally.noise is None else tally.noise.add_(added)
        tally.budgets[client] = epsilon
        tally.variance += noise_std**2
        self.nominal_epsilon[client] += epsilon
        return Contribution(client, noised, 1.0, contribution.finite)

    def release(
        self, plan: RoundPlan, summed: Summed, tally: RoundTally
    ) -> tuple[torch.Tensor, NoiseReport]:
        """Average the noised vectors."""
        mean = summed.total / summed.weight
        if tally.variance > 0:  # zero only by a rule of its own, whose charge is infinite
            self.squared_gdp[plan.clients] += _bound_of(plan) ** 2 / tally.variance
        noise = torch.zeros_like(mean) if tally.noise is None else tally.noise / summed.weight
        report = NoiseReport(
            float(np.mean(list(tally.budgets.values()))),
            math.sqrt(tally.variance) / summed.weight,
            norm(noise),
            norm(mean - noise),
            client_budgets=tally.budgets,
        )
        return self._limit(mean, report)


def _bound_of(plan: RoundPlan) -> float:
    """Return the clip bound that step 4 has put into the plan."""
    if plan.clip_value is None:
        raise RuntimeError("the clip bound of the round (clip_bound) belongs into its plan")
    return plan.clip_value
