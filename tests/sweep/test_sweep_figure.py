"""Figures of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedquilt.common.errors import InvalidValueError
from fedquilt.sweep.table import plot_sweep


def row(mean: float | None = 0.5, **values: Any) -> dict[str, Any]:
    low, high = (None, None) if mean is None else (mean - 0.1, mean + 0.1)
    return {"values": values, "mean": mean, "low": low, "high": high}


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_one_option_is_a_line(tmp_path: Path, ending: str) -> None:
    rows = [row(0.2, epsilon=1.0), row(0.6, epsilon=30.0), row(None, epsilon=4.0)]
    (path,) = plot_sweep(rows, ["epsilon"], tmp_path / f"s.{ending}")
    assert Path(path).stat().st_size > 1000


def test_two_options_are_lines_and_a_map(tmp_path: Path) -> None:
    rows = [row(e / 10 + c, epsilon=e, mode=m) for e in (1, 2) for c, m in ((0.1, "a"), (0.2, "b"))]
    lines, cells = plot_sweep(rows, ["epsilon", "mode"], tmp_path / "s.svg")
    text = Path(cells).read_text()
    assert Path(cells).name == "s_map.svg"
    assert Path(lines).is_file()
    assert "<svg" in text


def test_names_and_nothing_measured_are_drawn_too(tmp_path: Path) -> None:
    rows = [row(None, mode="a", policy="x", seed=1), row(None, mode="b", policy="y", seed=2)]
    assert len(plot_sweep(rows, ["mode", "policy", "seed"], tmp_path / "s.png")) == 2
    with pytest.raises(InvalidValueError, match="at least one"):
        plot_sweep([], ["mode"], tmp_path / "s.png")
