"""The index algebra of one dimension, against lists of positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.errors import InvalidValueError
from fedquilt.slices import Axis
from fedquilt.slices.selection import end_to_end


@st.composite
def choices(draw: st.DrawFn, most: int = 12) -> tuple[int, list[int]]:
    size = draw(st.integers(1, most))
    index = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True))
    return size, index


@given(choices())
def test_an_axis_is_its_list_of_positions(choice: tuple[int, list[int]]) -> None:
    size, index = choice
    axis = Axis.from_index(size, index)
    assert axis.index.tolist() == index
    assert len(axis) == len(index)
    assert axis.is_full == (index == list(range(size)))
    assert Axis.from_runs(size, [(i, i + 1) for i in index]) == axis


@given(choices(), st.integers(1, 4))
def test_spread_and_stacked(choice: tuple[int, list[int]], times: int) -> None:
    size, index = choice
    axis = Axis.from_index(size, index)
    spread = [i * times + k for i in index for k in range(times)]
    assert axis.spread(times) == Axis.from_index(size * times, spread)
    stacked = [copy * size + i for copy in range(times) for i in index]
    assert axis.stacked(times) == Axis.from_index(size * times, stacked)


@given(choices(), choices())
def test_end_to_end(one: tuple[int, list[int]], other: tuple[int, list[int]]) -> None:
    axes = [Axis.from_index(*one), Axis.from_index(*other)]
    expected = one[1] + [one[0] + i for i in other[1]]
    assert end_to_end(axes) == Axis.from_index(one[0] + other[0], expected)


@given(choices(), choices())
def test_contains(one: tuple[int, list[int]], other: tuple[int, list[int]]) -> None:
    size = max(one[0], other[0])
    outer, inner = (Axis.from_index(size, index) for _, index in (one, other))
    if outer.contains(inner):
        assert set(other[1]) <= set(one[1])
    elif outer.runs == tuple(sorted(outer.runs)):
        assert not set(other[1]) <= set(one[1])


@given(choices(3), choices(4))
def test_per_group_undoes_a_choice_of_groups_and_of_channels(
    groups: tuple[int, list[int]], inside: tuple[int, list[int]]
) -> None:
    index = [g * inside[0] + c for g in groups[1] for c in inside[1]]
    axis = Axis.from_index(groups[0] * inside[0], index)
    split = axis.per_group(groups[0])
    assert split is not None
    held, within = split
    assert [g * inside[0] + c for g in held for c in within.index.tolist()] == index


def test_groups_that_keep_different_channels_do_not_split() -> None:
    assert Axis.from_index(6, [0, 4]).per_group(2) is None
    assert Axis.from_index(6, [0, 1, 3]).per_group(2) is None
    assert Axis.from_index(6, [0, 3, 1, 4]).per_group(2) is None


@pytest.mark.parametrize("index", [[], [3], [-1], [1, 1]])
def test_foreign_positions_are_refused(index: list[int]) -> None:
    with pytest.raises(InvalidValueError, match="index"):
        Axis.from_index(3, np.asarray(index, dtype=np.int64))
