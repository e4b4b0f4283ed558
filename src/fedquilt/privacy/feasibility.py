"""Will a private run learn anything?  The answer before the run, in figures.

Notation: noise of standard deviation z·C on the sum of updates clipped at C, a
cohort of m clients, d trainable parameters, T rounds, at most K joins a client.

    noise on the mean update, per coordinate     z·C/m
    its norm                                     z·C·√d/m
    largest norm of the mean update              C           (all clients agree)

    ratio of a round      z·√d/m
    ratio of the run      T rounds add signal like T·C and noise like √T·z·C·√d/m:
                          z·√d/(m·√T)

Signal is taken at its largest: every update at the clip bound, all in the same
direction, round after round.  A ratio of the run below 0.55 is called workable, from 1.5
on hopeless, hard in between.  The words are from validation accuracies on digits, 50
clients that all join (60 rounds, every update scaled to the clip; 0.95 without noise):

    ratio      0.22   0.39   0.59   0.71   0.75   1.02   1.07   1.37   1.90
    accuracy   0.92   0.90   0.71   0.79   0.88   0.60   0.37   0.70   0.36
    model      linear linear CNN    linear MLP    linear CNN    MLP    linear

Without sampling z = √K/μ, with μ that of (epsilon, delta), or 2·√K/μ where a client's
data may be exchanged for any others (replace-one).  The ratio of the run is then
√(d·K/T)/(m·μ), or twice that: where every client joins every round the number of rounds
cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import format_bound, text_table
from fedquilt.privacy.accounting import (
    Adjacency,
    Release,
    calibrate,
    gaussian_epsilon,
    gaussian_mu,
)
from fedquilt.privacy.accounting import epsilon as total_epsilon

_WEAK_EPSILON = 10.0
WORKABLE, HOPELESS = 0.55, 1.5
"""Ratios of the run: below the first it is workable, from the second on hopeless."""


class NoiseSoFar:
    """The noise of all rounds so far against the largest signal they could carry.

    √(d Σ noise_std²) / Σ clip, with d noised numbers: after the last round it is the ratio of the
    run.  It is public, because it follows from options and charges.
    """

    def __init__(self, noised: int) -> None:
        self._noised = noised
        self._noise = self._signal = 0.0
        self.rounds = 0

    def after(self, lines: Iterable[Mapping[str, Any]]) -> float | None:
        """Count the lines of further rounds; return the ratio, None before there is noise."""
        for line in lines:
            self.rounds += 1
            if line.get("noise_std") and line.get("clip_value"):
                self._noise += line["noise_std"] ** 2
                self._signal += line["clip_value"] * line.get("agg_scale", 1.0)
        return math.sqrt(self._noised * self._noise) / self._signal if self._signal else None


@dataclass(frozen=True)
class Feasibility:
    """What was asked, and what the noise will do to it.

    `noise_multiplier` is z, in units of the clip bound, on the sum;
    `noise_std_on_mean` = z·C/m.  `noise_to_signal_round` and
    `noise_to_signal_run` are the two ratios of the module's docstring.
    `usable_parameters` and `usable_cohort` are the most parameters and the
    fewest clients per round at which the run is workable, the rest unchanged.
    `joins` is how many of a client's joins the noise is made for, `verdict` one of
    workable, hard and hopeless, and `advice` what to change, the first thing first.
    """

    population: int
    rounds: int
    epsilon: float
    delta: float
    parameters: int
    joins: float
    cohort: float
    clip_norm: float
    sampling_rate: float
    method: str
    adjacency: str
    noise_multiplier: float
    noise_std_on_mean: float
    noise_to_signal_round: float
    noise_to_signal_run: float
    usable_parameters: int
    usable_cohort: int
    verdict: str
    advice: tuple[str, ...]

    @property
    def workable(self) -> bool:
        """Whether the noise of the whole run stays well below the largest signal."""
        return self.noise_to_signal_run < WORKABLE

    @property
    def limits(self) -> tuple[float, float]:
        """The noise/signal below which a run is workable, and from which it is hopeless."""
        return WORKABLE, HOPELESS

    @property
    def line(self) -> str:
        """Noise, verdict and the first thing to change, in one line."""
        ratio, first = self.noise_to_signal_run, ""
        if not self.workable:
            advice = f"{self.advice[0][0].lower()}{self.advice[0][1:]}"
            first = f"; {advice}" if " not enough" in advice else f"; first {advice}"
        size = f"{ratio:.2g} of" if ratio < 1 else f"{ratio:.3g} times"
        return f"noise over the run: {size} a typical update, {self.verdict}{first}"

    @property
    def cell(self) -> str:
        """Noise and verdict for a table."""
        return f"{self.noise_to_signal_run:.2g}x, {self.verdict}"


def plan_privacy(
    population: int,
    rounds: int,
    epsilon: float,
    delta: float,
    parameters: int,
    joins: float | None,
    cohort: float,
    clip_norm: float = 1.0,
    sampling_rate: float = 1.0,
    adjacency: str | Adjacency = Adjacency.ZERO_OUT,
    noise_multiplier: float | None = None,
) -> Feasibility:
    """Return what (epsilon, delta) for every client costs a run.

    `joins` is the most rounds any client takes part in, `None` for all of them;
    `cohort` the number of clients expected in a round.  With `sampling_rate` < 1
    the server tosses a secret coin for each client, and `joins` counts tosses.
    The guarantee compares a client's data with nothing in their place; with
    `adjacency="replace_one"` it compares any data of a client with any other.
    Whoever knows the noise already gives it as `noise_multiplier`; `joins` is then how
    many joins it is made for, on average.
    """
    checks.integer("population", population, at_least=1)
    checks.integer("rounds", rounds, at_least=1)
    epsilon = checks.number("epsilon", epsilon, above=0)
    delta = checks.number("delta", delta, above=0, below=1)
    checks.integer("parameters", parameters, at_least=1)
    joins = rounds if joins is None else joins
    if noise_multiplier is None:
        joins = checks.integer("joins", checks.integer("joins", joins, at_least=1), at_most=rounds)
    clip_norm = checks.number("clip_norm", clip_norm, above=0)
    sampling_rate = checks.number("sampling_rate", sampling_rate, above=0, at_most=1)
    cohort = _cohort(cohort, population * joins * sampling_rate / rounds)

    relation = Adjacency.of(adjacency)
    method = _method(sampling_rate, int(joins), epsilon, relation)
    z = noise_multiplier or calibrate(
        epsilon,
        delta,
        rounds=int(joins),
        sampling_rate=sampling_rate,
        method=method,
        adjacency=relation,
    )
    per_round = z * math.sqrt(parameters) / cohort
    ratio = per_round / math.sqrt(rounds)
    asked = Feasibility(
        population=population,
        rounds=rounds,
        epsilon=epsilon,
        delta=delta,
        parameters=parameters,
        joins=joins,
        cohort=cohort,
        clip_norm=clip_norm,
        sampling_rate=sampling_rate,
        method=method,
        adjacency=relation.value,
        noise_multiplier=z,
        noise_std_on_mean=z * clip_norm / cohort,
        noise_to_signal_round=per_round,
        noise_to_signal_run=ratio,
        usable_parameters=max(0, math.ceil((WORKABLE * cohort / z) ** 2 * rounds) - 1),
        usable_cohort=math.floor(z * math.sqrt(parameters / rounds) / WORKABLE) + 1,
        verdict="workable" if ratio < WORKABLE else "hard" if ratio < HOPELESS else "hopeless",
        advice=(),
    )
    return _advised(asked)


_MOST_PLD_TOSSES = 10_000  # more take minutes
_LEAST_EPSILON, _LARGEST_EPSILON = 1e-3, 1e4


def _method(sampling_rate: float, tosses: int, epsilon: float, adjacency: Adjacency) -> str:
    """Return how the noise is calibrated; with a coin, in a time that can be waited for."""
    if sampling_rate == 1:
        return "gdp"
    checks.number("epsilon", epsilon, at_least=_LEAST_EPSILON, at_most=_LARGEST_EPSILON)
    if tosses <= _MOST_PLD_TOSSES:
        return "pld"
    if adjacency is Adjacency.REPLACE_ONE:
        raise InvalidValueError(
            f"joins={tosses} must be <= {_MOST_PLD_TOSSES} with sampling_rate < 1 and "
            f"adjacency={adjacency.value!r}: only privacy loss distributions bound them, which "
            "take too long for so many"
        )
    return "rdp"


def plan_table(plan: Feasibility) -> str:
    """Return the plan as a table of plain text."""
    rows = [
        ("verdict", plan.verdict),
        ("clients in the population", f"{plan.population:,}"),
        ("clients a release", f"{plan.cohort:,.3g}"),
        ("releases", f"{plan.rounds:,}"),
        ("joins of a client", f"{plan.joins:,.3g}"),
        ("sampling rate", f"{plan.sampling_rate:g}"),
        ("trainable parameters", f"{plan.parameters:,}"),
        ("promise to every client", f"epsilon {plan.epsilon:g}, delta {plan.delta:g}"),
        ("adjacency", Adjacency.of(plan.adjacency).words),
        ("noise multiplier, on the sum", f"{plan.noise_multiplier:.4g}"),
        ("noise std per coordinate, on the mean", f"{plan.noise_std_on_mean:.4g}"),
        ("noise / signal of a round", f"{plan.noise_to_signal_round:.3g}"),
        ("noise / signal of the run", f"{plan.noise_to_signal_run:.3g}"),
        ("most parameters that would work", f"{plan.usable_parameters:,}"),
        ("fewest clients a release that would work", f"{plan.usable_cohort:,}"),
    ]
    return text_table((), rows)


def _cohort(cohort: object, most: float) -> float:
    """Return the cohort, refusing one that the clients' joins cannot fill."""
    value = checks.number("cohort", cohort, above=0)
    if value > most * (1 + 1e-9):
        raise InvalidValueError(
            f"cohort={cohort!r} must be <= {most:g} "
            "(population * joins * sampling_rate / rounds: all the joins there are)"
        )
    return value


def _advised(asked: Feasibility) -> Feasibility:
    if asked.workable:
        return replace(asked, advice=_praise(asked))
    levers = (_fewer_parameters, _larger_cohort, _fewer_joins, _larger_epsilon)
    return replace(asked, advice=tuple(lever(asked) for lever in levers))


def _praise(asked: Feasibility) -> tuple[str, ...]:
    return (
        f"workable: over the run the noise is {asked.noise_to_signal_run:.3g} times the largest "
        f"signal; it stays so up to {asked.usable_parameters:,} parameters.",
    )


def _fewer_parameters(asked: Feasibility) -> str:
    if asked.usable_parameters < 1:
        return "Fewer trainable parameters are not enough: even one would drown in the noise."
    return (
        f"Train fewer parameters: {asked.usable_parameters:,} or fewer (now "
        f"{asked.parameters:,}), with a smaller model or with `trainable`, which freezes the rest."
    )


def _larger_cohort(asked: Feasibility) -> str:
    return (
        f"Let more clients join each round: {asked.usable_cohort:,} or more (now "
        f"{asked.cohort:,.3g}){_population_note(asked, asked.usable_cohort, asked.joins)}."
    )


def _fewer_joins(asked: Feasibility) -> str:
    joins = _usable_joins(asked)
    if joins < 1:
        advice = "Fewer joins are not enough: even one join a client costs too much."
    else:
        people = _population_note(asked, asked.cohort, joins)
        advice = (
            f"Let each client join less often, over the same rounds: {joins:,} or fewer joins "
            f"(now {asked.joins:,.3g}), with policy 'cap' and `max_joins`{people}."
        )
    return f"{advice} {_rounds_note(asked)}"


def _rounds_note(asked: Feasibility) -> str:
    if asked.joins < asked.rounds:
        return "Fewer rounds at the same joins make it worse."
    change = "nothing" if asked.sampling_rate == 1 else "little"
    return f"Fewer rounds alone change {change}: signal and noise of the run shrink together."


def _larger_epsilon(asked: Feasibility) -> str:
    needed = _spent(asked, asked.joins)
    weak = ", a promise too weak to mean much" if needed > _WEAK_EPSILON else ""
    return f"Accept a larger epsilon: {format_bound(needed)} or more (now {asked.epsilon:g}){weak}."


def _spent(asked: Feasibility, joins: float) -> float:
    """Return the epsilon of `joins` at the noise with which the run is just workable."""
    noise = WORKABLE * asked.cohort * math.sqrt(asked.rounds / asked.parameters)
    if asked.method == "gdp":
        # mu grows with the root of the joins and falls with the noise.
        now = gaussian_mu(asked.epsilon, asked.delta)
        mu = now * asked.noise_multiplier / noise * math.sqrt(joins / asked.joins)
        return gaussian_epsilon(mu, asked.delta)
    release = Release(noise, int(joins), asked.sampling_rate)
    return total_epsilon(
        [release], asked.delta, method=asked.method, adjacency=Adjacency.of(asked.adjacency)
    ).epsilon


def _usable_joins(asked: Feasibility) -> int:
    """Return the most joins a client may have at the noise that is usable, by bisection."""
    low, high = 0, math.ceil(asked.joins)
    while high - low > 1:
        middle = (low + high) // 2
        if _spent(asked, middle) <= asked.epsilon:
            low = middle
        else:
            high = middle
    return low


def _population_note(asked: Feasibility, cohort: float, joins: float) -> str:
    """Say how many clients it takes to fill `cohort` with `joins` a client, if more than now."""
    needed = math.ceil(cohort * asked.rounds / (joins * asked.sampling_rate) - 1e-9)
    if needed <= asked.population:
        return ""
    return f", which takes a population of {needed:,} (now {asked.population:,})"
