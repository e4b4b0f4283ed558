"""The table that travels: there and back, clients end to end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from fedquilt.condense.statistics import StatisticsTable
from fedquilt.errors import InvalidValueError

PARTS = ("models", "classes", "counts", "features", "logits")


def make_table(groups: int, features: int, logits: int, seed: int = 0) -> StatisticsTable:
    source = np.random.default_rng(seed)
    return StatisticsTable(
        torch.from_numpy(source.integers(0, 8, groups)),
        torch.from_numpy(source.integers(0, 1000, groups)),
        torch.from_numpy(source.integers(1, 5000, groups)),
        torch.from_numpy(source.normal(size=(groups, features)).astype(np.float32)),
        torch.from_numpy(source.normal(size=(groups, logits)).astype(np.float32)),
    )


def same(one: StatisticsTable, other: StatisticsTable) -> bool:
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        and getattr(one, name).dtype == getattr(other, name).dtype
        for name in PARTS
    )


@given(
    groups=st.integers(0, 6),
    features=st.integers(1, 5),
    logits=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(60))
def test_there_and_back(groups: int, features: int, logits: int, seed: int) -> None:
    table = make_table(groups, features, logits, seed)
    vector = table.pack()
    assert vector.shape == (groups * (3 + features + logits),)
    assert same(StatisticsTable.unpack(vector, features, logits), table)
    assert table.num_bytes() == 4 * vector.numel()


def test_layout_by_hand() -> None:
    table = StatisticsTable(
        torch.tensor([0, 1]),
        torch.tensor([7, 9]),
        torch.tensor([32, 33]),
        torch.tensor([[0.5, 1.5], [2.5, 3.5]]),
        torch.tensor([[-1.0], [-2.0]]),
    )
    assert table.pack().tolist() == [0, 7, 32, 0.5, 1.5, -1, 1, 9, 33, 2.5, 3.5, -2]
    assert len(table) == 2
    assert table.num_bytes() == 48


@pytest.mark.parametrize("logits", [0, 3])
def test_clients_end_to_end(logits: int) -> None:
    """Clients of different length, one of them with nothing, read back in their order."""
    tables = [make_table(groups, 4, logits, seed=groups) for groups in (3, 0, 5, 1)]
    whole = StatisticsTable.unpack(torch.cat([table.pack() for table in tables]), 4, logits)
    assert len(whole) == 9
    for name in PARTS:
        expected = torch.cat([getattr(table, name) for table in tables])
        assert torch.equal(getattr(whole, name), expected)


def test_whole_numbers_survive_up_to_two_to_the_24() -> None:
    most = 2**24
    table = StatisticsTable(
        torch.tensor([0]),
        torch.tensor([most - 1]),
        torch.tensor([most]),
        torch.ones(1, 1),
        torch.ones(1, 0),
    )
    back = StatisticsTable.unpack(table.pack(), 1, 0)
    assert (back.classes.item(), back.counts.item()) == (most - 1, most)


def test_rows_of_one_model() -> None:
    table = make_table(20, 3, 2)
    sizes = 0
    for number in range(8):
        part = table.of_model(number)
        rows = [i for i in range(20) if table.models[i] == number]
        assert torch.equal(part.features, table.features[rows])
        assert torch.equal(part.classes, table.classes[rows])
        assert torch.equal(part.counts, table.counts[rows])
        assert torch.equal(part.logits, table.logits[rows])
        sizes += len(part)
    assert sizes == 20
    assert len(table.of_model(99)) == 0


def test_torn_vector_is_refused() -> None:
    vector = make_table(3, 4, 2).pack()
    with pytest.raises(InvalidValueError, match="26 numbers must consist of rows of 9"):
        StatisticsTable.unpack(vector[:-1], 4, 2)
