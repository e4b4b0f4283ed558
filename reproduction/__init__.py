"""The experiments of the papers, run again: cells that are kept, tables beside the printed ones."""

from reproduction.cells import Cell, Kept, kept_cells, run_cells
from reproduction.command import Wanted, reproduce
from reproduction.papers import PAPERS, Paper, write_page

__all__ = [
    "PAPERS",
    "Cell",
    "Kept",
    "Paper",
    "Wanted",
    "kept_cells",
    "reproduce",
    "run_cells",
    "write_page",
]
