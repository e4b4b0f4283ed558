"""From what a run recorded to tables and figures.

Everything here reads plain dictionaries, as a run writes them to its
`result.json`, or plain arrays of images; nothing here trains.
"""

from fedquilt.report.compare import comparison_table, render_comparison
from fedquilt.report.compare_figure import plot_comparison
from fedquilt.report.condensed import (
    animate_condensed,
    draw_condensed,
    draw_condensed_strip,
)
from fedquilt.report.condensed_table import condensation_table
from fedquilt.report.groups import plot_paper_figures, plot_privacy_consumption_by_group
from fedquilt.report.history import plot_training_history
from fedquilt.report.seeds import plot_multi_seed_comparison
from fedquilt.report.slices import slices_table
from fedquilt.report.style import FigureSettings, figure_settings
from fedquilt.report.summary import generate_summary_table

__all__ = [
    "FigureSettings",
    "animate_condensed",
    "comparison_table",
    "condensation_table",
    "draw_condensed",
    "draw_condensed_strip",
    "figure_settings",
    "generate_summary_table",
    "plot_comparison",
    "plot_multi_seed_comparison",
    "plot_paper_figures",
    "plot_privacy_consumption_by_group",
    "plot_training_history",
    "render_comparison",
    "slices_table",
]
