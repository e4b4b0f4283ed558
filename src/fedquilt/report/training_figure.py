"""The figure of one run: accuracy, loss, nominal budget and clip bound by round."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.report.series import (
    Series,
    as_number,
    headline,
    in_title,
    is_absent,
    no_budget_in_words,
    per_evaluation,
    per_round,
    running_sum,
    target_accuracy,
)
from fedquilt.report.style import (
    BLUE,
    GREEN,
    NOMINAL,
    PURPLE,
    accuracy_limits,
    drawing,
    figure_path,
    figure_settings,
    in_words,
    line,
    logarithmic,
    panel_title,
    reference,
    save_figure,
    shortfall,
    whole_rounds,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_training_history(
    history: Mapping[str, Any],
    dataset_name: str,
    seed: int,
    config: Mapping[str, Any] | None = None,
    save_path: str | os.PathLike[str] | None = None,
) -> str:
    """Draw the four panels of one run and return the path of the file.

    Parameters
    ----------
    history : mapping
        What the run recorded; lists may be missing or hold None and NaN.
    dataset_name, seed
        Named in the title; the data set also decides the target line.
    config : mapping, optional
        Keys of VISUALIZATION_CONFIG, merged over its defaults.  The run's own
        `epsilon` (or `epsilon_total`) and `target_accuracy` may stand here too
        and place the two reference lines.  `enabled` is for the caller to ask:
        calling this function draws.
    save_path : path, optional
        File to write; by default
        ./results/{dataset}_seed{seed}_training_{timestamp}.{format}.

    Raises
    ------
    InvalidValueError
        For a setting that is not allowed, such as an unknown style.
    StorageError
        When the file cannot be written.
    """
    settings = figure_settings(config)
    path = figure_path(save_path, f"{dataset_name}_seed{seed}_training", settings)
    with drawing(settings) as figure:
        ((top_left, top_right), (bottom_left, bottom_right)) = figure.subplots(2, 2)
        figure.suptitle(f"Training history: {str(dataset_name).upper()}, seed {seed}")
        draw_accuracy(top_left, history, target_accuracy(dataset_name, config))
        _draw_loss(top_right, history)
        _draw_budget(bottom_left, history, config or {})
        _draw_clip(bottom_right, history)
        return save_figure(figure, path, settings)


def draw_accuracy(axes: Axes, history: Mapping[str, Any], target: float | None) -> None:
    """Draw test accuracy with the target line, or the metric that a run is judged by."""
    key = headline(history)
    series = per_evaluation(history, key)
    title = f"Test {in_title(key)} over Rounds"
    if not series.finite.any():
        panel_title(axes, title)
        in_words(axes, _why_empty(series, "no evaluation was recorded"))
        return
    line(axes, series, BLUE)
    notes = shortfall(series, "evaluations")
    if key != "test_accuracy":
        axes.set_ylabel(f"Test {in_title(key)}")
        whole_rounds(axes, series.positions, series.axis)
        panel_title(axes, title, notes)
        return
    if target is not None:
        reference(axes, target)
        notes.insert(0, f"dashed: target {target:g}")
    accuracy_limits(axes, series.values, target)
    axes.set_ylabel("Test accuracy")
    whole_rounds(axes, series.positions, series.axis)
    panel_title(axes, title, notes)


def _draw_loss(axes: Axes, history: Mapping[str, Any]) -> None:
    series = per_evaluation(history, "test_loss")
    title = "Test Loss over Rounds"
    if not series.finite.any():
        panel_title(axes, title)
        in_words(axes, _why_empty(series, "no evaluation was recorded"))
        return
    notes = shortfall(series, "evaluations")
    positive = np.where(series.values > 0, series.values, np.nan)
    if not np.isfinite(positive).any():
        line(axes, series, BLUE)
        axes.set_ylabel("Test loss")
        notes.append("no positive loss: linear scale")
    else:
        hidden = int((series.values <= 0).sum())
        notes += [f"{hidden} losses of zero or less: not drawn on a log scale"] if hidden else []
        line(axes, Series(series.positions, positive, series.axis), BLUE)
        logarithmic(axes)
        axes.set_ylabel("Test loss (log scale)")
    whole_rounds(axes, series.positions, series.axis)
    panel_title(axes, title, notes)


def _draw_budget(axes: Axes, history: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    series = per_round(history, "privacy_budgets")
    title = "Privacy Budget Consumption"
    if not series.finite.any():
        panel_title(axes, title)
        absent = is_absent(history, "privacy_budgets")
        in_words(axes, no_budget_in_words(history) if absent else _why_empty(series, ""))
        return
    total, origin = _total_budget(config)
    line(axes, Series(series.positions, running_sum(series.values), series.axis), GREEN)
    reference(axes, total)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("nominal epsilon")
    whole_rounds(axes, series.positions, series.axis)
    panel_title(axes, title, [NOMINAL, f"dashed: {origin} {total:g}", *shortfall(series, "rounds")])


def _total_budget(config: Mapping[str, Any]) -> tuple[float, str]:
    """Return the line of the total budget and what to call it."""
    from fedquilt.config import HYPERPARAMETERS

    for key in ("epsilon", "epsilon_total"):
        value = as_number(config.get(key))
        if np.isfinite(value):
            return value, "total budget of the run"
    return float(HYPERPARAMETERS["epsilon_total"]), "default total budget"


def _draw_clip(axes: Axes, history: Mapping[str, Any]) -> None:
    series = per_round(history, "clip_values")
    title = "Adaptive Clipping Values"
    if not series.finite.any():
        panel_title(axes, title)
        absent = is_absent(history, "clip_values")
        in_words(axes, "no clipping in this mode" if absent else _why_empty(series, ""))
        return
    mean = float(np.nanmean(series.values))
    line(axes, series, PURPLE)
    reference(axes, mean)
    axes.set_ylabel("Clip bound")
    whole_rounds(axes, series.positions, series.axis)
    panel_title(axes, title, [f"dashed: mean {mean:.4g}", *shortfall(series, "rounds")])


def _why_empty(series: Series, nothing: str) -> str:
    return "no finite value was recorded" if series.values.size else nothing
