"""Dividing samples among clients, and the helpers of QuAP-FL's interface around it."""

from __future__ import annotations

import heapq
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from fedquilt.common import checks
from fedquilt.common.errors import DataError, InvalidValueError
from fedquilt.common.untrusted import read_json
from fedquilt.config.choices import PARTITIONS
from fedquilt.data.load import load_dataset
from fedquilt.data.samples import (
    ImageDataset,
    IndexArray,
    as_labels,
    check_num_clients,
    group_by_owner,
    samples_by_class,
)
from fedquilt.data.specs import WITH_PEOPLE


def dirichlet_split(
    labels: object,
    num_clients: int,
    num_classes: int,
    alpha: float,
    rng: np.random.Generator | int | None = None,
) -> list[IndexArray]:
    """Divide samples among clients with class mixtures drawn from a Dirichlet distribution.

    Each client i draws a mixture p_i ~ Dirichlet(alpha * 1_K) over the K classes.  The
    n_k samples of class k are shuffled and cut at

        floor(n_k * sum_{j <= i} p_jk / sum_j p_jk),

    so that client i receives the share p_ik / sum_j p_jk of the class.  Every sample has
    one owner and each client's list is in random order.  Sizes are unequal, and a client
    can end with nothing: `fill_empty_clients` then gives it one sample of the largest
    client.

    Parameters
    ----------
    labels
        Class of each sample: tensor, array or list.
    num_clients
        Number of clients, at most the number of samples.
    num_classes
        K; labels are below it.
    alpha
        Concentration, > 0.  Large: all clients alike; small: few classes each.
    rng
        A generator, a seed, or None for fresh randomness.
    """
    targets = as_labels(labels)
    clients = check_num_clients(num_clients, len(targets))
    classes = checks.integer("num_classes", num_classes, at_least=1)
    concentration = checks.number("alpha", alpha, above=0)
    if targets.max() >= classes:
        raise InvalidValueError(f"labels must be < num_classes={classes}, got {targets.max()}")
    generator = _as_generator(rng)
    log_mixtures = log_dirichlet(concentration, (clients, classes), generator)
    owner = np.empty(len(targets), dtype=np.int64)
    for k, members in samples_by_class(targets, generator):
        owner[members] = np.repeat(
            np.arange(clients), _share_sizes(log_mixtures[:, k], len(members))
        )
    return fill_empty_clients(group_by_owner(owner, clients, generator))


def log_dirichlet(
    alpha: float, shape: tuple[int, int], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return the logarithm of rows drawn from Dirichlet(alpha * 1_K), shape [rows, K].

    A row is g / sum(g) with g_k ~ Gamma(alpha).  For small alpha all of g underflows to 0
    and the row becomes NaN, so g is drawn in logarithms: if g' ~ Gamma(alpha + 1) and
    E ~ Exp(1), then g' * exp(-E / alpha) ~ Gamma(alpha) (Marsaglia and Tsang 2000,
    section 6, with U = exp(-E)).
    """
    log_gamma = np.log(rng.standard_gamma(alpha + 1.0, size=shape))
    with np.errstate(over="ignore"):
        log_gamma -= rng.standard_exponential(size=shape) / alpha
    log_gamma = np.maximum(log_gamma, -1e308)  # keeps differences finite at any alpha
    log_gamma -= log_gamma.max(axis=1, keepdims=True)
    return np.asarray(log_gamma - np.log(np.exp(log_gamma).sum(axis=1, keepdims=True)))


def fill_empty_clients(clients: list[IndexArray]) -> list[IndexArray]:
    """Give each empty client, in order, the last sample of the client that is largest then.

    Of equally large clients the first gives.  There must be as many samples as clients.
    """
    filled = list(clients)
    empty = [i for i, samples in enumerate(clients) if len(samples) == 0]
    if not empty:
        return filled
    largest = [(-len(samples), i) for i, samples in enumerate(clients)]
    heapq.heapify(largest)
    for i in empty:
        size, donor = largest[0]
        filled[i], filled[donor] = filled[donor][-1:], filled[donor][:-1]
        heapq.heapreplace(largest, (size + 1, donor))
    return filled


def _as_generator(rng: np.random.Generator | int | None) -> np.random.Generator:
    if isinstance(rng, np.random.Generator):
        return rng
    return np.random.default_rng(None if rng is None else checks.integer("rng", rng, at_least=0))


def _share_sizes(log_shares: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Return how many of `count` samples each client gets for its unnormalised log share."""
    cumulative = np.cumsum(np.exp(log_shares - log_shares.max()))
    # Divided by its own last element it ends at exactly 1, and so does every element
    # after which nothing is left to give: no sample is lost to rounding.
    cuts = np.floor(cumulative / cumulative[-1] * count).astype(np.int64)
    sizes: npt.NDArray[np.int64] = np.diff(cuts, prepend=0)
    return sizes


SPLITS: Final = PARTITIONS
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
        'dirichlet' (see `dirichlet_split`), 'iid', 'shards' (see `shard_split`), 'part'
        (see `part_split`) or 'writer' (see `writer_split`).
    labels
        Class of each sample: tensor, array or list of integers >= 0.
    num_clients
        Number of clients, at most the number of samples; None only for 'writer'.
    rng
        The source of all randomness of the split.
    dirichlet_alpha
        Concentration, for 'dirichlet' and 'part'.
    classes_per_client
        Most classes a client may have, for 'shards' and 'part'.
    groups
        Who made each sample, for 'writer'.
    """
    checks.choice("split", kind, SPLITS)
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
    if kind == "part":
        return part_split(targets, clients, classes_per_client, dirichlet_alpha, rng)
    return dirichlet_split(targets, clients, int(targets.max()) + 1, dirichlet_alpha, rng)


def part_split(
    labels: IndexArray,
    num_clients: int,
    classes_per_client: int,
    alpha: float,
    rng: np.random.Generator,
) -> list[IndexArray]:
    """Give each client a few classes, and divide a class among its owners by Dirichlet(alpha).

    The split that the published FedNum code calls `part`.  Classes are dealt from a
    shuffled pack in which each stands equally often; a client takes the next ones that it
    has not got.  A class that nobody draws goes to one client at random.  Clients that end
    with nothing get one sample (`fill_empty_clients`).
    """
    wanted = checks.integer("classes_per_client", classes_per_client, at_least=1)
    concentration = checks.number("dirichlet_alpha", alpha, above=0)
    members = dict(samples_by_class(labels, rng))
    owners = _deal_classes(list(members), num_clients, min(wanted, len(members)), rng)
    owner = np.empty(len(labels), dtype=np.int64)
    for label, part in members.items():
        shares = log_dirichlet(concentration, (1, len(owners[label])), rng)[0]
        owner[part] = np.repeat(owners[label], _share_sizes(shares, len(part)))
    return fill_empty_clients(group_by_owner(owner, num_clients, rng))


def _deal_classes(
    classes: list[int], num_clients: int, per_client: int, rng: np.random.Generator
) -> dict[int, list[int]]:
    """Return who holds each class: everybody `per_client` of them, every class somebody."""
    copies = -(-num_clients * per_client // len(classes))
    pack = list(rng.permutation(np.repeat(classes, copies)))
    owners: dict[int, list[int]] = {label: [] for label in classes}
    for client in range(num_clients):
        for _ in range(per_client):
            fresh = [at for at, label in enumerate(pack) if client not in owners[label]]
            label = pack.pop(fresh[0]) if fresh else None
            if label is None:
                label = rng.choice([c for c in classes if client not in owners[c]])
            owners[int(label)].append(client)
    for holders in owners.values():
        if not holders:
            holders.append(int(rng.integers(num_clients)))
    return owners


def read_split_file(path: str | os.PathLike[str], num_samples: int) -> list[IndexArray]:
    """Read a split in the JSON form of the published FedNum code.

    `{"client_idx": [[sample, ...], ...], "client_classes": [[class, ...], ...]}`; the classes
    follow from the samples and are not read.  Clients without samples are left out.
    """
    content = read_json(Path(path))
    listed = content.get("client_idx") if isinstance(content, dict) else None
    if not isinstance(listed, list) or not all(isinstance(part, list) for part in listed):
        raise DataError(f"{path} must hold 'client_idx', a list of samples for each client")
    parts = [_sample_numbers(part, num_samples, path) for part in listed if part]
    if not parts:
        raise DataError(f"{path} must give some client a sample; its lists are empty")
    counts = np.bincount(np.concatenate(parts), minlength=num_samples)
    if counts.max() > 1:
        raise DataError(f"{path} gives sample {int(counts.argmax())} twice; one client may hold it")
    return parts


def _sample_numbers(part: list[object], num_samples: int, path: object) -> IndexArray:
    if not all(type(i) is int and 0 <= i < num_samples for i in part):
        wrong = next(i for i in part if type(i) is not int or not 0 <= i < num_samples)
        most = num_samples - 1
        raise DataError(f"{path}: sample {wrong!r} must be a whole number from 0 to {most}")
    return np.array(part, dtype=np.int64)


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
    per_client = checks.integer("classes_per_client", classes_per_client, at_least=1)
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
    """Make each writer, or speaker, one client, in the order of their ids.

    With `num_clients` below the number of writers, that many are drawn at random and the
    samples of the others belong to nobody.
    """
    if groups is None:
        raise InvalidValueError(
            "split='writer' needs a data set that says who made each sample: "
            + ", ".join(map(repr, WITH_PEOPLE))
        )
    writer_ids = as_labels(groups, "groups")
    if len(writer_ids) != num_samples or num_samples == 0:
        raise InvalidValueError(f"groups has length {len(writer_ids)}, must be {num_samples}")
    writers, counts = np.unique(writer_ids, return_counts=True)
    order = np.argsort(writer_ids, kind="stable").astype(np.int64, copy=False)
    by_writer = np.split(order, np.cumsum(counts)[:-1])
    if num_clients is None:
        return by_writer
    wanted = checks.integer("num_clients", num_clients, at_least=1)
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


def prepare_non_iid_data(
    dataset_name: str,
    num_clients: int,
    alpha: float = 0.5,
    data_dir: str | os.PathLike[str] = "./data",
    seed: int | None = None,
) -> tuple[list[IndexArray], ImageDataset, ImageDataset]:
    """Load a data set and divide its training part with `dirichlet_split`.

    Returns
    -------
    client_indices, train_dataset, test_dataset
        Index arrays into the training part, one a client, and the two parts.
    """
    checks.integer("num_clients", num_clients, at_least=1)
    checks.number("alpha", alpha, above=0)
    if seed is not None:
        checks.integer("seed", seed, at_least=0)
    train, test = load_dataset(dataset_name, data_dir)
    rng = np.random.default_rng(seed)
    clients = dirichlet_split(train.targets, num_clients, train.num_classes, alpha, rng)
    return clients, train, test


def create_client_dataloaders(
    dataset: Dataset[Any],
    client_indices: Sequence[Sequence[int] | IndexArray],
    batch_size: int,
    client_id: int,
    *,
    generator: torch.Generator | None = None,
) -> DataLoader[Any]:
    """Return a loader over the samples of one client: shuffled, the last batch kept.

    `generator` orders the samples; None takes a fresh one, so that two loaders differ.
    """
    checks.integer("batch_size", batch_size, at_least=1)
    checks.integer("client_id", client_id, at_least=0, at_most=len(client_indices) - 1)
    size = len(dataset)  # type: ignore[arg-type]  # map-style data sets have a length
    indices = checks.indices(f"client_indices[{client_id}]", client_indices[client_id], size)
    if len(indices) == 0:
        raise InvalidValueError(f"client_id={client_id} must have samples, it has none")
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    return DataLoader(
        Subset(dataset, indices.tolist()),
        batch_size=batch_size,
        shuffle=True,
        drop_last=False,
        generator=generator,
    )


def analyze_data_distribution(
    client_indices: Sequence[Sequence[int] | IndexArray], labels: object, num_classes: int
) -> dict[str, Any]:
    """Return how samples and classes are spread over the clients.

    Returns
    -------
    dict
        `counts` [clients, classes]: samples of each class at each client; `client_sizes`
        and `class_totals`: its row and column sums; `classes_per_client`: how many
        classes each client has; `min_size`, `max_size`, `mean_size`, `std_size`,
        `empty_clients`; `mean_classes_per_client`; `label_skew`: the total variation
        distance between a client's class mixture and that of all clients together,
        averaged over the clients that have samples (0: all alike, near 1: disjoint).
    """
    targets = as_labels(labels)
    classes = checks.integer("num_classes", num_classes, at_least=1)
    if len(targets) and targets.max() >= classes:
        raise InvalidValueError(f"labels must be < num_classes={classes}, got {targets.max()}")
    if len(client_indices) == 0:
        raise InvalidValueError("client_indices must list at least one client")
    counts = np.stack(
        [
            np.bincount(
                targets[checks.indices(f"client_indices[{i}]", indices, len(targets))],
                minlength=classes,
            )
            for i, indices in enumerate(client_indices)
        ]
    )
    sizes = counts.sum(axis=1)
    present = (counts > 0).sum(axis=1)
    return {
        "num_clients": len(counts),
        "num_samples": int(sizes.sum()),
        "counts": counts,
        "client_sizes": sizes,
        "class_totals": counts.sum(axis=0),
        "classes_per_client": present,
        "min_size": int(sizes.min()),
        "max_size": int(sizes.max()),
        "mean_size": float(sizes.mean()),
        "std_size": float(sizes.std()),
        "empty_clients": int((sizes == 0).sum()),
        "mean_classes_per_client": float(present.mean()),
        "label_skew": _label_skew(counts),
    }


def _label_skew(counts: IndexArray) -> float:
    held = counts[counts.sum(axis=1) > 0]
    if len(held) == 0:
        return 0.0
    mixtures = held / held.sum(axis=1, keepdims=True)
    overall = held.sum(axis=0) / held.sum()
    return float(np.abs(mixtures - overall).sum(axis=1).mean() / 2)
