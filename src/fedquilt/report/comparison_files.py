"""A comparison of finished runs on disk: its table in four formats, its figures in three."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedquilt.common.bounds import format_bound
from fedquilt.common.storage import write_file
from fedquilt.report.together import (
    Entry,
    RunSeries,
    differences,
    entry_of_result,
    lay_together,
    levels,
)

Result = Mapping[str, Any]
FIGURES = ("comparison", "training", "seeds", "paper")
_COLUMNS = {
    "level": "promise",
    "label": "what ran",
    "accuracy_mean": "accuracy",
    "accuracy_std": "sd",
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


def entries_of(results: Mapping[str, Result]) -> list[Entry]:
    """Return what is compared of results, by the name of their folder."""
    return [entry_of_result(result, name) for name, result in results.items()]


def comparison_rows(series: Sequence[RunSeries]) -> list[dict[str, Any]]:
    """Return one row a series, those that promise the same next to one another.

    Every value can be written as JSON: `epsilon_max` is "inf" where there is no bound.
    """
    rows = []
    for level in levels(series):
        for index in level.series:
            one = series[index]
            unbounded = one.epsilon is None or one.epsilon == float("inf")
            rows.append(
                {
                    "level": level.heading,
                    "label": one.label,
                    "mode": one.mode,
                    "accuracy_mean": one.spread.mean,
                    "accuracy_std": one.spread.sd,
                    "interval": None
                    if one.spread.low is None
                    else [one.spread.low, one.spread.high],
                    "seeds": [entry.seed for entry in one.entries],
                    "accuracies": [entry.final for entry in one.entries],
                    "epsilon_max": "inf" if unbounded else one.epsilon,
                    "delta": one.delta,
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


def write_tables(results: Mapping[str, Result], folder: Path) -> dict[str, str]:
    """Write comparison.json, .csv, .md and .tex; return their paths by format."""
    series = lay_together(entries_of(results))
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
        "accuracy_mean": _four(row["accuracy_mean"]),
        "accuracy_std": _four(row["accuracy_std"]),
        "interval": "-" if interval is None else f"{_four(interval[0])} to {_four(interval[1])}",
        "seeds": str(len(row["seeds"])),
        "epsilon_max": format_bound(row["epsilon_max"]) if bounded else "∞",
        "claim": row["claim"],
    }


def _four(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table for a terminal."""
    from tabulate import tabulate

    body = [[_cells(row)[name] for name in _COLUMNS if name != "level"] for row in rows]
    titles = [title for name, title in _COLUMNS.items() if name != "level"]
    return tabulate(body, headers=titles, disable_numparse=True)


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
    lines = [_markdown(_COLUMNS.values()), _markdown("---" for _ in _COLUMNS)]
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
    lines += [_latex_line(_COLUMNS[name] for name in columns), r"\hline"]
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
