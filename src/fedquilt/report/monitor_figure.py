"""The figure of what a run used: processor, memory, network, and power or time, by round."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.common.errors import RunFolderError
from fedquilt.common.untrusted import read_lines
from fedquilt.report.series import ROUND, Series, as_number
from fedquilt.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    as_drawn,
    drawing,
    figure_settings,
    in_words,
    line,
    panel_title,
    save_figure,
    whole_rounds,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

    settings = figure_settings(None)
    measured = any("energy_vdd_in" in entry for entry in rounds)
    panels = (
        ("cpu_usage", "Processor", "% (100: one core)", 1.0),
        ("memory_usage", "Memory", "% of the machine's", 1.0),
        ("network_bytes_sent", "Bytes sent", "MB", 1e-6),
        ("energy_vdd_in", "Energy", "J", 1e-3) if measured else ("seconds", "Time", "s", 1.0),
    )
    with drawing(settings) as figure:
        figure.suptitle(as_drawn(f"What the run used: {folder.name}"))
        for axes, (key, title, unit, factor) in zip(
            figure.subplots(2, 2).flat, panels, strict=True
        ):
            _draw(axes, rounds, key, title, unit, factor)
        handles = [Line2D([], [], color=c, label=n) for n, c in _colors(rounds).items()]
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
        # How long clients take tells how much they hold.
        return save_figure(figure, folder / PICTURE, settings, 0o600)


def _colors(rounds: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a colour for each tier that ever trained, widest first, and for the server."""
    names = {name for entry in rounds for name in entry.get("tiers") or {}}
    widths = sorted(names - {"server"}, key=lambda name: as_number(_width(name)), reverse=True)
    listed = [*widths, *(["server"] if "server" in names else [])]
    return dict(zip(listed, cycle((VERMILION, GREEN, PURPLE, ORANGE, GREY)), strict=False))


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
    panel_title(axes, title, ["thick: the whole round"])
    if not whole.finite.any():
        in_words(axes, "not measured")
        return
    line(axes, whole, BLUE)
    tiers = [entry.get("tiers") or {} for entry in rounds]
    for name, color in _colors(rounds).items():
        part = series([found.get(name) or {} for found in tiers])
        line(axes, part, color, linewidth=1.0, markersize=2.5)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0, top=1.15 * max(float(np.nanmax(whole.values)), 1e-9))
    whole_rounds(axes, positions, ROUND)
