"""What a mode does to the clients' vectors, in the order the round calls it.

    plan_round -> (reserve) -> shrink_to -> open_round
    receive -> clip_bound -> clip -> noise_client -> (sum) -> release

The round owns the order, the plan, the tally and the sum; a mechanism owns the rules.  What is
fixed before anybody trains is in the frozen `RoundPlan`, what is counted since in the
`RoundTally`: every step receives what it needs, and a mechanism keeps for itself only what later
rounds depend on (`state`).  Whatever a mechanism may claim about it is in its `statement`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.vectors import is_finite
from fedquilt.privacy.statement import Statement


@dataclass(frozen=True, eq=False)
class RoundPlan:
    """What is fixed of a round before anybody trains; all of it is public.

    Parameters
    ----------
    round_index, clients
        The round, and who is exposed in it.
    charges : array, optional
        What joining costs each of them in squared GDP units under zero-out adjacency: a client's
        part of the sum against nothing.  The account converts it where the run's claim is about
        another.  None: no finite charge would be true.
    noise_std : float
        Standard deviation of the noise on the sum, where it is fixed in advance.
    clips : mapping
        The clip of each client, where it is fixed in advance.
    learning_rate : float
        Of this round.
    rates : array
        Participation rates of `clients`, this round included.
    coverage : tensor, optional
        For each coordinate of the model, which share of `clients` hold it in this round; None:
        everybody holds everything.
    clip_value : float, optional
        The clip bound of the round (step 4), None where nothing is clipped.
    least, bits : int
        Under secure aggregation the fewest clients whose sum may be opened, and the length of
        the integers that it sums.
    settled_share : callable, optional
        Under secure aggregation which share of `charges` is settled where so many have survived.
    """

    round_index: int
    clients: NDArray[np.int64]
    charges: NDArray[np.float64] | None = None
    noise_std: float = math.nan
    clips: Mapping[int, float] = field(default_factory=dict)
    learning_rate: float = math.nan
    rates: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    coverage: torch.Tensor | None = None
    clip_value: float | None = None
    least: int = 0
    bits: int = 0
    settled_share: Callable[[int], float] | None = None

    def charges_of(self, here: NDArray[np.bool_]) -> NDArray[np.float64] | None:
        """Return what is settled of those who are here: with more of them it may be less."""
        if self.charges is None or self.settled_share is None or not here.any():
            return None if self.charges is None else self.charges[here]
        return self.charges[here] * self.settled_share(int(here.sum()))


@dataclass(eq=False)
class RoundTally:
    """What a round has counted of its contributions so far: statistics of the data, private.

    `clipped` counts updates above their clip, `bits` sums the bits of a private quantile;
    `budgets`, `variance` and `noise` are of clients that are noised one by one.
    """

    clipped: int = 0
    bits: float = 0.0
    budgets: dict[int, float] = field(default_factory=dict)
    variance: float = 0.0
    noise: torch.Tensor | None = None


class Summed(Protocol):
    """The sum of a round's contributions, as an accumulator has it.

    `weight` is that of all contributions, `held` the weight on each coordinate where clients
    hold parts of the model.
    """

    @property
    def total(self) -> torch.Tensor: ...

    @property
    def weight(self) -> float: ...

    @property
    def held(self) -> torch.Tensor | None: ...


@dataclass(frozen=True, eq=False)
class Contribution:
    """One client's vector in the mechanism's units, and its weight in the sum.

    A vector with a NaN or Inf entry arrives as zero, marked not finite.

    With a `scale` the vector is `scale` times what was `sent`, in float64, and is computed
    when it is looked at: whoever sums it a chunk at a time need not hold all of it.
    """

    client: int
    sent: torch.Tensor
    weight: float
    finite: bool = True
    scale: float | None = None

    @property
    def vector(self) -> torch.Tensor:
        """The vector itself."""
        return self.sent if self.scale is None else self.sent.to(torch.float64) * self.scale


@dataclass(frozen=True)
class NoiseReport:
    """What the noise of a round was; fields are None where there was none.

    `epsilon` is the nominal budget of the round, `noise_std` the standard
    deviation on the mean, both norms are of vectors in the mechanism's units.
    Norms and the fraction of clipped clients are statistics of the data: a mode
    that claims a bound keeps them private.

    `agg_scale` is the factor by which `max_agg_norm` shortened the noised mean, noise and all;
    None where it did not.  The other figures are of what was applied, after it.
    `client_budgets` are the nominal budgets of the clients that were noised one by one.
    """

    epsilon: float | None = None
    noise_std: float | None = None
    noise_norm: float | None = None
    signal_norm: float | None = None
    clipped_fraction: float | None = None
    agg_scale: float | None = None
    client_budgets: Mapping[int, float] | None = None

    def scaled(self, factor: float) -> NoiseReport:
        """Return what was applied of this noise when the noised mean is scaled by a factor."""
        figures = (self.noise_std, self.noise_norm, self.signal_norm)
        std, noise, signal = (None if value is None else value * factor for value in figures)
        return dataclasses.replace(
            self, noise_std=std, noise_norm=noise, signal_norm=signal, agg_scale=factor
        )


class Mechanism(Protocol):
    """The rules of one mode for steps 1 and 4 to 7 of a round."""

    @property
    def is_bounded(self) -> bool:
        """Whether every charge is known before its release; raw measurements stay private.

        The same answer as `RunConfig.is_bounded` gave before the run began, and as
        `RunAccount.is_bounded` gives where there is a ledger.
        """

    @property
    def claims(self) -> bool:
        """Whether a bound may be claimed: charges are known, and the noise is secret.

        At the end of the run it is what `Statement.is_bounded` says, unless parts of
        somebody's own leave doubts (`round.Federation`).
        """

    @property
    def needs_whole_cohort(self) -> bool:
        """Whether the clip bound depends on all updates of the round."""

    def eligible(
        self, round_index: int, remaining: NDArray[np.float64]
    ) -> NDArray[np.bool_] | None:
        """Tell who may be selected, given what each may still spend; None is everybody."""

    def has_allowance(self, remaining: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell who has enough left for one more join."""

    def plan_round(
        self,
        round_index: int,
        clients: NDArray[np.int64],
        remaining: NDArray[np.float64],
        joins: NDArray[np.float64],
        rounds_done: int,
    ) -> RoundPlan:
        """Fix charges, noise and clips of a round, as far as they are known in advance.

        `remaining` and `joins` (in the `rounds_done` rounds so far) belong to these clients.
        A plan changes nothing: the ledger may refuse its charges.
        """

    def shrink_to(self, plan: RoundPlan, granted: NDArray[np.float64] | None) -> RoundPlan:
        """Return the plan with clips so low that it costs at most what the ledger granted."""

    def open_round(self, plan: RoundPlan) -> None:
        """Begin a round whose charges are reserved: note what later rounds depend on."""

    def receive(
        self, plan: RoundPlan, client: int, delta: torch.Tensor, num_examples: int
    ) -> Contribution:
        """Bring an update into the mechanism's units; it may be changed in place."""

    def clip_bound(self, plan: RoundPlan, received: Iterable[Contribution]) -> float | None:
        """Return the clip bound of the round (step 4), None when nothing is clipped."""

    def clip(self, plan: RoundPlan, contribution: Contribution, tally: RoundTally) -> Contribution:
        """Bound one contribution (step 5)."""

    def noise_client(
        self, plan: RoundPlan, contribution: Contribution, tally: RoundTally
    ) -> Contribution:
        """Noise one contribution, for mechanisms that noise before the sum (step 6)."""

    def release(
        self, plan: RoundPlan, summed: Summed, tally: RoundTally
    ) -> tuple[torch.Tensor, NoiseReport]:
        """Noise the sum and divide it (steps 6 and 7); return the mean update.

        The sum may be changed in place.
        """

    def statement(
        self, counts: NDArray[np.float64], epsilons: NDArray[np.float64] | None
    ) -> Statement:
        """Say what may be claimed.

        `counts` tells how often each client joined; `epsilons` is what the ledger
        says of each, when there is one that bounds this run.
        """

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what must survive a restart, as arrays; never noise."""

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Restore what `state` returned."""


class Unbounded:
    """What mechanisms without a bound say when they are asked about budgets."""

    @property
    def is_bounded(self) -> bool:
        """No finite charge would be true."""
        return False

    @property
    def claims(self) -> bool:
        """Nothing may be claimed."""
        return False

    def eligible(
        self, round_index: int, remaining: NDArray[np.float64]
    ) -> NDArray[np.bool_] | None:
        """Everybody may join."""
        return None

    def has_allowance(self, remaining: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Nobody runs out of what is not counted."""
        return np.ones(remaining.shape, dtype=np.bool_)

    def plan_round(
        self,
        round_index: int,
        clients: NDArray[np.int64],
        remaining: NDArray[np.float64],
        joins: NDArray[np.float64],
        rounds_done: int,
    ) -> RoundPlan:
        """No finite charge would be true."""
        return RoundPlan(round_index, clients)

    def shrink_to(self, plan: RoundPlan, granted: NDArray[np.float64] | None) -> RoundPlan:
        """Infinity needs no grant."""
        return plan

    def open_round(self, plan: RoundPlan) -> None:
        """Nothing depends on the round."""


class NoPrivacy(Unbounded):
    """FedAvg: the mean of the updates weighted by examples, nothing clipped or noised.

    A client whose update is not finite is left out of the mean.
    """

    needs_whole_cohort = False

    def __init__(
        self, tensor_names: Sequence[str], delta: float, notes: Sequence[str] = ()
    ) -> None:
        self._names = tuple(tensor_names)
        self._delta = delta
        self._notes = tuple(notes)

    def receive(
        self, plan: RoundPlan, client: int, delta: torch.Tensor, num_examples: int
    ) -> Contribution:
        """Weight the update by the client's examples."""
        if is_finite(delta):
            return Contribution(client, delta, float(num_examples))
        return Contribution(client, torch.zeros_like(delta), 0.0, finite=False)

    def clip_bound(self, plan: RoundPlan, received: Iterable[Contribution]) -> float | None:
        """Clip nothing."""
        return None

    def clip(self, plan: RoundPlan, contribution: Contribution, tally: RoundTally) -> Contribution:
        """Clip nothing."""
        return contribution

    def noise_client(
        self, plan: RoundPlan, contribution: Contribution, tally: RoundTally
    ) -> Contribution:
        """Noise nothing."""
        return contribution

    def release(
        self, plan: RoundPlan, summed: Summed, tally: RoundTally
    ) -> tuple[torch.Tensor, NoiseReport]:
        """Return the weighted mean over who holds each coordinate, zero where nobody does."""
        total, weight, held = summed.total, summed.weight, summed.held
        if held is not None:
            someone = held > 0
            return torch.where(someone, total / held.masked_fill(~someone, 1.0), 0.0), NoiseReport()
        mean = total.div_(weight) if weight else total
        return mean, NoiseReport()

    def statement(
        self, counts: NDArray[np.float64], epsilons: NDArray[np.float64] | None
    ) -> Statement:
        """Say that nothing is protected."""
        return Statement.without_bound(
            delta=self._delta,
            covered=(),
            uncovered=self._names,
            noise_source="none",
            notes=("no noise: nothing may be claimed about any client", *self._notes),
        )

    def state(self) -> dict[str, NDArray[Any]]:
        """Return nothing: there is no state."""
        return {}

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Accept the empty state."""
