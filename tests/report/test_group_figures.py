"""The paper's figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from report_samples import FAST, make_history, words

from fedquilt.errors import InvalidValueError
from fedquilt.report import plot_paper_figures, plot_privacy_consumption_by_group
from fedquilt.report.paper_figures import consumption_by_group


def test_consumption_by_hand() -> None:
    # five clients, groups of one: client 0 joins always, client 4 never
    history = {
        "privacy_budgets": [0.1, 0.2, 0.4],
        "client_participation": [[0, 1], [0, 2, 3], [0, 1, 2, 3]],
    }
    most, least = consumption_by_group(history, 5)
    assert (most.members.tolist(), most.attended) == ([0], 3.0)
    np.testing.assert_allclose(most.mean, [0.1, 0.3, 0.7])
    assert (least.members.tolist(), least.attended) == ([4], 0.0)
    np.testing.assert_allclose(least.mean, [0, 0, 0])


def test_consumption_against_a_loop_over_clients() -> None:
    history = make_history(3, rounds=30)
    budgets, cohorts = history["privacy_budgets"], history["client_participation"]
    spent = np.zeros((30, 20))
    for client in range(20):
        total = 0.0
        for t in range(30):
            total += budgets[t] if client in cohorts[t] else 0.0
            spent[t, client] = total
    for group in consumption_by_group(history, 20, fraction=0.25):
        assert group.members.size == 5
        np.testing.assert_allclose(group.mean, spent[:, group.members].mean(axis=1))
        np.testing.assert_allclose(group.low, spent[:, group.members].min(axis=1))
        np.testing.assert_allclose(group.high, spent[:, group.members].max(axis=1))
    most, least = consumption_by_group(history, 20, fraction=0.25)
    counts = np.bincount(np.concatenate(cohorts), minlength=20)
    assert counts[most.members].min() >= np.sort(counts)[-5]
    assert counts[least.members].max() <= np.sort(counts)[4]


def test_a_client_listed_twice_pays_once_and_uneven_lists_are_cut() -> None:
    history = {"privacy_budgets": [0.1, math.nan, 9.0], "client_participation": [[1, 1], None]}
    most, _ = consumption_by_group(history, 2)
    np.testing.assert_allclose(most.mean, [0.1, 0.1])


@pytest.mark.parametrize(
    ("cohort", "message"),
    [
        ([0, 20], "round 2 holds 20, every number"),
        ([-1], "holds -1"),
        ([0.5], "flat list of whole numbers"),
    ],
)
def test_a_foreign_client_is_refused_before_anything_is_written(
    cohort: list[Any], message: str, tmp_path: Path
) -> None:
    history = make_history() | {"client_participation": [[0], cohort]}
    with pytest.raises(InvalidValueError, match=message):
        plot_paper_figures(history, 20, "mnist", tmp_path / "out", FAST)
    assert not (tmp_path / "out").exists()


def test_the_paper_s_figures_are_two_files(saved: list[Figure], tmp_path: Path) -> None:
    history = make_history()
    paths = plot_paper_figures(history, 20, "mnist", tmp_path / "out", FAST)
    assert [Path(path).name for path in paths] == [
        "mnist_accuracy_curve.png",
        "mnist_privacy_by_group.png",
    ]
    assert all(Path(path).is_file() for path in paths)
    accuracy, groups = (figure.axes[0] for figure in saved)
    assert accuracy.lines[0].get_ydata().tolist() == history["test_accuracy"]
    most, least = consumption_by_group(history, 20)
    assert groups.lines[0].get_ydata().tolist() == most.mean.tolist()
    assert groups.lines[1].get_ydata().tolist() == least.mean.tolist()
    assert "not a guarantee" in words(groups)
    legend = [text.get_text() for text in groups.get_legend().get_texts()]
    assert legend[0].startswith("most frequent 20%: 4 clients")


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (make_history(noised=False), "no noise in this mode"),
        ({"privacy_budgets": [0.1]}, "does not say who took part"),
        ({}, "no noise in this mode"),
    ],
)
def test_missing_data_is_said_in_words(
    saved: list[Figure], tmp_path: Path, history: Any, message: str
) -> None:
    path = plot_privacy_consumption_by_group(history, 20, tmp_path / "figure.png", config=FAST)
    assert Path(path).is_file()
    assert message in words(saved[0].axes[0])


@pytest.mark.parametrize("fraction", [0.0, 0.6])
def test_groups_may_not_be_empty_or_overlap(fraction: float) -> None:
    with pytest.raises(InvalidValueError, match="fraction"):
        consumption_by_group({}, 10, fraction)
