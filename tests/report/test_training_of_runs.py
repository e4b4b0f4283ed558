"""Every figure takes several runs: seeds of one setting are one line with a band."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from report_samples import FAST, make_run, words

from fedquilt.config.modes import MODE_TABLE
from fedquilt.report import (
    plot_multi_seed_comparison,
    plot_paper_figures,
    plot_privacy_consumption_by_group,
    plot_training_history,
)
from fedquilt.report.style import COLORS


def result(mode: str, seed: int, **settings: Any) -> dict[str, Any]:
    """Return a result; a certified one has a spend in place of nominal budgets."""
    made = make_run(mode, seed, 0.8, 3.0 if mode == "certified" else "inf", joins=[1] * 20)
    made["statement"]["adjacency"] = "zero-out"
    made["metadata"]["hyperparameters"] = {"mode": mode, "epsilon": 3.0, **settings}
    if mode == "certified":
        rounds = len(made["history"]["privacy_budgets"])
        worst = np.linspace(0.5, 3.0, rounds) - 0.01 * seed
        made["history"]["privacy_budgets"] = [None] * rounds
        levels = ("lowest", "lower_quartile", "median", "upper_quartile", "worst")
        made["history"]["epsilon_spent"] = [dict.fromkeys(levels, float(w)) for w in worst]
    return made


@pytest.fixture
def results() -> list[dict[str, Any]]:
    return [*(result("certified", s) for s in (0, 1)), result("quap_fl", 0)]


def test_training_of_several_runs(
    results: list[dict[str, Any]], saved: list[Figure], tmp_path: Path
) -> None:
    plot_training_history(results, config=FAST, save_path=tmp_path / "training.png")
    accuracy, loss, spend, clip = saved[-1].axes
    assert len(accuracy.lines) == len(loss.lines) == len(clip.lines) == 2
    seeds = [r["history"]["test_accuracy"] for r in results[:2]]
    drawn = {line.get_color(): np.asarray(line.get_ydata()) for line in accuracy.lines}
    np.testing.assert_allclose(drawn[COLORS[MODE_TABLE["certified"].color]], np.mean(seeds, axis=0))
    assert len(accuracy.collections) == 1, "a band for the mode with two seeds"
    curve, budget = spend.lines
    assert np.asarray(curve.get_ydata())[-1] == pytest.approx(2.995)
    assert list(budget.get_ydata()) == [3.0, 3.0]
    assert words(spend).count("band") == 1
    labels = [text.get_text() for text in saved[-1].legends[0].get_texts()]
    assert sorted(labels) == ["certified (2 seeds)", "quap_fl"]


def test_without_a_bound_the_panel_shows_who_took_part(saved: list[Figure], tmp_path: Path) -> None:
    plot_training_history([result("fedavg", 0)], config=FAST, save_path=tmp_path / "training.png")
    assert "Clients in a round" in words(saved[-1].axes[2])


def test_settings_of_one_mode_have_colours_of_their_own(
    saved: list[Figure], tmp_path: Path
) -> None:
    runs = [result("certified", 0), result("certified", 0, clip_norm=0.5)]
    plot_training_history(runs, config=FAST, save_path=tmp_path / "training.png")
    colors = {line.get_color() for line in saved[-1].axes[0].lines}
    assert len(colors) == 2


def test_the_paper_s_figures_of_several_runs(
    results: list[dict[str, Any]], saved: list[Figure], tmp_path: Path
) -> None:
    paths = plot_paper_figures(results, 20, "mnist", tmp_path, FAST)
    assert [Path(path).name for path in paths] == [
        "figure2_accuracy.png",
        "figure3_privacy_by_group.png",
    ]
    plot_privacy_consumption_by_group(
        [result("quap_fl", s) for s in (0, 1)], 20, tmp_path / "g.png", config=FAST, fraction=0.25
    )
    (axes,) = saved[-1].axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["quap_fl: most frequent 25%", "quap_fl: least frequent 25%"]


def test_seeds_with_a_bound_show_what_was_spent(saved: list[Figure], tmp_path: Path) -> None:
    runs = [result("certified", s) for s in (0, 1)]
    plot_multi_seed_comparison(runs, [0, 1], "mnist", FAST, tmp_path / "seeds.png")
    panel = saved[-1].axes[2]
    assert "Privacy Spent" in words(panel)
    assert len(panel.lines) == 2
