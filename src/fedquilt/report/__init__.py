"""From what a run recorded to tables and figures.

Everything here reads plain dictionaries, as a run writes them to its
`result.json`, or plain arrays of images; nothing here trains.
"""

from fedquilt.report.comparison import comparison_table, plot_comparison, render_comparison
from fedquilt.report.images import animate_condensed, draw_condensed, draw_condensed_strip
from fedquilt.report.paper_figures import (
    plot_multi_seed_comparison,
    plot_paper_figures,
    plot_privacy_consumption_by_group,
)
from fedquilt.report.style import FigureSettings, figure_settings
from fedquilt.report.tables import (
    condensation_row,
    condensation_table,
    generate_summary_table,
    slices_table,
)
from fedquilt.report.training_figure import plot_training_history

__all__ = [
    "FigureSettings",
    "animate_condensed",
    "comparison_table",
    "condensation_row",
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
