"""The certified mechanism where nobody trusts the server: clients add the noise themselves.

What a client sends is a vector of integers modulo 2^b, which secure aggregation masks
(`fedquilt.aggregation.secure`); the server learns the sum of at least T of the n clients of a
round.  With the grid g, the update u_i clipped at c_i and d coordinates,

    x_i = round(u_i / g),    |x_i|^2 <= D_i^2 = (c_i / g)^2 + d / 4,
    sent  x_i + Skellam(V / M)  modulo 2^b,

**Rounding.**  Each coordinate goes up or down at random, without bias, which adds at most d / 4
to the squared norm on average.  A vector beyond D_i is rounded anew, and after eight times towards
zero, which lengthens no vector: D_i holds always, whatever the vector and the chance.

**Noise.**  M = T - C, where C clients may side with the server: of any k that survive, k - C are
honest, and each of these adds variance V / M that the others do not know.  So the sum of k costs

    D_i^2 m(V_k)^2,    V_k = (k - C) V / M, rounded down,

in squared GDP units (`skellam_mu`), at most D_i^2 m(V)^2 for the fewest.  That is what is reserved;
the charge of the k is settled when they are known to all and before anybody can open their sum.
The server may choose who they are: it sees numbers under masks until then, so its choice follows
from earlier releases, as clips do, and of two lists at most one has the signatures of T clients.
A vector of a client on that list is in what can be opened, or its masks are.  The noise that
everybody sees on the sum has variance k V / M.

**The grid.**  V is so large that rounding takes about one hundredth of a join's charge, and g such
that the reference charge is clipped at exactly C_t, as in `Certified`, where all n survive.  What
would be charged if only the fewest did must be at hand (`Policy.most`): where a typical client
has less, as in the only round or the first of even parts, the noise of g is larger by that.

**Wrap-around.**  |sum x_i| <= sum D_i in every coordinate.  Skellam noise of variance v stays
below t but with probability 2 exp(-t^2 / (2 (v + t / 3))) (Bernstein); b leaves room for both, up
to a probability of 2^-40 in all coordinates together.  Where it wraps all the same, the release is
wrong by 2^b g in a coordinate; the claim holds, because it is computed from a protected sum.

There is no rotation: a sum of vectors that are bounded in norm is bounded in every coordinate as
it is, at the price of a few bits, and rotations would pad the vector to a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.quorum import fewest
from fedquilt.common.vectors import norm
from fedquilt.privacy.certified import NOTHING, SHAVE, Certified, CertifiedSettings
from fedquilt.privacy.mechanism import Contribution, NoiseReport, RoundPlan, RoundTally, Summed
from fedquilt.privacy.noise import BandedNoise, NoiseSource, words_of
from fedquilt.privacy.policies import JoinFacts, Policy
from fedquilt.privacy.skellam import LEAST_VARIANCE, MOST_VARIANCE, skellam, skellam_mu

MOST_BITS = 32
_ROUNDING_SHARE = 0.01  # of a join's charge
_MOST_ROUNDING = 0.5
_TRIES = 8
_WRAP = 40 * math.log(2.0)  # -ln of the probability that any coordinate wraps
_PURPOSE = 3  # of the streams of a round: 0 or none the sum's noise, 1 the bits, 2 evaluations


@dataclass(frozen=True, kw_only=True)
class SecureSettings:
    """The public numbers of secure aggregation in a run.

    Parameters
    ----------
    size : int
        d, the length of a client's vector.
    variance : int
        V, of the noise that is charged, in squared steps of the grid.
    share : float
        The share of a round's clients that must survive, at least.
    colluding : int
        C, how many clients of a round may side with the server.
    simulated : bool
        Whether keys and masks are left out, which change nothing in the sum.
    """

    size: int
    variance: int
    share: float
    colluding: int
    simulated: bool

    @property
    def rounding(self) -> float:
        """What rounding adds to a squared norm."""
        return self.size / 4.0

    @property
    def unit(self) -> float:
        """What a squared norm of 1 on the grid is charged at most."""
        return skellam_mu(self.variance) ** 2

    def settled_share(self, count: int, survivors: int) -> float:
        """Return which part of that is charged where so many of `count` have survived."""
        if survivors < fewest(count, self.share, self.colluding):
            return 1.0  # nothing of so few is opened
        return settled_share(self.variance, survivors - self.colluding, self.honest(count))

    def honest(self, count: int) -> int:
        """Return M, the honest ones among the fewest survivors of so many clients."""
        return fewest(count, self.share, self.colluding) - self.colluding


def variance_for(size: int, charge: float) -> int:
    """Return V, a power of two, with which rounding takes about 1 % of a join's charge."""
    wanted = size / (4.0 * _ROUNDING_SHARE * charge)
    variance = min(1 << math.ceil(math.log2(max(wanted, LEAST_VARIANCE))), MOST_VARIANCE)
    if size / 4.0 * skellam_mu(variance) ** 2 > _MOST_ROUNDING * charge:
        most = int(4.0 * _MOST_ROUNDING * charge * MOST_VARIANCE)
        raise InvalidValueError(
            f"{size:,} released parameters must be at most {most:,} under secure_aggregation with "
            f"a charge of {charge:.3g} a join: rounding to integers would take more than half of it"
        )
    return variance


def settled_share(variance: int, honest: int, fewest_honest: int) -> float:
    """Return (m(V_k) / m(V))^2, where `honest` of the survivors have added noise.

    >>> round(settled_share(1024, 10, 7), 4), settled_share(1024, 7, 7)
    (0.7001, 1.0)
    """
    more = min(variance * honest // fewest_honest, 2 * MOST_VARIANCE)
    return (skellam_mu(more) / skellam_mu(variance)) ** 2


class SecureCertified(Certified):
    """Clip, round and noise on the clients; the server only adds up."""

    public_facts = "who joined when, clip bounds, charges, cohort sizes, grid and modulus"

    def __init__(
        self,
        settings: CertifiedSettings,
        policy: Policy,
        noise: BandedNoise,
        secure: SecureSettings,
        num_clients: int,
    ) -> None:
        super().__init__(settings, policy, noise, None, num_clients)
        self.secure = secure

    def grid(self, plan: RoundPlan) -> float:
        """Return g of a round."""
        return plan.noise_std / math.sqrt(self.secure.variance)

    def plan_round(
        self,
        round_index: int,
        clients: NDArray[np.int64],
        remaining: NDArray[np.float64],
        joins: NDArray[np.float64],
        rounds_done: int,
    ) -> RoundPlan:
        """Fix the grid, the clips and the modulus; `noise_std` is that of the fewest."""
        secure, count = self.secure, len(clients)
        plan = super().plan_round(round_index, clients, remaining, joins, rounds_done)
        if plan.charges is None:
            raise AssertionError("a certified plan has charges")
        facts = JoinFacts(round_index, remaining, joins, rounds_done)
        most = np.minimum(np.maximum(plan.charges, self.policy.most(facts)), remaining)
        unit = secure.unit * self._planned_share(count, plan.charges, most)
        reference = (self.bound / plan.noise_std) ** 2
        grid = self.bound / math.sqrt(reference / unit - secure.rounding)
        squares = np.minimum(plan.charges / unit, most / secure.unit)
        clips = grid * np.sqrt(np.maximum(0.0, squares - secure.rounding))
        clips = np.minimum(clips, self.settings.clip_cap * self.bound)
        squares = np.where(clips > 0, (clips / grid) ** 2 + secure.rounding, 0.0)
        return replace(
            plan,
            charges=np.minimum(most, squares * secure.unit),
            noise_std=grid * math.sqrt(secure.variance),
            clips=dict(zip(clients.tolist(), clips.tolist(), strict=True)),
            least=max(2, fewest(count, secure.share, secure.colluding)),  # nodes sum no single one
            bits=modulus_bits(secure, count, float(np.sqrt(squares).sum())),
            settled_share=partial(secure.settled_share, count),
        )

    def _planned_share(
        self, count: int, charges: NDArray[np.float64], most: NDArray[np.float64]
    ) -> float:
        """Return which part of its largest charge a round is planned to cost."""
        room = float(np.median(most / np.maximum(charges, NOTHING)))
        return max(self.secure.settled_share(count, count), 1.0 / room)

    def shrink_to(self, plan: RoundPlan, granted: NDArray[np.float64] | None) -> RoundPlan:
        """Lower the clips where the ledger granted a hair less than was asked."""
        if granted is None:
            raise RuntimeError("a certified round needs a ledger that bounds it")
        squares = np.maximum(0.0, granted / self.secure.unit - self.secure.rounding)
        limits = self.grid(plan) * np.sqrt(squares)
        granted_clips = zip(plan.clients.tolist(), limits.tolist(), strict=True)
        clips = {client: min(plan.clips[client], limit) for client, limit in granted_clips}
        return replace(plan, clips=clips)

    def noise_client(
        self, plan: RoundPlan, contribution: Contribution, tally: RoundTally
    ) -> Contribution:
        """Round a clipped update to the grid and add this client's share of the noise."""
        secure, client = self.secure, contribution.client
        noised = noised_integers(
            contribution.vector.to("cpu", torch.float64).numpy(),
            clip=plan.clips[client],
            grid=self.grid(plan),
            share=Fraction(secure.variance, max(1, secure.honest(len(plan.clients)))),
            words=client_words(self.noise.source, plan.round_index, client),
        )
        sent = torch.from_numpy(noised.astype(np.float64)).to(contribution.sent.device)
        return Contribution(client, sent, 1.0, contribution.finite)

    def release(
        self, plan: RoundPlan, summed: Summed, tally: RoundTally
    ) -> tuple[torch.Tensor, NoiseReport]:
        """Bring the sum modulo 2^b back to the update's units; nobody knows its noise."""
        grid, divisor = self.grid(plan), self.settings.divisor
        half = 2.0 ** (plan.bits - 1)
        total = summed.total.to(torch.float64)  # integers below 2^53: sums of them are exact
        total = torch.remainder(total + half, 2.0 * half).sub_(half).mul_(grid / divisor)
        more = summed.weight / self.secure.honest(len(plan.clients))
        report = NoiseReport(
            noise_std=plan.noise_std * math.sqrt(more) / divisor,
            clipped_fraction=tally.clipped / max(summed.weight, 1.0),
        )
        return total, report

    def _notes(self) -> tuple[str, ...]:
        secure = self.secure
        whom = f"{secure.colluding} of them" if secure.colluding else "none of them"
        return (
            *super()._notes(),
            "secure aggregation: clients round and noise their own updates, and what a server "
            f"learns of a round is the noised sum of at least {secure.share:g} of its clients: the "
            "server need not be trusted with updates and noise; it must be with how many rounds "
            "there are, and so must the clients' programs and the list of their keys",
            f"the claim counts the noise of the fewest clients that may be summed, if {whom} side "
            "with the server; a client that sends what it likes can spoil a sum, not open one",
            self._how(),
        )

    def _how(self) -> str:
        """Say who saw what in this run."""
        masks = "by protocol"
        if self.secure.simulated:
            masks = "without the keys and masks of the protocol, so nothing was protected in it"
        return f"in this run one process was server and clients, {masks}: it saw every update"


class MaskedCertified(SecureCertified):
    """The same where clients are elsewhere: what arrives is clipped, noised and under masks."""

    def receive(
        self, plan: RoundPlan, client: int, delta: torch.Tensor, num_examples: int
    ) -> Contribution:
        """Count the client; its vector is in the sum that the engine keeps."""
        return Contribution(client, delta, 1.0)

    def clip(self, plan: RoundPlan, contribution: Contribution, tally: RoundTally) -> Contribution:
        """Leave it as it is: nobody here could clip it."""
        return contribution

    def noise_client(
        self, plan: RoundPlan, contribution: Contribution, tally: RoundTally
    ) -> Contribution:
        """Leave it as it is: the client has noised it."""
        return contribution

    def release(
        self, plan: RoundPlan, summed: Summed, tally: RoundTally
    ) -> tuple[torch.Tensor, NoiseReport]:
        """Bring the sum back to the update's units; nobody knows who was clipped."""
        update, report = super().release(plan, summed, tally)
        return update, replace(report, clipped_fraction=None)

    def _how(self) -> str:
        honest = "all but so many" if self.secure.colluding else "all"
        return (
            "in this run clients were nodes elsewhere, by protocol: the server saw numbers under "
            f"masks and the sums of rounds; {honest} of a round's clients must keep to the "
            "protocol for the noise that is charged, and a node without a policy of its own takes "
            "the noise that its orders name"
        )


def modulus_bits(secure: SecureSettings, count: int, reach: float) -> int:
    """Return b: room for a signal of at most `reach` and the noise of all clients."""
    _, tail = _noise_of_all(secure, count)
    bits = math.ceil(math.log2(2.0 * (reach + tail) + 2.0))
    if bits > MOST_BITS:
        raise InvalidValueError(
            f"clients_per_round={count} must be fewer under secure_aggregation: their sum needs "
            f"{bits} bits, and numbers have {MOST_BITS} at most"
        )
    return bits


def _noise_of_all(secure: SecureSettings, count: int) -> tuple[float, float]:
    """Return the variance of the noise of all clients, and what no coordinate of it passes."""
    variance = count * secure.variance / max(1, secure.honest(count))
    rare = math.log(2.0 * secure.size) + _WRAP
    return variance, rare / 3.0 + math.sqrt(rare**2 / 9.0 + 2.0 * variance * rare)


def longest_sum(secure: SecureSettings, plan: RoundPlan) -> float:
    """Return the norm, on the grid, that sums of clients which keep to the protocol stay below.

    |sum x_i| <= sum D_i.  Of noise of variance v in d coordinates, each below t, the squares are
    below t^2 and have a second moment of 3 v^2 + v, so by Bernstein's inequality their sum passes
    d v + s with probability exp(-s^2 / (2 d (3 v^2 + v) + 2 t^2 s / 3)); s is that of 2^-40.
    A sum of uniform numbers is longer wherever d is more than some ten: a secret that does not
    fit, or a vector that its client has not clipped, is seen here, and what is shorter is not.
    """
    grid, size = plan.noise_std / math.sqrt(secure.variance), secure.size
    reach = sum(math.sqrt((clip / grid) ** 2 + secure.rounding) for clip in plan.clips.values())
    v, tail = _noise_of_all(secure, len(plan.clients))
    some = _WRAP * tail**2 / 3.0
    more = some + math.sqrt(some**2 + 2.0 * _WRAP * size * (3.0 * v**2 + v))
    return reach + math.sqrt(size * v + more)


def client_words(
    source: NoiseSource, round_index: int, client: int
) -> Callable[[int], NDArray[np.uint64]]:
    """Return the fair bits of a client in a round."""
    return words_of(source.stream(round_index, _PURPOSE, client))


def noised_integers(
    vector: NDArray[np.float64],
    *,
    clip: float,
    grid: float,
    share: Fraction,
    words: Callable[[int], NDArray[np.uint64]],
) -> NDArray[np.int64]:
    """Round a vector of at most the norm `clip` to the grid; add noise of variance `share`."""
    coins = np.random.Generator(np.random.PCG64(words(4).tolist()))
    limit = (clip / grid) ** 2 + vector.size / 4.0
    return round_within(vector / grid, limit, coins) + skellam(share, vector.size, words)


def clipped(vector: torch.Tensor, clip: float, *, normalise: bool) -> NDArray[np.float64]:
    """Return an update as `certified` clips it; zeros for one that is not finite."""
    plain = vector.detach().to("cpu", torch.float64)
    length = norm(plain)
    if not math.isfinite(length):
        return np.zeros(plain.numel())
    if length > clip or (normalise and length > NOTHING):
        plain = plain * (clip / length * SHAVE)
    return np.asarray(plain.numpy())


def round_within(
    vector: NDArray[np.float64], limit: float, coins: np.random.Generator
) -> NDArray[np.int64]:
    """Round a vector to integers at random, to a squared norm of at most `limit`.

    The squared norm of the vector itself must be below `limit`.

    >>> round_within(np.array([0.5, -0.5, 3.0]), 9.5, np.random.default_rng(0)).tolist()
    [0, 0, 3]
    """
    low = np.floor(vector)
    part, floor = vector - low, low.astype(np.int64)
    for _ in range(_TRIES):
        rounded = floor + (coins.random(vector.size) < part)
        if int(rounded @ rounded) <= limit:
            return rounded
    return np.trunc(vector).astype(np.int64)
