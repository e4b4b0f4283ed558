"""Groups: every sample once, sizes as equal as can be, none too small to be sent."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedquilt.condense.statistics
from examples import examples
from fedquilt.condense.statistics import Groups, group_counts, make_groups
from fedquilt.errors import InvalidValueError

LABELS = st.lists(st.sampled_from([0, 3, 4, 17, 1000]), max_size=120).map(
    lambda values: np.array(values, dtype=np.int64)
)
SEEDS = st.integers(0, 2**32 - 1)


def grouped(labels, avg_num: int, min_group: int, seed: int = 0, max_samples: int = 0) -> Groups:
    return make_groups(labels, avg_num, min_group, np.random.default_rng(seed), max_samples)


def cut(groups: Groups) -> list[list[int]]:
    """Return the samples of each group, read off `order` and `counts`."""
    parts, start = [], 0
    for count in groups.counts.tolist():
        parts.append(groups.order[start : start + count].tolist())
        start += count
    assert start == len(groups.order)
    return parts


@given(labels=LABELS, avg_num=st.integers(1, 40), min_group=st.integers(1, 40), seed=SEEDS)
@settings(max_examples=examples(50))
def test_every_sample_of_a_sent_class_is_in_exactly_one_group(
    labels, avg_num: int, min_group: int, seed: int
) -> None:
    groups = grouped(labels, avg_num, min_group, seed)
    parts = cut(groups)
    sizes = {label: int((labels == label).sum()) for label in labels.tolist()}
    sent = sorted(label for label, size in sizes.items() if size >= min_group)
    assert sorted(set(groups.classes.tolist())) == sent
    assert groups.classes.tolist() == sorted(groups.classes.tolist())
    for label in sent:
        own = [part for part, c in zip(parts, groups.classes.tolist(), strict=True) if c == label]
        assert sorted(s for part in own for s in part) == np.flatnonzero(labels == label).tolist()
        assert len(own) == max(1, sizes[label] // avg_num)
        lengths = [len(part) for part in own]
        assert max(lengths) - min(lengths) <= 1
        assert min(lengths) >= min(avg_num, sizes[label])
    assert [i for i, part in enumerate(parts) for _ in part] == groups.members.tolist()


@given(labels=LABELS, avg_num=st.integers(1, 40), seed=SEEDS)
@settings(max_examples=examples(50))
def test_min_group_of_one_sends_every_sample(labels, avg_num: int, seed: int) -> None:
    groups = grouped(labels, avg_num, 1, seed)
    assert sorted(groups.order.tolist()) == list(range(len(labels)))


@given(
    labels=LABELS,
    avg_num=st.integers(1, 20),
    min_group=st.integers(1, 20),
    extra=st.integers(0, 30),
    seed=SEEDS,
)
@settings(max_examples=examples(50))
def test_max_samples_takes_so_many_of_each_class(
    labels, avg_num: int, min_group: int, extra: int, seed: int
) -> None:
    most = min(avg_num, min_group) + extra
    groups = grouped(labels, avg_num, min_group, seed, most)
    assert len(set(groups.order.tolist())) == len(groups.order)
    assert (labels[groups.order] == groups.classes[groups.members]).all()
    for label in np.unique(labels).tolist():
        held = int((labels == label).sum())
        taken = int(groups.counts[groups.classes == label].sum())
        assert taken == (min(held, most) if held >= min_group else 0)
    assert groups.counts.min(initial=10**9) >= min(avg_num, min_group)


@pytest.mark.parametrize(("avg_num", "min_group", "most"), [(32, 8, 7), (4, 8, 3), (32, 32, 1)])
def test_max_samples_cannot_undo_the_smallest_group(
    avg_num: int, min_group: int, most: int
) -> None:
    """Otherwise max_samples=1 would send single samples whatever min_group says."""
    labels = np.zeros(100, dtype=np.int64)
    with pytest.raises(InvalidValueError, match=f"max_samples={most} must be 0"):
        grouped(labels, avg_num, min_group, 0, most)


def test_equal_generators_give_equal_groups_and_others_do_not() -> None:
    labels = np.repeat([2, 5], 60)
    first, again, other = (grouped(labels, 10, 1, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.order, again.order)
    assert not np.array_equal(first.order, other.order)
    together = {frozenset(part) for part in cut(first)} & {frozenset(part) for part in cut(other)}
    assert not together


def test_groups_are_shuffled_evenly() -> None:
    """Over many draws the first sample sits in each of four groups a quarter of the time."""
    labels = np.zeros(40, dtype=np.int64)
    source = np.random.default_rng(0)
    places = np.zeros(4)
    for _ in range(400):
        groups = make_groups(labels, 10, 1, source)
        places[groups.members[groups.order == 0]] += 1
    # Standard deviation of each is sqrt(400 * 3/16) < 9.
    assert np.abs(places - 100).max() < 45


@pytest.mark.parametrize(
    ("samples", "avg_num", "expected"),
    [
        (1, 32, [1]),
        (31, 32, [31]),
        (32, 32, [32]),
        (63, 32, [63]),
        (64, 32, [32, 32]),
        (95, 32, [48, 47]),
        (100, 32, [34, 33, 33]),
        (7, 1, [1] * 7),
    ],
)
def test_sizes_by_hand(samples: int, avg_num: int, expected: list[int]) -> None:
    assert group_counts(samples, avg_num).tolist() == expected


def test_empty_client_sends_nothing() -> None:
    groups = grouped(np.zeros(0, dtype=np.int64), 32, 1)
    for part in (groups.order, groups.counts, groups.classes, groups.members):
        assert part.shape == (0,)
        assert part.dtype == np.int64


def test_client_with_small_classes_only_sends_nothing() -> None:
    assert len(grouped(np.arange(50), 32, 2).counts) == 0


def test_sparse_classes_of_a_hundred() -> None:
    """500 samples over 100 classes, skewed: what is too small stays, the rest leaves whole."""
    labels = np.random.default_rng(0).choice(
        100, 500, p=np.random.default_rng(1).dirichlet([0.1] * 100)
    )
    sizes = np.bincount(labels, minlength=100)
    assert (sizes == 0).sum() > 20
    assert ((sizes > 0) & (sizes < 8)).sum() > 5
    groups = grouped(labels, 32, 8)
    assert np.unique(groups.classes).tolist() == np.flatnonzero(sizes >= 8).tolist()
    assert len(groups.order) == sizes[sizes >= 8].sum()
    assert groups.counts.min() >= 8


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 1, 0), "avg_num"), ((1, 0, 0), "min_group"), ((1, 1, -1), "max_samples")],
)
def test_wrong_sizes_are_refused(arguments: tuple[int, int, int], name: str) -> None:
    avg_num, min_group, most = arguments
    with pytest.raises(InvalidValueError, match=name):
        grouped(np.zeros(3, dtype=np.int64), avg_num, min_group, 0, most)


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(fedquilt.condense.statistics).failed == 0
