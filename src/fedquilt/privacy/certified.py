"""The certified mechanism: everything released is clipped once and noised.

For round t with noise s_t on the sum and client i clipped at c_i,

    release  sum_i clip(u_i, c_i) + s_t N(0, I),   divided by a public number,
    cost of client i:  (c_i / s_t)^2 [+ 1 / (4 sigma_b^2) for its quantile bit]

in squared GDP units under zero-out adjacency (under replace-one, where the sum moves
by up to 2 c_i, the account charges four times as much), exactly additive
over rounds and runs (Dong, Roth and Su 2022), also when clips and noise are chosen from
earlier releases and the public history, as long as nobody passes its budget (Smith and
Thakurta 2022, arXiv:2210.17520; per client: Koskela, Tobaben and Honkela 2023,
arXiv:2209.15596).  The ledger refuses whatever would pass it.

A client's clip is a public function of the participation history; what its data
are decides neither whether it is counted nor what divides the sum.

Where clients hold slices of the model, u_i is the vector of client i's slice and has
one clip over all of it.  Laying it into the whole vector, zero elsewhere, keeps its
norm, so the sum still moves by at most c_i when a client's data are taken away.  Which
coordinates a client holds is chosen by the server without looking at data; so is the
set S_t that somebody of the round's public roster holds.  Outside S_t every client's
part is zero whatever its data are: nothing is released there, and no noise is needed.
Inside, every coordinate has the noise s_t and is divided by

    n_j = max(1, D k_j / m),

where k_j of the m clients of the roster hold j and D divides whole models: a public
number again, so this is post-processing and the cost of a round is the same.

| edge case | what happens |
|---|---|
| clip 0: what is left pays the bit alone | the update becomes zero, counts, and costs the bit |
| no allowance left | the client is not eligible; the ledger refuses what would pass it |
| an update with NaN or Inf | counts as zero, is charged in full, and is in no public record |
| an update of zeros | stays zero, also with `normalise`; adds no bit |
| an empty cohort | nothing is planned, charged or released; the model stays as it is |
| nothing arrives of a client | its charge is taken back, unless a secret coin asked it |

A round by hand: two clients with the whole budget mu^2 = 1, ten rounds, clip 1.

>>> from fedquilt.aggregation import RunningMean
>>> from fedquilt.privacy.noise import SeededNoise
>>> from fedquilt.privacy.policies import EvenPolicy
>>> settings = CertifiedSettings(tensor_names=("w",), frozen_names=(), delta=1e-5,
...                              clip_norm=1.0, clip_cap=2.0, divisor=2.0)
>>> mechanism = Certified(settings, EvenPolicy(1.0, 10), BandedNoise(SeededNoise(0)), None, 2)
>>> who, left, joins = np.array([0, 1]), np.array([1.0, 1.0]), np.zeros(2)
>>> plan = mechanism.plan_round(0, who, left, joins, 0)
>>> plan.charges.round(3).tolist(), round(plan.noise_std, 3), plan.clips
([0.1, 0.1], 3.162, {0: 1.0, 1: 1.0})
>>> plan = mechanism.shrink_to(plan, plan.charges)  # all of it was granted
>>> mechanism.open_round(plan)
>>> total, tally = RunningMean(2), RoundTally()
>>> for client, sent in enumerate([[3.0, 4.0], [float("nan"), 1.0]]):
...     received = mechanism.receive(plan, client, torch.tensor(sent), 1)
...     clipped = mechanism.clip(plan, received, tally)
...     print(clipped.finite, [round(x, 3) for x in clipped.vector.tolist()])
...     total.add(clipped.vector, clipped.weight)
True [0.6, 0.8]
False [0.0, 0.0]
>>> update, report = mechanism.release(plan, total, tally)
>>> round(report.noise_std, 3), report.clipped_fraction  # on the mean; of the cohort
(1.581, 0.5)

The certified mechanism under a secret Poisson coin.

Each available client is kept with probability q by a coin that only the server
sees.  What leaves is then a Poisson-subsampled Gaussian release, cheaper for every
client that was *available*, whether or not it was kept - and only if the cohorts
stay secret and the divisor does not depend on them.  Availability itself is the
client's doing and amplifies nothing.

Where data are exchanged for others (replace-one), a kept client sends a vector u in one
world and v in the other, both within the clip C, so the pair of releases is

    (1 - q) N(0, s^2) + q N(u, s^2)    against    (1 - q) N(0, s^2) + q N(v, s^2).

The worst is u = -v of length C.  For a set S with N(0, s^2)(S) = p, the lemma of Neyman
and Pearson gives N(u, s^2)(S) <= Phi(Phi^-1(p) + C/s) and N(v, s^2)(S) >=
Phi(Phi^-1(p) - C/s), both with equality for one half-space when u = -v; so every
difference P(S) - e^eps Q(S) is largest there.

Subsampled releases are not described by one GDP parameter, so they cannot share an
account with others.  Therefore the run is accounted for as a whole: its noise is
calibrated (PLD) for at most `max_exposures` rounds of availability, a client's
account must be untouched when the run begins, and its whole allowance is charged at
its first exposure.  A client that another run has touched by then takes no part, and
none can touch it afterwards.  Later exposures are recorded at no further charge, and
the ledger's count of them - which survives any crash - ends a client's part in the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.vectors import StreamingNorm, cached_norm, chunks_of, is_finite, norm
from fedquilt.privacy.accounting import Adjacency, Release, epsilon
from fedquilt.privacy.clip import PrivateQuantile
from fedquilt.privacy.mechanism import Contribution, NoiseReport, RoundPlan, RoundTally, Summed
from fedquilt.privacy.noise import BandedNoise
from fedquilt.privacy.policies import EvenPolicy, JoinFacts, Policy
from fedquilt.privacy.statement import NOT_COVERED, Statement, cautions

# Keeps the norm of a clipped vector below its bound through float64 rounding.
SHAVE = 1 - 1e-12
# Below this, squares underflow and a norm is no longer to be trusted for scaling up.
NOTHING = 1e-100


@dataclass(frozen=True, kw_only=True)
class CertifiedSettings:
    """The public numbers of a certified run.

    Parameters
    ----------
    tensor_names, frozen_names : tuple of str
        What is released, and what never is because it never changes.
    delta : float
        Delta of the claim.
    clip_norm : float
        C: the clip of a client with the policy's reference charge; with a
        quantile, its first value.
    clip_cap : float
        No client is clipped above clip_cap * C, however much it has left.
    divisor : float
        The public number that divides the noised sum.
    normalise : bool
        Scale every update to exactly its clip instead of only down to it.
    sliced : bool
        Clients hold parts of the model.
    notes : tuple of str
        What else the statement should say.
    adjacency : Adjacency
        What the claim is about; the account converts charges to it.
    sum_sensitivity : float
        S: zeros in the place of a vector x move the sum by at most S |x|; 1 of a plain one.
    window : int
        Over how many rounds the cohort of a release is gathered (`CohortSelector`).
    """

    tensor_names: tuple[str, ...]
    frozen_names: tuple[str, ...]
    delta: float
    clip_norm: float
    clip_cap: float
    divisor: float
    normalise: bool = False
    sliced: bool = False
    notes: tuple[str, ...] = ()
    adjacency: Adjacency = Adjacency.ZERO_OUT
    sum_sensitivity: float = 1.0
    window: int = 1


class Certified:
    """Clip per client, noise the sum, divide by a public number."""

    needs_whole_cohort = False
    is_bounded = True  # a rehearsal with a noise seed keeps to the same files
    sensitivity = 1.0
    """The norm of what `bound_vector` returns, in units of the limit it is given."""
    public_facts = "who joined when, clip bounds, charges, cohort sizes"

    def __init__(
        self,
        settings: CertifiedSettings,
        policy: Policy,
        noise: BandedNoise,
        quantile: PrivateQuantile | None,
        num_clients: int,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.noise = noise
        self.quantile = quantile
        self._last_join = np.full(num_clients, -(2**31), dtype=np.int64)

    @property
    def bound(self) -> float:
        """C_t: the clip of a typical client in the coming round."""
        return self.settings.clip_norm if self.quantile is None else self.quantile.bound

    @property
    def bit_cost(self) -> float:
        """What the quantile bit costs each client of a round."""
        return 0.0 if self.quantile is None else self.quantile.cost

    def eligible(self, round_index: int, remaining: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell who may join: allowance left, and long enough since the last join."""
        allowed = self.has_allowance(remaining)
        if self.noise.bands > 1:
            allowed &= round_index - self._last_join >= self.noise.bands
        return allowed

    def has_allowance(self, remaining: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell who has enough left for one more join."""
        return np.asarray(remaining >= max(self.policy.min_charge, 1.01 * self.bit_cost))

    def plan_round(
        self,
        round_index: int,
        clients: NDArray[np.int64],
        remaining: NDArray[np.float64],
        joins: NDArray[np.float64],
        rounds_done: int,
    ) -> RoundPlan:
        """Fix noise and clips of the round, and what each join will cost (zero-out).

        With charge a_i, bit cost b and the correlation factor k,
        c_i = s_t sqrt(max(0, a_i - b) / k), at most clip_cap * C_t, and the cost
        is k (c_i / s_t)^2 + b <= a_i.
        """
        facts = JoinFacts(round_index, remaining, joins, rounds_done)
        charges = np.minimum(self.policy.charges(facts), remaining)
        factor, bit = self.noise.cost_factor, self.bit_cost
        multiplier = math.sqrt(factor / (self.policy.reference_charge(charges) - bit))
        noise_std = multiplier * self.bound
        spendable = np.maximum(0.0, charges - bit) / factor
        clips = np.minimum(noise_std * np.sqrt(spendable), self.settings.clip_cap * self.bound)
        return RoundPlan(
            round_index,
            clients,
            charges=np.asarray(factor * (clips / noise_std) ** 2 + bit),
            noise_std=noise_std,
            clips=dict(zip(clients.tolist(), clips.tolist(), strict=True)),
        )

    def shrink_to(self, plan: RoundPlan, granted: NDArray[np.float64] | None) -> RoundPlan:
        """Lower the clips where the ledger granted a hair less than was asked."""
        if granted is None:
            raise RuntimeError("a certified round needs a ledger that bounds it")
        spendable = np.maximum(0.0, granted - self.bit_cost) / self.noise.cost_factor
        limits = plan.noise_std * np.sqrt(spendable)
        granted_clips = zip(plan.clients.tolist(), limits.tolist(), strict=True)
        clips = {client: min(plan.clips[client], limit) for client, limit in granted_clips}
        return replace(plan, clips=clips)

    def open_round(self, plan: RoundPlan) -> None:
        """Note who has joined: correlated noise keeps them out of the next rounds."""
        self._last_join[plan.clients] = plan.round_index

    def receive(
        self, plan: RoundPlan, client: int, delta: torch.Tensor, num_examples: int
    ) -> Contribution:
        """Take the plain delta in float64; one that is not finite counts as zero."""
        if not _is_finite(delta):
            return Contribution(client, torch.zeros_like(delta), 1.0, finite=False, scale=1.0)
        return Contribution(client, delta, 1.0, scale=1.0)

    def clip_bound(self, plan: RoundPlan, received: Iterable[Contribution]) -> float | None:
        """Return C_t, which was fixed before anybody trained."""
        return self.bound

    def clip(self, plan: RoundPlan, contribution: Contribution, tally: RoundTally) -> Contribution:
        """Bound the whole vector by the client's own clip, once.

        With a rule of a subclass's own, `bound_vector` is asked for at most c_i /
        sensitivity, so that what it declares keeps to c_i; what is longer all the same is
        shortened, and the charge holds whatever the rule does.
        """
        as_sent = contribution.scale in (None, 1.0)
        vector = contribution.sent if as_sent else contribution.vector
        length = norm(vector)
        if self.quantile is not None:
            tally.bits += self.quantile.bit(length)
        client, limit = contribution.client, plan.clips[contribution.client]
        tally.clipped += int(length > limit)
        has_own_rule = type(self).bound_vector is not Certified.bound_vector
        if has_own_rule:
            vector = self.bound_vector(contribution.vector, limit / self.sensitivity)
            length = norm(vector) if is_finite(vector) else math.inf
        if length > limit or (self.settings.normalise and length > NOTHING):
            if not math.isfinite(length):
                vector, length = torch.zeros_like(vector), limit
            scale = limit / length * SHAVE
            return Contribution(client, vector, 1.0, contribution.finite, scale)
        if has_own_rule:
            return Contribution(client, vector, 1.0, contribution.finite)
        return contribution

    def bound_vector(self, vector: torch.Tensor, limit: float) -> torch.Tensor:
        """Bound an update in a way of a subclass's own, to at most `sensitivity` * limit."""
        return vector

    def noise_client(
        self, plan: RoundPlan, contribution: Contribution, tally: RoundTally
    ) -> Contribution:
        """Noise comes once, on the sum."""
        return contribution

    def release(
        self, plan: RoundPlan, summed: Summed, tally: RoundTally
    ) -> tuple[torch.Tensor, NoiseReport]:
        """Noise the sum in float64 and divide it by the public number.

        What divides is public coverage, never the weight of who really sent.
        """
        index, coverage = plan.round_index, plan.coverage
        total = summed.total.to(torch.float64)
        # Client i moves the sum by S c_i at most, and is charged (c_i / s_t)^2.
        noise_std = plan.noise_std * self.settings.sum_sensitivity
        noise_norm, signal_norm = StreamingNorm(), StreamingNorm()
        for chunk, drawn in self.noise.draw_chunks(index, total.numel(), total.device):
            signal, noise = total[chunk], noise_std * drawn
            divisor: float | torch.Tensor = self.settings.divisor
            if coverage is not None:
                noise = torch.where(coverage[chunk] > 0, noise, 0.0)
                divisor = coverage_divisor(self.settings.divisor, coverage[chunk])
            noise_norm.add(noise / divisor)
            signal_norm.add(signal / divisor)
            signal.add_(noise).div_(divisor)
        report = NoiseReport(
            noise_std=noise_std / self.settings.divisor,
            noise_norm=noise_norm.value(),
            signal_norm=signal_norm.value(),
            clipped_fraction=tally.clipped / max(summed.weight, 1.0),
        )
        if self.quantile is not None:
            self.quantile.close_round(tally.bits, self.noise.source.stream(index, 1))
        return total, report

    @property
    def claims(self) -> bool:
        """A bound may be claimed unless its noise can be reproduced."""
        return not self.noise.source.reproducible

    def statement(
        self, counts: NDArray[np.float64], epsilons: NDArray[np.float64] | None
    ) -> Statement:
        """State the ledger's bound for every client."""
        if epsilons is None:
            raise RuntimeError("a certified run has its epsilons from the ledger")
        notes = self._notes()
        if not self.claims:
            return Statement.without_bound(
                delta=self.settings.delta,
                covered=self.settings.tensor_names,
                uncovered=(),
                noise_source=self.noise.source.description,
                notes=("reproducible noise: no privacy", *notes),
                adjacency=self.settings.adjacency.words,
            )
        worst = float(epsilons.max())
        return Statement(
            delta=self.settings.delta,
            epsilon_max=worst,
            epsilon_median=float(np.median(epsilons)),
            covered=self.settings.tensor_names,
            uncovered=(),
            noise_source=self.noise.source.description,
            notes=(
                *cautions(worst, self.settings.delta, len(self._last_join)),
                "the claim covers every released version of the model, all rounds together",
                *notes,
            ),
            adjacency=self.settings.adjacency.words,
        )

    def _notes(self) -> tuple[str, ...]:
        notes = [
            f"public by this adjacency: {self.public_facts}",
            NOT_COVERED,
            *self.settings.notes,
        ]
        if self.settings.frozen_names:
            notes.append(
                "frozen, as the run began: not changed and not released by it (what an earlier run "
                "learned of clients was that run's release): "
                + some_names(self.settings.frozen_names)
            )
        if self.settings.sliced:
            notes.append(
                "clients hold slices of the model, each clipped once as a whole; who holds which "
                "is chosen without looking at data, and public"
            )
        if self.quantile is not None:
            notes.append("the clip bound follows a private quantile, whose cost is included")
        if self.settings.window > 1:
            notes.append(
                f"the model stands still for {self.settings.window} rounds, and whoever comes in "
                "them counts once, in one release: charges and joins are of releases"
            )
        if self.noise.bands > 1:
            notes.append(
                f"noise correlated over {self.noise.bands} "
                f"{'rounds' if self.settings.window == 1 else 'releases'}; "
                "no client joins twice within them"
            )
        return tuple(notes)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return last joins and the quantile's bound; never noise."""
        quantile = {} if self.quantile is None else self.quantile.state()
        return {"last_join": self._last_join, **quantile}

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Restore what `state` returned."""
        self._last_join = np.array(state["last_join"], dtype=np.int64)
        if self.quantile is not None:
            self.quantile.load_state(state)


def _is_finite(delta: torch.Tensor) -> bool:
    """Tell whether every entry is finite; sums of float32 in float64 do not overflow."""
    if delta.dtype == torch.float64 or cached_norm(delta) is not None:
        return is_finite(delta)
    return all(is_finite(delta[chunk].to(torch.float64)) for chunk in chunks_of(delta))


def some_names(names: tuple[str, ...], most: int = 12) -> str:
    """Return the names in words; of a large model the first ones and how many there are."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def coverage_divisor(divisor: float, coverage: torch.Tensor) -> torch.Tensor:
    """Return n_j = max(1, D k_j / m) from the shares k_j / m; D itself where everybody holds j."""
    return (divisor * coverage).clamp(min=min(1.0, divisor))


class AmplifiedCertified(Certified):
    """One clip, one noise level, exposures counted instead of joins."""

    public_facts = "who was available when, the clip bound, charges; not who joined"

    def __init__(
        self,
        settings: CertifiedSettings,
        noise: BandedNoise,
        *,
        noise_multiplier: float,
        sampling_rate: float,
        max_exposures: int,
        exposures: Callable[[], NDArray[np.int64]],
        whole_allowance: float,
        num_clients: int,
    ) -> None:
        super().__init__(settings, EvenPolicy(1.0, max_exposures), noise, None, num_clients)
        self.noise_multiplier = noise_multiplier
        self.sampling_rate = sampling_rate
        self.max_exposures = max_exposures
        self.whole_allowance = whole_allowance
        self._exposures = exposures

    def has_allowance(self, remaining: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell who was exposed fewer times than the noise was calibrated for."""
        seen = self._exposures()
        untouched = remaining >= self.whole_allowance
        return np.asarray((seen < self.max_exposures) & ((seen > 0) | untouched))

    def plan_round(
        self,
        round_index: int,
        clients: NDArray[np.int64],
        remaining: NDArray[np.float64],
        joins: NDArray[np.float64],
        rounds_done: int,
    ) -> RoundPlan:
        """Charge everything at the first exposure and nothing afterwards."""
        return RoundPlan(
            round_index,
            clients,
            charges=np.where(self._exposures()[clients] == 0, remaining, 0.0),
            noise_std=self.noise_multiplier * self.bound,
            clips=dict.fromkeys(clients.tolist(), self.bound),
        )

    def shrink_to(self, plan: RoundPlan, granted: NDArray[np.float64] | None) -> RoundPlan:
        """Keep the clip: what a round costs does not depend on the charge."""
        return plan

    def statement(
        self, counts: NDArray[np.float64], epsilons: NDArray[np.float64] | None
    ) -> Statement:
        """State the amplified bound of the client with the most exposures."""
        seen = self._exposures()
        most, middle = int(seen.max()), int(np.ceil(np.median(seen)))
        amplified = np.asarray([self._epsilon(most), self._epsilon(middle)])
        stated = super().statement(counts, amplified)
        if not stated.is_bounded:
            return stated
        notes = (
            f"amplified by a secret Poisson coin of {self.sampling_rate:g}; cohorts are private, "
            f"clients are charged for every round in which they were available "
            f"(at most {int(seen.max())})",
            "the ledger counts the whole allowance as spent from the first exposure",
            *stated.notes,
        )
        return replace(
            stated, epsilon_max=float(amplified[0]), epsilon_median=float(amplified[1]), notes=notes
        )

    def _epsilon(self, exposures: int) -> float:
        if exposures == 0:
            return 0.0
        release = Release(self.noise_multiplier, exposures, self.sampling_rate)
        return epsilon(
            [release], self.settings.delta, method="pld", adjacency=self.settings.adjacency
        ).epsilon
