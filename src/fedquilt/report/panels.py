"""The pieces that several figures draw: titles, lines with gaps, words for no data."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.report.series import Array, Series
from fedquilt.report.style import VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOMINAL = "nominal epsilon, summed over rounds (not a guarantee)"
_SMALL = 9
_MANY_POINTS = 40


def head(axes: Axes, title: str, notes: Sequence[str] = ()) -> None:
    """Set a left title with notes in small type under it, above the data.

    What a dashed line means stands in a note rather than in a legend, since a
    legend may cover data.
    """
    width = max(20, int(axes.get_position().width * axes.figure.get_figwidth() * 17))  # type: ignore[union-attr]
    lines = [line for note in notes for line in textwrap.wrap(note, width)]
    axes.set_title(title, loc="left", fontweight="bold", pad=6 + 12 * max(1, len(lines)))
    axes.annotate(
        "\n".join(lines),
        xy=(0, 1),
        xycoords="axes fraction",
        xytext=(0, 4),
        textcoords="offset points",
        ha="left",
        va="bottom",
        fontsize=_SMALL,
        alpha=0.8,
        linespacing=1.25,
    )


def in_words(axes: Axes, text: str) -> None:
    """Say in the middle of a panel why it holds no data."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, alpha=0.8)


def text_color() -> str:
    """Return the colour of text in the style in use: dark on light, or light on dark."""
    from matplotlib import rcParams

    return str(rcParams["text.color"])


def whole_rounds(axes: Axes, positions: Array, label: str) -> None:
    """Label the horizontal axis, with ticks at whole numbers, over the whole run.

    Positions without a value count too: a run that diverged did not end there.
    """
    from matplotlib.ticker import MaxNLocator

    first, last = float(positions.min()), float(positions.max())
    room = 0.04 * (last - first) or 0.5
    axes.set_xlim(first - room, last + room)
    axes.set_xlabel(label)
    steps = [1, 2, 2.5, 5, 10]
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=steps, integer=True, min_n_ticks=1))


def line(axes: Axes, series: Series, color: str, **options: Any) -> None:
    """Draw a line that breaks where a value is missing; few points get markers."""
    marker = "o" if series.finite.sum() <= _MANY_POINTS else ""
    style: dict[str, Any] = {"marker": marker, "markersize": 4, "linewidth": 1.6} | options
    axes.plot(series.positions, series.values, color=color, **style)


def reference(axes: Axes, value: float) -> None:
    """Draw a dashed horizontal line to compare with."""
    axes.axhline(value, color=VERMILION, linestyle="--", linewidth=1.2, alpha=0.8)


def shortfall(series: Series, unit: str) -> list[str]:
    """Return a note on entries that hold no finite value, or nothing."""
    missing = int(series.values.size - series.finite.sum())
    return [f"{missing} of {series.values.size} {unit} without a finite value"] if missing else []


def accuracy_limits(axes: Axes, values: Array, target: float | None = None) -> None:
    """Fit the vertical axis to the accuracies and the target, inside [0, 1]."""
    axes.set_ylim(*padded(np.append(values, np.nan if target is None else target)))


def padded(values: Array) -> tuple[float, float]:
    """Return limits in [0, 1] around finite accuracies, at least 0.05 apart."""
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    room = max(0.06 * (high - low), 0.025)
    return max(0.0, low - room), min(1.0, high + room) if high <= 1 else high + room


def logarithmic(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers at its ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    if high / low < 30:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.yaxis.set_minor_formatter(NullFormatter())
