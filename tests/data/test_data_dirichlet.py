from __future__ import annotations

import numpy as np
import pytest
from partitions import assert_partition
from scipy import stats

from fedquilt.data import dirichlet_split
from fedquilt.data.split import fill_empty_clients, log_dirichlet
from fedquilt.errors import InvalidValueError


def class_counts(clients, labels, num_classes):
    return np.array([np.bincount(labels[c], minlength=num_classes) for c in clients])


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_mixtures_have_the_marginal_of_a_dirichlet(alpha: float) -> None:
    # One coordinate of Dirichlet(alpha * 1_K) is Beta(alpha, (K - 1) alpha).
    rows = np.exp(log_dirichlet(alpha, (4000, 5), np.random.default_rng(3)))
    np.testing.assert_allclose(rows.sum(axis=1), 1.0, rtol=1e-12)
    for k in (0, 4):
        assert stats.kstest(rows[:, k], stats.beta(alpha, 4 * alpha).cdf).pvalue > 0.01


@pytest.mark.parametrize("alpha", [1e-2, 1e-4, 1e-12, 1e-300, 5e-324])
def test_tiny_alpha_gives_one_class_each_and_no_nan(alpha: float) -> None:
    logs = log_dirichlet(alpha, (3000, 4), np.random.default_rng(5))
    assert np.isfinite(logs).all()
    np.testing.assert_allclose(np.exp(logs).sum(axis=1), 1.0)
    if alpha >= 1e-12:
        winners = np.bincount(logs.argmax(axis=1), minlength=4)
        assert stats.chisquare(winners).pvalue > 0.01


def test_shares_follow_the_definition() -> None:
    rng = np.random.default_rng(11)
    labels = rng.integers(0, 6, 5000)
    clients = dirichlet_split(labels, 7, 6, 0.8, np.random.default_rng(42))
    mixtures = np.exp(log_dirichlet(0.8, (7, 6), np.random.default_rng(42)))
    expected = np.empty((7, 6), dtype=int)
    for k in range(6):
        share = mixtures[:, k] / mixtures[:, k].sum()
        n_k = int((labels == k).sum())
        cuts = [0, *(int(np.floor(c * n_k)) for c in np.cumsum(share)[:-1]), n_k]
        expected[:, k] = np.diff(cuts)
    assert np.array_equal(class_counts(clients, labels, 6), expected)
    assert_partition(clients, 5000)


def test_large_alpha_is_even() -> None:
    labels = np.repeat(np.arange(10), 500)
    counts = class_counts(dirichlet_split(labels, 20, 10, 1e9, 0), labels, 10)
    assert np.abs(counts - 25).max() <= 1


@pytest.mark.parametrize("num_samples", [60_000, 1_500, 1_000])
def test_a_thousand_clients_at_alpha_one_hundredth(num_samples: int) -> None:
    labels = np.random.default_rng(0).integers(0, 10, num_samples)
    clients = dirichlet_split(labels, 1000, 10, 0.01, 1)
    assert len(clients) == 1000
    assert_partition(clients, num_samples)
    # Almost every client holds one class, or one and the crumbs of others.
    top = class_counts(clients, labels, 10).max(axis=1)
    assert np.mean(top / np.array([len(c) for c in clients])) > 0.9


def test_each_list_is_in_random_order_and_classes_are_shuffled() -> None:
    labels = np.repeat(np.arange(2), 1000)
    for client in dirichlet_split(labels, 2, 2, 100.0, 0):
        assert abs(stats.spearmanr(np.arange(len(client)), client).statistic) < 0.1
        # Not a run of consecutive samples of the class.
        assert np.ptp(client[labels[client] == 0]) > 900


def test_the_seed_decides() -> None:
    labels = np.random.default_rng(0).integers(0, 5, 300)
    first, again, other = (dirichlet_split(labels, 9, 5, 0.5, seed) for seed in (7, 7, 8))
    same = dirichlet_split(labels, 9, 5, 0.5, np.random.default_rng(7))
    for a, b, c in zip(first, again, same, strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert_partition(dirichlet_split(labels.tolist(), 9, 5, 0.5), 300)


def test_global_random_state_is_left_alone() -> None:
    state = np.random.get_state()[1].copy()
    dirichlet_split(np.zeros(50, dtype=int), 5, 1, 0.5)
    assert np.array_equal(np.random.get_state()[1], state)


def test_empty_clients_take_from_the_largest() -> None:
    arrays = [np.array(c, dtype=np.int64) for c in ([1, 2, 3], [], [4, 5, 6, 7], [], [])]
    # The third gives 7; then first and third are equal and the first gives 3; then 6.
    filled = fill_empty_clients(arrays)
    assert [c.tolist() for c in filled] == [[1, 2], [7], [4, 5], [3], [6]]
    assert [len(c) for c in arrays] == [3, 0, 4, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 1, 1], 4, 2, 0.5), "num_clients=4 must be at most the number of samples, 3"),
        (([0, 1, 1], 0, 2, 0.5), "num_clients=0 must be >= 1"),
        (([0, 1, 1], 2, 1, 0.5), "labels must be < num_classes=1, got 1"),
        (([0, 1, 1], 2, 2, 0.0), "alpha=0.0 must be > 0"),
        (([0, 1, 1], 2, 2, float("nan")), "alpha=nan"),
        (([0.5, 1], 2, 2, 0.5), "labels must be integer labels"),
        (([0, -2], 2, 2, 0.5), r"labels\[1\]=-2 must be >= 0"),
        (([0, 1, 1], 2, 2, 0.5, -1), "rng=-1 must be >= 0"),
        (([0, 1, 1], 2, 2, 0.5, "x"), "rng='x' must be a whole number"),
    ],
)
def test_bad_arguments(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        dirichlet_split(*arguments)
