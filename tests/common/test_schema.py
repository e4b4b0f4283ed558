"""The shapes of values that were read: what fits, and what the refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from fedquilt.common.errors import DataError
from fedquilt.common.schema import (
    COUNT,
    NAME,
    NUMBER,
    TEXT,
    ListOf,
    MapOf,
    Nullable,
    Object,
    Scalar,
    Schema,
    check,
    maybe,
)

EPSILON = Scalar("a number or inf", frozenset({int, float, str}), least=0, texts=("inf",))
CASES: list[tuple[Schema, list[Any], list[Any]]] = [
    (TEXT, ["", "x"], [1, None, ["x"]]),
    (NAME, ["x" * 200], ["x" * 201]),
    (NUMBER, [0, -1.5], [True, "1", None, float("nan"), float("inf"), [1]]),
    (COUNT, [0, 2**63 - 1], [-1, 1.0, True, 2**63, None]),
    (maybe(COUNT), [None, 3], ["", -3]),
    (EPSILON, [0, 3.5, "inf"], [-1, "nan", "1", None]),
    (ListOf(COUNT), [[], [1, 2]], [None, {}, "12", [1, -2], [1, None]]),
    (ListOf(maybe(NUMBER), 2), [[None, 1]], [[1], [1, 2, 3], ["a", 1]]),
    (ListOf(ListOf(COUNT)), [[[1], []]], [[1], [[1.5]]]),
    (Nullable(ListOf(TEXT)), [None, ["a"]], [[None], "a"]),
    (MapOf(NUMBER), [{}, {"a": 1}], [{"a": "1"}, [1], None]),
    (
        Object({"a": TEXT}, {"b": COUNT}),
        [{"a": "x"}, {"a": "x", "b": 1, "c": []}],
        [{}, {"b": 1}, {"a": 1}, {"a": "x", "b": -1}, [], None],
    ),
]


@pytest.mark.parametrize(("shape", "good", "bad"), CASES)
def test_what_fits_and_what_does_not(shape: Schema, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check(value, shape, "f", DataError)
    for value in bad:
        with pytest.raises(DataError, match=r"^f"):
            check(value, shape, "f", DataError)


def test_the_refusal_names_the_place() -> None:
    shape = Object({"rows": ListOf(Object({"joins": COUNT}))})
    with pytest.raises(DataError, match=r"^f: rows, entry 1,: joins .*; it is 'x.x1b'$"):
        check({"rows": [{"joins": 1}, {"joins": "x\x1b"}]}, shape, "f", DataError)
    with pytest.raises(DataError, match=r"^a\\nb lacks 'rows'"):
        check({}, shape, "a\nb", DataError)
