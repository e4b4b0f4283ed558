"""The privacy panel of a run that claims a bound: what its clients have spent, by round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.common.bounds import format_bound
from fedquilt.report.series import ROUND, Array, as_number, entries
from fedquilt.report.style import BLUE, GREEN, panel_title, reference, whole_rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUANTILES = ("lowest", "lower_quartile", "median", "upper_quartile", "worst")


def spend_by_round(history: Mapping[str, Any]) -> dict[str, Array]:
    """Return the quantiles of the clients' epsilons after each round; empty without a bound."""
    recorded = entries(history, "epsilon_spent")
    if not any(isinstance(found, Mapping) for found in recorded):
        return {}
    rows = [found if isinstance(found, Mapping) else {} for found in recorded]
    return {name: np.asarray([as_number(row.get(name)) for row in rows]) for name in QUANTILES}


def draw_spend(axes: Axes, history: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Draw median and worst client, the range of all, the run's budget, and who sat out."""
    spent = spend_by_round(history)
    rounds = np.arange(1.0, spent["worst"].size + 1)
    axes.fill_between(rounds, spent["lowest"], spent["worst"], color=GREEN, alpha=0.12, linewidth=0)
    axes.fill_between(
        rounds,
        spent["lower_quartile"],
        spent["upper_quartile"],
        color=GREEN,
        alpha=0.25,
        linewidth=0,
    )
    marker = "o" if rounds.size == 1 else ""
    axes.plot(rounds, spent["median"], color=GREEN, linewidth=2, marker=marker, label="median")
    axes.plot(
        rounds, spent["worst"], color=BLUE, linewidth=1.6, marker=marker, label="worst client"
    )
    notes = ["upper line: worst client; lower: median; bands: middle half, all"]
    budget = as_number(config.get("epsilon"))
    top = float(np.nanmax(spent["worst"]))
    if math.isfinite(budget):
        reference(axes, budget)
        notes.append(f"dashed: budget of the run, epsilon {format_bound(budget)}")
        top = max(top, budget)
    out = sat_out(history)
    if out:
        notes.append(f"sat out the last round, with nothing left: {out}")
    axes.set_ylim(0, 1.08 * top if top > 0 else 1.0)
    axes.set_ylabel("epsilon spent in this run")
    whole_rounds(axes, rounds, ROUND)
    panel_title(axes, "Privacy Spent by Each Client", notes)


def sat_out(history: Mapping[str, Any]) -> int:
    """Return how many clients could not pay the last round."""
    counts = [as_number(value) for value in entries(history, "without_allowance")]
    return int(counts[-1]) if counts and math.isfinite(counts[-1]) else 0
