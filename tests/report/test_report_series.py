"""Columns of a history: missing values, rounds, alignment."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedquilt.errors import InvalidValueError
from fedquilt.report import series


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (np.float32(0.5), 0.5), (None, None), ("inf", None), ("nan", None),
     (float("inf"), None), ({}, None), (10**400, None)],
)  # fmt: skip
def test_what_is_no_finite_number_becomes_nan(value: object, expected: float | None) -> None:
    number = series.as_number(value)
    assert math.isnan(number) if expected is None else number == expected


def test_absent_means_nothing_but_none_while_nan_is_a_recorded_value() -> None:
    assert series.is_absent({}, "clip_values")
    assert series.is_absent({"clip_values": None}, "clip_values")
    assert series.is_absent({"clip_values": [None, None]}, "clip_values")
    assert not series.is_absent({"clip_values": [None, math.nan]}, "clip_values")


def test_a_column_that_is_no_list_is_named_in_the_error() -> None:
    with pytest.raises(InvalidValueError, match=r"history\['test_loss'\]=3.0 must be a list"):
        series.column({"test_loss": 3.0}, "test_loss")
    with pytest.raises(InvalidValueError, match="must be a dictionary"):
        series.column([1, 2], "test_loss")  # type: ignore[arg-type]


def test_evaluations_stand_at_their_rounds_and_else_where_the_statistics_say() -> None:
    stated = {"test_accuracy": [0.1, 0.2], "evaluation_rounds": [5, 7]}
    assert series.per_evaluation(stated, "test_accuracy").positions.tolist() == [5, 7]
    counted = {"test_accuracy": [0.1, 0.2], "participation_stats": [{"total_rounds": 3}] * 2}
    assert series.per_evaluation(counted, "test_accuracy").positions.tolist() == [3, 3]
    every = {"test_accuracy": [0.1, 0.2], "clip_values": [1, 1]}
    assert series.per_evaluation(every, "test_accuracy").axis == series.ROUND


def test_without_any_rounds_the_axis_counts_evaluations() -> None:
    unknown = {"test_accuracy": [0.1, 0.2], "clip_values": [1.0] * 20, "evaluation_rounds": [5]}
    found = series.per_evaluation(unknown, "test_accuracy")
    assert (found.axis, found.positions.tolist()) == (series.EVALUATION, [1, 2])


def test_aligned_keeps_the_rounds_that_all_share() -> None:
    often = {"test_accuracy": [0.1, 0.2, 0.3, 0.4], "evaluation_rounds": [5, 10, 15, 20]}
    seldom = {"test_accuracy": [0.5, 0.7], "evaluation_rounds": [10, 20]}
    positions, values, axis = series.aligned([often, seldom, {}], "test_accuracy")
    assert positions.tolist() == [10, 20]
    assert values.tolist() == [[0.2, 0.4], [0.5, 0.7]]
    assert axis == series.ROUND


def test_aligned_without_common_rounds_is_empty() -> None:
    runs = [{"test_accuracy": [0.1], "evaluation_rounds": [r]} for r in (1, 2)]
    positions, values, _ = series.aligned(runs, "test_accuracy")
    assert positions.size == 0
    assert values.shape == (2, 0)


def test_running_sum_passes_over_missing_values() -> None:
    total = series.running_sum(np.asarray([1.0, np.nan, 2.0]))
    assert total.tolist() == [1.0, 1.0, 3.0]


def test_the_target_of_the_run_goes_before_the_one_of_the_data_set() -> None:
    assert series.target_accuracy("MNIST", None) == 0.971
    assert series.target_accuracy("mnist", {"target_accuracy": 0.5}) == 0.5
    assert series.target_accuracy("mnist", {"target_accuracy": None}) == 0.971
    assert series.target_accuracy("elsewhere", {}) is None
