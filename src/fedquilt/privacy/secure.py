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

Skellam noise: an exact sampler, and the Gaussian that dominates it.

A Skellam number of variance v is the difference of two Poisson numbers of mean v/2.  Sums of
independent ones are Skellam again, so clients that each add a share make one noise whose variance
is the sum of theirs: what secure aggregation needs (Agarwal, Kairouz and Liu 2021).

**What it costs.**  Let X be Skellam of variance v on the integers and F its distribution function.
X is log-concave (a convolution of Poissons), so the best tests between X and X + 1 are thresholds:
the trade-off curve of the pair is the polygon through (P(X >= t), P(X + 1 < t)).  Between two
vertices a chord of the convex curve G_m(a) = Phi(Phi^-1(1 - a) - m) lies above that curve, so the
pair is m-GDP (Dong, Roth and Su 2022) if and only if it is at the vertices:

    m(v) = sup_t  Phi^-1(F(t)) - Phi^-1(F(t - 1)),        about (1 + 1/(6v)) / sqrt(v).

A shift by k is k shifts by one, hence (k m)-GDP (group privacy, Theorem 2.14 there); coordinates
have independent noise, hence a shift of a vector by integers x is |x|_2 m(v)-GDP (Corollary 3.3).
The ledger's unit of a release is thus |x|_2^2 m(v)^2: it is proved for the whole curve of
(epsilon, delta), not for some orders of Renyi, and sums with Gaussian releases exactly.

`skellam_mu` computes the supremum and proves it for every t.  Let S(t) = P(X > t), and let
z(t) = Phi^-1(F(t)).

1. |t| <= T about 5 v^(3/4): every step is computed.  I_t(v) solves the recurrence of Bessel
   functions between t = 0 and a t far out, a tridiagonal system, which damps errors (Olver 1967).
2. T < t < 8v: as the normal hazard is at least z, a step is at most ln(S(t-1) / S(t)) / z(t-1).
   With r_t = P(X = t) / P(X = t + 1) <= exp(asinh((t + 1) / v)) (Amos 1974), which grows with t,
   S(t) / P(X = t) >= R^-1 + .. + R^-J for R = exp(asinh((t + J + 1) / v)); and z(t - 1) is at least
   the normal quantile of Chernoff's bound exp(-t asinh(t/v) + sqrt(t^2 + v^2) - v).  Numerator
   and denominator both grow with t, so blocks of t are bounded by their ends.
3. t >= 8v: the same with J = 1 gives at most ln(2t/v + 6) / sqrt(t (ln(2t/v) - 1)), which falls
   with t and at t = 8v is below 1 / sqrt(v).

X is symmetric, so steps at -t are those at t.

**Sampling.**  `skellam` is exact: its numbers have the Skellam distribution itself, not one near
it, given independent fair bits.  It inverts the distribution function of the Poisson numbers on
integers: a word of 64 bits is the beginning of a uniform number, and the table has for every value
two integers between which the exact probability lies, with their distance proved.  A word that
falls between two such integers (one in 2^50 or so) is continued by another word, under a table of
twice the precision, and so on.  No floating point is involved.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.quorum import fewest
from fedquilt.common.vectors import norm
from fedquilt.privacy.certified import NOTHING, SHAVE, Certified, CertifiedSettings
from fedquilt.privacy.mechanism import Contribution, NoiseReport, RoundPlan, RoundTally, Summed
from fedquilt.privacy.noise import BandedNoise, NoiseSource, words_of
from fedquilt.privacy.policies import JoinFacts, Policy

Words = Callable[[int], NDArray[np.uint64]]
"""Draws so many independent words of 64 fair bits."""

LEAST_VARIANCE, MOST_VARIANCE = 16, 2**26
"""Of the noise of the fewest on a sum; that of all may have twice as much."""

_GUARD = 1e-8  # relative, far above the rounding errors of the steps
_WORD = 64


@dataclass(frozen=True, eq=False)
class _Table:
    """Bounds of 2^bits times the distribution function at `first`, `first` + 1, ..."""

    first: int
    below: list[int]
    above: list[int]


@functools.lru_cache(maxsize=16)
def _poisson_table(mean: Fraction, bits: int) -> _Table:
    """Enclose the distribution function of a Poisson number, in units of 2^-bits.

    Weights w_t = mean^t / t!, relative to that of the mode, are rounded down step by step away
    from it.  A step multiplies by at most 1 and loses at most one unit, so after K steps the
    true weight is at most K units above; a geometric series bounds what is left out.
    """
    over, under = mean.numerator, mean.denominator
    mode = over // under
    up, down = [1 << (bits + 2 * _WORD)], []
    while up[-1]:
        up.append(up[-1] * over // (under * (mode + len(up))))
    weight, value = up[0], mode
    while value and weight:
        weight = weight * under * value // over
        value -= 1
        down.append(weight)
    weights = down[::-1] + up
    steps, last = max(len(up), len(down)), mode + len(up) - 1
    left_out = steps * (value + 1) + steps * (last + 1) * under // ((last + 1) * under - over) + 1
    slack = steps * len(weights) + left_out
    total = sum(weights)
    below, above, done = [], [], 0
    for weight in weights:
        done += weight
        below.append((done << bits) // (total + slack))
        above.append(min(-((-(done + slack) << bits) // total), 1 << bits))
    return _Table(value, below, above)


def _continue(mean: Fraction, prefix: int, bits: int, draw: Words, word: int) -> int:
    """Return the Poisson number of the uniform number that begins with `prefix`."""
    while True:
        prefix, bits = prefix << word | int(draw(1)[0]) >> (_WORD - word), bits + word
        table = _poisson_table(mean, bits)
        place = bisect.bisect_right(table.below, prefix)
        least = table.above[place - 1] if place else table.first and 1 << bits
        if place < len(table.below) and prefix >= least:
            return table.first + place


def poisson(mean: Fraction, size: int, draw: Words, word: int = _WORD) -> NDArray[np.int64]:
    """Return exact Poisson numbers; `word` is how many bits are looked at first."""
    table = _poisson_table(mean, word)
    most = (1 << word) - 1
    known = sum(value <= most for value in table.above)
    below = np.array(table.below[:known], dtype=np.uint64)
    above = np.array(table.above[:known], dtype=np.uint64)
    drawn = draw(size) >> np.uint64(_WORD - word)
    places = np.searchsorted(below, drawn, side="right")
    sure = (places > 0) & (places < known)
    sure[sure] = drawn[sure] >= above[places[sure] - 1]
    if not table.first:  # nothing lies below the first value of the table
        sure |= (places == 0) & (known > 0)
    numbers = places.astype(np.int64) + table.first
    for unsure in np.flatnonzero(~sure):
        numbers[unsure] = _continue(mean, int(drawn[unsure]), word, draw, word)
    return numbers


def skellam(variance: Fraction, size: int, draw: Words) -> NDArray[np.int64]:
    """Return exact Skellam numbers of a variance: differences of two Poisson numbers."""
    numbers = poisson(variance / 2, 2 * size, draw)
    return numbers[:size] - numbers[size:]


@functools.lru_cache(maxsize=256)
def skellam_mu(variance: int) -> float:
    """Return an m, rounded up, with which Skellam noise under a shift by one is m-GDP.

    >>> round(skellam_mu(10_000) * 100, 6)
    1.000017
    """
    checks.integer("variance", variance, at_least=LEAST_VARIANCE, at_most=2 * MOST_VARIANCE)
    v = float(variance)
    reach = min(int(8 * v), max(64, int(5 * v**0.75)))
    found = _largest_step(v, reach)
    beyond = _largest_beyond(v, reach)
    if beyond > found:
        raise InvalidValueError(
            f"variance={variance} must have its largest step within {reach}: {beyond} > {found}"
        )
    return found * (1 + _GUARD)


def _largest_step(v: float, reach: int) -> float:
    """Return the largest Phi^-1(F(t)) - Phi^-1(F(t - 1)) for 0 <= t <= reach."""
    from scipy.linalg import solve_banded

    # Beyond the start, ratios are near Amos' bounds; the recurrence damps what they leave.
    start = reach + 64 + int(40 * v / reach)
    logs, ratios = _bessel(v, start)
    # tail[t] = S(t) / P(X = t + 1) = 1 + tail[t + 1] P(X = t + 2) / P(X = t + 1)
    bands = np.ones((2, start - 1))
    bands[0, 1:] = -1.0 / ratios[1:]
    tail = solve_banded((0, 1), bands, np.ones(start - 1), overwrite_ab=True, check_finite=False)
    log_tail = logs[1:] + np.log(tail)
    log_total = math.log1p(2.0 * math.exp(log_tail[0]))
    quantiles = _upper_quantile(log_tail[: reach + 1] - log_total)
    steps = np.diff(quantiles, prepend=-quantiles[0])
    return float(steps.max())


def _bessel(v: float, start: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ln(I_t(v) / I_0(v)) for t < `start`, and the ratios of each to the next.

    I_(t-1) = (2t / v) I_t + I_(t+1).  What is solved for is w_t = I_t / g_t, near 1, where
    ln g_t = -sum asinh((s + 1/2) / v) over s < t, with w_0 = w_start = 1.
    """
    from scipy.linalg import solve_banded

    falls = np.arcsinh((np.arange(start) + 0.5) / v)
    steps = np.exp(-falls)
    bands = np.zeros((3, start - 1))
    bands[0, 1:] = steps[1:-1]
    bands[1] = 2.0 * np.arange(1, start) / v
    bands[2, :-1] = -1.0 / steps[1:-1]
    ends = np.zeros(start - 1)
    ends[0], ends[-1] = 1.0 / steps[0], -steps[-1]
    inner = solve_banded((1, 1), bands, ends, overwrite_ab=True, check_finite=False)
    weights = np.concatenate([[1.0], inner])
    logs = np.log(weights)
    logs[1:] -= np.cumsum(falls[:-1])
    return logs, weights[:-1] / weights[1:] / steps[:-1]


def _largest_beyond(v: float, reach: int) -> float:
    """Return a bound of the steps at t > reach (see 2 and 3 above)."""
    if reach >= 8 * v:
        return 0.0
    share = 0.02 * (reach / v) ** 2  # of a block: below what is left between bound and 1/sqrt(v)
    count = int(math.log(8 * v / reach) / math.log1p(share)) + 2
    ends = reach * np.exp(np.linspace(0.0, math.log(8.01 * v / reach), count))
    low, high = ends[:-1], ends[1:]
    terms = np.ceil((3.0 + 0.6 * math.log(v)) / np.arcsinh(low / v))
    ratio = np.arcsinh((high + terms + 1) / v)
    drop = np.log1p(np.expm1(ratio) / -np.expm1(-terms * ratio))
    chernoff = low * np.arcsinh(low / v) - low * low / (np.sqrt(low * low + v * v) + v)
    z = _upper_quantile(-chernoff)
    return float((drop / z).max())


def _upper_quantile(log_tail: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return z with ln(1 - Phi(z)) = log_tail."""
    from scipy.special import ndtri_exp

    return np.asarray(-ndtri_exp(log_tail))


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
