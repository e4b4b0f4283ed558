from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedquilt.privacy.ledger import Ledger, Population

CLIENTS, EPSILON, DELTA = 10, 6.0, 1e-5


@pytest.fixture
def path() -> Iterator[Path]:
    """A place for a ledger, in memory where there is such a folder: syncing is free there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder) / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger.open(path, create=True) as opened:
        yield opened


@pytest.fixture
def population(ledger: Ledger) -> Population:
    return ledger.population("digits", num_clients=CLIENTS, epsilon=EPSILON, delta=DELTA)
