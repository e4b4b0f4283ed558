"""Ways to look into the figures that were saved."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect every figure that is written, in order; writing goes on as usual."""
    return _collect(monkeypatch, keep_layout=True)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect the figures, drawn without the slow search for their layout."""
    return _collect(monkeypatch, keep_layout=False)


def _collect(monkeypatch: pytest.MonkeyPatch, keep_layout: bool) -> list[Figure]:
    figures: list[Figure] = []
    write = Figure.savefig

    def remember(figure: Figure, *args: Any, **options: Any) -> None:
        figures.append(figure)
        if not keep_layout:
            figure.set_layout_engine("none")
        write(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", remember)
    return figures
