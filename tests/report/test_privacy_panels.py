"""What figures and tables say of privacy: spends, claims, methods; and that they fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from report_samples import FAST, make_history, make_run, words

from fedquilt.common import formatting
from fedquilt.report import comparison_table, generate_summary_table, plot_training_history
from fedquilt.report.comparison import render_comparison
from fedquilt.report.ledger import client_facts, ledger_tables, plot_ledger

ROUNDS = 12


def certified_history() -> dict[str, Any]:
    history = make_history(rounds=ROUNDS, every=4)
    worst = np.linspace(0.5, 3.0, ROUNDS)
    history["privacy_budgets"] = [None] * ROUNDS
    history["clip_values"] = [1.0] * ROUNDS
    history["epsilon_spent"] = [
        {
            "lowest": 0.0,
            "lower_quartile": w / 4,
            "median": w / 2,
            "upper_quartile": w / 1.5,
            "worst": w,
        }
        for w in worst
    ]
    history["without_allowance"] = [0] * (ROUNDS - 1) + [7]
    return history


def draw(saved: list[Figure], tmp_path: Path, history: Any, **config: Any) -> list[Any]:
    plot_training_history(history, "digits", 3, FAST | config, tmp_path / "figure.png")
    return list(saved[-1].axes)


def test_the_panel_shows_each_clients_spend(saved: list[Figure], tmp_path: Path) -> None:
    history = certified_history()
    panel = draw(saved, tmp_path, history, mode="certified", epsilon=3.5)[2]
    lines = {line.get_label(): line.get_ydata() for line in panel.lines}
    told = history["epsilon_spent"]
    np.testing.assert_allclose(lines["median"], [row["median"] for row in told])
    np.testing.assert_allclose(lines["worst client"], [row["worst"] for row in told])
    assert panel.lines[-1].get_ydata() == [3.5, 3.5], "the run's own budget, not a default"
    said = words(panel)
    assert "Privacy Spent by Each Client" in said
    assert "budget of the run, epsilon 3.5" in said
    assert "sat out the last round, with nothing left: 7" in said.replace("\n", " ")
    assert len(panel.collections) == 2, "the middle half and all of them"
    assert panel.get_ylim()[1] > 3.5


def test_nothing_is_drawn_that_the_run_did_not_have(saved: list[Figure], tmp_path: Path) -> None:
    panels = draw(saved, tmp_path, certified_history(), mode="certified")
    assert "dashed" not in words(panels[2])
    assert [line.get_label() for line in panels[2].lines] == ["median", "worst client"]
    assert "Clip Bound, Fixed in Advance" in words(panels[3])


@pytest.mark.parametrize(
    ("config", "title"),
    [
        ({"mode": "certified"}, "DIGITS, certified, seed 3"),
        ({"mode": "fedavg", "method": "heterofl"}, "DIGITS, fedavg, heterofl, seed 3"),
        ({"mode": "fedavg", "method": "full"}, "DIGITS, fedavg, seed 3"),
        ({}, "DIGITS, seed 3"),
    ],
)
def test_titles_name_mode_and_method(
    saved: list[Figure], tmp_path: Path, config: Any, title: str
) -> None:
    draw(saved, tmp_path, make_history(), **config)
    assert saved[-1].get_suptitle() == f"Training history: {title}"


def test_a_mode_without_noise_has_no_empty_half(saved: list[Figure], tmp_path: Path) -> None:
    history = make_history(noised=False)
    panels = draw(saved, tmp_path, history, mode="fedavg")
    assert panels[2].lines[0].get_ydata().tolist() == [6.0] * 40
    assert panels[3].lines[0].get_ydata().tolist() == history["train_loss"]
    assert "nothing is bounded" in words(panels[2])


def test_a_loss_that_hardly_moves_has_ticks(saved: list[Figure], tmp_path: Path) -> None:
    history = make_history() | {"test_loss": [1.3, 1.1, 0.9, 0.75]}
    loss = draw(saved, tmp_path, history)[1]
    low, high = loss.get_ylim()
    assert sum(low <= tick <= high for tick in loss.get_yticks()) >= 3


# Tables

CLAIM = {"epsilon_max": 2.99999, "delta": 1e-5, "unit": "client"}


def table_of(history: Any, statement: Any) -> str:
    return generate_summary_table(0.8, 0.5, "digits", 0, history, {}, "certified", statement)


def test_the_table_shows_the_claim() -> None:
    table = table_of(certified_history(), CLAIM)
    (row,) = [line for line in table.splitlines() if "Privacy Claim" in line]
    assert "each: ε ≤ 3" in row
    assert "δ = 1e-05" in row
    assert "Total Privacy Budget" not in table
    assert {len(line) for line in table.splitlines() if line[0] in "│╒"} == {70}


def test_a_nominal_budget_is_not_taken_for_a_claim() -> None:
    table = table_of(make_history(), {"epsilon_max": "inf", "delta": 1e-5})
    assert "none (ε = ∞)" in table
    (nominal,) = [line for line in table.splitlines() if "Total Privacy Budget" in line]
    assert "nominal, no bound" in nominal


def test_two_methods_are_two_rows_and_fit_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formatting, "screen_width", lambda: 80)
    runs = [
        make_run("certified", 1, 0.9, 5.97),
        make_run("certified", 2, 0.8, 5.97),
        *(make_run("fedavg", seed, 0.95, "inf") for seed in (1, 2)),
    ]
    for run, method in zip(runs, ("full", "heterofl", "full", "fedrolex"), strict=True):
        run["metadata"]["hyperparameters"] = {"method": method}
        run["statement"]["adjacency"] = "replace-one"
    rows = comparison_table(runs)
    assert [row["mode"] for row in rows] == [
        "fedavg", "fedavg, fedrolex", "certified", "certified, heterofl",
    ]  # fmt: skip
    text = render_comparison(rows)
    assert max(map(len, text.splitlines())) <= 80
    assert "replace-one" in text


# Ledgers


def population(clients: int, allowance: float = 6.0) -> tuple[Any, list[Any]]:
    rows = [
        SimpleNamespace(
            client=k,
            client_id=f"hospital of the holy name number {k}",
            joins=3 if k % 2 else 5,
            epsilon_spent=allowance if k < clients - 2 else 1.0,
            epsilon_left=0.0,
            mu2_spent=2.0 if k < clients - 2 else 0.1,
            mu2_left=0.0 if k < clients - 2 else 1.9,
            last_round=7,
            last_run=f"digits_certified_seed0_20261115_112028-d74b50a{k % 2}",
        )
        for k in range(clients)
    ]
    summary = SimpleNamespace(
        population="digits-100-8814626dc9bbe7d8",
        clients=clients,
        joined=clients,
        epsilon_allowance=allowance,
        delta=1e-5,
        adjacency="replace_one",
        epsilon_max=allowance,
        epsilon_median=allowance,
        near_end=0,
        exhausted=clients - 2,
        largest_run_epsilon=0.0,
    )
    return summary, rows


def test_the_tables_of_a_ledger_fit_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formatting, "screen_width", lambda: 80)
    summary, rows = population(6)
    text = ledger_tables([summary], {summary.population: rows})
    assert max(map(len, text.splitlines())) <= 80
    assert "allowance          6 at 1e-05, replace-one" in text
    assert "[1] digits_certified_seed0_20261115_112028-d74b50a0" in text
    assert "[2] digits_certified_seed0_20261115_112028-d74b50a1" in text
    assert "[1] 8" in text, "the ledger's round 7 is the eighth"
    after = text.splitlines()[text.splitlines().index("all can still pay  0") + 1]
    assert "do not add up" in after


def test_what_one_client_gave_away_counts_rounds_from_1() -> None:
    (row, *_) = population(6)[1]
    text = client_facts("clinics", SimpleNamespace(**vars(row), delta=1e-5, epsilon_allowance=6.0))
    assert "round 8 of digits_certified" in text
    assert "do not add up" in text
    assert max(map(len, text.splitlines())) <= 80


def test_no_label_runs_through_the_points_of_a_ledger(
    laid_out: list[Figure], tmp_path: Path
) -> None:
    """All clients used up, which is the usual end: their points lie on the allowance."""
    summary, rows = population(21)
    plot_ledger([summary], {summary.population: rows}, tmp_path / "ledger.png", FAST)
    axes, shares = laid_out[-1].axes
    assert "dashed: allowance 6" in words(axes)
    assert "diamonds: 19 clients near the end" in words(axes).replace("\n", " ")
    assert shares.patches[-1].get_height() == 19, "the last tenth"
    assert shares.patches[0].get_height() == 2, "0.1 of 2 units, which is epsilon 1 of 6"
    box = axes.get_window_extent()
    texts = [text for text in axes.texts if text.get_text()]
    for drawn in texts:
        assert not drawn.get_window_extent().overlaps(box), "all words stand outside"
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    points = [c for c in axes.collections if len(c.get_offsets())]
    sizes = {
        tuple(xy): size
        for marks in points
        for xy, size in zip(marks.get_offsets(), marks.get_sizes(), strict=True)
    }
    assert sizes[(5.0, 6.0)] > sizes[(5.0, 1.0)], "more clients, a larger mark"
