"""Who holds which samples, in one array."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
import torch

from fedquilt.common.errors import InvalidValueError
from fedquilt.data import holdings
from fedquilt.data.holdings import Holdings

LISTS = [[3, 1], np.array([], dtype=float), np.array([9], dtype=np.uint8), torch.tensor([0, 2]), ()]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "_AT_ONCE", 2)


def test_a_client_is_found_at_its_place() -> None:
    held = Holdings(LISTS, 10)
    expected = [[3, 1], [], [9], [0, 2], []]
    assert len(held) == 5
    assert [part.tolist() for part in held] == expected
    assert [held[k].tolist() for k in range(-5, 5)] == expected * 2
    assert [part.tolist() for part in held[1:4]] == expected[1:4]
    assert all(part.dtype == np.int64 for part in held)
    with pytest.raises(IndexError):
        held[5]
    assert [part.tolist() for part in pickle.loads(pickle.dumps(held))] == expected


def test_bytes_are_those_of_older_digests() -> None:
    digest = hashlib.sha256()
    for part in Holdings(LISTS):
        digest.update(len(part).to_bytes(8, "big") + part.astype("<i8").tobytes())
    assert hashlib.sha256(b"".join(Holdings(LISTS).as_bytes())).digest() == digest.digest()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([0.5], r"clients\[3\] must be a list of sample numbers"),
        ([[1]], r"clients\[3\] must be a list of sample numbers"),
        (([[1, 2]], [1]), r"clients\[3\] must be .* one a client, are given as train"),
        ([4, 10], r"clients\[3\] must hold numbers >= 0 and < 10.* it holds 4 to 10"),
        ([-1], r"clients\[3\] must hold numbers >= 0"),
        (np.array([2**63], dtype=np.uint64), r"clients\[3\] must hold numbers >= 0"),
    ],
)
def test_a_wrong_list_is_named(wrong: object, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Holdings([[1], [2], [], wrong], 10)
