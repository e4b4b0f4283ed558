"""Figures of one run, or of several, by round: accuracy, loss, privacy, clip; what machines used.

Of several runs, seeds of one another make one line with a band from the lowest to the highest.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.common.errors import RunFolderError
from fedquilt.common.formatting import format_bound
from fedquilt.common.untrusted import read_lines
from fedquilt.report import style
from fedquilt.report.runs import series_of
from fedquilt.report.series import (
    ROUND,
    Array,
    Series,
    aligned,
    as_number,
    column,
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]
Curves = tuple[Array, Array]
"""Rounds, and a row of values for each seed."""
Drawn = Sequence[tuple[style.Look, Sequence[Result]]]
"""Colour and dash of each series, and its seeds."""
_BAND = "line: mean of the seeds; band: lowest to highest seed"
QUANTILES = ("lowest", "lower_quartile", "median", "upper_quartile", "worst")


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
        with a band.
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
        return _plot_several(history, save_path, config)
    settings = style.figure_settings(config)
    path = style.figure_path(save_path, f"{dataset_name}_seed{seed}_training", settings)
    with style.drawing(settings) as figure:
        ((top_left, top_right), (bottom_left, bottom_right)) = figure.subplots(2, 2)
        figure.suptitle(style.as_drawn(_title(dataset_name, seed, config or {})))
        draw_accuracy(top_left, history, target_accuracy(dataset_name, config))
        _draw_loss(top_right, history)
        _draw_privacy(bottom_left, history, config or {})
        _draw_last(bottom_right, history, config or {})
        return style.save_figure(figure, path, settings)


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
        style.in_words(axes, "no round was recorded", title)
        return
    series = Series(np.arange(1.0, sizes.size + 1), sizes, ROUND)
    style.line(axes, series, style.GREEN)
    axes.set_ylim(0, 1.1 * max(1.0, float(sizes.max())))
    style.whole_rounds(axes, series.positions, series.axis, "clients")
    style.panel_title(
        axes, title, [f"mean {sizes.mean():.4g}; no noise in this mode, nothing is bounded"]
    )


def _draw_last(axes: Axes, history: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Draw the clip bound or, in a mode that clips nothing, the training loss."""
    losses = per_round(history, "train_loss")
    if not config.get("mode") or not is_absent(history, "clip_values") or not losses.finite.any():
        _draw_clip(axes, history, config)
        return
    style.line(axes, losses, style.PURPLE)
    style.whole_rounds(axes, losses.positions, losses.axis, "Training loss")
    style.panel_title(
        axes, "Training Loss over Rounds", ["mean over the clients of a round; no clipping"]
    )


def draw_accuracy(axes: Axes, history: Mapping[str, Any], target: float | None) -> None:
    """Draw test accuracy with the target line, or the metric that a run is judged by."""
    key = headline(history)
    series = per_evaluation(history, key)
    title = f"Test {in_title(key)} over Rounds"
    if not series.finite.any():
        style.in_words(axes, _why_empty(series, "no evaluation was recorded"), title)
        return
    style.line(axes, series, style.BLUE)
    notes = style.shortfall(series, "evaluations")
    tiers = _draw_tiers(axes, history) if key == "test_accuracy" else np.zeros(0)
    if key != "test_accuracy":
        style.whole_rounds(axes, series.positions, series.axis, f"Test {in_title(key)}")
        style.panel_title(axes, title, notes)
        return
    if tiers.size:
        notes.insert(0, "thin: what clients of each width hold, by itself")
    if target is not None:
        style.reference(axes, target)
        notes.insert(0, f"dashed: target {target:g}")
    style.accuracy_limits(axes, np.append(series.values, tiers), target)
    style.whole_rounds(axes, series.positions, series.axis, "Test accuracy")
    style.panel_title(axes, title, notes)


def _draw_tiers(axes: Axes, history: Mapping[str, Any]) -> Array:
    """Draw the accuracy of each narrow tier's own small model; return all of their values."""
    found = entries(history, "tiers")
    looked = [tiers if isinstance(tiers, Mapping) else {} for tiers in found]
    widths = [w for w in dict.fromkeys(width for tiers in looked for width in tiers) if w != "1"]
    drawn = [np.zeros(0)]
    for width, color in zip(
        widths, cycle((style.VERMILION, style.GREEN, style.PURPLE, style.GREY)), strict=False
    ):
        scores = [tiers.get(width, {}).get("accuracy") for tiers in looked]
        series = per_evaluation({**history, "tier": scores}, "tier")
        style.line(axes, series, color, linewidth=1.0, markersize=2.5)
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
        style.in_words(axes, _why_empty(series, "no evaluation was recorded"), title)
        return
    notes = style.shortfall(series, "evaluations")
    positive = np.where(series.values > 0, series.values, np.nan)
    if not np.isfinite(positive).any():
        style.line(axes, series, style.BLUE)
        axes.set_ylabel("Test loss")
        notes.append("no positive loss: linear scale")
    else:
        hidden = int((series.values <= 0).sum())
        notes += [f"{hidden} losses of zero or less: not drawn on a log scale"] if hidden else []
        style.line(axes, Series(series.positions, positive, series.axis), style.BLUE)
        style.logarithmic(axes)
        axes.set_ylabel("Test loss (log scale)")
    style.whole_rounds(axes, series.positions, series.axis)
    style.panel_title(axes, title, notes)


def _draw_budget(axes: Axes, history: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    series = per_round(history, "privacy_budgets")
    title = "Privacy Budget Consumption"
    if not series.finite.any():
        absent = is_absent(history, "privacy_budgets")
        style.in_words(
            axes, no_budget_in_words(history) if absent else _why_empty(series, ""), title
        )
        return
    total, origin = _total_budget(config)
    style.line(axes, Series(series.positions, running_sum(series.values), series.axis), style.GREEN)
    style.reference(axes, total)
    axes.set_ylim(bottom=0)
    style.whole_rounds(axes, series.positions, series.axis, "nominal epsilon")
    style.panel_title(
        axes,
        title,
        [style.NOMINAL, f"dashed: {origin} {total:g}", *style.shortfall(series, "rounds")],
    )


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
        absent = is_absent(history, "clip_values")
        style.in_words(
            axes, "no clipping in this mode" if absent else _why_empty(series, ""), title
        )
        return
    mean = float(np.nanmean(series.values))
    style.line(axes, series, style.PURPLE)
    style.reference(axes, mean)
    style.whole_rounds(axes, series.positions, series.axis, "Clip bound")
    style.panel_title(axes, title, [f"dashed: mean {mean:.4g}", *style.shortfall(series, "rounds")])


def _why_empty(series: Series, nothing: str) -> str:
    return "no finite value was recorded" if series.values.size else nothing


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
    axes.fill_between(
        rounds, spent["lowest"], spent["worst"], color=style.GREEN, alpha=0.12, linewidth=0
    )
    axes.fill_between(
        rounds,
        spent["lower_quartile"],
        spent["upper_quartile"],
        color=style.GREEN,
        alpha=0.25,
        linewidth=0,
    )
    marker = "o" if rounds.size == 1 else ""
    axes.plot(
        rounds, spent["median"], color=style.GREEN, linewidth=2, marker=marker, label="median"
    )
    axes.plot(
        rounds, spent["worst"], color=style.BLUE, linewidth=1.6, marker=marker, label="worst client"
    )
    notes = ["upper line: worst client; lower: median; bands: middle half, all"]
    budget = as_number(config.get("epsilon"))
    top = float(np.nanmax(spent["worst"]))
    if math.isfinite(budget):
        style.reference(axes, budget)
        notes.append(f"dashed: budget of the run, epsilon {format_bound(budget)}")
        top = max(top, budget)
    out = sat_out(history)
    if out:
        notes.append(f"sat out the last round, with nothing left: {out}")
    axes.set_ylim(0, 1.08 * top if top > 0 else 1.0)
    style.whole_rounds(axes, rounds, ROUND, "epsilon spent in this run")
    style.panel_title(axes, "Privacy Spent by Each Client", notes)


def sat_out(history: Mapping[str, Any]) -> int:
    """Return how many clients could not pay the last round."""
    counts = [as_number(value) for value in entries(history, "without_allowance")]
    return int(counts[-1]) if counts and math.isfinite(counts[-1]) else 0


def _plot_several(
    results: Sequence[Result],
    save_path: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Draw the four panels of `plot_training_history` for several runs; return the path.

    `results` are whole results, as result.json holds them: a history alone does not say which
    runs are seeds of one another.
    """
    series = series_of(results)
    own = [
        (look, [results[member] for member in one.members])
        for look, one in zip(style.looks_of(series), series, strict=True)
    ]
    settings = style.figure_settings(config)
    path = style.figure_path(save_path, "training_of_runs", settings)
    with style.drawing(settings) as figure:
        ((top_left, top_right), (bottom_left, bottom_right)) = figure.subplots(2, 2)
        datasets = sorted({one.entries[0].dataset.upper() for one in series})
        figure.suptitle(style.as_drawn(f"Training: {', '.join(datasets)}, {len(results)} runs"))
        name = f"Test {series[0].metric_name}" if series else "Test Accuracy"
        metric = series[0].metric if series else "test_accuracy"
        _draw_lines(top_left, own, _evaluated(metric), name.capitalize())
        _draw_losses(top_right, own)
        _draw_spends(bottom_left, own)
        if _draw_lines(bottom_right, own, _by_round("clip_values"), "Clip bound"):
            bottom_right.set_ylim(bottom=0)
        style.name_series(figure, series)
        return style.save_figure(figure, path, settings)


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


def _draw_lines(
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
            style.draw_curve(axes, positions, values, look, markersize=4)
            reached.append(positions)
    if len(reached) == 1:
        style.in_words(axes, "nothing of it in these runs", label)
        return False
    style.whole_rounds(axes, np.concatenate(reached), ROUND, label)
    seeds = [_BAND] if any(len(runs) > 1 for _, runs in own) else []
    style.panel_title(axes, title or f"{label} by round", [*seeds, *notes])
    return True


def _draw_losses(axes: Axes, own: Drawn) -> None:
    def positive(runs: Sequence[Result]) -> Curves:
        positions, values = _evaluated("test_loss")(runs)
        return positions, np.where(values > 0, values, np.nan)

    if _draw_lines(axes, own, positive, "Test loss"):
        style.logarithmic(axes)
        axes.set_ylabel("Test loss (log scale)")


def _draw_spends(axes: Axes, own: Drawn) -> None:
    """Draw the worst client's spend, or, where no run bounds anything, who took part."""

    def worst(runs: Sequence[Result]) -> Curves:
        spent = [spend_by_round(run["history"]).get("worst", np.zeros(0)) for run in runs]
        return _together(spent)

    def cohorts(runs: Sequence[Result]) -> Curves:
        listed = [entries(run["history"], "client_participation") for run in runs]
        return _together([np.asarray([len(c or ()) for c in sizes], float) for sizes in listed])

    bounded = [run for _, runs in own for run in runs if spend_by_round(run["history"])]
    if not bounded:
        _draw_lines(axes, own, cohorts, "Clients in a round")
        axes.set_ylim(bottom=0)
        return
    budgets = {as_number(_settings(run).get("epsilon")) for run in bounded}
    known = sorted(budget for budget in budgets if math.isfinite(budget))
    shown = ", ".join(format_bound(budget) for budget in known)
    notes = [f"dashed: budget of a run, epsilon {shown}"] if known else []
    _draw_lines(axes, own, worst, "Epsilon spent", "Privacy spent by the worst client", notes)
    for budget in known:
        style.reference(axes, budget)
    axes.set_ylim(bottom=0)


def _settings(run: Result) -> Mapping[str, Any]:
    found = run["metadata"].get("hyperparameters")
    return found if isinstance(found, Mapping) else {}


FILE = "monitor.jsonl"
PICTURE = "monitor.png"


def read_usage(folder: Path) -> list[dict[str, Any]]:
    """Return the measured rounds of a run, in order; of a round measured twice, the last."""
    path = folder / FILE
    if not path.exists():
        return []
    rounds: dict[int, dict[str, Any]] = {}
    for text in read_lines(path, RunFolderError):
        try:
            entry = json.loads(text)
            rounds[int(entry["round"])] = dict(entry)
        except (ValueError, TypeError, KeyError) as error:
            raise RunFolderError(f"{path} has a line that is no measured round") from error
    return [rounds[number] for number in sorted(rounds)]


def plot_usage(folder: Path) -> str | None:
    """Draw monitor.png beside a run's monitor.jsonl, for its owner; None without measurements."""
    rounds = read_usage(folder)
    if not rounds:
        return None
    from matplotlib.lines import Line2D

    settings = style.figure_settings(None)
    measured = any("energy_vdd_in" in entry for entry in rounds)
    panels = (
        ("cpu_usage", "Processor", "% (100: one core)", 1.0),
        ("memory_usage", "Memory", "% of the machine's", 1.0),
        ("network_bytes_sent", "Bytes sent", "MB", 1e-6),
        ("energy_vdd_in", "Energy", "J", 1e-3) if measured else ("seconds", "Time", "s", 1.0),
    )
    with style.drawing(settings) as figure:
        figure.suptitle(style.as_drawn(f"What the run used: {folder.name}"))
        for axes, (key, title, unit, factor) in zip(
            figure.subplots(2, 2).flat, panels, strict=True
        ):
            _draw(axes, rounds, key, title, unit, factor)
        handles = [Line2D([], [], color=c, label=n) for n, c in _colors(rounds).items()]
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
        # How long clients take tells how much they hold.
        return style.save_figure(figure, folder / PICTURE, settings, 0o600)


def _colors(rounds: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a colour for each tier that ever trained, widest first, and for the server."""
    names = {name for entry in rounds for name in entry.get("tiers") or {}}
    widths = sorted(names - {"server"}, key=lambda name: as_number(_width(name)), reverse=True)
    listed = [*widths, *(["server"] if "server" in names else [])]
    return dict(
        zip(
            listed,
            cycle((style.VERMILION, style.GREEN, style.PURPLE, style.ORANGE, style.GREY)),
            strict=False,
        )
    )


def _width(name: str) -> float | None:
    with contextlib.suppress(ValueError, ZeroDivisionError):
        return float(Fraction(name))
    return None


def _draw(
    axes: Axes, rounds: Sequence[Mapping[str, Any]], key: str, title: str, unit: str, factor: float
) -> None:
    """Draw the whole round, and thinner each tier and the server."""
    positions = np.asarray([float(entry["round"]) + 1 for entry in rounds])

    def series(entries: Sequence[Mapping[str, Any]]) -> Series:
        values = np.asarray([as_number(entry.get(key)) * factor for entry in entries])
        return Series(positions, values, ROUND)

    whole = series(rounds)
    style.panel_title(axes, title, ["thick: the whole round"])
    if not whole.finite.any():
        style.in_words(axes, "not measured")
        return
    style.line(axes, whole, style.BLUE)
    tiers = [entry.get("tiers") or {} for entry in rounds]
    for name, color in _colors(rounds).items():
        part = series([found.get(name) or {} for found in tiers])
        style.line(axes, part, color, linewidth=1.0, markersize=2.5)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0, top=1.15 * max(float(np.nanmax(whole.values)), 1e-9))
    style.whole_rounds(axes, positions, ROUND)
