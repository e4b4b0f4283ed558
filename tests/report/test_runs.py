"""Seeds in a series, equal promises on a level, differences on the same seeds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import scipy.stats

from fedquilt.common.errors import InvalidValueError
from fedquilt.report.runs import (
    Entry,
    differences,
    entry_of_result,
    group_by_config,
    levels,
    paired,
    spread,
)


def entry(mode: str = "certified", seed: int = 0, final: float = 0.5, **changes: Any) -> Entry:
    settings = {"epsilon": 3.0, "seed": seed, **changes.pop("settings", {})}
    values: dict[str, Any] = {
        "name": f"{mode}-{seed}",
        "mode": mode,
        "dataset": "digits",
        "seed": seed,
        "settings": settings,
        "history": {
            "evaluation_rounds": [1, 2],
            "test_accuracy": [0.1, final],
            "test_loss": [2.0, 1.0],
        },
        "epsilon": 3.0,
        "delta": 1e-5,
        "adjacency": "zero-out",
    }
    return Entry(**{**values, **changes})


def test_a_series_is_one_configuration() -> None:
    runs = [
        entry(seed=1, final=0.6),
        entry(seed=0, final=0.5, settings={"output_dir": "elsewhere"}),
        entry(seed=0, settings={"epsilon": 6.0}, epsilon=6.0),
        entry("fedavg", epsilon=math.inf),
    ]
    series = group_by_config(runs)
    assert [one.label for one in series] == [
        "fedavg",
        "certified, epsilon=3.0",
        "certified, epsilon=6.0",
    ]
    assert series[1].members == [1, 0]
    assert series[1].spread.mean == pytest.approx(0.55)
    rounds, values, _ = series[1].curve()
    assert rounds.tolist() == [1, 2]
    assert values.tolist() == [[0.1, 0.5], [0.1, 0.6]]


def test_levels_hold_equal_promises() -> None:
    runs = [
        entry(epsilon=2.96, settings={"clip_norm": 1}),
        entry(epsilon=3.0, settings={"clip_norm": 2}),
        entry(epsilon=3.0, delta=1e-6, settings={"clip_norm": 3}),
        entry(epsilon=1.0, settings={"clip_norm": 4}),
        entry("fedavg", epsilon=math.inf),
        entry("quap_fl", epsilon=None, delta=None),
    ]
    series = group_by_config(runs)
    found = [(one.heading, [series[i].epsilon for i in one.series]) for one in levels(series)]
    assert found == [
        ("Every client: ε ≤ 1 at δ = 1e-05, zero-out", [1.0]),
        ("Every client: ε ≤ 3 at δ = 1e-05, zero-out", [2.96, 3.0]),
        ("Every client: ε ≤ 3 at δ = 1e-06, zero-out", [3.0]),
        ("No guarantee (ε = ∞)", [math.inf]),
        ("Not finished", [None]),
    ]


def test_the_worst_seed_speaks_for_all() -> None:
    (series,) = group_by_config([entry(epsilon=2.0), entry(seed=1, epsilon=2.9)])
    assert series.claim == "ε ≤ 2.9 for every client, δ = 1e-05, zero-out"


def test_the_interval_of_two_and_three_values_in_closed_form() -> None:
    """Student's quantile is tan(π(p - 1/2)) for 1 degree of freedom, algebraic for 2."""
    two = spread([0.4, 0.6])
    assert two.mean is not None
    assert two.high == pytest.approx(0.5 + math.tan(math.pi * 0.475) * 0.1)
    three = spread([0.5, 0.7, 0.9])
    quantile = 0.95 * math.sqrt(2 / (1 - 0.95**2))
    assert three.high == pytest.approx(0.7 + quantile * 0.2 / math.sqrt(3))


def test_spread_agrees_with_scipy() -> None:
    values = [0.91, 0.88, 0.93, 0.9]
    found = spread(values)
    expected = scipy.stats.t.interval(0.95, 3, loc=found.mean, scale=scipy.stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)
    assert spread([None, math.nan]).mean is None
    assert spread([0.5]).low is None


def test_pairs_are_taken_seed_by_seed() -> None:
    first, second = {0: 0.9, 1: 0.8, 2: 0.85, 7: 0.1}, {0: 0.8, 1: 0.75, 2: 0.7, 3: 0.0}
    found = paired(first, second)
    assert found.seeds == (0, 1, 2)
    expected = scipy.stats.ttest_rel([0.9, 0.8, 0.85], [0.8, 0.75, 0.7])
    assert found.p == pytest.approx(expected.pvalue)
    assert found.spread.mean == pytest.approx(0.1)


def test_differences_need_two_shared_seeds() -> None:
    runs = [entry(seed=s, final=0.5 + s / 10) for s in range(2)]
    runs += [entry("fedavg", s, 0.7, epsilon=math.inf) for s in range(2)]
    series = group_by_config([*runs, entry("quap_fl", 0)])
    assert [(a, b) for a, b, _ in differences(series)] == [(0, 2)]


def test_what_is_no_result_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="'odd' must hold a result"):
        entry_of_result({"mode": "certified"}, "odd")


def test_a_series_is_judged_by_its_headline_metric() -> None:
    history = {"evaluation_rounds": [1, 2], "test_mse": [4.0, 2.5], "test_loss": [4.0, 2.5]}
    (series,) = group_by_config([entry(seed=s, history=history) for s in (0, 1)])
    assert (series.metric, series.metric_name) == ("test_mse", "MSE")
    assert series.spread.mean == 2.5
    assert series.curve()[1].tolist() == [[4.0, 2.5], [4.0, 2.5]]
    (alone,) = group_by_config([entry(history={"evaluation_rounds": [1], "test_loss": [3.0]})])
    assert (alone.metric, alone.spread.mean) == ("test_loss", 3.0)
    mixed = group_by_config([entry("fedavg", history=history), entry()])
    assert differences(mixed) == []
