"""The names of the module `utils` of the QuAP-FL API document, and a self-test."""

from fedquilt.papers.self_test import check_milestone, validate_implementation
from fedquilt.report import (
    generate_summary_table,
    plot_multi_seed_comparison,
    plot_paper_figures,
    plot_privacy_consumption_by_group,
    plot_training_history,
)

__all__ = [
    "check_milestone",
    "generate_summary_table",
    "plot_multi_seed_comparison",
    "plot_paper_figures",
    "plot_privacy_consumption_by_group",
    "plot_training_history",
    "validate_implementation",
]
