"""Runs side by side: a table and a figure."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.common.bounds import format_bound
from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.config.modes import MODE_TABLE
from fedquilt.report.series import ROUND, Array, aligned, as_number, column, run_label
from fedquilt.report.style import (
    COLORS,
    GREY,
    PALETTE,
    accuracy_limits,
    drawing,
    figure_path,
    figure_settings,
    in_words,
    padded,
    panel_title,
    save_figure,
    text_color,
    whole_rounds,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NO_GUARANTEE = "no guarantee (ε = ∞)"

Run = Mapping[str, Any]


def comparison_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Summarise the runs by mode; every value can be written as JSON.

    Returns
    -------
    list of dict
        One entry per mode with `mode`; `accuracy_mean` and `accuracy_std` of the
        final accuracies (the sample deviation, divisor n - 1, None for one seed);
        `epsilon_max`, the worst client's epsilon in the worst seed, "inf" when
        any seed has no guarantee; `delta`, the largest of the seeds; `seeds`;
        `accuracies`, one per seed, None where a run has no finite one (these are
        not in the mean); `claim`, in words.
    """
    return [_summary(mode, members) for mode, members in runs_by_mode(runs).items()]


def runs_by_mode(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs of one data set by mode and method, least private mode first."""
    if not runs:
        raise InvalidValueError("runs=[] must hold at least one run")
    groups: dict[str, list[Run]] = {}
    for index, run in enumerate(runs):
        _check_run(index, run)
        groups.setdefault(_label(run), []).append(run)
    datasets = sorted({str(run["metadata"].get("dataset")) for run in runs})
    if len(datasets) > 1:
        raise InvalidValueError(
            f"runs of different data sets cannot be compared: {', '.join(datasets)}"
        )
    order = [mode for mode in MODE_TABLE if any(_mode(label) == mode for label in groups)]
    known = [label for mode in order for label in groups if _mode(label) == mode]
    return {label: groups[label] for label in [*known, *(g for g in groups if g not in known)]}


def _label(run: Run) -> str:
    """Return the mode of a run, with its method where clients do not train whole models."""
    settings = run["metadata"].get("hyperparameters")
    method = settings.get("method") if isinstance(settings, Mapping) else None
    return run_label({"mode": run["mode"], "method": method})


def _mode(label: str) -> str:
    return label.partition(",")[0]


def _check_run(index: int, run: object) -> None:
    if not isinstance(run, Mapping):
        raise RunFolderError(f"runs[{index}]={run!r:.60} must be the dictionary of a result")
    if not isinstance(run.get("mode"), str):
        raise RunFolderError(f"runs[{index}]['mode']={run.get('mode')!r} must name a mode")
    for key in ("metadata", "history"):
        if not isinstance(run.get(key), Mapping):
            raise RunFolderError(f"runs[{index}] must hold a dictionary {key!r}")


def final_accuracy(run: Run) -> float:
    """Return the accuracy at the end of a run, NaN when there is none."""
    stated = as_number(run["metadata"].get("final_accuracy"))
    if math.isfinite(stated):
        return stated
    recorded = column(run["history"], "test_accuracy")
    return float(recorded[-1]) if recorded.size else math.nan


def _summary(mode: str, runs: Sequence[Run]) -> dict[str, Any]:
    accuracies = np.asarray([final_accuracy(run) for run in runs])
    finite = accuracies[np.isfinite(accuracies)]
    epsilon, delta = _worst_epsilon(runs), _worst_delta(runs)
    return {
        "mode": mode,
        "accuracy_mean": float(finite.mean()) if finite.size else None,
        "accuracy_std": float(finite.std(ddof=1)) if finite.size > 1 else None,
        "epsilon_max": epsilon if math.isfinite(epsilon) else "inf",
        "delta": delta,
        "seeds": [run["metadata"].get("seed") for run in runs],
        "accuracies": [float(value) if np.isfinite(value) else None for value in accuracies],
        "claim": _claim(epsilon, delta, runs),
    }


def _statement(run: Run) -> Mapping[str, Any]:
    statement = run.get("statement")
    return statement if isinstance(statement, Mapping) else {}


def _worst_epsilon(runs: Sequence[Run]) -> float:
    """Return the largest epsilon of the seeds; what states none has none."""
    values = [as_number(_statement(run).get("epsilon_max")) for run in runs]
    return max((value if value >= 0 else math.inf) for value in values)


def _worst_delta(runs: Sequence[Run]) -> float | None:
    values = [as_number(_statement(run).get("delta")) for run in runs]
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) if finite else None


def _claim(epsilon: float, delta: float | None, runs: Sequence[Run]) -> str:
    """Say what a mode may claim; without a delta there is no claim."""
    if not math.isfinite(epsilon) or delta is None:
        return NO_GUARANTEE
    units = {str(_statement(run).get("unit") or "client") for run in runs}
    claim = f"ε ≤ {epsilon_text(epsilon)} for every {' or '.join(sorted(units))}, δ = {delta:g}"
    others = {str(_statement(run).get("adjacency")) for run in runs} - {"zero-out", "None"}
    return ", ".join([claim, *sorted(others)])


def epsilon_text(epsilon: float | str) -> str:
    """Return an epsilon of a record, a number or "inf", as `format_bound` shows it."""
    return format_bound(as_number(epsilon))


def accuracy_text(row: Mapping[str, Any]) -> str:
    """Return "mean ± std", and in words what is missing."""
    if row["accuracy_mean"] is None:
        return "none finite"
    spread = "" if row["accuracy_std"] is None else f" ± {row['accuracy_std']:.4f}"
    lost = sum(value is None for value in row.get("accuracies", ()))
    return f"{row['accuracy_mean']:.4f}{spread}" + (f" ({lost} not finite)" if lost else "")


def render_comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of `comparison_table` as text, 80 columns wide or less."""
    from tabulate import tabulate

    body = [
        (
            row["mode"],
            accuracy_text(row),
            str(len(row["seeds"])),
            row["claim"],
        )
        for row in rows
    ]
    headings = ["mode", "accuracy ± std", "seeds", "what it may claim"]
    padded_heads = [f"{heading}  " for heading in headings]  # as tabulate lays them out
    columns = list(zip(padded_heads, *body, strict=True))[:-1]
    used = sum(max(map(len, cells)) + 2 for cells in columns)
    return tabulate(
        body,
        headers=headings,
        tablefmt="simple",
        disable_numparse=True,
        colalign=("left", "left", "right", "left"),
        maxcolwidths=[None, None, None, max(20, _SCREEN - used)],
    )


_LABEL_INCHES = 0.2
_SCREEN = 80
# Dotted, because a solid rule from a lone point would read as data.
_LEADER: dict[str, Any] = {
    "arrowstyle": "-",
    "linestyle": ":",
    "linewidth": 1.3,
    "relpos": (0, 0.5),
}


def plot_comparison(
    runs: Sequence[Run],
    save_path: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
    title: str | None = None,
) -> str:
    """Draw the modes of one data set side by side and return the path of the file.

    Left, the accuracy by round: the mean over the seeds, at the evaluations all
    seeds of a mode share, and a band from the lowest to the highest seed.
    Right, the final accuracy of every seed, and what the mode may claim.
    """
    groups = runs_by_mode(runs)
    rows = comparison_table(runs)
    settings = figure_settings(config, (13.0, max(4.0, 1.6 + 0.95 * len(rows))))
    dataset = str(runs[0]["metadata"].get("dataset"))
    path = figure_path(save_path, f"{dataset}_comparison", settings)
    with drawing(settings) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
        figure.suptitle(title or f"Modes compared: {dataset.upper()}")
        _draw_curves(left, groups)
        _draw_finals(right, rows)
        return save_figure(figure, path, settings)


def _color(mode: str) -> str:
    if mode in MODE_TABLE:
        return COLORS[MODE_TABLE[mode].color]
    if ":" in mode:  # another policy, or another epsilon: colours that no mode of `run` has
        return COLORS["vermilion" if mode.startswith("certified") else "sky"]
    return PALETTE[sum(map(ord, mode)) % len(PALETTE)]


def _draw_curves(axes: Axes, groups: Mapping[str, Sequence[Run]]) -> None:
    title = "Test accuracy by round"
    ends: list[tuple[str, float, float]] = []
    everything: list[Array] = []
    label = ROUND
    reached: list[Array] = []
    for mode, runs in groups.items():
        positions, values, label = aligned([run["history"] for run in runs], "test_accuracy")
        mean = values.mean(axis=0) if values.size else np.zeros(0)
        shown = np.isfinite(mean)
        if not shown.any():
            continue
        marker = "o" if shown.sum() <= 5 else ""
        axes.plot(positions, mean, color=_color(mode), linewidth=2, marker=marker, markersize=4)
        low, high = values.min(axis=0), values.max(axis=0)
        axes.fill_between(positions, low, high, color=_color(mode), alpha=0.2, linewidth=0)
        last = np.flatnonzero(shown)[-1]
        ends.append((mode, float(positions[last]), float(mean[last])))
        everything.append(values.ravel())
        reached.append(positions)
    if not ends:
        panel_title(axes, title)
        in_words(axes, "no evaluation that all seeds of a mode share")
        return
    accuracy_limits(axes, np.concatenate(everything))
    axes.set_ylabel("Test accuracy")
    whole_rounds(axes, np.concatenate(reached), label)
    _label_ends(axes, ends)
    absent = [mode for mode in groups if mode not in {mode for mode, _, _ in ends}]
    notes = ["line: mean over the seeds; band: lowest to highest seed"]
    notes += [f"nothing finite to draw for {', '.join(absent)}"] if absent else []
    panel_title(axes, title, notes)


def _label_ends(axes: Axes, ends: Sequence[tuple[str, float, float]]) -> None:
    """Name every line to the right of the axes, joined to its end by a dotted rule."""
    bottom, top = axes.get_ylim()
    heights = np.asarray([(y - bottom) / (top - bottom) for _, _, y in ends])
    gap = _LABEL_INCHES / (axes.get_position().height * axes.figure.get_figheight())  # type: ignore[union-attr]
    for (mode, x, y), height in zip(ends, spread_apart(heights, gap), strict=True):
        axes.annotate(
            mode,
            xy=(x, y),
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops=_LEADER | {"color": _color(mode)},
        )


def spread_apart(heights: Array, gap: float) -> Array:
    """Move heights in [0, 1] as little as needed for neighbours to be `gap` apart.

    With i * gap taken off the i-th lowest, "gap apart" becomes "not falling", and
    the nearest such sequence is the isotonic regression: neighbours that fall are
    pooled into their mean.
    """
    order = np.argsort(heights, kind="stable")
    steps = gap * np.arange(heights.size)
    pools: list[tuple[float, int]] = []
    for value in heights[order] - steps:
        mean, size = float(value), 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (mean * size + before * count) / (size + count), size + count
        pools.append((mean, size))
    lowered = np.repeat([mean for mean, _ in pools], [size for _, size in pools])
    result = np.empty(heights.size)
    result[order] = np.clip(lowered, 0.0, max(0.0, 1.0 - steps[-1])) + steps
    return result


def _draw_finals(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw one band per mode: its name, result and claim, and under them its seeds."""
    points = [value for row in rows for value in row["accuracies"] if value is not None]
    axes.set_xlim(*(padded(np.asarray(points)) if points else (0.0, 1.0)))
    axes.set_ylim(len(rows), 0)
    axes.set_yticks([])
    axes.set_xlabel("Test accuracy at the end of the run")
    for index, row in enumerate(rows):
        _draw_mode(axes, index, row)
    panel_title(axes, "Final accuracy and claim", ["dots: one seed each; bar: their mean"])


def _draw_mode(axes: Axes, top: int, row: Mapping[str, Any]) -> None:
    color = _color(row["mode"])
    across = axes.get_yaxis_transform()
    text: dict[str, Any] = {"transform": across, "va": "center"}
    seeds = "1 seed" if len(row["seeds"]) == 1 else f"{len(row['seeds'])} seeds"
    axes.text(0.015, top + 0.18, row["mode"], fontweight="bold", **text)
    axes.text(0.985, top + 0.18, f"{accuracy_text(row)}, {seeds}", ha="right", **text)
    axes.text(0.015, top + 0.42, row["claim"], fontsize=9.5, alpha=0.85, **text)
    values = [value for value in row["accuracies"] if value is not None]
    axes.plot(values, [top + 0.72] * len(values), "o", color=color, markersize=7, alpha=0.7)
    if row["accuracy_mean"] is not None:
        axes.vlines(row["accuracy_mean"], top + 0.58, top + 0.86, linewidth=1.5, color=text_color())
    if top:
        axes.axhline(top, color=GREY, linewidth=0.6, alpha=0.5)
