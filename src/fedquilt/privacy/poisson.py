"""The certified mechanism under a secret Poisson coin.

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

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedquilt.privacy.accounting import Release, epsilon
from fedquilt.privacy.certified import Certified, CertifiedSettings
from fedquilt.privacy.mechanism import RoundPlan
from fedquilt.privacy.noise import BandedNoise
from fedquilt.privacy.policies import EvenPolicy
from fedquilt.privacy.statement import Statement


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
