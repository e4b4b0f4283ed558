"""What the tests of mechanisms share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from certified_samples import memory_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory."""
    with memory_folder() as path:
        yield path
