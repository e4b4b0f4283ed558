"""The data helpers of QuAP-FL's interface: prepare, load one client, describe the split."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.data.dataset import ImageDataset, IndexArray, as_labels
from fedquilt.data.load import load_dataset
from fedquilt.data.split import dirichlet_split


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
