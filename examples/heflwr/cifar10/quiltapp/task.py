"""CIFAR-10 with a ResNet-18, as in HeFlwr's examples."""

import functools

import numpy as np
import torch
from torch import nn

from fedquilt.data import ImageDataset, load_dataset, split_clients
from fedquilt.models.convolutional import ResNet18

DATASET = "cifar10"


def make_model() -> nn.Module:
    """Return a ResNet-18 with GroupNorm in the place of BatchNorm without memory."""
    return ResNet18()


def client_data(context) -> ImageDataset | tuple[np.ndarray, np.ndarray]:
    """Return this node's own samples: of its file, or its share of the public data set."""
    path = context.node_config.get("data")
    if path:
        with np.load(str(path), allow_pickle=False) as held:
            return held["x"], held["y"]
    place, count = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    train, _ = _data()
    # Label skew as in HeFlwr: Dirichlet with alpha 0.5, the same deal on every node.
    deal = split_clients(
        "dirichlet", train.targets.numpy(), count, np.random.default_rng(0), dirichlet_alpha=0.5
    )
    held = torch.from_numpy(deal[place])
    return ImageDataset(train.images[held], train.targets[held], DATASET, train.num_classes)


def test_data() -> ImageDataset:
    """Return what the server evaluates on."""
    return _data()[1]


@functools.cache
def _data() -> tuple[ImageDataset, ImageDataset]:
    return load_dataset(DATASET)
