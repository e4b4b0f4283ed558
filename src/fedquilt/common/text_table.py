"""Tables of plain text that fit the screen: columns give way at words wherever they can."""

from __future__ import annotations

import operator
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

GAP = "  "
_SHORT = 16  # no column gives way below it inside a word


def screen_width() -> int | None:
    """Return the columns of the terminal; None where output goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def text_table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Collection[int] = (),
    width: int | None = None,
) -> str:
    """Return rows under a head, at most as wide as the screen where their words allow it.

    Parameters
    ----------
    head : sequence of str
        The columns' titles; empty for a table without.
    rows : sequence of sequences
        The cells, as many in each row.
    right : collection of int
        The columns that are aligned to the right.
    width : int, optional
        The most characters of a line; by default those of the screen, without limit where
        output goes to a file.
    """
    lines = [[str(cell) for cell in row] for row in ([head, *rows] if head else rows)]
    if not lines:
        return ""
    widths = _fitted(list(zip(*lines, strict=True)), width or screen_width())
    rule = GAP.join("-" * width for width in widths)
    laid = [_laid(line, widths, right) for line in lines]
    parts = [laid[0], rule, *laid[1:]] if head else [rule, *laid, rule]
    return "\n".join(parts)


def wrapped(text: str, width: int | None = None, indent: str = "") -> str:
    """Return prose broken at words to fit the screen; further lines of a paragraph are indented."""
    limit = width or screen_width()
    if limit is None:
        return text
    return "\n".join(
        "\n".join(_lines(line, limit, indent)) if line.strip() else line
        for line in text.splitlines()
    )


def _lines(text: str, width: int, indent: str = "", *, breaks: bool = False) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 1),
        subsequent_indent=indent,
        break_long_words=breaks,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    ) or [""]


def _fitted(columns: list[tuple[str, ...]], limit: int | None) -> list[int]:
    """Return the columns' widths: those with the most room give way, down to their longest word."""
    widths = [max(map(len, column)) for column in columns]
    least = [
        max(len(word) for cell in column for word in cell.split() or [""]) for column in columns
    ]
    if limit is None:
        return widths
    room = limit - len(GAP) * (len(widths) - 1)
    for floor in (least, [_SHORT] * len(widths)):  # then words such as long ids are broken
        while sum(widths) > room and any(map(operator.gt, widths, floor)):
            free = [wide if wide > few else 0 for wide, few in zip(widths, floor, strict=True)]
            widths[free.index(max(free))] -= 1
    return widths


def _laid(cells: Sequence[str], widths: Sequence[int], right: Collection[int]) -> str:
    """Return one row, as many lines as its longest cell needs."""
    wrapped_cells = [
        [cell] if len(cell) <= width else _lines(cell, width, breaks=True)
        for cell, width in zip(cells, widths, strict=True)
    ]
    lines = []
    for number in range(max(map(len, wrapped_cells))):
        parts = [part[number] if number < len(part) else "" for part in wrapped_cells]
        padded = [
            part.rjust(width) if column in right else part.ljust(width)
            for column, (part, width) in enumerate(zip(parts, widths, strict=True))
        ]
        lines.append(GAP.join(padded).rstrip())
    return "\n".join(lines)
