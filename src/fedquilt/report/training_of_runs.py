"""The figure of several runs: accuracy, loss, what privacy cost and the clip bound, by round.

Runs that are seeds of one another make one line with a band from the lowest to the highest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.common.bounds import format_bound
from fedquilt.report.paper import Look, label_of, looks_of
from fedquilt.report.series import ROUND, Array, aligned, as_number, column, entries
from fedquilt.report.spend import spend_by_round
from fedquilt.report.style import (
    as_drawn,
    drawing,
    figure_path,
    figure_settings,
    in_words,
    logarithmic,
    panel_title,
    reference,
    save_figure,
    whole_rounds,
)
from fedquilt.report.together import RunSeries, entry_of_result, lay_together

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]
Curves = tuple[Array, Array]
"""Rounds, and a row of values for each seed."""
Drawn = Sequence[tuple[Look, Sequence[Result]]]
"""Colour and dash of each series, and its seeds."""
_BAND = "line: mean of the seeds; band: lowest to highest seed"


def plot_training_of_runs(
    results: Sequence[Result],
    save_path: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Draw the four panels of `plot_training_history` for several runs; return the path.

    `results` are whole results, as result.json holds them: a history alone does not say which
    runs are seeds of one another.
    """
    named = [entry_of_result(result, str(index)) for index, result in enumerate(results)]
    series = lay_together(named)
    own = [
        (look, [results[member] for member in one.members])
        for look, one in zip(looks_of(series), series, strict=True)
    ]
    settings = figure_settings(config)
    path = figure_path(save_path, "training_of_runs", settings)
    with drawing(settings) as figure:
        ((top_left, top_right), (bottom_left, bottom_right)) = figure.subplots(2, 2)
        datasets = sorted({entry.dataset.upper() for entry in named})
        figure.suptitle(as_drawn(f"Training: {', '.join(datasets)}, {len(results)} runs"))
        _draw(top_left, own, _evaluated("test_accuracy"), "Test accuracy")
        _draw_loss(top_right, own)
        _draw_privacy(bottom_left, own)
        if _draw(bottom_right, own, _by_round("clip_values"), "Clip bound"):
            bottom_right.set_ylim(bottom=0)
        _name(figure, series)
        return save_figure(figure, path, settings)


def _evaluated(key: str) -> Callable[[Sequence[Result]], Curves]:
    def read(runs: Sequence[Result]) -> Curves:
        positions, values, _ = aligned([run["history"] for run in runs], key)
        return positions, values

    return read


def _by_round(key: str) -> Callable[[Sequence[Result]], Curves]:
    return lambda runs: _together([column(run["history"], key) for run in runs])


def _together(columns: Sequence[Array]) -> Curves:
    """Return columns by round, as far as the shortest goes."""
    length = min(values.size for values in columns)
    return np.arange(1.0, length + 1), np.asarray([values[:length] for values in columns])


def _draw(
    axes: Axes,
    own: Drawn,
    read: Callable[[Sequence[Result]], Curves],
    label: str,
    title: str | None = None,
    notes: Sequence[str] = (),
) -> bool:
    """Draw one line a series with its band; say so where there is none."""
    reached = [np.zeros(0)]
    for look, runs in own:
        positions, values = read(runs)
        if np.isfinite(values).any():
            _line(axes, positions, values, look)
            reached.append(positions)
    if len(reached) == 1:
        panel_title(axes, label)
        in_words(axes, "nothing of it in these runs")
        return False
    axes.set_ylabel(label)
    whole_rounds(axes, np.concatenate(reached), ROUND)
    seeds = [_BAND] if any(len(runs) > 1 for _, runs in own) else []
    panel_title(axes, title or f"{label} by round", [*seeds, *notes])
    return True


def _line(axes: Axes, positions: Array, values: Array, look: Look) -> None:
    color, dash = look
    marker = "o" if positions.size <= 5 else ""
    axes.plot(positions, values.mean(axis=0), color=color, ls=dash, marker=marker, markersize=4)
    if len(values) > 1:
        low, high = values.min(axis=0), values.max(axis=0)
        axes.fill_between(positions, low, high, color=color, alpha=0.2, linewidth=0)


def _draw_loss(axes: Axes, own: Drawn) -> None:
    def positive(runs: Sequence[Result]) -> Curves:
        positions, values = _evaluated("test_loss")(runs)
        return positions, np.where(values > 0, values, np.nan)

    if _draw(axes, own, positive, "Test loss"):
        logarithmic(axes)
        axes.set_ylabel("Test loss (log scale)")


def _draw_privacy(axes: Axes, own: Drawn) -> None:
    """Draw the worst client's spend, or, where no run bounds anything, who took part."""

    def worst(runs: Sequence[Result]) -> Curves:
        spent = [spend_by_round(run["history"]).get("worst", np.zeros(0)) for run in runs]
        return _together(spent)

    def cohorts(runs: Sequence[Result]) -> Curves:
        listed = [entries(run["history"], "client_participation") for run in runs]
        return _together([np.asarray([len(c or ()) for c in sizes], float) for sizes in listed])

    bounded = [run for _, runs in own for run in runs if spend_by_round(run["history"])]
    if not bounded:
        _draw(axes, own, cohorts, "Clients in a round")
        axes.set_ylim(bottom=0)
        return
    budgets = {as_number(_settings(run).get("epsilon")) for run in bounded}
    known = sorted(budget for budget in budgets if math.isfinite(budget))
    shown = ", ".join(format_bound(budget) for budget in known)
    notes = [f"dashed: budget of a run, epsilon {shown}"] if known else []
    _draw(axes, own, worst, "Epsilon spent", "Privacy spent by the worst client", notes)
    for budget in known:
        reference(axes, budget)
    axes.set_ylim(bottom=0)


def _settings(run: Result) -> Mapping[str, Any]:
    found = run["metadata"].get("hyperparameters")
    return found if isinstance(found, Mapping) else {}


def _name(figure: Figure, series: Sequence[RunSeries]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=color, ls=dash, label=as_drawn(label_of(one)))
        for (color, dash), one in zip(looks_of(series), series, strict=True)
    ]
    columns = min(len(handles), 3)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
