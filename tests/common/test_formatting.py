"""Text from elsewhere that is printed: no control character is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.common.formatting import (
    printable,
    printable_lines,
    printable_message,
    shortened,
)


@given(st.text(st.characters(), max_size=50))
def test_nothing_unprintable_is_left(text: str) -> None:
    assert printable(text).isprintable()
    assert printable_lines(text).replace("\n", "").isprintable()
    assert printable_message(text).replace("\n  ", "").isprintable()
    printable(text).encode()  # also what no file could hold


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\ud800", r"\ud800"),
        ("Zürich 東京", "Zürich 東京"),
    ],
)
def test_escapes_are_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_long_values_are_cut() -> None:
    assert shortened("x" * 100) == "'" + "x" * 59 + "..."
    assert shortened(12) == "12"
