"""Tables for a screen: they fit, and words stay whole where they can."""

from __future__ import annotations

import pytest

from fedquilt.common.formatting import text_table, wrapped

HEAD = ("mode", "accuracy", "what it may claim")
ROWS = [
    ("fedavg", "0.9662", "no guarantee"),
    ("certified:worst_case", "0.7615", "epsilon at most 5.27 for every client at delta 1e-05"),
]


def test_where_nothing_limits_it_a_row_is_a_line() -> None:
    lines = text_table(HEAD, ROWS).splitlines()
    assert len(lines) == 4
    assert lines[2].split() == ["fedavg", "0.9662", "no", "guarantee"]
    assert len({line.index(word) for line, word in zip(lines[2:], ("no", "eps"), strict=True)}) == 1


@pytest.mark.parametrize("width", [60, 80, 140])
def test_it_fits_and_breaks_no_word(width: int) -> None:
    text = text_table(HEAD, ROWS, width=width)
    assert max(map(len, text.splitlines())) <= width
    words = {word for row in (HEAD, *ROWS) for cell in row for word in cell.split()}
    found = {word for word in text.split() if set(word) != {"-"}}
    assert found == words


def test_a_long_id_is_broken_rather_than_the_screen() -> None:
    text = text_table(("client", "joins"), [("key:" + "0123456789abcdef" * 4, 3)], width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert "".join(text.split()).count("0123456789abcdef") >= 1


def test_numbers_stand_to_the_right() -> None:
    text = text_table(("n", "seeds"), [("a", 3), ("b", 12)], right=(1,))
    assert [line[-2:] for line in text.splitlines()[2:]] == [" 3", "12"]


def test_prose_is_broken_at_words() -> None:
    said = "Let each client join less often, over the same rounds."
    assert max(map(len, wrapped(said, 20).splitlines())) <= 20
    assert " ".join(wrapped(said, 20).split()) == said


def test_an_equation_is_not_broken() -> None:
    rows = [("certified", "ε ≤ 5.27 for every client, δ = 1e-05")]
    shown = text_table(["mode", "what it may claim"], rows, width=34)
    assert max(map(len, shown.splitlines())) <= 34
    assert "ε ≤ 5.27" in shown
    assert "δ = 1e-05" in shown
    assert "\u00a0" not in shown
