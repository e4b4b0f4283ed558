"""Statements survive the way to a file and back, and say the same in words."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from fedquilt.common.formatting import format_bound, format_left
from fedquilt.privacy.statement import Coverage, Statement, cautions

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


@pytest.mark.parametrize(
    ("adjacency", "words"),
    [
        ("zero-out", "zero-out (its data against nothing in their place)"),
        ("replace-one", "replace-one (its data against any others, or nothing)"),
    ],
)
def test_a_claim_says_which_worlds_it_compares(adjacency: str, words: str) -> None:
    stated = dataclasses.replace(BOUNDED, adjacency=adjacency)
    assert stated.as_text().splitlines()[1] == f"unit       client, adjacency {words}"
    assert Statement.from_json(stated.as_json()).adjacency == adjacency


@pytest.mark.parametrize(
    "epsilon", [4.6549, 4.651, 0.30001, 2.1, 6.0, 5.9999999999999, 12.34, 9999]
)
def test_bounds_are_never_shown_smaller_than_they_are(epsilon: float) -> None:
    assert float(format_bound(epsilon)) >= epsilon * (1 - 1e-12)
    assert float(format_bound(epsilon)) < epsilon * 1.01
    assert float(format_left(epsilon)) <= epsilon * (1 + 1e-12)
    stated = dataclasses.replace(BOUNDED, epsilon_max=epsilon, epsilon_median=epsilon)
    claim = stated.as_text().splitlines()[0]
    shown = float(claim.split("<= ")[1].split(" ")[0])
    assert shown >= epsilon * (1 - 1e-12)
    assert float(claim.split("median ")[1].split(")")[0]) == shown


@pytest.mark.parametrize(
    ("delta", "shown"), [(1e-5, "1e-05"), (1.0000049e-5, "1.00001e-05"), (1 / 60000, "1.66667e-05")]
)
def test_a_delta_is_never_shown_smaller_than_it_is(delta: float, shown: str) -> None:
    stated = dataclasses.replace(BOUNDED, delta=delta)
    assert stated.as_text().splitlines()[0].endswith(f" at delta {shown}")
    (caution,) = cautions(3.0, 0.50000049, 100)
    assert "delta 0.500001 is above" in caution


def test_the_text_of_the_review() -> None:
    stated = dataclasses.replace(BOUNDED, epsilon_max=4.6549)
    assert "epsilon <= 4.66 " in stated.as_text()


def test_weak_claims_are_called_weak() -> None:
    assert cautions(3.0, 1e-5, 100) == ()
    assert cautions(10.0, 1e-3, 1000) == ()
    (delta,) = cautions(3.0, 0.5, 100)
    assert "delta 0.5 is above 1/100" in delta
    assert "one client's data outright" in delta
    (alone,) = cautions(3.0, 0.5, 1)
    assert "delta 0.5 is the probability with which the claim may fail" in alone
    (epsilon,) = cautions(9999.0, 1e-5, 100)
    assert "epsilon 10000 is above 10" in epsilon
    assert "hardly a protection" in epsilon
    assert len(cautions(11.0, 0.02, 100)) == 2


TENSORS = [("a", 0, 3), ("b", 3, 4), ("c", 4, 9), ("empty", 9, 9), ("d", 9, 11)]


@pytest.mark.parametrize(
    ("chosen", "ranges", "indices"),
    [
        (["a"], ((0, 3),), [0, 1, 2]),
        (["b", "a"], ((0, 4),), [0, 1, 2, 3]),
        (["a", "c"], ((0, 3), (4, 9)), [0, 1, 2, 4, 5, 6, 7, 8]),
        (["b", "d"], ((3, 4), (9, 11)), [3, 9, 10]),
        (["c", "empty", "d"], ((4, 11),), list(range(4, 11))),
        (["a", "b", "c", "empty", "d"], ((0, 11),), list(range(11))),
    ],
)
def test_take_and_put_touch_exactly_the_chosen_coordinates(
    chosen: list[str], ranges: tuple[tuple[int, int], ...], indices: list[int]
) -> None:
    coverage = Coverage.make(11, TENSORS, chosen)
    assert coverage.ranges == ranges
    assert coverage.num_covered == len(indices)
    assert set(coverage.covered) == set(chosen)
    assert coverage.covered + coverage.uncovered == tuple(
        sorted((name for name, _, _ in TENSORS), key=lambda name: name not in chosen)
    )
    vector = torch.arange(11.0)
    assert coverage.take(vector).tolist() == [float(index) for index in indices]
    coverage.put(vector, -torch.arange(1.0, len(indices) + 1))
    expected = torch.arange(11.0)
    expected[indices] = -torch.arange(1.0, len(indices) + 1)
    assert torch.equal(vector, expected)


def test_one_range_is_a_view_and_several_are_a_copy() -> None:
    vector = torch.zeros(11)
    Coverage.make(11, TENSORS, ["b", "c"]).take(vector).fill_(1)
    assert vector.tolist() == [0] * 3 + [1] * 6 + [0] * 2
    Coverage.make(11, TENSORS, ["a", "d"]).take(vector).fill_(2)
    assert vector.max() == 1


def test_lines_break_between_words_on_a_narrow_screen() -> None:
    notes = ("a note that is far longer than any screen is wide, " * 4, "see " + "x" * 90)
    statement = Statement.without_bound(
        delta=1e-5, covered=("a.weight",), uncovered=(), noise_source="none", notes=notes
    )
    wrapped, plain = statement.as_text(80), statement.as_text()
    lines = wrapped.splitlines()
    assert all(len(line) <= 80 for line in lines if "xxx" not in line)
    assert " ".join(wrapped.split()) == " ".join(plain.split()), "no word is broken"
    assert len(plain.splitlines()) < len(lines)
