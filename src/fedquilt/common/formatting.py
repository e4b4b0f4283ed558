"""Figures and foreign text as they are printed.

A name in a file, a note, a path: whoever chose it may have put in characters that move the
cursor, change colours or the title of a window, or turn the direction of writing around.
A figure that is promised is never shown smaller than it is.
"""

from __future__ import annotations

import math
import re
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
