"""Data for `client_data`: a node's own file, or, to try an app, a share of a public data set."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray

from fedquilt.data import ImageDataset, load_dataset, split_clients


def own_file(context: Context) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return (x, y) of the .npz file that a node was told of, None where it was told of none.

    A node is told when it is started: `--node-config 'data="/srv/data.npz"'`.
    """
    path = context.node_config.get("data")
    if not path:
        return None
    with np.load(str(path), allow_pickle=False) as held:
        return held["x"], held["y"]


def share_of(dataset: str, context: Context, *, dirichlet_alpha: float = 0.5) -> ImageDataset:
    """Return a node's share of a public data set, dealt by label with Dirichlet's law.

    Every node makes the same deal and takes its part, `partition-id` of `num-partitions`: each
    has the whole set on its disk, so this is for trying out, not for data of one's own.
    """
    place, count = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    train, _ = public_data(dataset)
    rng = np.random.default_rng(0)
    labels = train.targets.numpy()
    deal = split_clients("dirichlet", labels, count, rng, dirichlet_alpha=dirichlet_alpha)
    held = torch.from_numpy(deal[place])
    return ImageDataset(train.images[held], train.targets[held], dataset, train.num_classes)


@functools.cache
def public_data(dataset: str) -> tuple[ImageDataset, ImageDataset]:
    """Return the training and the test samples of a public data set, read once a process."""
    return load_dataset(dataset)
