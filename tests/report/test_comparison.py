"""Modes compared over seeds: table and figure."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from report_samples import FAST, make_run, words

from fedquilt.common.formatting import format_bound
from fedquilt.errors import InvalidValueError, RunFolderError
from fedquilt.report import (
    comparison_table,
    plot_comparison,
    plot_training_history,
    render_comparison,
)
from fedquilt.report.style import spread_apart


def runs() -> list[Any]:
    """Return three seeds of a certified mode, two without guarantee, one single run."""
    return [
        *(make_run("certified", s, a, e) for s, a, e in
          [(1, 0.80, 2.0), (2, 0.84, 2.1004), (3, 0.88, 1.9)]),
        *(make_run("quap_fl", s, a, "inf") for s, a in [(1, 0.9), (2, 0.94)]),
        make_run("fedavg", 1, 0.95, "inf"),
    ]  # fmt: skip


def test_the_table_has_mean_sample_deviation_and_worst_epsilon() -> None:
    fedavg, quap, certified = comparison_table(runs())
    assert [row["mode"] for row in (fedavg, quap, certified)] == ["fedavg", "quap_fl", "certified"]
    assert certified["accuracy_mean"] == pytest.approx(0.84)
    assert certified["accuracy_std"] == pytest.approx(0.04)  # divisor n - 1
    assert certified["epsilon_max"] == 2.1004
    assert certified["seeds"] == [1, 2, 3]
    assert quap["accuracy_std"] == pytest.approx(math.sqrt(2) * 0.02)
    assert quap["epsilon_max"] == "inf"
    assert fedavg["accuracy_std"] is None


def test_the_table_can_be_written_as_json() -> None:
    given_runs = [*runs(), make_run("fixed_dp", 1, None, float("inf"))]
    given_runs[-1]["history"]["test_accuracy"] = [math.nan]
    rows = comparison_table(given_runs)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


@pytest.mark.parametrize("epsilon", ["inf", float("inf"), None, math.nan, "none", -1.0])
def test_one_seed_without_a_guarantee_takes_it_from_the_mode(epsilon: Any) -> None:
    both = [make_run("certified", 1, 0.8, 1.0), make_run("certified", 2, 0.8, epsilon)]
    (row,) = comparison_table(both)
    assert row["epsilon_max"] == "inf"
    assert row["claim"] == "no guarantee (ε = ∞)"


@pytest.mark.parametrize("statement", [None, {}, {"epsilon_max": 1.0}])
def test_without_a_statement_or_a_delta_nothing_may_be_claimed(statement: Any) -> None:
    (row,) = comparison_table([make_run("certified", 1, 0.8, 1.0, statement=statement)])
    assert row["claim"] == "no guarantee (ε = ∞)"


def test_the_claim_names_epsilon_unit_and_the_largest_delta() -> None:
    both = [make_run("certified", s, 0.8, 2.1) for s in (1, 2)]
    both[1]["statement"]["delta"] = 1e-4
    assert comparison_table(both)[0]["claim"] == "ε ≤ 2.1 for every client, δ = 0.0001"
    both[0]["statement"]["unit"] = both[1]["statement"]["unit"] = "record"
    assert "for every record" in comparison_table(both)[0]["claim"]


def test_the_claim_names_another_adjacency_than_the_usual_one() -> None:
    run = make_run("certified", 1, 0.8, 2.1)
    run["statement"]["adjacency"] = "replace-one"
    assert comparison_table([run])[0]["claim"].endswith(", replace-one")
    run["statement"]["adjacency"] = "zero-out"
    assert "zero-out" not in comparison_table([run])[0]["claim"]


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [(2.1, "2.1"), (2.1001, "2.11"), (0.37912, "0.38"), (2, "2"), (0.0, "0"), (1234.5, "1240"),
     (999.6, "1000"), ("inf", "∞"), (0.1 + 0.2, "0.3")],
)  # fmt: skip
def test_epsilon_is_rounded_up_never_down(epsilon: Any, text: str) -> None:
    assert format_bound(float(epsilon)) == text


@given(st.floats(min_value=1e-6, max_value=1e6))
def test_the_text_of_epsilon_covers_it(epsilon: float) -> None:
    shown = float(format_bound(float(epsilon)))
    assert epsilon * (1 - 1e-10) <= shown <= epsilon * 1.011


def test_the_last_evaluation_serves_when_the_result_has_no_final_accuracy() -> None:
    run = make_run("fedavg", 1, None, "inf")
    run["history"]["test_accuracy"] = [0.1, 0.7]
    assert comparison_table([run])[0]["accuracy_mean"] == 0.7


def test_a_diverged_seed_is_counted_in_words() -> None:
    good, bad = make_run("fedavg", 1, 0.9, "inf"), make_run("fedavg", 2, None, "inf")
    bad["history"]["test_accuracy"] = [0.1, math.nan]
    (row,) = comparison_table([good, bad])
    assert row["accuracies"] == [0.9, None]
    assert "0.9000 (1 not finite)" in render_comparison([row])


def test_the_rendered_table_reads_in_plain_words() -> None:
    head, _, *body = render_comparison(comparison_table(runs())).splitlines()
    for heading in ("mode", "accuracy ± std", "seeds", "may claim"):
        assert heading in head
    assert body[0].split() == ["fedavg", "0.9500", "1", "nothing", "(ε", "=", "∞)"]
    assert "0.8400 ± 0.0400" in body[2]
    assert body[2].endswith("ε ≤ 2.11")
    assert body[-1] == "may claim: for every client, δ = 1e-05"


def test_bounds_that_are_not_alike_are_said_in_full() -> None:
    rows = comparison_table(runs())
    other = {**rows[-1], "claim": "ε ≤ 1 for every client, δ = 1e-06"}
    said = render_comparison([*rows, other])
    assert "ε ≤ 2.11 for every client, δ = 1e-05" in said
    assert said.endswith("ε ≤ 1 for every client, δ = 1e-06")


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([], InvalidValueError, "at least one"),
        ([3], RunFolderError, r"runs\[0\]=3"),
        ([{"metadata": {}, "history": {}}], RunFolderError, r"\['mode'\]=None"),
        ([{"mode": "fedavg", "history": {}}], RunFolderError, "'metadata'"),
        ([{"mode": "fedavg", "metadata": {}}], RunFolderError, "'history'"),
    ],
)
def test_what_is_no_run_is_named(bad: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        comparison_table(bad)


def test_runs_of_two_data_sets_are_not_mixed() -> None:
    other = make_run("fedavg", 1, 0.9, "inf")
    other["metadata"]["dataset"] = "cifar10"
    with pytest.raises(InvalidValueError, match="cifar10, mnist"):
        comparison_table([*runs(), other])


def test_the_figure_shows_mean_band_points_and_claims(saved: list[Figure], tmp_path: Path) -> None:
    given_runs = runs()
    path = plot_comparison(given_runs, tmp_path / "compare.png", FAST)
    assert Path(path).is_file()
    curves, finals = saved[0].axes
    table = np.asarray([run["history"]["test_accuracy"] for run in given_runs[:3]])
    np.testing.assert_allclose(curves.lines[2].get_ydata(), table.mean(axis=0))
    band = curves.collections[-1].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((table.min(), table.max()))
    assert {"fedavg", "quap_fl", "certified"} <= set(words(curves).splitlines())
    dots = [line.get_xdata().tolist() for line in finals.lines if line.get_linestyle() == "None"]
    assert dots == [[0.95], [0.9, 0.94], [0.80, 0.84, 0.88]]
    text = words(finals)
    assert "ε ≤ 2.11 for every client" in text
    assert text.count("no guarantee (ε = ∞)") == 2


def test_the_figure_names_what_runs_are_judged_by(saved: list[Figure], tmp_path: Path) -> None:
    run = make_run("fedavg", 1, None, "inf")
    run["history"]["test_mse"] = [4.0 for _ in run["history"].pop("test_accuracy")]
    plot_comparison([run], tmp_path / "compare.png", FAST)
    plot_training_history(run["history"], "d", 1, None, tmp_path / "training.png")
    for axes in (*saved[0].axes, saved[1].axes[0]):
        said = " ".join((words(axes), axes.get_xlabel(), axes.get_ylabel())).lower()
        assert "mse" in said
        assert "accuracy" not in said


def test_the_figure_of_odd_runs(saved: list[Figure], tmp_path: Path) -> None:
    lost = make_run("quap_fl", 1, None, "inf")
    lost["history"] = {"test_accuracy": [math.nan, None]}
    other = make_run("my_mode", 1, 0.7, "inf")
    other["history"] = {"test_accuracy": [0.7], "evaluation_rounds": [3]}
    plot_comparison([lost, other], tmp_path / "compare.png", FAST)
    curves, finals = saved[0].axes
    assert "nothing finite to draw for quap_fl" in words(curves)
    assert "none finite, 1 seed" in words(finals)
    plot_comparison([lost], tmp_path / "compare.png", FAST)
    assert "no evaluation" in words(saved[1].axes[0])


def test_labels_stay_inside_the_figure(laid_out: list[Figure], tmp_path: Path) -> None:
    modes = ("fedavg", "fixed_dp", "quap_fl", "quap_fl_client", "certified")
    plot_comparison(
        [make_run(mode, s, 0.9, 1.5) for mode in modes for s in (1, 2)], tmp_path / "c.png", FAST
    )
    figure = laid_out[0]
    left, right = (axes.get_tightbbox() for axes in figure.axes)
    assert not left.overlaps(right)
    assert right.x1 <= figure.bbox.width
    labels = [t for t in figure.axes[0].texts if t.get_text() in modes]
    boxes = [Text.get_window_extent(label) for label in labels]  # without the leader
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])


def test_names_of_very_different_runs_fit(laid_out: list[Figure], tmp_path: Path) -> None:
    """Labels of 110 characters: matplotlib would warn, which is an error here, and draw badly."""
    runs = []
    for rate, model in itertools.product((0.125, 0.25), ("mlp", "linear")):
        run = make_run("certified", 1, 0.5 + rate, 1.5)
        named = ("num_rounds", "local_epochs", "batch_size", "server_learning_rate", "clip_norm")
        own = {"mode": "certified", **dict.fromkeys(named, rate), "model": model}
        run["metadata"]["hyperparameters"] = own
        runs.append(run)
    assert min(len(row["mode"]) for row in comparison_table(runs)) >= 100
    plot_comparison(runs, tmp_path / "c.png", FAST)
    left, right = laid_out[0].axes
    names = [text for text in left.texts if "…" in text.get_text()]
    assert len({text.get_text() for text in names}) == len(runs) == len(names)
    assert all(text.get_text() in words(right) for text in names)
    assert not left.get_tightbbox().overlaps(right.get_tightbbox())
    lines = [text for text in right.texts if text.get_text() != ""]
    boxes = [Text.get_window_extent(text) for text in lines]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_spread_labels_keep_gap_order_and_edges(values: list[float]) -> None:
    heights = np.asarray(values)
    placed = spread_apart(heights, 0.05)
    order = np.argsort(heights, kind="stable")
    assert (np.diff(placed[order]) >= 0.05 - 1e-12).all()
    assert placed.min() >= -1e-12
    assert placed.max() <= 1 + 1e-12


def test_spread_labels_move_as_little_as_needed() -> None:
    np.testing.assert_allclose(spread_apart(np.asarray([0.5, 0.5]), 0.1), [0.45, 0.55])
    np.testing.assert_allclose(spread_apart(np.asarray([0.9, 0.1]), 0.1), [0.9, 0.1])
    np.testing.assert_allclose(spread_apart(np.asarray([1.0, 1.0]), 0.1), [0.9, 1.0])
