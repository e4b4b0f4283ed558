"""Budgets for people: who has spent what of a ledger, and what the noise of a plan will do."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.common import checks
from fedquilt.common.formatting import format_bound, format_left, printable, text_table
from fedquilt.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEAR_END = 0.9
NOT_ADDED = "epsilons do not add up to the allowance; the squares of their mu (mu²) do"


def ledger_tables(
    summaries: Sequence[Any], rows: Mapping[str, Sequence[Any]], most: int = 10
) -> str:
    """Return a table of the populations and, for each, its dearest clients.

    `summaries` and `rows` are what a population's `summary` and `rows` give.
    """
    if not summaries:
        return "no population yet"
    parts = []
    for summary in summaries:
        parts += [_summary(summary), f"\n{printable(summary.population)}: who has spent most"]
        parts.append(_clients(rows[summary.population], most) + "\n")
    return "\n".join(parts).removesuffix("\n")


def _summary(s: Any) -> str:
    """Return one line a fact: side by side they would not fit a screen."""
    allowance = f"{format_bound(s.epsilon_allowance, 6)} at {format_bound(s.delta, 6)}"
    facts = {
        "population": printable(s.population),
        "clients": s.clients,
        "joined": s.joined,
        "allowance": allowance + (", replace-one" if s.adjacency == "replace_one" else ""),
        "most spent": _spent(s.epsilon_max),
        "median": _spent(s.epsilon_median),
        "near the end": s.near_end,
        "used up": s.exhausted,
        "all can still pay": format_left(s.largest_run_epsilon),
    }
    return "\n".join([*(f"{name:<18} {value}" for name, value in facts.items()), NOT_ADDED])


def client_facts(population: str, row: Any) -> str:
    """Return what one client has given away and may still give, a line a fact."""
    delta, allowance = format_bound(row.delta, 6), format_bound(row.epsilon_allowance, 6)
    last = "-" if row.last_round is None else f"round {row.last_round + 1} of {row.last_run}"
    facts = {
        "client": printable(row.client if row.client_id is None else row.client_id),
        "population": printable(population),
        "joins": row.joins,
        "given away": f"epsilon {_spent(row.epsilon_spent)} at delta {delta}",
        "can still pay": f"epsilon {format_left(row.epsilon_left)} of a lifetime {allowance}",
        "last release": printable(last),
    }
    return "\n".join([*(f"{name:<18} {value}" for name, value in facts.items()), NOT_ADDED])


def _clients(rows: Sequence[Any], most: int) -> str:
    dearest = sorted(rows, key=lambda row: (-row.epsilon_spent, row.client))[:most]
    runs: dict[str, int] = {}  # their names are long: a number stands for each
    for row in dearest:
        if row.last_round is not None:
            runs.setdefault(row.last_run, len(runs) + 1)
    lines = [
        (
            row.client if row.client_id is None else printable(row.client_id),
            row.joins,
            _spent(row.epsilon_spent),
            format_left(row.epsilon_left),
            "-" if row.last_round is None else f"[{runs[row.last_run]}] {row.last_round + 1}",
        )
        for row in dearest
    ]
    titles = ["client", "joins", "epsilon spent", "can still pay", "last round"]
    table = text_table(titles, lines)
    return "\n".join([table, *(f"[{number}] {printable(name)}" for name, number in runs.items())])


def plot_ledger(
    summaries: Sequence[Any],
    rows: Mapping[str, Sequence[Any]],
    save_path: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Draw, for each population, spend against joins, and how much of its allowance is gone.

    Clients near the end have a mark of their own.
    """
    count = max(1, len(summaries))
    settings = style.figure_settings(config, (12.0, 0.6 + 4.2 * count))
    path = style.figure_path(save_path, "ledger", settings)
    with style.drawing(settings) as figure:
        panels = figure.subplots(count, 2, squeeze=False, width_ratios=[1.5, 1])
        for (left, right), summary in zip(panels, summaries, strict=False):
            _draw(left, summary, rows[summary.population])
            _draw_shares(right, summary, rows[summary.population])
        return style.save_figure(figure, path, settings)


def _draw_shares(axes: Axes, summary: Any, rows: Sequence[Any]) -> None:
    """Draw how many clients have spent which tenth of their allowance, in units that add up."""
    from matplotlib.ticker import MaxNLocator

    used = np.asarray([row.mu2_spent for row in rows])
    whole = used + np.asarray([row.mu2_left for row in rows])
    known = np.isfinite(used) & (whole > 0)
    shares = np.minimum(used[known] / whole[known], 1.0)
    never = int((shares == 0).sum())
    counts, edges = np.histogram(shares[shares > 0], bins=10, range=(0.0, 1.0))
    colors = [style.VERMILION if edge >= NEAR_END - 1e-9 else style.BLUE for edge in edges[:-1]]
    axes.bar(edges[:-1] + 0.05, counts, width=0.09, color=colors, alpha=0.8)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("share of the allowance that is spent")
    axes.set_ylabel("clients")
    told = "shares of squared GDP units, which add up"
    notes = [f"{never} of {summary.clients} clients have spent nothing; {told}"]
    left = f"epsilon that everybody can still pay: {format_left(summary.largest_run_epsilon)}"
    style.panel_title(axes, "How much is gone", [*notes, left])


def _draw(axes: Axes, summary: Any, rows: Sequence[Any]) -> None:
    joins = np.asarray([row.joins for row in rows])
    spent = np.asarray([row.epsilon_spent for row in rows])
    left = np.asarray([row.mu2_left for row in rows])
    used = np.asarray([row.mu2_spent for row in rows])
    bounded = np.isfinite(spent)
    near = bounded & (used > NEAR_END * (used + left)) & (used > 0)
    calm = bounded & ~near
    scatter_counts(axes, joins[calm], spent[calm], style.BLUE, "o")
    if near.any():
        scatter_counts(axes, joins[near], spent[near], style.VERMILION, "D")
    allowance = summary.epsilon_allowance
    axes.axhline(allowance, color=style.GREY, linestyle="--", linewidth=1.2)
    notes = [f"dashed: allowance {format_bound(allowance, 6)}; a larger mark is more clients"]
    unbounded = int((~bounded).sum())
    notes += [f"{unbounded} clients without any bound: not drawn"] if unbounded else []
    axes.set_ylim(0, 1.12 * allowance)
    style.whole_rounds(
        axes,
        np.append(joins, 0).astype(np.float64),
        "joins",
        f"epsilon spent at delta {format_bound(summary.delta, 6)}",
    )
    if near.any():
        notes.append(f"diamonds: {near.sum()} clients near the end or used up")
    style.panel_title(
        axes, f"{style.as_drawn(summary.population)}: {summary.clients} clients", notes
    )


def scatter_counts(
    axes: Axes, across: NDArray[Any], up: NDArray[Any], color: str, marker: str
) -> None:
    """Draw one mark for all clients at a place, its area as their number."""
    places, counts = np.unique(np.stack([across, up], axis=1), axis=0, return_counts=True)
    looks: dict[str, Any] = {"color": color, "alpha": 0.6, "marker": marker}
    axes.scatter(places[:, 0], places[:, 1], s=14 + 6 * counts, **looks)


def _spent(epsilon: float) -> str:
    return format_bound(epsilon) if math.isfinite(epsilon) else "inf"


if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COHORT_FACTORS = {1: style.BLUE, 10: style.PURPLE, 100: style.ORANGE}


def plan_figure(plan: Any, path: str | Path, config: Mapping[str, Any] | None = None) -> Path:
    """Draw noise/signal of the run against trainable parameters, and save it at `path`.

    One line each for the asked cohort, 10 and 100 times as many clients per
    round; the asked point is marked.  The suffix chooses png, pdf or svg.  `plan` is what
    `fedquilt.privacy.feasibility.plan_privacy` returns.
    """
    path = Path(path)
    checks.choice(
        "suffix of the figure", path.suffix.lower(), [f".{kind}" for kind in style.FORMATS]
    )
    settings = style.figure_settings(config, (7.2, 5.2))
    with style.drawing(settings) as figure:
        _draw_plan(figure.add_subplot(), plan)
        figure.legend(loc="outside lower center", fontsize=9, frameon=False)
        style.save_figure(figure, path, settings)
    return path


def _draw_plan(axes: Axes, plan: Any) -> None:
    most = 10.0 ** math.ceil(math.log10(max(10.0 * plan.parameters, 1e6)))
    workable, hopeless = plan.limits
    slope = plan.noise_to_signal_run / math.sqrt(plan.parameters)
    for factor, colour in _COHORT_FACTORS.items():
        label = (
            f"{_count(plan.cohort * factor)} clients per round: "
            f"workable up to {_count(math.ceil((workable * factor / slope) ** 2) - 1)} parameters"
        )
        ends = [slope / factor, slope / factor * math.sqrt(most)]
        axes.plot([1.0, most], ends, color=colour, label=label)
    lowest, highest = slope / max(_COHORT_FACTORS), max(10.0, 2 * slope * math.sqrt(most))
    ink = style.text_color()
    axes.axhline(workable, color=ink, linestyle="--", linewidth=1)
    axes.axhline(hopeless, color=ink, linestyle=":", linewidth=1)
    axes.axhspan(min(lowest, 0.1), workable, color=ink, alpha=0.06, linewidth=0)
    axes.text(1.3, 0.9 * workable, "workable below this line", va="top", fontsize=9)
    axes.text(1.3, 1.1 * hopeless, "hopeless above this line", va="bottom", fontsize=9)
    found = f"{plan.noise_to_signal_run:.3g} ({plan.verdict})"
    asked = f"asked: {plan.parameters:,} parameters, {found}"
    axes.plot(plan.parameters, plan.noise_to_signal_run, "o", color=style.VERMILION, label=asked)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(1.0, most),
        ylim=(min(lowest, 0.1), highest),
        xlabel="trainable parameters",
        ylabel="noise / largest signal, whole run",
    )
    told = f"epsilon {plan.epsilon:g}, delta {plan.delta:g}, {plan.rounds:,} rounds, "
    style.panel_title(axes, "What the noise does", [f"{told}{plan.joins:,.4g} joins a client"])


def _count(value: float) -> str:
    return f"{value:,.0f}" if 100 <= value < 1e9 else f"{value:.3g}"
