"""Divide a data set among clients: dirichlet, iid, shards, writer."""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np

from fedquilt import validate
from fedquilt.data.dirichlet import dirichlet_split
from fedquilt.data.labels import (
    IndexArray,
    as_labels,
    check_num_clients,
    group_by_owner,
    samples_by_class,
)
from fedquilt.errors import InvalidValueError

SPLITS: Final = ("dirichlet", "iid", "shards", "writer")
"""The kinds of split that `split_clients` knows."""


def split_clients(
    kind: str,
    labels: object,
    num_clients: int | None,
    rng: np.random.Generator,
    *,
    dirichlet_alpha: float = 0.5,
    classes_per_client: int = 2,
    groups: object = None,
) -> list[IndexArray]:
    """Return the sample indices of each client: int64, disjoint, none empty.

    Parameters
    ----------
    kind
        'dirichlet' (see `dirichlet_split`), 'iid', 'shards' (see `shard_split`) or
        'writer' (see `writer_split`).
    labels
        Class of each sample: tensor, array or list of integers >= 0.
    num_clients
        Number of clients, at most the number of samples; None only for 'writer'.
    rng
        The source of all randomness of the split.
    dirichlet_alpha
        Concentration, for 'dirichlet'.
    classes_per_client
        Most classes a client may have, for 'shards'.
    groups
        Who made each sample, for 'writer'.
    """
    validate.choice("split", kind, SPLITS)
    if not isinstance(rng, np.random.Generator):
        raise InvalidValueError(f"rng={rng!r} must be a numpy.random.Generator")
    targets = as_labels(labels)
    if kind == "writer":
        return writer_split(groups, len(targets), num_clients, rng)
    clients = check_num_clients(num_clients, len(targets))
    if kind == "iid":
        return iid_split(len(targets), clients, rng)
    if kind == "shards":
        return shard_split(targets, clients, classes_per_client, rng)
    return dirichlet_split(targets, clients, int(targets.max()) + 1, dirichlet_alpha, rng)


def iid_split(num_samples: int, num_clients: int, rng: np.random.Generator) -> list[IndexArray]:
    """Shuffle all samples and deal them out; sizes differ by at most one."""
    order = rng.permutation(num_samples).astype(np.int64, copy=False)
    return np.array_split(order, num_clients)


def shard_split(
    labels: IndexArray, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> list[IndexArray]:
    """Give each client `classes_per_client` shards, each of one class.

    The split of McMahan et al. 2017 (section 3), where samples sorted by label are cut
    into equal shards and each client draws some of them, except that no shard crosses
    from one class into the next: a client has at most `classes_per_client` classes
    (fewer when it draws two shards of one class).  A class is cut into shards in
    proportion to its size, so shards are nearly equal, and every sample is used.  With
    fewer samples than shards a shard is one sample and some clients have fewer shards.
    """
    per_client = validate.integer("classes_per_client", classes_per_client, at_least=1)
    num_shards = min(num_clients * per_client, len(labels))
    members = samples_by_class(labels, rng)
    if len(members) > num_clients * per_client:
        raise InvalidValueError(
            f"num_clients={num_clients} with classes_per_client={per_client} leave samples "
            f"over: their product must be at least the number of classes, {len(members)}"
        )
    counts = _shards_per_class([len(part) for _, part in members], num_shards)
    # Shard number s goes to the client at place s of a random order, which starts again
    # from the first client when it ends: all have equally many shards, or one less.
    client_of = rng.permutation(num_shards) % num_clients
    owner = np.empty(len(labels), dtype=np.int64)
    start = 0
    for (_, part), count in zip(members, counts, strict=True):
        shard = start + np.arange(len(part)) * count // len(part)
        owner[part] = client_of[shard]
        start += count
    return group_by_owner(owner, num_clients, rng)


def writer_split(
    groups: object, num_samples: int, num_clients: int | None, rng: np.random.Generator
) -> list[IndexArray]:
    """Make each writer one client, in the order of their ids.

    With `num_clients` below the number of writers, that many are drawn at random and the
    samples of the others belong to nobody.
    """
    if groups is None:
        raise InvalidValueError(
            "split='writer' needs a data set that says who made each sample: 'mnist-writers'"
        )
    writer_ids = as_labels(groups, "groups")
    if len(writer_ids) != num_samples or num_samples == 0:
        raise InvalidValueError(f"groups has length {len(writer_ids)}, must be {num_samples}")
    writers, counts = np.unique(writer_ids, return_counts=True)
    order = np.argsort(writer_ids, kind="stable").astype(np.int64, copy=False)
    by_writer = np.split(order, np.cumsum(counts)[:-1])
    if num_clients is None:
        return by_writer
    wanted = validate.integer("num_clients", num_clients, at_least=1)
    if wanted > len(writers):
        raise InvalidValueError(
            f"num_clients={wanted} must be at most the number of writers, {len(writers)}"
        )
    drawn = rng.choice(len(writers), size=wanted, replace=False)
    return [by_writer[i] for i in np.sort(drawn)]


def _shards_per_class(sizes: list[int], num_shards: int) -> list[int]:
    """Divide shards among classes by size: at least one each, no more than samples.

    A first, low estimate cannot exceed the total; what remains goes one by one to the
    class whose shards are largest.
    """
    share = (num_shards - len(sizes)) / sum(sizes)
    counts = [max(1, int(size * share)) for size in sizes]
    largest = [
        (-size / count, k) for k, (size, count) in enumerate(zip(sizes, counts, strict=True))
    ]
    heapq.heapify(largest)
    for _ in range(num_shards - sum(counts)):
        k = largest[0][1]
        counts[k] += 1
        heapq.heapreplace(largest, (-sizes[k] / counts[k], k))
    return counts
