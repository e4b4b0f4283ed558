"""The participation history against the documents' words and a naive recount."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from fedquilt.errors import FedquiltError
from fedquilt.population import ParticipationTracker

rounds_of_ten = st.lists(st.sets(st.integers(0, 9)).map(sorted), max_size=12)


def test_rates_are_counts_over_rounds() -> None:
    tracker = ParticipationTracker(num_clients=4)
    assert tracker.get_participation_rate(0) == 0.0
    tracker.update([0, 1])
    tracker.update([0])
    tracker.update([])
    assert [tracker.get_participation_rate(i) for i in range(4)] == [2 / 3, 1 / 3, 0.0, 0.0]
    rates = tracker.get_all_participation_rates()
    assert rates.dtype == np.float64
    assert rates.tolist() == [2 / 3, 1 / 3, 0.0, 0.0]


def test_the_statistics_are_the_documents_keys_and_the_true_moments() -> None:
    tracker = ParticipationTracker(10)
    for cohort in ([0, 1, 2], [1, 2, 3], [1]):
        tracker.update(cohort)
    rates = np.array([1, 3, 2, 1, 0, 0, 0, 0, 0, 0]) / 3
    assert tracker.get_statistics() == {
        "total_rounds": 3,
        "mean_participation_rate": pytest.approx(7 / 30),
        "std_participation_rate": pytest.approx(np.sqrt(np.mean((rates - 7 / 30) ** 2))),
        "min_participation_rate": 0.0,
        "max_participation_rate": 1.0,
        "participating_clients": 4,
        "never_participated": 6,
    }


def test_the_statistics_before_any_round() -> None:
    statistics = ParticipationTracker(3).get_statistics()
    assert statistics["total_rounds"] == 0
    assert statistics["mean_participation_rate"] == 0.0
    assert statistics["never_participated"] == 3


def test_reset_forgets_everything() -> None:
    for ema in (None, 0.4):
        tracker = ParticipationTracker(3, ema=ema)
        tracker.update([0, 2])
        tracker.reset()
        assert tracker.total_rounds == 0
        assert tracker.get_all_participation_rates().tolist() == [0, 0, 0]
        tracker.update([1])
        assert tracker.get_participation_rate(1) == (1.0 if ema is None else 0.4)


@pytest.mark.parametrize(
    "ids",
    [
        lambda: [1, 3],
        lambda: (1, 3),
        lambda: {1, 3},
        lambda: (i for i in (1, 3)),
        lambda: range(1, 4, 2),
        lambda: np.array([1, 3]),
        lambda: np.array([3, 1], dtype=np.uint8),
        lambda: [np.int64(1), np.uint16(3)],
        lambda: torch.tensor([1, 3]),
        lambda: torch.tensor([1, 3], dtype=torch.int32),
        lambda: [torch.tensor(1), torch.tensor(3)],
    ],
)
def test_ids_come_in_many_forms(ids: Callable[[], Any]) -> None:
    tracker = ParticipationTracker(5)
    tracker.update(ids())
    assert tracker.participation_count.tolist() == [0, 1, 0, 1, 0]
    assert tracker.total_rounds == 1


def test_rates_can_be_asked_with_numpy_and_torch_ids() -> None:
    tracker = ParticipationTracker(3)
    tracker.update([2])
    for client in (2, np.int32(2), np.array(2), torch.tensor(2)):
        assert tracker.get_participation_rate(client) == 1.0


BAD_IDS: list[Any] = [
    [0, 1, 5],
    [0, 1, -1],
    [0, 1, 1],
    [0, 1.0],
    [0, True],
    [0, "1"],
    "01",
    [[0, 1]],
    [[0], [1, 2]],
    [0, None],
    [0, 10**30],
    np.array([0, 5]),
    np.array([0, -1]),
    np.array([1, 1]),
    np.array([0.0, 1.0]),
    np.array([True, False]),
    np.array([[0, 1]]),
    np.array(3),
    torch.tensor([0, 5]),
    torch.tensor([0.0]),
    torch.tensor([2, 2]),
    torch.tensor([True]),
]


@pytest.mark.parametrize("ema", [None, 0.5])
def test_one_bad_id_counts_nobody(ema: float | None) -> None:
    for ids in BAD_IDS:
        tracker = ParticipationTracker(5, ema=ema)
        tracker.update([0, 3])
        before = tracker.state()
        with pytest.raises(ValueError, match=r"client|ids") as caught:
            tracker.update(ids)
        assert isinstance(caught.value, FedquiltError), ids
        after = tracker.state()
        assert all(np.array_equal(before[key], after[key]) for key in before), ids


@pytest.mark.parametrize("client", [-1, 5, 1.0, "1", None, True])
def test_a_bad_id_has_no_rate(client: Any) -> None:
    with pytest.raises(ValueError, match="client_id"):
        ParticipationTracker(5).get_participation_rate(client)


@pytest.mark.parametrize(
    "arguments", [(0,), (-3,), (2.0,), ("5",), (5, 0.0), (5, 1.01), (5, float("nan"))]
)
def test_bad_construction(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        ParticipationTracker(*arguments)


@given(cohorts=rounds_of_ten)
def test_a_recount_gives_the_same_rates(cohorts: list[list[int]]) -> None:
    tracker = ParticipationTracker(10)
    for cohort in cohorts:
        tracker.update(cohort)
    joins = [sum(i in cohort for cohort in cohorts) for i in range(10)]
    expected = np.array(joins) / max(len(cohorts), 1)
    assert np.array_equal(tracker.get_all_participation_rates(), expected)
    statistics = tracker.get_statistics()
    assert statistics["participating_clients"] + statistics["never_participated"] == 10
    if cohorts:
        mean_cohort = sum(map(len, cohorts)) / len(cohorts)
        assert statistics["mean_participation_rate"] == pytest.approx(mean_cohort / 10)


@settings(max_examples=examples(60))
@given(cohorts=rounds_of_ten, eta=st.floats(0.001, 1.0))
def test_the_moving_average_is_equation_3_in_every_round(
    cohorts: list[list[int]], eta: float
) -> None:
    """p_i(t) = eta [i in S_t] + (1 - eta) p_i(t - 1), for all clients, step by step."""
    tracker = ParticipationTracker(10, ema=eta)
    expected = np.zeros(10)
    for cohort in cohorts:
        tracker.update(cohort)
        joined = np.isin(np.arange(10), cohort)
        expected = eta * joined + (1 - eta) * expected
        assert np.allclose(tracker.get_all_participation_rates(), expected, rtol=1e-12, atol=1e-15)
        some = np.array([7, 2])
        assert np.allclose(tracker.rates(some), expected[some], rtol=1e-12, atol=1e-15)
        assert tracker.get_all_participation_rates().max() <= 1.0


def test_a_client_in_every_round_never_exceeds_rate_one() -> None:
    for eta in np.linspace(0.01, 1.0, 40):
        tracker = ParticipationTracker(1, ema=float(eta))
        for _ in range(400):
            tracker.update([0])
        assert 1 - 1e-12 < tracker.get_participation_rate(0) + (1 - eta) ** 400 <= 1 + 1e-12
        assert tracker.get_participation_rate(0) <= 1.0


@pytest.mark.parametrize("ema", [None, 0.3])
def test_a_saved_state_continues_alike(ema: float | None) -> None:
    rng = np.random.default_rng(0)
    cohorts = [np.flatnonzero(rng.random(20) < 0.3) for _ in range(12)]
    whole, first, second = (ParticipationTracker(20, ema=ema) for _ in range(3))
    for cohort in cohorts:
        whole.update(cohort)
    for cohort in cohorts[:5]:
        first.update(cohort)
    saved = first.state()
    first.update([1])  # a state that was handed out does not move on
    second.load_state(saved)
    for cohort in cohorts[5:]:
        second.update(cohort)
    assert second.get_statistics() == whole.get_statistics()
    assert np.array_equal(second.get_all_participation_rates(), whole.get_all_participation_rates())


def test_a_state_of_another_population_is_refused() -> None:
    tracker, other = ParticipationTracker(4), ParticipationTracker(5)
    tracker.update([1])
    with pytest.raises(ValueError, match="4 clients"):
        tracker.load_state(other.state())
    assert tracker.get_participation_rate(1) == 1.0


def test_returned_rates_are_the_callers_own() -> None:
    tracker = ParticipationTracker(2)
    tracker.get_all_participation_rates()[:] = 9
    tracker.update([0])
    tracker.get_all_participation_rates()[:] = 9
    assert tracker.get_all_participation_rates().tolist() == [1, 0]
