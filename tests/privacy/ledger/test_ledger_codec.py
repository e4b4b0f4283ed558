from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.errors import InvalidValueError
from fedquilt.privacy.ledger import LedgerCorruptError, entries


@given(st.sets(st.integers(0, 99_999_999), max_size=80))
def test_clients_survive(clients: set[int]) -> None:
    ordered = np.array(sorted(clients), dtype=np.int64)
    blob = entries.encode_clients(ordered)
    np.testing.assert_array_equal(entries.decode_clients(blob, 100_000_000), ordered)


@given(st.lists(st.floats(0, allow_nan=False), max_size=50))
def test_charges_survive_bit_for_bit(charges: list[float]) -> None:
    blob = entries.encode_charges(np.array(charges, dtype=np.float64))
    assert entries.decode_charges(blob, len(charges)).tolist() == charges


def test_a_large_cohort_is_small() -> None:
    rng = np.random.default_rng(0)
    clients = np.sort(rng.choice(1_000_000, 10_000, replace=False))
    assert len(entries.encode_clients(clients)) == 20_001
    assert len(entries.encode_charges(np.full(10_000, 0.1))) == 8
    assert len(entries.encode_charges(rng.uniform(size=10_000))) == 80_000


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"\x01", "cannot be read"),
        (b"\x03\x01\x02\x03", "cannot be read"),
        (b"\x02\x01\x00\x02", "cannot be read"),
        (b"\x01\x05\x00", "out of order"),
        (b"\x01\x05\x05", "out of range"),
    ],
)
def test_damaged_clients_are_refused(blob: bytes, reason: str) -> None:
    with pytest.raises(LedgerCorruptError, match=reason):
        entries.decode_clients(blob, 10)


def test_damaged_charges_are_refused() -> None:
    with pytest.raises(LedgerCorruptError, match="do not match"):
        entries.decode_charges(np.ones(2).tobytes(), 3)
    with pytest.raises(LedgerCorruptError, match="not a number >= 0"):
        entries.decode_charges(np.array([1.0, np.nan]).tobytes(), 2)
    with pytest.raises(LedgerCorruptError, match="not a number >= 0"):
        entries.decode_charges(np.array([-1.0]).tobytes(), 2)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([0, 10], "clients holds 10, every number must be >= 0 and < 10"),
        ([-1], "clients holds -1"),
        ([3, 4, 3], "clients holds 3 more than once"),
        ([1.0], "flat list of whole numbers"),
        ([[1]], "flat list of whole numbers"),
        ([True], "flat list of whole numbers"),
        (["a"], "flat list of whole numbers"),
        (4, "flat list of whole numbers"),
    ],
)
def test_wrong_clients(clients: object, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        entries.check_clients(clients, 10)  # type: ignore[arg-type]


@pytest.mark.parametrize("charges", [-1.0, np.nan, np.inf, [1.0, np.nan], [1.0], "a", ["a", "b"]])
def test_wrong_charges(charges: object) -> None:
    with pytest.raises(InvalidValueError, match="charges_mu2"):
        entries.check_charges(charges, 2)  # type: ignore[arg-type]
