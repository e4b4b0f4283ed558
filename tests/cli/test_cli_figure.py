"""What training.png shows of the run it stands beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from fedquilt.cli.run import draw_history
from fedquilt.experiment.api import RunResult, run_config
from run_samples import tiny


def drawn(monkeypatch: pytest.MonkeyPatch, finished: RunResult) -> list[Any]:
    """Return the panels of training.png: accuracy, loss, budget, clip."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: figures.append(figure))
    monkeypatch.setattr("os.replace", lambda *paths: None)
    draw_history(finished)
    (figure,) = figures
    return list(figure.axes)


def dashed(panel: Any) -> list[float]:
    """Return where the dashed lines of a panel stand."""
    return [line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == "--"]


def test_the_dashed_lines_are_the_run_s_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tiny(
        mode="quap_fl",
        noise_layers="all",
        epsilon=6.0,
        target_accuracy=0.5,
        output_dir=str(tmp_path),
    )
    accuracy, _, budget, _ = drawn(monkeypatch, run_config(config))
    assert dashed(accuracy) == [0.5]
    assert dashed(budget) == [6.0]


def test_without_a_target_there_is_no_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finished = run_config(tiny(mode="quap_fl", output_dir=str(tmp_path)))
    accuracy, _, budget, _ = drawn(monkeypatch, finished)
    assert dashed(accuracy) == []
    assert dashed(budget) == [finished.result["metadata"]["hyperparameters"]["epsilon"]]
