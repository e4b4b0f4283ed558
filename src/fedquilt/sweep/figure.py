"""Figures of a sweep: accuracy along one option, or over two as a heat map."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.common.colors import identities
from fedquilt.common.errors import InvalidValueError
from fedquilt.report.style import (
    as_look,
    drawing,
    figure_path,
    figure_settings,
    in_words,
    panel_title,
    save_figure,
)
from fedquilt.sweep.table import shown_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
_WIDE = 20  # a ratio of largest to smallest value that asks for a logarithmic axis


def plot_sweep(
    rows: Sequence[Row],
    axes: Sequence[str],
    save_path: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
    metric: str = "accuracy",
) -> list[str]:
    """Draw a sweep: lines along the first option and, with two or more, heat maps.

    `rows` have `values` (option: value), `mean`, `low` and `high` (of the mean), None where
    nothing was measured.  Options beyond the second are averaged over.
    Returns the paths: `{path}`, and `{stem}_map` for the heat map.
    """
    if not rows or not axes:
        raise InvalidValueError("a figure of a sweep needs at least one option and one row")
    settings = figure_settings(config, (6.8, 4.4))
    path = figure_path(save_path, "sweep", settings)
    with drawing(settings) as figure:
        _draw_lines(figure.subplots(), rows, axes, metric)
        paths = [save_figure(figure, path, settings)]
    if len(axes) > 1:
        with drawing(settings) as figure:
            _draw_map(figure.subplots(), rows, axes[0], axes[1], metric)
            place = path.with_name(f"{path.stem}_map{path.suffix}")
            paths.append(save_figure(figure, place, settings))
    return paths


def _draw_lines(axes: Axes, rows: Sequence[Row], keys: Sequence[str], metric: str) -> None:
    first = keys[0]
    families = _values(rows, keys[1]) if len(keys) > 1 else [None]
    numeric = all(_is_number(value) for value in _values(rows, first))
    places = {shown_value(value): i for i, value in enumerate(_values(rows, first))}
    looks = [as_look(one) for one in identities([""] * len(families), {})]
    for index, family in enumerate(families):
        own = [r for r in rows if family is None or r["values"][keys[1]] == family]
        table = _averaged(own, first)
        if not table:
            continue
        xs = [value if numeric else places[shown_value(value)] for value, *_ in table]
        means, lows, highs = (np.asarray([entry[k] for entry in table]) for k in (1, 2, 3))
        look = looks[index]
        label = None if family is None else f"{keys[1]} = {shown_value(family)}"
        errors = np.abs(np.vstack([means - lows, highs - means]))
        axes.errorbar(
            xs,
            means,
            np.nan_to_num(errors),
            **look.line,
            marker=look.marker,
            capsize=3,
            label=label,
        )
    _label_x(axes, rows, first, numeric, places)
    axes.set_ylabel(f"test {metric}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9)
    notes = ["points: mean of the seeds; bars: 95 % interval of the mean"]
    if len(keys) > 2:
        notes.append(f"averaged over {', '.join(keys[2:])}")
    panel_title(axes, f"{metric.capitalize()} by {first}", notes)


def _label_x(
    axes: Axes, rows: Sequence[Row], key: str, numeric: bool, places: Mapping[str, int]
) -> None:
    axes.set_xlabel(key)
    if not numeric:
        axes.set_xticks(list(places.values()), list(places))
        return
    values = [value for value in _values(rows, key) if value > 0]
    if len(values) == len(_values(rows, key)) and max(values) / min(values) > _WIDE:
        axes.set_xscale("log")


def _draw_map(axes: Axes, rows: Sequence[Row], across: str, down: str, metric: str) -> None:
    columns, lines = _values(rows, across), _values(rows, down)
    cells = np.full((len(lines), len(columns)), np.nan)
    for i, line in enumerate(lines):
        table = _averaged([r for r in rows if r["values"][down] == line], across)
        for value, mean, *_ in table:
            cells[i, columns.index(value)] = mean
    panel_title(axes, f"{metric.capitalize()} by {across} and {down}", ["mean of the seeds"])
    if not np.isfinite(cells).any():
        in_words(axes, "nothing was measured")
        return
    axes.grid(False)
    picture = axes.imshow(cells, aspect="auto", cmap="cividis", origin="lower")
    middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
    for i, j in zip(*np.nonzero(np.isfinite(cells)), strict=True):
        color = "white" if cells[i, j] < middle else "black"
        axes.text(j, i, f"{cells[i, j]:.3f}", ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(columns)), [shown_value(value) for value in columns])
    axes.set_yticks(range(len(lines)), [shown_value(value) for value in lines])
    axes.set_xlabel(across)
    axes.set_ylabel(down)
    axes.figure.colorbar(picture, ax=axes, label=f"test {metric}")


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    """Return the values of an option: numbers in order, others as they come."""
    found = list(dict.fromkeys(row["values"][key] for row in rows))
    return sorted(found) if all(_is_number(value) for value in found) else found


def _averaged(rows: Sequence[Row], key: str) -> list[tuple[Any, float, float, float]]:
    """Return (value, mean, low, high) by the value of an option, averaged over the rest."""
    table = []
    for value in _values(rows, key):
        own = [r for r in rows if r["values"][key] == value and r["mean"] is not None]
        if own:
            means = float(np.mean([row["mean"] for row in own]))
            alone = len(own) == 1 and own[0]["low"] is not None
            low, high = (own[0]["low"], own[0]["high"]) if alone else (math.nan, math.nan)
            table.append((value, means, low, high))
    return table


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
