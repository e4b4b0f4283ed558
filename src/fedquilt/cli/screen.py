"""How wide what is printed may be."""

from __future__ import annotations

import shutil
import sys


def screen_width() -> int | None:
    """Return the columns of the terminal; None where output goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
