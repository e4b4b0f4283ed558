"""What the tests of condensation share."""

from __future__ import annotations

import pytest

from certified_samples import refine_in_few_steps


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refine images in a few steps where a test is about something else."""
    refine_in_few_steps(monkeypatch)
