"""The table of a condensation and what stands beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def condensation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one line a method: accuracy, megabytes both ways, rounds, seconds.

    Each row has `name`, `accuracy`, `bytes_up`, `bytes_down`, `rounds`, `seconds`,
    `raw` (whether clients' own images leave them) and `note`.
    """
    from tabulate import tabulate

    lines = [
        (
            row["name"],
            "-" if row["accuracy"] is None else f"{row['accuracy']:.4f}",
            _megabytes(row["bytes_up"]),
            _megabytes(row["bytes_down"]),
            str(row["rounds"]),
            "-" if row["seconds"] is None else f"{row['seconds']:.0f}",
            "yes" if row["raw"] else "no",
        )
        for row in rows
    ]
    head = ("method", "accuracy", "MB up", "MB down", "rounds", "seconds", "raw images leave")
    align = ("left", *("right",) * 5, "left")
    table = tabulate(lines, headers=head, disable_numparse=True, colalign=align)
    notes = [f"{row['name']}: {row['note']}" for row in rows if row.get("note")]
    return "\n".join([table, *([""] if notes else []), *notes])


def _megabytes(count: int | None) -> str:
    """Return bytes in megabytes; traffic of seeds alone is not zero."""
    if count is None:
        return "-"
    return f"{count / 1e6:.1f}" if count == 0 or count >= 50_000 else "< 0.1"
