"""The table of one run."""

from __future__ import annotations

import math
from typing import Any

import pytest
from report_samples import make_history

from fedquilt.config import HYPERPARAMETERS
from fedquilt.privacy.statement import Statement
from fedquilt.report import generate_summary_table

# The example of the API document, to the character, but for what is said of privacy: it prints
# the sum of nominal budgets as if it were a guarantee.
DOCUMENTED = """\
======================================================================
QuAP-FL Experiment Results - MNIST (seed=42)
======================================================================
╒═════════════════════════╤═════════════════════╤════════════════════╕
│ Metric                  │ Value               │ Status             │
╞═════════════════════════╪═════════════════════╪════════════════════╡
│ Final Accuracy          │ 0.9710 (97.10%)     │ Achieved           │
│ Best Accuracy           │ 0.9752 (97.52%)     │ Round 190          │
│ Final Loss              │ 0.0921              │ -                  │
│ Privacy Claim           │ not given           │ pass statement=    │
│ Total Privacy Budget    │ ε = 3.0             │ nominal, no bound  │
│ Average Clipping        │ 0.5210              │ -                  │
│ Mean Participation Rate │ 0.300               │ 30 clients         │
╘═════════════════════════╧═════════════════════╧════════════════════╛
======================================================================"""

HISTORY: dict[str, Any] = {
    "test_accuracy": [0.5, 0.9752, 0.9710],
    "evaluation_rounds": [100, 190, 200],
    "clip_values": [0.520, 0.522],
    "privacy_budgets": [0.015] * 200,
    "participation_stats": [
        {"mean_participation_rate": 0.29, "participating_clients": 29},
        {"mean_participation_rate": 0.30, "participating_clients": 30},
    ],
}


def row(table: str, name: str) -> list[str]:
    """Return value and status of one row."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"│ {name} ")]
    return [cell.strip() for cell in line.split("│")[2:4]]


@pytest.mark.parametrize("config", [{}, HYPERPARAMETERS, None])
def test_the_documented_example(config: Any) -> None:
    assert generate_summary_table(0.9710, 0.0921, "mnist", 42, HISTORY, config) == DOCUMENTED


def test_the_best_loss_has_its_round() -> None:
    history = HISTORY | {"test_loss": [0.4, 0.08, 0.0921]}
    table = generate_summary_table(0.971, 0.0921, "mnist", 42, history, {})
    assert row(table, "Best Loss") == ["0.0800", "Round 190"]


@pytest.mark.parametrize(
    ("accuracy", "dataset", "config", "status"),
    [
        (0.9709, "mnist", {}, "Not achieved"),
        (0.9709, "mnist", {"target_accuracy": 0.9}, "Achieved"),
        (0.812, "cifar10", {}, "Achieved"),
        (0.99, "digits", {}, "-"),
        (math.nan, "mnist", {}, "Not achieved"),
    ],
)
def test_the_status_compares_with_the_target(
    accuracy: float, dataset: str, config: Any, status: str
) -> None:
    table = generate_summary_table(accuracy, 0.1, dataset, 1, {}, config)
    assert row(table, "Final Accuracy")[1] == status


def test_nothing_recorded_is_a_table_of_dashes() -> None:
    table = generate_summary_table(None, math.inf, "digits", 1, {}, {})
    names = ["Final Accuracy", "Best Accuracy", "Final Loss", "Total Privacy Budget"]
    for name in [*names, "Average Clipping", "Mean Participation Rate"]:
        assert row(table, name) == ["-", "-"]
    assert "Best Loss" not in table


def test_a_run_without_accuracy_has_no_row_for_it() -> None:
    history = make_history() | {"test_mse": [4.0, 3.0, 2.5, 2.25]}
    both = generate_summary_table(0.9, 0.1, "digits", 1, history, {})
    assert row(both, "Final Accuracy")[0].startswith("0.9000")
    history["test_accuracy"] = [None] * 4
    table = generate_summary_table(None, 0.1, "digits", 1, history, {})
    assert "Accuracy" not in table
    assert "2.2500" in table


def test_a_mode_without_noise_claims_no_budget() -> None:
    table = generate_summary_table(
        0.9, 0.1, "mnist", 1, make_history(noised=False), HYPERPARAMETERS
    )
    assert row(table, "Total Privacy Budget") == ["-", "-"]
    assert row(table, "Average Clipping") == ["-", "-"]


def test_missing_values_are_passed_over() -> None:
    history = HISTORY | {
        "test_accuracy": [0.5, math.nan, 0.6],
        "test_loss": [None, 3.0, math.inf],
        "clip_values": [None, 0.5, math.nan, 0.7],
        "privacy_budgets": [0.5, None, 0.25],
    }
    table = generate_summary_table(0.6, 3.0, "mnist", 1, history, {})
    assert row(table, "Best Accuracy") == ["0.6000 (60.00%)", "Round 200"]
    assert row(table, "Best Loss") == ["3.0000", "Round 190"]
    assert row(table, "Average Clipping") == ["0.6000", "-"]
    assert row(table, "Total Privacy Budget") == ["ε = 0.75", "nominal, no bound"]


@pytest.mark.parametrize(
    ("budget", "text"), [(7.5432, "7.54"), (12.0, "12.0"), (0.5, "0.5"), (0.0021, "0.0021")]
)
def test_the_total_budget_is_short(budget: float, text: str) -> None:
    table = generate_summary_table(0.6, 3.0, "mnist", 1, {"privacy_budgets": [budget]}, {})
    assert row(table, "Total Privacy Budget")[0] == f"ε = {text}"


def test_participation_is_counted_when_there_are_no_statistics() -> None:
    history = {"client_participation": [[0, 1], [1, 2, 3, 3], None]}
    table = generate_summary_table(0.6, 3.0, "mnist", 1, history, {"num_clients": 10})
    assert row(table, "Mean Participation Rate") == ["0.167", "4 clients"]
    unknown = generate_summary_table(0.6, 3.0, "mnist", 1, history, {})
    assert row(unknown, "Mean Participation Rate") == ["-", "4 clients"]


def test_a_history_without_rounds_names_the_evaluation() -> None:
    table = generate_summary_table(0.6, 3.0, "mnist", 1, {"test_accuracy": [0.1, 0.6]}, {})
    assert row(table, "Best Accuracy")[1] == "Evaluation 2"


def test_a_loss_that_exploded_still_fits() -> None:
    table = generate_summary_table(0.1, 5.6e11, "mnist", 1, {}, {})
    assert row(table, "Final Loss")[0] == "5.6000e+11"
    assert {len(line) for line in table.splitlines() if line[0] in "│╒╞╘"} == {70}


def test_a_history_that_knows_its_claim_needs_no_statement() -> None:
    class Told(dict[str, Any]):
        statement = Statement.without_bound(
            delta=1e-5, covered=(), uncovered=("fc1",), noise_source="none", notes=()
        )

    table = generate_summary_table(0.9, 0.1, "mnist", 1, Told(HISTORY), {})
    assert row(table, "Privacy Claim") == ["none (ε = ∞)", "no guarantee"]
    bounded = {"epsilon_max": 2.0, "delta": 1e-5}
    table = generate_summary_table(0.9, 0.1, "mnist", 1, Told(HISTORY), {}, statement=bounded)
    assert row(table, "Privacy Claim") == ["each: ε ≤ 2", "δ = 1e-05"]


def test_a_table_can_be_left_out() -> None:
    assert generate_summary_table(0.9, 0.1, "mnist", 1, HISTORY, {"include_table": False}) == ""
