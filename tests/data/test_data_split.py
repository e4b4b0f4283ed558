from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from partitions import assert_partition

from examples import examples
from fedquilt.data import split_clients
from fedquilt.data.split import SPLITS
from fedquilt.errors import InvalidValueError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@settings(max_examples=examples(60))
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=80),
    fraction=st.floats(0, 1),
    per_client=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_every_split_is_a_partition_without_empty_clients(
    labels: list[int], fraction: float, per_client: int, seed: int
) -> None:
    num_clients = 1 + int(fraction * (len(labels) - 1))
    for kind in ("dirichlet", "iid", "shards"):
        if kind == "shards" and num_clients * per_client < len(set(labels)):
            continue
        clients = split_clients(
            kind,
            labels,
            num_clients,
            rng(seed),
            dirichlet_alpha=0.05,
            classes_per_client=per_client,
        )
        assert len(clients) == num_clients
        assert_partition(clients, len(labels))
        if kind == "shards":
            assert max(len({labels[i] for i in c}) for c in clients) <= per_client


def test_iid_sizes_differ_by_at_most_one_and_classes_are_even() -> None:
    labels = np.repeat(np.arange(4), 2500)
    clients = split_clients("iid", labels, 7, rng())
    assert {len(c) for c in clients} == {1428, 1429}
    counts = np.array([np.bincount(labels[c]) for c in clients])
    assert np.abs(counts - 10_000 / 28).max() < 5 * np.sqrt(10_000 / 28)


@pytest.mark.parametrize("per_client", [1, 2, 3])
def test_shards_of_even_classes_are_equal(per_client: int) -> None:
    labels = rng(1).permutation(np.repeat(np.arange(10), 600))
    clients = split_clients("shards", labels, 100, rng(), classes_per_client=per_client)
    assert_partition(clients, 6000)
    assert {len(c) for c in clients} == {60}
    classes = [len(np.unique(labels[c])) for c in clients]
    assert max(classes) == per_client
    # Two shards meet in one class with probability near 1/10.
    assert np.mean(classes) > 0.85 * per_client


def test_shards_of_uneven_classes_stay_inside_their_class() -> None:
    sizes = [1, 7, 50, 1000, 3]
    labels = np.repeat(np.arange(5), sizes)
    clients = split_clients("shards", labels, 30, rng(), classes_per_client=2)
    assert_partition(clients, 1061)
    assert max(len(np.unique(labels[c])) for c in clients) <= 2
    # 60 shards of 1,061 samples: none needs to be larger than 20.
    assert max(len(c) for c in clients) <= 40


def test_shards_with_fewer_samples_than_shards() -> None:
    labels = np.array([0, 0, 1, 1, 2])
    clients = split_clients("shards", labels, 4, rng(), classes_per_client=3)
    assert sorted(len(c) for c in clients) == [1, 1, 1, 2]


def test_shards_that_cannot_hold_every_class() -> None:
    with pytest.raises(InvalidValueError, match="at least the number of classes, 10"):
        split_clients("shards", np.arange(10), 3, rng(), classes_per_client=3)
    with pytest.raises(InvalidValueError, match="classes_per_client=0 must be >= 1"):
        split_clients("shards", np.arange(10), 3, rng(), classes_per_client=0)


GROUPS = np.array([30, 10, 30, 20, 10, 30])


@pytest.mark.parametrize("num_clients", [None, 3])
def test_every_writer_is_a_client(num_clients: int | None) -> None:
    clients = split_clients("writer", np.zeros(6, dtype=int), num_clients, rng(), groups=GROUPS)
    assert [c.tolist() for c in clients] == [[1, 4], [3], [0, 2, 5]]
    assert all(c.dtype == np.int64 for c in clients)


def test_some_writers_are_drawn() -> None:
    drawn = set()
    for seed in range(30):
        clients = split_clients("writer", np.zeros(6, dtype=int), 2, rng(seed), groups=GROUPS)
        assert len(clients) == 2
        drawn.add(tuple(int(GROUPS[c[0]]) for c in clients))
        assert all(len(np.unique(GROUPS[c])) == 1 for c in clients)
    assert drawn == {(10, 20), (10, 30), (20, 30)}


@pytest.mark.parametrize(
    ("num_clients", "groups", "message"),
    [
        (4, GROUPS, "num_clients=4 must be at most the number of writers, 3"),
        (0, GROUPS, "num_clients=0"),
        (2, None, "needs a data set that says who made each sample: 'mnist-writers'"),
        (2, GROUPS[:4], "groups has length 4, must be 6"),
    ],
)
def test_writer_splits_that_cannot_be(num_clients: int, groups: object, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        split_clients("writer", np.zeros(6, dtype=int), num_clients, rng(), groups=groups)


@pytest.mark.parametrize("kind", SPLITS)
def test_bad_arguments_of_every_kind(kind: str) -> None:
    with pytest.raises(InvalidValueError, match="num_clients=3 must be at most"):
        split_clients(kind, [0, 1], 3, rng(), groups=[5, 6])
    with pytest.raises(InvalidValueError, match="labels must be integer labels"):
        split_clients(kind, [0.0, 1.0], 1, rng(), groups=[5, 6])
    with pytest.raises(InvalidValueError, match="rng=0 must be a numpy"):
        split_clients(kind, [0, 1], 1, 0, groups=[5, 6])  # type: ignore[arg-type]
    if kind != "writer":
        with pytest.raises(InvalidValueError, match="num_clients=None must be a whole number"):
            split_clients(kind, [0, 1], None, rng())


def test_unknown_kind() -> None:
    with pytest.raises(InvalidValueError, match=r"split='shard' .*did you mean 'shards'"):
        split_clients("shard", [0], 1, rng())


@pytest.mark.parametrize("kind", ["dirichlet", "iid", "shards"])
def test_a_split_depends_on_the_generator_only(kind: str) -> None:
    labels = torch.arange(200) % 5
    first, again, other = (split_clients(kind, labels, 10, rng(s)) for s in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("kind", ["dirichlet", "iid", "shards"])
def test_a_million_samples(kind: str) -> None:
    labels = rng().integers(0, 100, 1_000_000)
    start = time.process_time()
    clients = split_clients(kind, labels, 1000, rng(), dirichlet_alpha=0.1)
    assert time.process_time() - start < 5
    assert sum(len(c) for c in clients) == 1_000_000
