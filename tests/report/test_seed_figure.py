"""Several seeds in one figure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from report_samples import FAST, make_history, words

from fedquilt.errors import InvalidValueError
from fedquilt.report import plot_multi_seed_comparison


def draw(saved: list[Figure], tmp_path: Path, results: Any, dataset: str = "mnist") -> list[Any]:
    """Return the panels: accuracy, loss, budgets, final accuracy."""
    seeds = list(range(len(results)))
    plot_multi_seed_comparison(results, seeds, dataset, FAST, tmp_path / "figure.png")
    return list(saved[-1].axes)


def test_mean_and_band_are_those_of_numpy(saved: list[Figure], tmp_path: Path) -> None:
    results = [make_history(seed) for seed in range(3)]
    accuracy, loss, _, _ = draw(saved, tmp_path, results)
    table = np.asarray([result["test_accuracy"] for result in results])
    *single, mean = accuracy.lines
    assert [line.get_ydata().tolist() for line in single] == table.tolist()
    np.testing.assert_allclose(mean.get_ydata(), table.mean(axis=0))
    band = accuracy.collections[0].get_paths()[0].vertices
    np.testing.assert_allclose(band[:, 1].max(), (table.mean(0) + table.std(0, ddof=1)).max())
    losses = np.asarray([result["test_loss"] for result in results])
    np.testing.assert_allclose(loss.lines[-1].get_ydata(), losses.mean(axis=0))
    assert loss.get_yscale() == "log"


def test_whole_results_are_taken_as_well_as_histories(saved: list[Figure], tmp_path: Path) -> None:
    history = make_history()
    panels = draw(saved, tmp_path, [{"metadata": {}, "history": history}])
    assert panels[0].lines[0].get_ydata().tolist() == history["test_accuracy"]


def test_seeds_with_other_rounds_are_averaged_over_the_common_ones(
    saved: list[Figure], tmp_path: Path
) -> None:
    results = [make_history(0), make_history(1, every=4), make_history(2, rounds=20)]
    mean = draw(saved, tmp_path, results)[0].lines[-1]
    assert mean.get_xdata().tolist() == [20]
    at_20 = [results[0]["test_accuracy"][1], results[1]["test_accuracy"][4]]
    expected = np.mean([*at_20, results[2]["test_accuracy"][1]])
    assert mean.get_ydata()[0] == pytest.approx(expected)


def test_without_common_rounds_there_is_no_mean(saved: list[Figure], tmp_path: Path) -> None:
    results = [{"test_accuracy": [0.1 * r], "evaluation_rounds": [r]} for r in (1, 2)]
    accuracy = draw(saved, tmp_path, results)[0]
    assert "share no evaluation round" in words(accuracy)
    assert [line.get_xdata().tolist() for line in accuracy.lines] == [[1.0], [2.0], []]


def test_the_mean_stops_where_a_seed_is_not_finite(saved: list[Figure], tmp_path: Path) -> None:
    good, bad = make_history(0), make_history(1)
    bad["test_loss"][2:] = [math.nan, None]
    loss = draw(saved, tmp_path, [good, bad])[1]
    mean = loss.lines[-1].get_ydata()
    assert np.isfinite(mean).tolist() == [True, True, False, False]
    assert "no mean where a seed is not finite" in words(loss)


def test_the_histograms_count_every_round_and_every_seed(
    saved: list[Figure], tmp_path: Path
) -> None:
    results = [make_history(seed) for seed in range(5)]
    _, _, budgets, final = draw(saved, tmp_path, results)
    assert sum(patch.get_height() for patch in budgets.patches) == 5 * 40
    assert sum(patch.get_height() for patch in final.patches) == 5
    finals = np.asarray([result["test_accuracy"][-1] for result in results])
    assert f"mean {finals.mean():.4f} ± {finals.std(ddof=1):.4f} over 5 of 5" in words(final)
    assert "target 0.971" in words(final)


def test_equal_budgets_make_one_bar(saved: list[Figure], tmp_path: Path) -> None:
    result = make_history() | {"privacy_budgets": [0.015] * 40}
    bars = draw(saved, tmp_path, [result])[2].patches
    assert [bar.get_height() for bar in bars] == [40]
    assert bars[0].get_x() < 0.015 < bars[0].get_x() + bars[0].get_width()


def test_seeds_without_noise_or_data_are_said_in_words(saved: list[Figure], tmp_path: Path) -> None:
    quiet = draw(saved, tmp_path, [make_history(noised=False)] * 2)
    assert "no noise in this mode" in words(quiet[2])
    empty = draw(saved, tmp_path, [{}, {"test_accuracy": [math.nan]}], dataset="digits")
    assert "no finite accuracy" in words(empty[0])
    assert "no finite positive loss" in words(empty[1])
    assert "no finite final accuracy" in words(empty[3])


def test_seeds_are_drawn_by_what_they_are_judged_by(saved: list[Figure], tmp_path: Path) -> None:
    results = [make_history(seed) for seed in range(3)]
    for seed, history in enumerate(results):
        history["test_mse"] = [4.0 + seed for _ in history.pop("test_accuracy")]
    metric, _, _, final = draw(saved, tmp_path, results)
    assert metric.lines[-1].get_ydata().tolist() == [5.0] * 4
    assert "Test MSE" in metric.get_title(loc="left") + words(metric)
    assert "mean 5.0000 ± 1.0000 over 3 of 3" in words(final)
    assert "accuracy" not in (words(metric) + words(final) + final.get_xlabel()).lower()


def test_few_seeds_are_named_and_many_are_not(saved: list[Figure], tmp_path: Path) -> None:
    draw(saved, tmp_path, [make_history(seed, rounds=10) for seed in range(3)])
    names = [text.get_text() for text in saved[-1].legends[0].get_texts()]
    assert names == ["seed 0", "seed 1", "seed 2"]
    draw(saved, tmp_path, [make_history(seed, rounds=10) for seed in range(9)])
    assert not saved[-1].legends


@pytest.mark.parametrize(
    ("results", "seeds", "message"),
    [
        ([], [], "at least one"),
        ([{}], [1, 2], r"results \(1\) and seeds \(2\)"),
        ([[0.1]], [1], r"results\[0\]=.* must be a history"),
    ],
)
def test_results_and_seeds_must_fit(results: Any, seeds: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=message):
        plot_multi_seed_comparison(results, seeds, "mnist", FAST, tmp_path / "figure.png")
