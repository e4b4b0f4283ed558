"""How figures look, the pieces they share, how they are saved.

Figures are made without pyplot, so drawing one changes no global state and
needs no screen.  Only `show_plot` brings pyplot in.
"""

from __future__ import annotations

import io
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.common import checks, optional
from fedquilt.common.colors import LIGHT, Identity, identities
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import printable
from fedquilt.common.storage import write_file
from fedquilt.config.documents import OUTPUT_CONFIG
from fedquilt.config.modes import mode_colors
from fedquilt.report.runs import RunSeries
from fedquilt.report.series import ROUND, Array, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf", "svg")
COLORS = LIGHT
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY = (
    COLORS[name] for name in ("blue", "vermilion", "green", "purple", "orange", "sky", "grey")
)
PALETTE = tuple(COLORS.values())

_STYLE_FILE = Path(__file__).parent / "assets" / "fedquilt.mplstyle"
"""The one style of all figures: colours, fonts that are embedded, room between panels."""
_METADATA: dict[str, dict[str, None]] = {
    "png": {},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}


@dataclass(frozen=True)
class FigureSettings:
    """The keys of VISUALIZATION_CONFIG, checked."""

    enabled: bool
    show_plot: bool
    dpi: float
    format: str
    style: str
    figsize: tuple[float, float]
    include_table: bool


def figure_settings(
    config: Mapping[str, Any] | None, figsize: tuple[float, float] | None = None
) -> FigureSettings:
    """Merge `config` over VISUALIZATION_CONFIG and check every value.

    Keys of a run's configuration may stand in `config` as well and are left
    alone; any other key is an error, because it is most likely a misspelling.
    `figsize` replaces the default size, never a size that `config` states.
    """
    from fedquilt.config import HYPERPARAMETERS, VISUALIZATION_CONFIG, option_fields

    given = dict(config or {})
    foreign = set(HYPERPARAMETERS) | set(option_fields()) | {"target_accuracy"}
    for key in given:
        if key not in VISUALIZATION_CONFIG and key not in foreign:
            checks.choice("visualization key", key, VISUALIZATION_CONFIG)
    defaults = VISUALIZATION_CONFIG | ({"figsize": figsize} if figsize else {})
    merged = {key: given.get(key, default) for key, default in defaults.items()}
    return FigureSettings(
        enabled=checks.flag("enabled", merged["enabled"]),
        show_plot=checks.flag("show_plot", merged["show_plot"]),
        dpi=checks.number("dpi", merged["dpi"], at_least=10, at_most=2400),
        format=checks.choice("format", merged["format"], FORMATS),
        style=_style(merged["style"]),
        figsize=_size(merged["figsize"]),
        include_table=checks.flag("include_table", merged["include_table"]),
    )


def _style(value: object) -> str:
    optional.require("matplotlib", "a figure")
    import matplotlib.style

    return checks.choice("style", value, ["default", *matplotlib.style.available])


def _size(value: object) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InvalidValueError(f"figsize={value!r} must be (width, height) in inches")
    width, height = (checks.number("figsize", side, above=0, at_most=100) for side in value)
    return width, height


@contextmanager
def drawing(settings: FigureSettings) -> Iterator[Figure]:
    """Give a figure in the wanted style; what is drawn and saved inside has that style."""
    import matplotlib.style

    with matplotlib.style.context([settings.style, str(_STYLE_FILE)]):
        if not settings.show_plot:
            yield _plain_figure(settings)
            return
        from matplotlib import pyplot

        figure = pyplot.figure(figsize=settings.figsize, dpi=settings.dpi, layout="constrained")
        try:
            yield figure
            pyplot.show()
        finally:
            pyplot.close(figure)


def _plain_figure(settings: FigureSettings) -> Figure:
    """Return a figure that pyplot does not know of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=settings.figsize, dpi=settings.dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def figure_path(
    save_path: str | os.PathLike[str] | None, default_stem: str, settings: FigureSettings
) -> Path:
    """Return where a figure goes; its ending is one of the formats.

    Without `save_path` that is `{default_stem}_{timestamp}.{format}` in the folder that
    OUTPUT_CONFIG names, `./results`.
    An ending in `save_path` decides the format; a path without one gets it.
    """
    if save_path is None:
        stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
        stem = re.sub(r"[^\w.-]+", "_", default_stem)
        folder = Path(checks.path("output_dir", OUTPUT_CONFIG["output_dir"]))
        return folder / f"{stem}_{stamp}.{settings.format}"
    path = Path(save_path)
    if not path.name:
        raise InvalidValueError(f"save_path={str(save_path)!r} must name a file")
    if not path.suffix:
        return path.with_suffix(f".{settings.format}")
    if path.suffix.lower().lstrip(".") not in FORMATS:
        raise InvalidValueError(
            f"save_path={str(save_path)!r} must end in .png, .pdf or .svg, or have no ending"
        )
    return path


def save_figure(figure: Figure, path: Path, settings: FigureSettings, mode: int = 0o666) -> str:
    """Write the figure in the format of its ending; return where it is.

    With `enabled` off, or `save_plots` of OUTPUT_CONFIG, nothing is written and the text is
    empty.
    """
    if not (settings.enabled and checks.flag("save_plots", OUTPUT_CONFIG["save_plots"])):
        return ""
    kind = path.suffix.lower().lstrip(".")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=settings.dpi, metadata=_METADATA[kind])
    write_file(path, drawn.getvalue(), mode, parents=True)
    return str(path)


NOMINAL = "nominal epsilon, summed over rounds (not a guarantee)"
_SMALL = 9
_MANY_POINTS = 40


def as_drawn(text: object) -> str:
    """Return a name so that a figure shows it as it is: a dollar sign would begin a formula."""
    return printable(text).replace("$", r"\$")


def panel_title(axes: Axes, title: str, notes: Sequence[str] = ()) -> None:
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


def in_words(axes: Axes, text: str, title: str | None = None) -> None:
    """Say in the middle of a panel, under its title, why it holds no data."""
    if title is not None:
        panel_title(axes, title)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, alpha=0.8)


def text_color() -> str:
    """Return the colour of text in the style in use: dark on light, or light on dark."""
    from matplotlib import rcParams

    return str(rcParams["text.color"])


def whole_rounds(axes: Axes, positions: Array, label: str, upright: str = "") -> None:
    """Label the horizontal axis, with ticks at whole numbers, over the whole run, and the other.

    Positions without a value count too: a run that diverged did not end there.
    """
    from matplotlib.ticker import MaxNLocator

    first, last = float(positions.min()), float(positions.max())
    room = 0.04 * (last - first) or 0.5
    axes.set_xlim(first - room, last + room)
    axes.set_xlabel(label)
    if upright:
        axes.set_ylabel(upright)
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
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    if high / low < 4:  # a power of ten would be the only tick, or none
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_minor_locator(NullLocator())
    elif high / low < 30:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.yaxis.set_minor_formatter(NullFormatter())


_MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "up": "^",
    "down": "v",
    "plus": "P",
    "cross": "X",
}


@dataclass(frozen=True)
class Look:
    """Colour, dash and marker of a series as matplotlib takes them."""

    color: str
    dash: Any
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """The options of a line."""
        return {"color": self.color, "ls": self.dash}


def as_look(identity: Identity) -> Look:
    """Return an identity as matplotlib takes it; its dashes are in units of the line's width."""
    dash = (0, tuple(part / 1.6 for part in identity.dash)) if identity.dash else "-"
    return Look(COLORS[identity.color], dash, _MARKERS[identity.marker])


def looks_of(series: Sequence[RunSeries]) -> list[Look]:
    """Return how each series looks, in every figure and on every page."""
    return [as_look(one) for one in identities([one.looks_as for one in series], mode_colors())]


def short_names(names: Sequence[str], most: int = 28) -> list[str]:
    """Return names that fit into a figure, as a page shortens them (`shortNames`, chart.js).

    Where one is too long, what all begin with is left out: what tells them apart is at their ends.

    >>> short_names(["certified, seed=1", "certified, seed=2"], most=12)
    ['seed=1', 'seed=2']
    """
    if all(len(name) <= most for name in names):
        return list(names)
    parts = [name.split(", ") for name in names]
    begin = takewhile(lambda own: len(set(own)) == 1, zip(*(p[:-1] for p in parts), strict=False))
    same = len(list(begin)) if len(names) > 1 else 0
    kept = [", ".join(one[same:]) for one in parts]
    half = most // 2
    cut = [name if len(name) <= most else f"{name[:half]}…{name[1 - half :]}" for name in kept]
    alike = {name for name in cut if cut.count(name) > 1}
    return [f"{one} [{k}]" if one in alike else one for k, one in enumerate(cut, 1)]


def name_series(figure: Figure, series: Sequence[RunSeries]) -> None:
    """Name series below the panels."""
    from matplotlib.lines import Line2D

    names = short_names([one.named for one in series])
    handles = [
        Line2D([], [], **look.line, marker=look.marker, markersize=4, label=as_drawn(name))
        for look, name in zip(looks_of(series), names, strict=True)
    ]
    columns = min(len(handles), 3)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


def draw_band(axes: Axes, positions: Array, values: Array, color: str) -> None:
    """Draw a band from the lowest to the highest row of values, where there are several."""
    if len(values) > 1:
        low, high = values.min(axis=0), values.max(axis=0)
        axes.fill_between(positions, low, high, color=color, alpha=0.2, linewidth=0)


def draw_curve(axes: Axes, positions: Array, values: Array, look: Look, **options: Any) -> None:
    """Draw the mean of rows of values as a line, with its band; few points get markers."""
    mean = values.mean(axis=0) if values.size else np.zeros(0)
    marker = look.marker if np.isfinite(mean).sum() <= 5 else ""
    axes.plot(positions, mean, **look.line, marker=marker, **options)
    draw_band(axes, positions, values, look.color)


def draw_metric(
    axes: Axes, series: Sequence[RunSeries], looks: Sequence[Look], *, with_seeds: bool = False
) -> list[RunSeries]:
    """Draw the headline metric of series by round, named at the ends; return what was drawn."""
    ends: list[tuple[str, float, float, str]] = []
    drawn, everything, reached, axis = [], [], [], ROUND
    names = short_names([one.named if with_seeds else one.label for one in series])
    for one, look, name in zip(series, looks, names, strict=True):
        positions, values, axis = one.curve()
        mean = values.mean(axis=0) if values.size else np.zeros(0)
        shown = np.flatnonzero(np.isfinite(mean))
        if not shown.size:
            continue
        draw_curve(axes, positions, values, look, linewidth=2, markersize=5)
        last = shown[-1]
        ends.append((name, float(positions[last]), float(mean[last]), look.color))
        drawn.append(one)
        everything.append(values.ravel())
        reached.append(positions)
    if drawn:
        if series[0].metric == "test_accuracy":
            accuracy_limits(axes, np.concatenate(everything))
        whole_rounds(axes, np.concatenate(reached), axis, f"Test {series[0].metric_name.lower()}")
        label_ends(axes, ends)
    return drawn


_LABEL_INCHES = 0.2
# Dotted, because a solid rule from a lone point would read as data.
_LEADER: dict[str, Any] = {
    "arrowstyle": "-",
    "linestyle": ":",
    "linewidth": 1.3,
    "relpos": (0, 0.5),
}


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Name every line to the right of the axes, joined to its end by a dotted rule."""
    bottom, top = axes.get_ylim()
    heights = np.asarray([(y - bottom) / (top - bottom) for _, _, y, _ in ends])
    gap = _LABEL_INCHES / (axes.get_position().height * axes.figure.get_figheight())  # type: ignore[union-attr]
    for (label, x, y, color), height in zip(ends, spread_apart(heights, gap), strict=True):
        axes.annotate(
            label,
            xy=(x, y),
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops=_LEADER | {"color": color},
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
