"""Figures, foreign text and tables as they are printed.

A name in a file, a note, a path: whoever chose it may have put in characters that move the
cursor, change colours or the title of a window, or turn the direction of writing around.
A figure that is promised is never shown smaller than it is.
Tables fit the screen: columns give way at words wherever they can.
"""

from __future__ import annotations

import math
import operator
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

_CONTINUED = "\n  "  # a message of several lines indents all but its first


def printable(text: object) -> str:
    r"""Return the text on one line, every character that does not print as its escape.

    >>> print(printable("run \x1b[31m7\n"))
    run \x1b[31m7\n
    >>> printable("Zürich, 東京")
    'Zürich, 東京'
    """
    plain = str(text)
    return plain if plain.isprintable() else "".join(map(_shown, plain))


def printable_lines(text: object) -> str:
    """Return a text of several lines so, its line ends kept."""
    return "\n".join(map(printable, str(text).split("\n")))


def printable_message(text: object) -> str:
    r"""Return a message so; only line ends before an indented line are kept.

    >>> printable_message("mirrors tried:\n  http://a\nerror: forged")
    'mirrors tried:\n  http://a\\nerror: forged'
    """
    return _CONTINUED.join(map(printable, str(text).split(_CONTINUED)))


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def shortened(value: object, longest: int = 60) -> str:
    """Return the value as Python writes it, printable and cut to a length."""
    written = printable(re.sub(r"\s+", " ", repr(value)[: longest + 1]))
    return written if len(written) <= longest else f"{written[:longest]}..."


_DIGITS = 3


def format_bound(value: float, digits: int = _DIGITS) -> str:
    """Return an upper bound in so many digits, rounded up; "∞" when it is not finite.

    What lies below the twelfth digit is rounding of a float and is dropped first, so
    that 2.1 stays 2.1.

    >>> format_bound(4.6549), format_bound(2.1), format_bound(0.30001), format_bound(12345.6)
    ('4.66', '2.1', '0.301', '12400')
    """
    return _rounded(value, digits, ROUND_CEILING)


def four_digits(value: float | None) -> str:
    """Return a measure with four digits behind the point; "-" where there is none."""
    return "-" if value is None else f"{value:.4f}"


def format_left(value: float, digits: int = _DIGITS) -> str:
    """Return what may still be spent in so many digits, rounded down.

    >>> format_left(4.8672)
    '4.86'
    """
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return "∞"
    exact = Context(prec=12).create_decimal(Decimal(value))
    return f"{float(Context(prec=digits, rounding=rounding).plus(exact)):.12g}"


GAP = "  "
_SIGN = re.compile(r" (=|≤|<=|±) ")
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


def _joined(text: str) -> str:
    """Return a text in which both sides of an equation are one word: δ = 1e-05."""
    return _SIGN.sub("\u00a0\\1\u00a0", text)


def _longest(texts: Sequence[str]) -> int:
    """Return the length of the longest word."""
    return max(len(word) for text in texts for word in text.split(" "))


def _lines(text: str, width: int, indent: str = "", *, breaks: bool = False) -> list[str]:
    whole = _joined(text)
    found = textwrap.wrap(
        whole if _longest([whole]) <= width else text,
        max(width, 1),
        subsequent_indent=indent,
        break_long_words=breaks,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    ) or [""]
    return [line.replace("\u00a0", " ") for line in found]


def _fitted(columns: list[tuple[str, ...]], limit: int | None) -> list[int]:
    """Return the columns' widths: those with the most room give way, down to their longest word."""
    widths = [max(map(len, column)) for column in columns]
    if limit is None:
        return widths
    room = limit - len(GAP) * (len(widths) - 1)
    equations = [_longest(list(map(_joined, column))) for column in columns]
    # First equations are kept whole, then words; in the end those such as long ids are broken.
    for floor in (equations, list(map(_longest, columns)), [_SHORT] * len(widths)):
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
