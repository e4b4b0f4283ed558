"""Seeds in a series, equal promises on a level, differences on the same seeds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import scipy.stats

from fedquilt.common.errors import InvalidValueError
from fedquilt.config import build_config
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


def test_releases_of_windows_stand_at_their_last_rounds() -> None:
    windows = {"rounds_per_release": 3, "num_rounds": 5}
    (one,) = group_by_config([entry(settings=windows)])
    assert one.curve()[0].tolist() == [3, 5]


def test_a_choice_that_is_the_default_goes_without_saying() -> None:
    runs = [entry(settings={"policy": policy}) for policy in ("worst_case", "adaptive")]
    labels = [one.label for one in group_by_config(runs)]
    assert labels == ["certified, policy=worst_case", "certified"]


def test_what_follows_from_the_recipe_is_not_named_beside_rows_without_it() -> None:
    arms = [{"mode": "certified"}, {"mode": "certified", "policy": "worst_case"}]
    rows = [build_config(arm, arms=arms).as_dict() for arm in arms]
    rows.append({**rows[1], "clip_norm": 0.5})
    runs = [entry(settings=settings) for settings in rows]
    texts = [
        entry(settings={k: "-" if v is None else str(v) for k, v in settings.items()})
        for settings in rows
    ]
    for known in (runs, texts):  # pages have texts
        assert [one.label for one in group_by_config(known[:2])] == [
            "certified, recipe",
            "certified, policy=worst_case",
        ]
        assert group_by_config(known[:2])[0].looks_as == "certified"
    assert [one.label for one in group_by_config(runs)] == [
        "certified, recipe",
        "certified, clip_norm=0.2, policy=worst_case",
        "certified, clip_norm=0.5, policy=worst_case",
    ]


def test_levels_hold_equal_promises() -> None:
    runs = [
        entry(epsilon=2.96, settings={"clip_norm": 1}),
        entry(epsilon=3.0, settings={"clip_norm": 2}),
        entry(epsilon=3.0, delta=1e-6, settings={"clip_norm": 3}),
        entry(epsilon=0.97, settings={"clip_norm": 4, "epsilon": 1.0}),
        entry(epsilon=0.5, final=0.4, settings={"clip_norm": 5, "epsilon": 1.0}),
        entry("fedavg", epsilon=math.inf),
        entry("quap_fl", epsilon=None, delta=None),
    ]
    series = group_by_config(runs)
    found = [(one.heading, [series[i].epsilon for i in one.series]) for one in levels(series)]
    assert found == [
        ("Every client: ε ≤ 1 at δ = 1e-05, zero-out", [0.97, 0.5]),
        ("Every client: ε ≤ 3 at δ = 1e-06, zero-out", [3.0]),
        ("Every client: ε ≤ 3 at δ = 1e-05, zero-out", [2.96, 3.0]),
        ("No guarantee (ε = ∞)", [math.inf]),
        ("Not finished", [None]),
    ]


def test_the_documents_epsilon_is_no_promise() -> None:
    """fixed_dp at 54 claims 5.88 by exact accounting: nobody promised 54."""
    runs = [entry(epsilon=6.0, settings={"epsilon": 6.0})]
    runs += [
        entry("fixed_dp", epsilon=reached, settings={"epsilon": e})
        for e, reached in ((6.0, 0.504), (54.0, 5.88))
    ]
    series = group_by_config(runs)
    found = [one.heading.split(" at ")[0] for one in levels(series)]
    assert found == ["Every client: ε ≤ 0.504", "Every client: ε ≤ 5.88", "Every client: ε ≤ 6"]


def test_the_worst_seed_speaks_for_all() -> None:
    (series,) = group_by_config([entry(epsilon=2.0), entry(seed=1, epsilon=2.9)])
    assert series.claim == "ε ≤ 2.9 for every client, δ = 1e-05, zero-out"


def test_the_interval_of_three_values_in_closed_form() -> None:
    """Student's quantile is algebraic for 2 degrees of freedom; two values have no interval."""
    three = spread([0.5, 0.7, 0.9])
    quantile = 0.95 * math.sqrt(2 / (1 - 0.95**2))
    assert three.high == pytest.approx(0.7 + quantile * 0.2 / math.sqrt(3))
    assert three.low == pytest.approx(0.7 - quantile * 0.2 / math.sqrt(3))
    two = spread([0.4, 0.6])
    assert (two.mean, two.low, two.high) == (0.5, None, None)
    assert two.sd == pytest.approx(math.sqrt(0.02))


def test_an_interval_of_accuracies_stays_between_0_and_1() -> None:
    (series,) = group_by_config([entry(seed=s, final=a) for s, a in enumerate((0.1, 0.5, 0.99))])
    assert (series.spread.low, series.spread.high) == (0.0, 1.0)
    losses = [{"evaluation_rounds": [1], "test_mse": [value]} for value in (0.1, 1.0, 4.0)]
    (series,) = group_by_config([entry(seed=s, history=h) for s, h in enumerate(losses)])
    assert series.spread.low is not None
    assert series.spread.low < 0


def test_a_seed_that_ran_twice_is_no_second_repetition() -> None:
    runs = [entry(seed=s, final=f) for s, f in ((0, 0.5), (1, 0.6), (0, 0.9))]
    first, again = group_by_config(runs)
    assert (first.label, first.members) == ("certified [1]", [0, 1])
    assert (again.label, again.members) == ("certified [2]", [2])
    assert first.spread.mean == pytest.approx(0.55)


def test_own_parts_that_differ_are_no_repetitions() -> None:
    """Two own aggregation rules, or a linear model beside a deep one, are called custom alike."""
    runs = [entry(seed=s, parts=digest) for digest in ("a", "b") for s in (0, 1, 2)]
    assert [one.members for one in group_by_config(runs)] == [[0, 1, 2], [3, 4, 5]]
    running = entry(seed=7, epsilon=None)
    assert [one.members for one in group_by_config([running, *runs[:3]])] == [[1, 2, 3, 0]]


def test_what_own_parts_hold_tells_them_apart_in_any_order() -> None:
    """Two rules of one source that differ in a constant; `held` is the owner's digest of it."""
    order = [("a", 0), ("b", 1), ("a", 2), ("b", 0), ("a", 1), ("b", 2)]
    runs = [entry(seed=s, parts="same", held=held, final=0.9) for held, s in order]
    assert [one.members for one in group_by_config(runs)] == [[0, 4, 2], [3, 1, 5]]


def test_what_cannot_be_told_apart_is_not_averaged() -> None:
    own = {"model": "custom"}
    order = [(0, 0.5), (1, 0.9), (0, 0.9), (1, 0.5)]  # two rules: nobody knows whose 0.9 is
    runs = [entry(seed=s, final=f, settings=own) for s, f in order]
    assert [one.members for one in group_by_config(runs)] == [[0], [1], [2], [3]]
    data = ["x", "y", "y", "x"]
    runs = [
        entry(seed=s, final=f, settings=own, data=d) for (s, f), d in zip(order, data, strict=True)
    ]
    assert [one.members for one in group_by_config(runs)] == [[0, 3], [2, 1]]
    again = [entry(seed=s, settings=own, data="x") for s in (0, 1, 0)]
    assert [one.members for one in group_by_config(again)] == [[0, 1], [2]]


def test_a_run_that_may_continue_another_is_not_averaged_with_it() -> None:
    own = {"model": "custom"}
    runs = [entry(seed=s, settings=own, population="people") for s in (0, 1)]
    assert len(group_by_config(runs)) == 2
    apart = [entry(seed=s, settings=own, population=f"people {s}") for s in (0, 1)]
    assert len(group_by_config(apart)) == 1
    named = [entry(seed=s, settings={"model": "mlp"}, population="people") for s in (0, 1)]
    assert len(group_by_config(named)) == 1


def test_a_model_and_what_goes_on_with_it_are_not_averaged() -> None:
    """Three seeds, each begun with the model of the one before it; two go on from the first."""
    own = {"model": "custom"}
    links = [("b", "c"), ("a", "b"), ("c", "d")]
    runs = [
        entry(seed=s, settings=own, begins=begins, ends=ends)
        for s, (begins, ends) in enumerate(links)
    ]
    assert [one.members for one in group_by_config(runs)] == [[0], [1], [2]]
    beside = [entry(seed=s, settings=own, begins="b", ends=str(s)) for s in (3, 4)]
    found = [one.members for one in group_by_config([runs[1], *beside])]
    assert found == [[0], [1, 2]]
    fresh = [entry(seed=s, settings=own, begins=f"x{s}", ends=f"y{s}") for s in (0, 1, 2)]
    assert [one.members for one in group_by_config(fresh)] == [[0, 1, 2]]


def test_a_run_that_goes_on_is_not_in_the_mean() -> None:
    (series,) = group_by_config([entry(seed=0), entry(seed=1, final=0.2, epsilon=None)])
    assert (series.spread.count, series.spread.mean) == (1, 0.5)


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
