"""The figure of one run: accuracy, loss, what privacy cost and the clip bound, by round."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.report.series import (
    ROUND,
    Array,
    Series,
    as_number,
    entries,
    headline,
    in_title,
    is_absent,
    no_budget_in_words,
    per_evaluation,
    per_round,
    run_label,
    running_sum,
    target_accuracy,
)
from fedquilt.report.spend import draw_spend, spend_by_round
from fedquilt.report.style import (
    BLUE,
    GREEN,
    GREY,
    NOMINAL,
    PURPLE,
    VERMILION,
    accuracy_limits,
    as_drawn,
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
    from collections.abc import Sequence

    from matplotlib.axes import Axes


def plot_training_history(
    history: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    dataset_name: str = "",
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    save_path: str | os.PathLike[str] | None = None,
) -> str:
    """Draw the four panels of one run, or of several, and return the path of the file.

    Parameters
    ----------
    history : mapping or sequence of mappings
        What the run recorded; lists may be missing or hold None and NaN.  Or several whole
        results (`RunResult.result`), laid over one another: seeds of one setting are a line
        with a band (`plot_training_of_runs`).
    dataset_name, seed
        Named in the title; the data set also decides the target line.  Several results say
        both themselves.
    config : mapping, optional
        Keys of VISUALIZATION_CONFIG, merged over its defaults.  The run's own
        `epsilon` (or `epsilon_total`) and `target_accuracy` may stand here too
        and place the two reference lines; its `mode` and `method` are named in the title,
        and panels that the mode has nothing for then show who took part and the training
        loss.  With `enabled` off nothing is written.
    save_path : path, optional
        File to write; by default {dataset}_seed{seed}_training_{timestamp}.{format} in the
        folder that OUTPUT_CONFIG names.

    Raises
    ------
    InvalidValueError
        For a setting that is not allowed, such as an unknown style.
    StorageError
        When the file cannot be written.
    """
    if not isinstance(history, Mapping):
        from fedquilt.report.training_of_runs import plot_training_of_runs

        return plot_training_of_runs(history, save_path, config)
    settings = figure_settings(config)
    path = figure_path(save_path, f"{dataset_name}_seed{seed}_training", settings)
    with drawing(settings) as figure:
        ((top_left, top_right), (bottom_left, bottom_right)) = figure.subplots(2, 2)
        figure.suptitle(as_drawn(_title(dataset_name, seed, config or {})))
        draw_accuracy(top_left, history, target_accuracy(dataset_name, config))
        _draw_loss(top_right, history)
        _draw_privacy(bottom_left, history, config or {})
        _draw_last(bottom_right, history, config or {})
        return save_figure(figure, path, settings)


def _title(dataset_name: str, seed: int, config: Mapping[str, Any]) -> str:
    """Name data set, mode and method, where the configuration tells them, and the seed."""
    what = run_label(config)
    parts = [str(dataset_name).upper(), *([what] if what else []), f"seed {seed}"]
    return f"Training history: {', '.join(parts)}"


def _draw_privacy(axes: Axes, history: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Draw what clients spent, a nominal budget, or else who took part."""
    if spend_by_round(history):
        draw_spend(axes, history, config)
    elif config.get("mode") and is_absent(history, "privacy_budgets"):
        _draw_cohorts(axes, history)
    else:
        _draw_budget(axes, history, config)


def _draw_cohorts(axes: Axes, history: Mapping[str, Any]) -> None:
    cohorts = entries(history, "client_participation")
    sizes = np.asarray([len(cohort) if cohort is not None else 0 for cohort in cohorts], float)
    title = "Clients in Each Round"
    if not sizes.size:
        panel_title(axes, title)
        in_words(axes, "no round was recorded")
        return
    series = Series(np.arange(1.0, sizes.size + 1), sizes, ROUND)
    line(axes, series, GREEN)
    axes.set_ylim(0, 1.1 * max(1.0, float(sizes.max())))
    axes.set_ylabel("clients")
    whole_rounds(axes, series.positions, series.axis)
    panel_title(
        axes, title, [f"mean {sizes.mean():.4g}; no noise in this mode, nothing is bounded"]
    )


def _draw_last(axes: Axes, history: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Draw the clip bound or, in a mode that clips nothing, the training loss."""
    losses = per_round(history, "train_loss")
    if not config.get("mode") or not is_absent(history, "clip_values") or not losses.finite.any():
        _draw_clip(axes, history, config)
        return
    line(axes, losses, PURPLE)
    axes.set_ylabel("Training loss")
    whole_rounds(axes, losses.positions, losses.axis)
    panel_title(
        axes, "Training Loss over Rounds", ["mean over the clients of a round; no clipping"]
    )


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
    tiers = _draw_tiers(axes, history) if key == "test_accuracy" else np.zeros(0)
    if key != "test_accuracy":
        axes.set_ylabel(f"Test {in_title(key)}")
        whole_rounds(axes, series.positions, series.axis)
        panel_title(axes, title, notes)
        return
    if tiers.size:
        notes.insert(0, "thin: what clients of each width hold, by itself")
    if target is not None:
        reference(axes, target)
        notes.insert(0, f"dashed: target {target:g}")
    accuracy_limits(axes, np.append(series.values, tiers), target)
    axes.set_ylabel("Test accuracy")
    whole_rounds(axes, series.positions, series.axis)
    panel_title(axes, title, notes)


def _draw_tiers(axes: Axes, history: Mapping[str, Any]) -> Array:
    """Draw the accuracy of each narrow tier's own small model; return all of their values."""
    found = entries(history, "tiers")
    looked = [tiers if isinstance(tiers, Mapping) else {} for tiers in found]
    widths = [w for w in dict.fromkeys(width for tiers in looked for width in tiers) if w != "1"]
    drawn = [np.zeros(0)]
    for width, color in zip(widths, cycle((VERMILION, GREEN, PURPLE, GREY)), strict=False):
        scores = [tiers.get(width, {}).get("accuracy") for tiers in looked]
        series = per_evaluation({**history, "tier": scores}, "tier")
        line(axes, series, color, linewidth=1.0, markersize=2.5)
        drawn.append(series.values)
        if series.finite.any():  # named where it ends: a legend may cover data
            last = int(np.flatnonzero(series.finite)[-1])
            end = (float(series.positions[last]), float(series.values[last]))
            axes.annotate(width, end, (4, -3), textcoords="offset points", color=color, fontsize=8)
    return np.concatenate(drawn)


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


def _draw_clip(
    axes: Axes, history: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> None:
    series = per_round(history, "clip_values")
    moves = np.unique(series.values[series.finite]).size > 1 or not (config or {}).get("mode")
    title = "Adaptive Clipping Values" if moves else "Clip Bound, Fixed in Advance"
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
