"""Lengths noted beside vectors: found again, and void once the numbers change."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch

from fedquilt.common.vectors import cache_norm, cached_norm, is_finite, norm


def test_a_note_is_found_and_used() -> None:
    vector = torch.tensor([3.0, 4.0])
    assert cached_norm(vector) is None
    cache_norm(vector, 5.0)
    assert cached_norm(vector) == 5.0
    assert norm(vector) == 5.0
    cache_norm(vector, math.nan)
    assert not is_finite(vector)


def test_a_note_is_void_once_anything_is_written() -> None:
    rows = torch.ones(2, 4)
    first, second = rows
    cache_norm(first, 2.0)
    second.mul_(3.0)  # another row of the same memory
    assert cached_norm(first) is None
    cache_norm(first, 2.0)
    first[0] = 7.0
    assert cached_norm(first) is None
    assert norm(first) == math.sqrt(52.0)
    assert cached_norm(first.clone()) is None


@pytest.mark.parametrize(
    "made", [copy.copy, copy.deepcopy, lambda vector: pickle.loads(pickle.dumps(vector))]
)
def test_a_note_does_not_go_with_a_copy(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    vector = torch.ones(4)
    for _ in range(5):
        vector.mul_(1.0)
    cache_norm(vector, 2.0)
    copied = made(vector)
    while copied._version < vector._version:  # a copy counts its changes anew
        copied.mul_(10.0)
    assert cached_norm(copied) is None
    assert norm(copied) > 2.0
