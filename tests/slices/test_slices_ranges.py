"""Ranges: what can be written, what is refused, how bounds are rounded."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from holders_oracle import Pairs, held_index, unions
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.errors import InvalidValueError
from fedquilt.nn import Interval, Intervals, Layer_Range, SSBatchNorm2d, SSConv2d, SSLinear
from fedquilt.slices.selection import format_ranges, parse_bound, parse_ranges, positions

HALF = ((Fraction(0), Fraction(1, 2)),)


@pytest.mark.parametrize(
    "written",
    [
        ("0", "1/2"),
        ("0", "2/4"),
        ["0", "0.5"],
        (0, 0.5),
        (0, Fraction(1, 2)),
        (np.int64(0), np.float32(0.5)),
        (Decimal(0), Decimal("0.5")),
        [("0", "1/2")],
        [[0, 0.5]],
        (("0", "5e-1"),),
    ],
)
def test_every_way_of_writing_a_half(written: object) -> None:
    assert parse_ranges(written) == HALF


def test_floats_are_the_decimals_they_print() -> None:
    assert parse_bound(0.1) == Fraction(1, 10)
    assert positions(parse_ranges((0, 0.3)), 10) == ((0, 3),)  # float 0.3 * 10 would be 2.99..


def test_order_is_kept_and_pieces_pack_as_given() -> None:
    assert positions(parse_ranges([("3/4", "1"), ("0", "1/4")]), 8) == ((6, 8), (0, 2))


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (("1/2", "1/2"), "start < end"),
        (("3/4", "1/4"), "start < end"),
        (("0", "5/4"), "inside"),
        (("-1/4", "1/2"), "inside"),
        ([("0", "1/2"), ("1/4", "3/4")], "disjoint"),
        ([("0", "1/2"), ("0", "1/2")], "disjoint"),
        ([("1/4", "1/2"), ("0", "1")], "disjoint"),
        ([], "at least one"),
        ("1/2", "interval"),
        (("0", "1/2", "1"), "intervals"),
        ([("0",), ("1/4",)], "intervals"),
        (("0", "1/0"), "fraction"),
        (("0", "half"), "fraction"),
        (("0", float("nan")), "fraction"),
        (("0", float("inf")), "fraction"),
        ((False, True), "number"),
        ((0, None), "number"),
    ],
)
def test_refusals_name_the_layer_and_the_range(written: Any, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason) as caught:
        SSLinear(8, 8, out_features_ranges=written)
    named, given = str(caught.value).split("=", 1)
    assert named == "SSLinear.out_features_ranges"
    culprits = written if reason in ("fraction", "number") else [written]
    assert any(given.startswith(repr(culprit)) for culprit in culprits)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SSLinear(3, 8, in_features_ranges=("0", "1/4")),
        lambda: SSConv2d(3, 8, 3, in_channels_ranges=("0", "1/4")),
        lambda: SSBatchNorm2d(3, features_ranges=("0", "1/4")),
    ],
)
def test_a_range_that_holds_nothing_is_refused(make: object) -> None:
    with pytest.raises(InvalidValueError, match=r"must hold a position of the 3"):
        make()  # type: ignore[operator]


@given(unions(), st.integers(1, 40))
def test_positions_are_the_floors_of_both_ends(pairs: Pairs, size: int) -> None:
    expected = held_index(pairs, size)
    if not expected:
        with pytest.raises(InvalidValueError):
            positions(parse_ranges(pairs), size)
        return
    runs = positions(parse_ranges(pairs), size)
    assert [i for start, stop in runs for i in range(start, stop)] == expected
    assert len(set(expected)) == len(expected)


@given(unions())
def test_ranges_are_shown_as_they_could_be_written(pairs: Pairs) -> None:
    assert parse_ranges(eval(format_ranges(parse_ranges(pairs)))) == tuple(pairs)


def test_the_uneven_quarter_fits_its_father() -> None:
    # 10 features, (1/4, 1/2): positions 2..4, which are three
    layer = SSLinear(4, 10, out_features_ranges=("1/4", "1/2"))
    assert layer.out_features == 3
    father = SSLinear(4, 10)
    layer.reset_parameters_from_father_layer(father)
    assert np.array_equal(layer.weight.detach().numpy(), father.weight.detach().numpy()[2:5])


def test_a_layer_takes_what_the_published_types_name() -> None:
    one: Interval = ("0", "1/2")
    several: Intervals = [one, ("3/4", "1")]
    for held, units in ((one, 4), (several, 6)):
        ranges: Layer_Range = held
        assert SSLinear(8, 2, in_features_ranges=ranges).weight.shape == (2, units)
