from __future__ import annotations

import hashlib
import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from fedquilt.privacy.ledger import Ledger, Population
from fedquilt.privacy.ledger.entries import GENESIS, Entry

FULL = Entry(4, "settle", "t", 2, 3, 0, 5, "n", "d", "{}", b"\x01\x02", b"12345678")
OTHER = {"seq": 9, "kind": "release", "time": "u", "clients": b"\x01\x03", "charges": b"12345679"}


def test_the_chain_can_be_recomputed_from_the_file_alone(
    path: Path, ledger: Ledger, population: Population
) -> None:
    run = population.start_run("r", epsilon=1.0)
    run.settle(run.reserve(3, [1, 4], [0.001, 0.002]), "a")
    head = bytes(32)
    columns = "seq, kind, time, population, run, round, reservation, name, digest, body"
    connection = sqlite3.connect(path)
    for *fields, clients, charges, stored in connection.execute(
        f"SELECT {columns}, clients, charges, hash FROM entries ORDER BY seq"
    ):
        lengths = [None if blob is None else len(blob) for blob in (clients, charges)]
        text = json.dumps([*fields, *lengths], separators=(",", ":")).encode()
        said = len(text).to_bytes(8, "big") + text + (clients or b"") + (charges or b"")
        head = hashlib.sha256(b"fedquilt ledger 1\n" + head + said).digest()
        assert stored == head
    connection.close()
    assert ledger.head() == head.hex()


@pytest.mark.parametrize("field", list(Entry.__dataclass_fields__))
def test_every_field_is_covered(field: str) -> None:
    other = OTHER.get(field, 77)
    assert replace(FULL, **{field: other}).chained(GENESIS) != FULL.chained(GENESIS)
    assert replace(FULL, **{field: None}).chained(GENESIS) != FULL.chained(GENESIS)


def test_fields_cannot_flow_into_one_another() -> None:
    moved = replace(FULL, clients=b"\x01", charges=b"\x0212345678")
    assert moved.chained(GENESIS) != FULL.chained(GENESIS)
    assert FULL.chained(bytes([1] * 32)) != FULL.chained(GENESIS)
    empty, nothing = replace(FULL, clients=b""), replace(FULL, clients=None)
    assert empty.chained(GENESIS) != nothing.chained(GENESIS)
