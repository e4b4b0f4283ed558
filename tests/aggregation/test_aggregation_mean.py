"""Weighted means, one vector at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedquilt.aggregation import RunningMean
from fedquilt.errors import InvalidValueError


def test_the_mean_is_numpys_weighted_average() -> None:
    rng = np.random.default_rng(0)
    vectors, weights = rng.standard_normal((7, 5)).astype(np.float32), rng.uniform(0.1, 9, 7)
    mean = RunningMean(5)
    for vector, weight in zip(vectors, weights, strict=True):
        mean.add(torch.from_numpy(vector), float(weight))
    assert mean.weight == pytest.approx(weights.sum())
    expected = np.average(vectors.astype(np.float64), axis=0, weights=weights)
    assert np.allclose(mean.mean(), expected, rtol=1e-12)


def test_sums_are_kept_in_float64() -> None:
    """In float32 the ten thousand small vectors would vanish beside the large one."""
    mean = RunningMean(1)
    mean.add(torch.tensor([1e8]))
    for _ in range(10_000):
        mean.add(torch.tensor([0.25]))
    assert mean.total.dtype == torch.float64
    assert mean.total.item() == 1e8 + 2500


def test_nothing_added_is_zero_and_the_vectors_stay_as_they_are() -> None:
    mean = RunningMean(2)
    assert mean.mean().tolist() == [0.0, 0.0]
    vector = torch.tensor([1.0, 2.0])
    mean.add(vector, 3.0)
    mean.add(vector, 1.0)
    assert vector.tolist() == [1.0, 2.0]
    assert mean.mean().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_must_be_positive(weight: float) -> None:
    mean = RunningMean(2)
    with pytest.raises(InvalidValueError, match="weight="):
        mean.add(torch.ones(2), weight)
    assert mean.weight == 0


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2), ()])
def test_a_vector_of_another_shape_is_refused_not_broadcast(shape: tuple[int, ...]) -> None:
    mean = RunningMean(2)
    with pytest.raises(InvalidValueError, match="shape"):
        mean.add(torch.ones(shape))
    assert mean.total.tolist() == [0.0, 0.0]


class Some:
    """A place: listed elements of the whole vector."""

    def __init__(self, *index: int) -> None:
        self.index = torch.tensor(index)

    def scatter_add_(self, total: torch.Tensor, part: torch.Tensor, alpha: float = 1.0) -> None:
        total.index_add_(0, self.index, part, alpha=alpha)

    def cover_(self, coverage: torch.Tensor, weight: float = 1.0) -> None:
        coverage[self.index] += weight


def test_shorter_vectors_count_where_they_lie() -> None:
    mean, ends = RunningMean(4), Some(3, 0)
    assert mean.held is None
    mean.add(torch.tensor([2.0, 4.0]), 1.0, ends)
    mean.add(torch.tensor([8.0, 1.0]), 3.0, ends)
    mean.add(torch.tensor([5.0, 6.0]), 4.0, Some(0, 1))
    assert mean.weight == 8.0
    assert mean.held is not None
    assert mean.held.tolist() == [8.0, 4.0, 0.0, 4.0]
    assert mean.mean().tolist() == [(4 + 3 + 20) / 8, 6.0, 0.0, (2 + 24) / 4]
    mean.add(torch.ones(4), 1.0)
    assert mean.held.tolist() == [9.0, 5.0, 1.0, 5.0]
