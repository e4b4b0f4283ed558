"""A plan as a figure: what the noise does to models of every size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.common import checks
from fedquilt.report.style import (
    BLUE,
    FORMATS,
    ORANGE,
    PURPLE,
    VERMILION,
    drawing,
    figure_settings,
    panel_title,
    save_figure,
    text_color,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COHORT_FACTORS = {1: BLUE, 10: PURPLE, 100: ORANGE}


def plan_figure(plan: Any, path: str | Path, config: Mapping[str, Any] | None = None) -> Path:
    """Draw noise/signal of the run against trainable parameters, and save it at `path`.

    One line each for the asked cohort, 10 and 100 times as many clients per
    round; the asked point is marked.  The suffix chooses png, pdf or svg.  `plan` is what
    `fedquilt.privacy.feasibility.plan_privacy` returns.
    """
    path = Path(path)
    checks.choice("suffix of the figure", path.suffix.lower(), [f".{kind}" for kind in FORMATS])
    settings = figure_settings(config, (7.2, 5.2))
    with drawing(settings) as figure:
        _draw(figure.add_subplot(), plan)
        figure.legend(loc="outside lower center", fontsize=9, frameon=False)
        save_figure(figure, path, settings)
    return path


def _draw(axes: Axes, plan: Any) -> None:
    most = 10.0 ** math.ceil(math.log10(max(10.0 * plan.parameters, 1e6)))
    workable, hopeless = plan.limits
    slope = plan.noise_to_signal_run / math.sqrt(plan.parameters)
    for factor, colour in _COHORT_FACTORS.items():
        label = (
            f"{_count(plan.cohort * factor)} clients per round: "
            f"workable up to {_count(math.ceil((workable * factor / slope) ** 2) - 1)} parameters"
        )
        ends = [slope / factor, slope / factor * math.sqrt(most)]
        axes.plot([1.0, most], ends, color=colour, label=label)
    lowest, highest = slope / max(_COHORT_FACTORS), max(10.0, 2 * slope * math.sqrt(most))
    ink = text_color()
    axes.axhline(workable, color=ink, linestyle="--", linewidth=1)
    axes.axhline(hopeless, color=ink, linestyle=":", linewidth=1)
    axes.axhspan(min(lowest, 0.1), workable, color=ink, alpha=0.06, linewidth=0)
    axes.text(1.3, 0.9 * workable, "workable below this line", va="top", fontsize=9)
    axes.text(1.3, 1.1 * hopeless, "hopeless above this line", va="bottom", fontsize=9)
    found = f"{plan.noise_to_signal_run:.3g} ({plan.verdict})"
    asked = f"asked: {plan.parameters:,} parameters, {found}"
    axes.plot(plan.parameters, plan.noise_to_signal_run, "o", color=VERMILION, label=asked)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(1.0, most),
        ylim=(min(lowest, 0.1), highest),
        xlabel="trainable parameters",
        ylabel="noise / largest signal, whole run",
    )
    told = f"epsilon {plan.epsilon:g}, delta {plan.delta:g}, {plan.rounds:,} rounds, "
    panel_title(axes, "What the noise does", [f"{told}{plan.joins:,.4g} joins a client"])


def _count(value: float) -> str:
    return f"{value:,.0f}" if 100 <= value < 1e9 else f"{value:.3g}"
