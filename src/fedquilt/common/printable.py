"""Text from elsewhere, made safe to print.

A name in a file, a note, a path: whoever chose it may have put in characters that move the
cursor, change colours or the title of a window, or turn the direction of writing around.
"""

from __future__ import annotations

import re

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
