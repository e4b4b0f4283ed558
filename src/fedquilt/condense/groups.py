"""How a client's samples are put into groups, whose means are all it sends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedquilt import validate
from fedquilt.errors import InvalidValueError


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of samples of one class each.

    Attributes
    ----------
    order : int64 [M]
        Sample numbers, group after group; samples of classes that are not sent are
        left out.
    counts : int64 [G]
        Samples in each group.
    classes : int64 [G]
        Class of each group, ascending.
    """

    order: NDArray[np.int64]
    counts: NDArray[np.int64]
    classes: NDArray[np.int64]

    @property
    def members(self) -> NDArray[np.int64]:
        """Return the group of each sample of `order`."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def group_counts(samples: int, avg_num: int) -> NDArray[np.int64]:
    """Return the sizes of the groups of a class: max(1, n // avg_num), as equal as can be.

    The remainder goes into the groups instead of into a small one of its own, so that
    no group is smaller than avg_num unless the whole class is.

    >>> group_counts(100, 32), group_counts(5, 32)
    (array([34, 33, 33]), array([5]))
    """
    number = max(1, samples // avg_num)
    small, larger = divmod(samples, number)
    return np.array([small + 1] * larger + [small] * (number - larger), dtype=np.int64)


def make_groups(
    labels: NDArray[np.int64],
    avg_num: int,
    min_group: int,
    source: np.random.Generator,
    max_samples: int = 0,
) -> Groups:
    """Shuffle the samples of each class and cut them into groups.

    A class with fewer than `min_group` samples gives none: a mean over few samples is
    close to a sample.  Shuffling before grouping makes the groups of two rounds
    different cuts through the same class.  With `max_samples`, only so many of a class
    are taken, others in every round.

    So no group has fewer than min(avg_num, min_group) samples.
    """
    validate.integer("avg_num", avg_num, at_least=1)
    validate.integer("min_group", min_group, at_least=1)
    validate.integer("max_samples", max_samples, at_least=0)
    if 0 < max_samples < min(avg_num, min_group):
        raise InvalidValueError(
            f"max_samples={max_samples} must be 0 (all) or at least {min(avg_num, min_group)}, "
            f"the smaller of avg_num={avg_num} and min_group={min_group}"
        )
    orders, counts, classes = [], [], []
    for label in np.unique(labels):
        samples = np.flatnonzero(labels == label)
        if len(samples) < min_group:
            continue
        samples = source.permutation(samples)[: max_samples or None]
        sizes = group_counts(len(samples), avg_num)
        orders.append(samples)
        counts.append(sizes)
        classes.append(np.full(len(sizes), label))
    nothing = [np.zeros(0, dtype=np.int64)]
    return Groups(
        *(np.concatenate(parts or nothing).astype(np.int64) for parts in (orders, counts, classes))
    )
