"""Runs side by side: the table, as text, JSON, CSV, Markdown and LaTeX, and a figure."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.common.formatting import format_bound, four_digits, text_table, wrapped
from fedquilt.common.storage import write_file
from fedquilt.report import style
from fedquilt.report.runs import (
    NO_GUARANTEE,
    RunSeries,
    differences,
    entries_of,
    group_by_config,
    levels,
    series_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Run = Mapping[str, Any]
FIGURES = ("comparison", "training", "seeds", "paper")


def comparison_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Summarise the runs by configuration; every value can be written as JSON.

    Returns
    -------
    list of dict
        One entry per configuration with `mode`, and what tells it from others of the mode;
        `metric`, what the runs are judged by; `mean` and `std` of it at the end (the sample
        deviation, divisor n - 1, None for one seed) and its `values`, one per seed, None where
        a run has no finite one (these are not in the mean); the same three under
        `accuracy_mean`, `accuracy_std` and `accuracies` where the metric is the accuracy;
        `epsilon_max`, the worst client's epsilon in the worst seed, "inf" when any seed has no
        guarantee; `delta`, the largest of the seeds; `seeds`; `claim`, in words.
    """
    return [_summary(one) for one in _compared(runs)]


def _compared(runs: Sequence[Run]) -> list[RunSeries]:
    """Lay runs of one data set together, least private mode first."""
    if not runs:
        raise InvalidValueError("runs=[] must hold at least one run")
    for index, run in enumerate(runs):
        _check_run(index, run)
    datasets = sorted({str(run["metadata"].get("dataset")) for run in runs})
    if len(datasets) > 1:
        raise InvalidValueError(
            f"runs of different data sets cannot be compared: {', '.join(datasets)}"
        )
    return series_of(runs)


def _check_run(index: int, run: object) -> None:
    if not isinstance(run, Mapping):
        raise RunFolderError(f"runs[{index}]={run!r:.60} must be the dictionary of a result")
    if not isinstance(run.get("mode"), str):
        raise RunFolderError(f"runs[{index}]['mode']={run.get('mode')!r} must name a mode")
    for key in ("metadata", "history"):
        if not isinstance(run.get(key), Mapping):
            raise RunFolderError(f"runs[{index}] must hold a dictionary {key!r}")


def _summary(one: RunSeries) -> dict[str, Any]:
    unbounded = one.epsilon is None or one.delta is None or not math.isfinite(one.epsilon)
    finals = [entry.final for entry in one.entries]
    measured = {"mean": one.spread.mean, "std": one.spread.sd, "values": finals}
    is_accuracy = one.metric == "test_accuracy"
    return {
        "mode": one.label,
        "metric": one.metric.removeprefix("test_"),
        **measured,
        "accuracy_mean": measured["mean"] if is_accuracy else None,
        "accuracy_std": measured["std"] if is_accuracy else None,
        "accuracies": finals if is_accuracy else [None for _ in finals],
        "epsilon_max": "inf" if unbounded else one.epsilon,
        "delta": one.delta,
        "seeds": [entry.seed for entry in one.entries],
        "claim": one.claim.removesuffix(", zero-out"),
    }


def metric_text(row: Mapping[str, Any]) -> str:
    """Return "mean ± std", and in words what is missing."""
    if row["mean"] is None:
        return "none finite"
    spread = "" if row["std"] is None else f" ± {row['std']:.4f}"
    lost = sum(value is None for value in row.get("values", ()))
    return f"{row['mean']:.4f}{spread}" + (f" ({lost} not finite)" if lost else "")


def render_comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of `comparison_table` as text; `noise` is shown where rows have it."""
    metrics = " or ".join(dict.fromkeys(row["metric"] for row in rows))
    claims, notes = _claims([row["claim"] for row in rows])
    head = ["mode", f"{metrics} ± std", "seeds", "may claim"]
    body = [
        [row["mode"], metric_text(row), str(len(row["seeds"])), claim]
        for row, claim in zip(rows, claims, strict=True)
    ]
    if any(row.get("noise") for row in rows):
        head.append("noise")
        notes.append("noise: over the run, as a multiple of a typical update")
        for row, cells in zip(rows, body, strict=True):
            cells.append(row.get("noise") or "-")
    return "\n".join([text_table(head, body, right=(2,)), *map(wrapped, notes)])


def _claims(claims: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return claims without what all bounds share, and a line that says it once."""
    shared = {
        about for _, about in (claim.split(" for ", 1) for claim in claims if " for " in claim)
    }
    if len(shared) != 1:
        return list(claims), []
    short = [
        "nothing (ε = ∞)" if claim == NO_GUARANTEE else claim.partition(" for ")[0]
        for claim in claims
    ]
    return short, [f"may claim: for {shared.pop()}"]


_COLUMNS = {
    "level": "promise",
    "label": "what ran",
    "mean": "",  # the name of the metric
    "std": "sd",
    "interval": "95 % interval of the mean",
    "seeds": "seeds",
    "epsilon_max": "worst client's ε",
    "claim": "what it may claim",
}
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    "≤": r"$\le$",
    "∞": r"$\infty$",
    "±": r"$\pm$",
}


def comparison_rows(series: Sequence[RunSeries]) -> list[dict[str, Any]]:
    """Return one row a series, those that promise the same next to one another.

    Every value can be written as JSON: `epsilon_max` is "inf" where there is no bound.
    """
    rows = []
    for level in levels(series):
        for index in level.series:
            one = series[index]
            rows.append(
                {
                    "level": level.heading,
                    "label": one.label,
                    **_summary(one),
                    "mode": one.mode,
                    "interval": None
                    if one.spread.low is None
                    else [one.spread.low, one.spread.high],
                    "adjacency": one.adjacency,
                    "claim": one.claim,
                    "runs": [entry.name for entry in one.entries],
                }
            )
    return rows


def comparison_pairs(series: Sequence[RunSeries]) -> list[dict[str, Any]]:
    """Return the differences of series that share seeds."""
    return [
        {
            "label": f"{series[first].label} minus {series[second].label}",
            "mean": found.spread.mean,
            "interval": [found.spread.low, found.spread.high],
            "p": found.p,
            "seeds": list(found.seeds),
        }
        for first, second, found in differences(series)
    ]


def write_tables(results: Mapping[str, Run], folder: Path) -> dict[str, str]:
    """Write comparison.json, .csv, .md and .tex; return their paths by format."""
    series = group_by_config(entries_of(results))
    rows = comparison_rows(series)
    record = {"schema_version": 1, "rows": rows, "pairs": comparison_pairs(series)}
    texts = {
        "json": json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False) + "\n",
        "csv": as_csv(rows),
        "md": as_markdown(rows),
        "tex": as_latex(rows),
    }
    paths = {}
    for ending, text in texts.items():
        path = folder / f"comparison.{ending}"
        write_file(path, text.encode(), parents=True)
        paths[ending] = str(path)
    return paths


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row in words."""
    interval = row["interval"]
    bounded = row["epsilon_max"] != "inf"
    return {
        "level": row["level"],
        "label": row["label"],
        "mean": four_digits(row["mean"]),
        "std": four_digits(row["std"]),
        "interval": "-"
        if interval is None
        else f"{four_digits(interval[0])} to {four_digits(interval[1])}",
        "seeds": str(len(row["seeds"])),
        "epsilon_max": format_bound(row["epsilon_max"]) if bounded else "∞",
        "claim": row["claim"],
    }


def _titles(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the headings of the columns."""
    metrics = " or ".join(dict.fromkeys(str(row["metric"]) for row in rows))
    return {**_COLUMNS, "mean": metrics}


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table for a terminal; the claim says what the worst client's ε is."""
    names = [name for name in _COLUMNS if name not in ("level", "epsilon_max")]
    claims, notes = _claims([row["claim"] for row in rows])
    cells = [{**_cells(row), "claim": claim} for row, claim in zip(rows, claims, strict=True)]
    titles = {**_titles(rows), "claim": "may claim"}
    table = text_table(
        [titles[name] for name in names], [[row[name] for name in names] for row in cells]
    )
    return "\n".join([table, *map(wrapped, notes)])


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the numbers, unrounded; lists are joined by blanks."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    names = list(rows[0])
    writer.writerow(names)
    for row in rows:
        writer.writerow([_csv_cell(row[name]) for name in names])
    return stream.getvalue()


def _csv_cell(value: Any) -> Any:
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else value


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table for a page; a bar in a name stays inside its cell."""
    lines = [_markdown(_titles(rows).values()), _markdown("---" for _ in _COLUMNS)]
    for row in rows:
        cells = _cells(row)
        lines.append(_markdown(cells[name].replace("|", "\\|") for name in _COLUMNS))
    return "\n".join(lines) + "\n"


def _markdown(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def as_latex(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a tabular for a paper (it needs no package)."""
    columns = [name for name in _COLUMNS if name not in ("level", "claim")]
    lines = [r"\begin{tabular}{lrrrrr}", r"\hline"]
    lines += [_latex_line(_titles(rows)[name] for name in columns), r"\hline"]
    level = None
    for row in rows:
        if row["level"] != level:
            level = row["level"]
            heading = rf"\multicolumn{{{len(columns)}}}{{l}}{{\emph{{{_latex(level)}}}}} \\"
            lines.append(heading)
        cells = _cells(row)
        lines.append(_latex_line(cells[name] for name in columns))
    return "\n".join([*lines, r"\hline", r"\end{tabular}"]) + "\n"


def _latex_line(cells: Any) -> str:
    return " & ".join(_latex(cell) for cell in cells) + r" \\"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)


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
    series = _compared(runs)
    rows = [_summary(one) for one in series]
    looks = style.looks_of(series)
    settings = style.figure_settings(config, (13.0, max(4.0, 1.6 + 0.95 * len(rows))))
    dataset = series[0].entries[0].dataset
    path = style.figure_path(save_path, f"{dataset}_comparison", settings)
    with style.drawing(settings) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
        figure.suptitle(title or f"Modes compared: {dataset.upper()}")
        _draw_curves(left, series, looks)
        _draw_finals(right, rows, series[0].metric_name.lower(), looks)
        return style.save_figure(figure, path, settings)


def _draw_curves(axes: Axes, series: Sequence[RunSeries], looks: Sequence[style.Look]) -> None:
    title = f"Test {series[0].metric_name.lower()} by round"
    drawn = style.draw_metric(axes, series, looks)
    if not drawn:
        style.in_words(axes, "no evaluation that all seeds of a mode share", title)
        return
    absent = [one.label for one in series if one not in drawn]
    notes = ["line: mean over the seeds; band: lowest to highest seed"]
    notes += [f"nothing finite to draw for {', '.join(absent)}"] if absent else []
    style.panel_title(axes, title, notes)


def _draw_finals(
    axes: Axes, rows: Sequence[Mapping[str, Any]], metric: str, looks: Sequence[style.Look]
) -> None:
    """Draw one band per mode: its name, result and claim, and under them its seeds."""
    points = [value for row in rows for value in row["values"] if value is not None]
    if metric == "accuracy":
        axes.set_xlim(*(style.padded(np.asarray(points)) if points else (0.0, 1.0)))
    axes.set_ylim(len(rows), 0)
    axes.set_yticks([])
    axes.set_xlabel(f"Test {metric} at the end of the run")
    for index, name in enumerate(style.short_names([row["mode"] for row in rows])):
        _draw_mode(axes, index, {**rows[index], "mode": name}, looks[index])
    style.panel_title(axes, f"Final {metric} and claim", ["dots: one seed each; bar: their mean"])


def _draw_mode(axes: Axes, top: int, row: Mapping[str, Any], look: style.Look) -> None:
    across = axes.get_yaxis_transform()
    text: dict[str, Any] = {"transform": across, "va": "center"}
    seeds = "1 seed" if len(row["seeds"]) == 1 else f"{len(row['seeds'])} seeds"
    axes.text(0.015, top + 0.18, row["mode"], fontweight="bold", **text)
    axes.text(0.985, top + 0.18, f"{metric_text(row)}, {seeds}", ha="right", **text)
    axes.text(0.015, top + 0.42, row["claim"], fontsize=9.5, alpha=0.85, **text)
    values = [value for value in row["values"] if value is not None]
    drawn: dict[str, Any] = {"color": look.color, "marker": look.marker, "markersize": 7}
    axes.plot(values, [top + 0.72] * len(values), linestyle="", alpha=0.7, **drawn)
    if row["mean"] is not None:
        axes.vlines(row["mean"], top + 0.58, top + 0.86, linewidth=1.5, color=style.text_color())
    if top:
        axes.axhline(top, color=style.GREY, linewidth=0.6, alpha=0.5)
