"""The QuAP-FL paper's figures 2 and 3 over several runs: accuracy, and who consumes the budget.

Runs that are seeds of one another make one line with a band from the lowest to the highest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.config.modes import MODE_TABLE
from fedquilt.report.groups import GroupConsumption, consumption_by_group
from fedquilt.report.series import ROUND, is_absent, no_budget_in_words
from fedquilt.report.style import (
    COLORS,
    PALETTE,
    accuracy_limits,
    drawing,
    figure_settings,
    in_words,
    panel_title,
    save_figure,
    whole_rounds,
)
from fedquilt.report.together import RunSeries, entry_of_result, lay_together

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (6.5, 4.5)
_DASHES = ("-", "--", ":", "-.")
_FRACTION = 0.2

Result = Mapping[str, Any]
Look = tuple[str, str]
"""A colour and a dash."""


def plot_paper_figures_of_runs(
    results: Sequence[Result],
    save_dir: str | os.PathLike[str],
    config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Draw figure 2 (accuracy by round) and figure 3 (nominal epsilon by group) of runs.

    Returns the paths of `figure2_accuracy` and `figure3_privacy_by_group` in `save_dir`.
    """
    settings = figure_settings(config, _SIZE)
    series = lay_together([entry_of_result(result, str(i)) for i, result in enumerate(results)])
    paths = []
    for stem, draw in (("figure2_accuracy", _accuracy), ("figure3_privacy_by_group", _groups)):
        with drawing(settings) as figure:
            draw(figure.subplots(), series, results)
            path = Path(save_dir) / f"{stem}.{settings.format}"
            paths.append(save_figure(figure, path, settings))
    return paths


def _accuracy(axes: Axes, series: Sequence[RunSeries], results: Sequence[Result]) -> None:
    title, drawn = "Test accuracy by round", []
    for (color, dash), one in zip(looks_of(series), series, strict=True):
        rounds = np.asarray(one.curve["rounds"], dtype=float)
        if not rounds.size:
            continue
        mean, low, high = (np.asarray(one.curve[k], dtype=float) for k in ("mean", "low", "high"))
        axes.plot(rounds, mean, color=color, ls=dash, label=label_of(one))
        if len(one.members) > 1:
            axes.fill_between(rounds, low, high, color=color, alpha=0.2, linewidth=0)
        drawn += [mean, low, high]
    if not drawn:
        panel_title(axes, title)
        in_words(axes, "no evaluation was recorded")
        return
    accuracy_limits(axes, np.concatenate(drawn))
    axes.set_ylabel("test accuracy")
    whole_rounds(axes, np.concatenate([np.asarray(s.curve["rounds"]) for s in series]), ROUND)
    axes.legend(fontsize=9)
    panel_title(axes, title, ["line: mean of the seeds; band: lowest to highest seed"])


def draw_groups_of_runs(axes: Axes, results: Sequence[Result], fraction: float) -> None:
    """Draw the nominal epsilon of the most and the least frequent clients of runs."""
    series = lay_together([entry_of_result(result, str(i)) for i, result in enumerate(results)])
    _groups(axes, series, results, fraction)


def _groups(
    axes: Axes,
    series: Sequence[RunSeries],
    results: Sequence[Result],
    fraction: float = _FRACTION,
) -> None:
    title = "Nominal epsilon by participation"
    longest = 0
    for (color, _), one in zip(looks_of(series), series, strict=True):
        own = [results[member] for member in one.members]
        if any(is_absent(result["history"], "privacy_budgets") for result in own):
            continue
        pairs = [consumption_by_group(r["history"], len(r["joins"]), fraction) for r in own]
        for place, (name, dash) in enumerate((("most", "-"), ("least", "--"))):
            rounds = _draw_group(axes, [pair[place] for pair in pairs], color, dash)
            axes.plot(
                [], [], color=color, ls=dash, label=f"{one.label}: {name} frequent {fraction:.0%}"
            )
            longest = max(longest, rounds)
    if not longest:
        panel_title(axes, title)
        in_words(axes, no_budget_in_words(results[0]["history"]))
        return
    axes.set_ylim(bottom=0)
    axes.set_ylabel("nominal epsilon")
    whole_rounds(axes, np.arange(1.0, longest + 1), ROUND)
    axes.legend(fontsize=9)
    notes = ["summed over the rounds a client attended (not a guarantee)"]
    panel_title(axes, title, [*notes, "line: mean of the group and the seeds; band: all seeds"])


def _draw_group(axes: Axes, groups: Sequence[GroupConsumption], color: str, dash: str) -> int:
    length = min(group.mean.size for group in groups)
    rounds = np.arange(1.0, length + 1)
    means = np.asarray([group.mean[:length] for group in groups])
    axes.plot(rounds, means.mean(axis=0), color=color, ls=dash)
    if len(groups) > 1:
        low, high = means.min(axis=0), means.max(axis=0)
        axes.fill_between(rounds, low, high, color=color, alpha=0.2, linewidth=0)
    return length


def looks_of(series: Sequence[RunSeries]) -> list[Look]:
    """Return colour and dash of each series: the colour of its mode where it is alone there."""
    modes = [one.mode for one in series]
    alone = len(set(modes)) == len(modes) and all(mode in MODE_TABLE for mode in modes)
    colors = [COLORS[MODE_TABLE[mode].color] for mode in modes] if alone else PALETTE
    return [(colors[i % len(colors)], _DASHES[i % len(_DASHES)]) for i in range(len(series))]


def label_of(one: RunSeries) -> str:
    """Return what a series is called, with the number of its seeds."""
    count = len(one.members)
    return one.label if count == 1 else f"{one.label} ({count} seeds)"
