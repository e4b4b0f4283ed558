"""The experiments of the papers, run again: cells that are kept, tables beside the printed ones."""

from fedquilt.reproduce.cells import Cell, Kept, kept_cells, run_cells
from fedquilt.reproduce.command import Wanted, reproduce
from fedquilt.reproduce.papers import PAPERS, Paper, write_page

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
