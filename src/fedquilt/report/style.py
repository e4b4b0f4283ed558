"""How figures look and how they reach the disk.

Figures are made without pyplot, so drawing one changes no global state and
needs no screen.  Only `show_plot` brings pyplot in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt import validate
from fedquilt.errors import InvalidValueError, StorageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf", "svg")
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#AA4499"
ORANGE, SKY, GREY = "#E69F00", "#56B4E9", "#666666"
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY)
"""Colours that stay apart for colour-blind readers (after Okabe and Ito)."""

_LAYOUT: dict[Any, Any] = {
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "svg.hashsalt": "fedquilt",
}
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
            validate.choice("visualization key", key, VISUALIZATION_CONFIG)
    defaults = VISUALIZATION_CONFIG | ({"figsize": figsize} if figsize else {})
    merged = {key: given.get(key, default) for key, default in defaults.items()}
    return FigureSettings(
        enabled=_flag("enabled", merged["enabled"]),
        show_plot=_flag("show_plot", merged["show_plot"]),
        dpi=validate.number("dpi", merged["dpi"], at_least=10, at_most=2400),
        format=validate.choice("format", merged["format"], FORMATS),
        style=_style(merged["style"]),
        figsize=_size(merged["figsize"]),
        include_table=_flag("include_table", merged["include_table"]),
    )


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidValueError(f"{name}={value!r} must be true or false")
    return value


def _style(value: object) -> str:
    import matplotlib.style

    return validate.choice("style", value, ["default", *matplotlib.style.available])


def _size(value: object) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InvalidValueError(f"figsize={value!r} must be (width, height) in inches")
    width, height = (validate.number("figsize", side, above=0, at_most=100) for side in value)
    return width, height


@contextmanager
def drawing(settings: FigureSettings) -> Iterator[Figure]:
    """Give a figure in the wanted style; what is drawn and saved inside has that style."""
    import matplotlib
    import matplotlib.style

    with matplotlib.style.context(settings.style), matplotlib.rc_context(_LAYOUT):
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

    Without `save_path` that is `results/{default_stem}_{timestamp}.{format}`.
    An ending in `save_path` decides the format; a path without one gets it.
    """
    if save_path is None:
        stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
        stem = re.sub(r"[^\w.-]+", "_", default_stem)
        return Path("results") / f"{stem}_{stamp}.{settings.format}"
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


def save_figure(figure: Figure, path: Path, settings: FigureSettings) -> str:
    """Write the figure beside its place, then move it there in one step."""
    kind = path.suffix.lower().lstrip(".")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, format=kind, dpi=settings.dpi, metadata=_METADATA[kind])
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"cannot write the figure {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return str(path)
