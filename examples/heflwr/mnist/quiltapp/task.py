"""MNIST with LeNet, as in HeFlwr's examples."""

import functools

import numpy as np
import torch
from torch import nn

from fedquilt.data import ImageDataset, load_dataset, split_clients

DATASET = "mnist"


class LeNet(nn.Sequential):
    """LeNet (LeCun et al. 1998) with HeFlwr's widths 8, 16, 120, 84, for 28 x 28 images."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )


def make_model() -> nn.Module:
    """Return HeFlwr's LeNet."""
    return LeNet()


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
