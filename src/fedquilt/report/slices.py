"""The table of what a client of each width sends, receives and computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COLUMNS = {
    "parameters": "parameters",
    "bytes_up": "bytes up",
    "bytes_down": "bytes down",
    "multiply_adds": "multiply-adds",
}


def slices_table(record: Mapping[str, Any]) -> str:
    """Return the costs that a run on slices has recorded, one line a width and their mean.

    Bytes are those of a round that the client joins; multiply-adds are those of one
    example, forward.
    """
    from tabulate import tabulate

    rows = [
        (tier["width"], tier["clients"], *(f"{tier[key]:,}" for key in _COLUMNS))
        for tier in record["tiers"]
    ]
    total = sum(tier["clients"] for tier in record["tiers"])
    rows.append(("mean", total, *(f"{record['mean'][key]:,.0f}" for key in _COLUMNS)))
    head = ["width", "clients", *_COLUMNS.values()]
    align = ("left", *("right",) * (len(head) - 1))
    table = tabulate(rows, headers=head, disable_numparse=True, colalign=align)
    return f"What a client holds ({record['method']})\n{table}"
