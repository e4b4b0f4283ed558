"""A ledger for people: tables of who spent what, and spend against joins as a figure."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.common.bounds import format_bound, format_left
from fedquilt.common.printable import printable
from fedquilt.report.style import (
    BLUE,
    GREY,
    VERMILION,
    as_drawn,
    drawing,
    figure_path,
    figure_settings,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEAR_END = 0.9


def ledger_tables(
    summaries: Sequence[Any], rows: Mapping[str, Sequence[Any]], most: int = 10
) -> str:
    """Return a table of the populations and, for each, its dearest clients.

    `summaries` and `rows` are what a population's `summary` and `rows` give.
    """
    from tabulate import tabulate

    if not summaries:
        return "no population yet"
    head = [
        (
            printable(s.population),
            s.clients,
            s.joined,
            f"{format_bound(s.epsilon_allowance, 6)} at {format_bound(s.delta, 6)}"
            + (", replace-one" if s.adjacency == "replace_one" else ""),
            _spent(s.epsilon_max),
            _spent(s.epsilon_median),
            s.near_end,
            s.exhausted,
            format_left(s.largest_run_epsilon),
        )
        for s in summaries
    ]
    titles = ["population", "clients", "joined", "allowance", "most spent", "median"]
    titles += ["near the end", "used up", "all can still pay"]
    parts = [tabulate(head, headers=titles, disable_numparse=True)]
    for summary in summaries:
        parts.append(f"\n{printable(summary.population)}: who has spent most")
        parts.append(_clients(rows[summary.population], most))
    return "\n".join(parts)


def _clients(rows: Sequence[Any], most: int) -> str:
    from tabulate import tabulate

    dearest = sorted(rows, key=lambda row: (-row.epsilon_spent, row.client))[:most]
    lines = [
        (
            row.client if row.client_id is None else printable(row.client_id),
            row.joins,
            _spent(row.epsilon_spent),
            format_left(row.epsilon_left),
            "-" if row.last_round is None else printable(f"{row.last_run}, round {row.last_round}"),
        )
        for row in dearest
    ]
    titles = ["client", "joins", "epsilon spent", "can still pay", "last"]
    return tabulate(lines, headers=titles, disable_numparse=True)


def plot_ledger(
    summaries: Sequence[Any],
    rows: Mapping[str, Sequence[Any]],
    save_path: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Draw, for each population, spend against joins and who is near the end."""
    count = max(1, len(summaries))
    settings = figure_settings(config, (7.5, 1.0 + 3.9 * count))
    path = figure_path(save_path, "ledger", settings)
    with drawing(settings) as figure:
        axes = np.atleast_1d(np.asarray(figure.subplots(count, 1)))
        for one, summary in zip(axes, summaries, strict=False):
            _draw(one, summary, rows[summary.population])
        return save_figure(figure, path, settings)


def _draw(axes: Axes, summary: Any, rows: Sequence[Any]) -> None:
    joins = np.asarray([row.joins for row in rows])
    spent = np.asarray([row.epsilon_spent for row in rows])
    left = np.asarray([row.mu2_left for row in rows])
    used = np.asarray([row.mu2_spent for row in rows])
    bounded = np.isfinite(spent)
    near = bounded & (used > NEAR_END * (used + left)) & (used > 0)
    calm = bounded & ~near
    axes.scatter(
        joins[calm], spent[calm], s=18, color=BLUE, alpha=0.55, label=f"{calm.sum()} clients"
    )
    if near.any():
        label = f"{near.sum()} near the end or used up"
        axes.scatter(joins[near], spent[near], s=18, color=VERMILION, marker="D", label=label)
    axes.axhline(summary.epsilon_allowance, color=GREY, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"allowance {format_bound(summary.epsilon_allowance, 6)}",
        (0.01, summary.epsilon_allowance),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4),
        textcoords="offset points",
        verticalalignment="top",
        color=GREY,
    )
    unbounded = int((~bounded).sum())
    note = f", {unbounded} without any bound (not drawn)" if unbounded else ""
    axes.set_title(f"{as_drawn(summary.population)}{note}", fontsize=10)
    axes.set_ylim(0, 1.12 * summary.epsilon_allowance)
    axes.set_xlim(left=min(0, -0.02 * joins.max(initial=1)))
    axes.set_xlabel("joins")
    axes.set_ylabel(f"epsilon spent at delta {format_bound(summary.delta, 6)}")
    axes.legend(loc="lower right", frameon=True)


def _spent(epsilon: float) -> str:
    return format_bound(epsilon) if math.isfinite(epsilon) else "inf"
