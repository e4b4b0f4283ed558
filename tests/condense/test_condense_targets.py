"""What a step is matched to: weights, draws without replacement, classes of unequal length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedquilt.condense.matching import matching_loss
from fedquilt.condense.statistics import ClassTargets, Drawn, StatisticsTable
from fedquilt.config.choices import LOSS_COMPUTATIONS
from fedquilt.errors import InvalidValueError

LABELS = torch.tensor([8, 2, 8, 8, 5, 2, 8, 8])  # two, one and five groups, mixed
COUNTS = torch.tensor([4, 3, 1, 2, 7, 9, 6, 5])


def make_table() -> StatisticsTable:
    """Return features that name their row: row i has [i, i^2], logits [-i]."""
    rows = torch.arange(8.0, dtype=torch.float64)
    features = torch.stack([rows, rows**2], dim=1)
    return StatisticsTable(
        torch.zeros(8, dtype=torch.int64), LABELS, COUNTS, features, -rows[:, None]
    )


def rows_of(drawn: Drawn, place: int) -> list[int]:
    """Return the rows with weight that were drawn for a class."""
    return [int(row) for row in drawn.features[place, drawn.weights[place] > 0, 0]]


def test_classes_are_listed_ascending() -> None:
    assert ClassTargets(make_table()).classes == [2, 5, 8]


def test_all_groups_with_counts_as_weights() -> None:
    drawn = ClassTargets(make_table(), average=False).draw(np.random.default_rng(0))
    assert drawn.features.shape == (3, 5, 2)
    assert [sorted(rows_of(drawn, place)) for place in range(3)] == [[1, 5], [4], [0, 2, 3, 6, 7]]
    for place in range(3):
        rows = rows_of(drawn, place)
        total = float(COUNTS[rows].sum())
        expected = [int(COUNTS[row]) / total for row in rows]
        assert drawn.weights[place, : len(rows)].tolist() == pytest.approx(expected)
        assert drawn.weights[place, len(rows) :].tolist() == [0.0] * (5 - len(rows))


def test_average_is_the_weighted_mean() -> None:
    drawn = ClassTargets(make_table()).draw(np.random.default_rng(0))
    assert drawn.features.shape == (3, 1, 2)
    assert drawn.weights.tolist() == [[1.0]] * 3
    # Class 2: rows 1 (3 samples) and 5 (9 samples).
    assert drawn.features[0, 0].tolist() == pytest.approx([48 / 12, (3 + 9 * 25) / 12])
    assert drawn.logits[0, 0].tolist() == pytest.approx([-48 / 12])
    assert drawn.features[1, 0].tolist() == [4.0, 16.0]


@pytest.mark.parametrize("per_step", [1, 2, 4])
def test_draws_are_without_replacement_and_take_short_classes_whole(per_step: int) -> None:
    targets = ClassTargets(make_table(), per_step, average=False)
    source = np.random.default_rng(0)
    taken = np.zeros(8)
    for _ in range(200):
        drawn = targets.draw(source)
        for place, own in enumerate(([1, 5], [4], [0, 2, 3, 6, 7])):
            rows = rows_of(drawn, place)
            assert len(rows) == len(set(rows)) == min(per_step, len(own))
            assert set(rows) <= set(own)
            taken[rows] += 1
        torch.testing.assert_close(drawn.weights.sum(dim=1), torch.ones(3, dtype=torch.float64))
    # Class 8 has five groups: each is drawn per_step / 5 of the time, within five deviations.
    share = per_step / 5
    deviation = (200 * share * (1 - share)) ** 0.5
    assert np.abs(taken[[0, 2, 3, 6, 7]] - 200 * share).max() < 5 * deviation


def test_weights_of_a_draw_are_counts_among_the_drawn() -> None:
    drawn = ClassTargets(make_table(), 2, average=False).draw(np.random.default_rng(4))
    rows = rows_of(drawn, 2)
    assert drawn.weights[2].tolist() == pytest.approx((COUNTS[rows] / COUNTS[rows].sum()).tolist())


def test_average_of_a_draw_is_the_average_of_what_was_drawn() -> None:
    each = ClassTargets(make_table(), 2, average=False).draw(np.random.default_rng(4))
    mean = ClassTargets(make_table(), 2).draw(np.random.default_rng(4))
    expected = (each.weights[..., None] * each.features).sum(dim=1)
    torch.testing.assert_close(mean.features[:, 0], expected)


def test_equal_generators_draw_alike_and_all_groups_need_none() -> None:
    targets = ClassTargets(make_table(), 2, average=False)
    one, other = (targets.draw(np.random.default_rng(9)) for _ in range(2))
    assert torch.equal(one.features, other.features)
    source = np.random.default_rng(9)
    before = source.bit_generator.state
    ClassTargets(make_table(), 5).draw(source)
    ClassTargets(make_table()).draw(source)
    assert source.bit_generator.state == before


@pytest.mark.parametrize("computation", LOSS_COMPUTATIONS)
@pytest.mark.parametrize("average", [True, False])
def test_a_broken_group_spoils_its_own_class_alone(average: bool, computation: str) -> None:
    """Places of weight 0 must not carry the NaN of one class into another."""
    table = make_table()
    table.features[0] = torch.nan  # the first row, of class 8
    drawn = ClassTargets(table, None, average).draw(np.random.default_rng(0))
    loss = matching_loss(
        torch.zeros(3, 2, dtype=torch.float64),
        torch.zeros(3, 1, dtype=torch.float64),
        drawn.features,
        drawn.logits,
        drawn.weights,
        loss_computation=computation,
    )
    assert torch.isfinite(loss).tolist() == [True, True, False]


def test_empty_table_has_no_classes() -> None:
    table = make_table().of_model(3)
    targets = ClassTargets(table)
    assert targets.classes == []
    assert targets.draw(np.random.default_rng(0)).features.shape == (0, 1, 2)


def test_a_step_sees_at_least_one_group() -> None:
    with pytest.raises(InvalidValueError, match="per_step=0 must be >= 1"):
        ClassTargets(make_table(), 0)
