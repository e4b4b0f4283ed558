"""Statements survive the way to a file and back, and say the same in words."""

from __future__ import annotations

import json
import math

import pytest

from fedquilt.privacy.statement import Statement

BOUNDED = Statement(
    delta=1e-5,
    epsilon_max=2.345678,
    epsilon_median=1.2,
    covered=("fc1.weight", "fc1.bias"),
    uncovered=(),
    noise_source="operating system generator",
    notes=("one", "two"),
)
OPEN = Statement.without_bound(
    delta=1e-6,
    covered=["fc2.bias"],
    uncovered=["conv.weight"],
    noise_source="none",
    notes=["nothing may be claimed"],
)


@pytest.mark.parametrize("statement", [BOUNDED, OPEN])
def test_json_there_and_back(statement: Statement) -> None:
    text = json.dumps(statement.as_json(), allow_nan=False)
    assert Statement.from_json(json.loads(text)) == statement


def test_an_absent_bound_is_infinite_and_said_so() -> None:
    assert not OPEN.is_bounded
    assert OPEN.epsilon_max == OPEN.epsilon_median == math.inf
    assert OPEN.as_json()["epsilon_max"] == "inf"
    assert OPEN.as_text().splitlines() == [
        "claim      epsilon: inf, no guarantee for the released model",
        "unit       client, adjacency zero-out",
        "covered    fc2.bias",
        "uncovered  conv.weight",
        "noise      none",
        "note       nothing may be claimed",
    ]


def test_a_bound_is_stated_with_its_delta() -> None:
    assert BOUNDED.is_bounded
    lines = BOUNDED.as_text().splitlines()
    assert lines[0] == "claim      every client: epsilon <= 2.35 (median 1.2) at delta 1e-05"
    assert lines[2:4] == ["covered    fc1.weight, fc1.bias", "uncovered  nothing"]
    assert BOUNDED.as_json()["unit"] == "client"
    assert BOUNDED.as_json()["adjacency"] == "zero-out"
