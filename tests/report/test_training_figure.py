"""The four panels of one run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from report_samples import FAST, make_history, words

from fedquilt.report import plot_training_history


def draw(saved: list[Figure], tmp_path: Path, history: Any, **config: Any) -> list[Any]:
    """Return the panels: accuracy, loss, budget, clip."""
    name = config.pop("dataset", "mnist")
    plot_training_history(history, name, 42, FAST | config, tmp_path / "figure.png")
    return list(saved[-1].axes)


def test_the_panels_show_the_history(saved: list[Figure], tmp_path: Path) -> None:
    history = make_history()
    accuracy, loss, budget, clip = draw(saved, tmp_path, history)
    curve, target = accuracy.lines
    assert curve.get_xdata().tolist() == history["evaluation_rounds"]
    assert curve.get_ydata().tolist() == history["test_accuracy"]
    assert target.get_ydata() == [0.971, 0.971]
    assert loss.lines[0].get_ydata().tolist() == history["test_loss"]
    assert loss.get_yscale() == "log"
    spent = np.add.accumulate(history["privacy_budgets"])
    np.testing.assert_allclose(budget.lines[0].get_ydata(), spent)
    assert clip.lines[0].get_ydata().tolist() == history["clip_values"]
    assert clip.lines[1].get_ydata()[0] == pytest.approx(np.mean(history["clip_values"]))


def test_titles_are_the_documented_ones_and_the_budget_is_no_guarantee(
    saved: list[Figure], tmp_path: Path
) -> None:
    panels = draw(saved, tmp_path, make_history())
    assert [panel.get_title(loc="left") for panel in panels] == [
        "Test Accuracy over Rounds",
        "Test Loss over Rounds",
        "Privacy Budget Consumption",
        "Adaptive Clipping Values",
    ]
    text = words(panels[2]).replace("\n", " ")
    assert "nominal epsilon, summed over rounds (not a guarantee)" in text


def test_the_total_line_is_the_run_s_own_budget_when_it_is_known(
    saved: list[Figure], tmp_path: Path
) -> None:
    default = draw(saved, tmp_path, make_history())[2]
    assert default.lines[1].get_ydata()[0] == 3.0
    assert "default total budget 3" in words(default)
    own = draw(saved, tmp_path, make_history(), epsilon=6.5)[2]
    assert own.lines[1].get_ydata()[0] == 6.5
    assert "total budget of the run 6.5" in words(own)


def test_noise_without_nominal_budgets_is_not_called_no_noise(
    saved: list[Figure], tmp_path: Path
) -> None:
    history = make_history()
    certified = history | {"privacy_budgets": [None] * len(history["privacy_budgets"])}
    said = words(draw(saved, tmp_path, certified)[2])
    assert "no noise" not in said
    assert "no nominal budgets in this mode" in said
    assert "ledger" in said


def test_a_mode_without_noise_says_so_in_words(saved: list[Figure], tmp_path: Path) -> None:
    _, _, budget, clip = draw(saved, tmp_path, make_history(noised=False))
    assert "no noise in this mode" in words(budget)
    assert "no clipping in this mode" in words(clip)
    assert not budget.lines
    assert not clip.lines


def test_a_diverged_run_keeps_its_rounds_and_counts_what_is_missing(
    saved: list[Figure], tmp_path: Path
) -> None:
    history = make_history()
    history["test_loss"] = [2.0, 3e38, math.nan, None]
    history["test_accuracy"] = [0.1, None, math.inf, math.nan]
    history["clip_values"] = [math.nan] * 40
    accuracy, loss, _, clip = draw(saved, tmp_path, history)
    assert "3 of 4 evaluations without a finite value" in words(accuracy)
    assert "2 of 4 evaluations without a finite value" in words(loss)
    assert loss.get_xlim()[1] > 40
    assert "no finite value was recorded" in words(clip)


def test_losses_that_a_log_scale_cannot_show(saved: list[Figure], tmp_path: Path) -> None:
    history = make_history() | {"test_loss": [1.0, -0.5, 0.0, 0.5]}
    loss = draw(saved, tmp_path, history)[1]
    assert "2 losses of zero or less" in words(loss)
    negative = draw(saved, tmp_path, history | {"test_loss": [-1.0, -2.0, -3.0, -4.0]})[1]
    assert negative.get_yscale() == "linear"
    assert negative.lines[0].get_ydata().tolist() == [-1.0, -2.0, -3.0, -4.0]


@pytest.mark.parametrize("history", [{}, {"test_accuracy": []}, {"test_accuracy": None}])
def test_an_empty_history_gives_words_in_every_panel(
    saved: list[Figure], tmp_path: Path, history: Any
) -> None:
    panels = draw(saved, tmp_path, history)
    assert "no evaluation was recorded" in words(panels[0])
    assert all(panel.texts and not panel.lines for panel in panels)


@pytest.mark.parametrize(("rounds", "every"), [(1, 1), (3, 1), (3, 3)])
def test_short_runs_have_whole_rounds_on_the_axis(
    saved: list[Figure], tmp_path: Path, rounds: int, every: int
) -> None:
    panels = draw(saved, tmp_path, make_history(rounds=rounds, every=every))
    for panel in panels:
        low, high = panel.get_xlim()
        ticks = [tick for tick in panel.get_xticks() if low <= tick <= high]
        assert ticks
        assert all(float(tick).is_integer() for tick in ticks)


def test_a_data_set_without_a_target_has_no_line(saved: list[Figure], tmp_path: Path) -> None:
    accuracy = draw(saved, tmp_path, make_history(), dataset="digits")[0]
    assert len(accuracy.lines) == 1
    assert "target" not in words(accuracy)


def test_no_text_is_cut_off_or_covers_another_panel(laid_out: list[Figure], tmp_path: Path) -> None:
    history = make_history()
    history["test_loss"] = [2.0, 1e30, math.nan, None]
    history["clip_values"][3] = None
    draw(laid_out, tmp_path, history, figsize=(9, 7))
    figure = laid_out[-1]
    width, height = figure.canvas.get_width_height()
    boxes = [panel.get_tightbbox() for panel in figure.axes]
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= width
        assert box.y1 <= height
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])
