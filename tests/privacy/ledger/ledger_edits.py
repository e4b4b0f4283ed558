"""What somebody with the file in hand can do to a ledger."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def edit(path: Path, *statements: str) -> None:
    """Change a ledger behind its back, in SQL."""
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
