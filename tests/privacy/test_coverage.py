"""Coverage: the covered coordinates, whichever tensors they belong to."""

from __future__ import annotations

import pytest
import torch

from fedquilt.privacy.statement import Coverage

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
