"""HeFlwr's comparison of methods (its README), on the settings of its examples.

MNIST with a LeNet and CIFAR-10 with a ResNet-18, split evenly and by Dirichlet 0.5: 8 clients of
the widths 1/4, 1/2, 3/4 and 1 (MFL: a half each, of 2^k fixed ones in turn), all of them in
every one of 50 rounds, one local epoch of Adam in batches of 64.  The README does not say with what
its table was made; these are the settings of the command beside it.

Full: both data sets, one seed.  Small: the embedded digits in the place of MNIST, in batches of 8,
because a client holds 180 of them and not 7,500.  Nothing is chosen by its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedquilt.config.files import method_defaults
from reproduction.cells import Cell

METHODS = {
    "full": "FedAvg (everybody whole)",
    "dropout": "Federated Dropout",
    "heterofl": "HeteroFL",
    "mfl": "MFL",
    "fedrolex": "FedRolex",
    "fjord": "FjORD",
    "largest_only": "Selective Client",
    "depthfl": "DepthFL",
    "smallest": "FedAvg of the smallest",
}
"""The methods, as the README calls them; the last two are not in it."""
SPLITS = {"iid": "split evenly", "dirichlet": "Dirichlet 0.5"}
PARTS = tuple(SPLITS)
SCALES = ("small", "full")
TIERS = ("1", "3/4", "1/2", "1/4")

README = {
    "full": (99.30, 98.88, 86.14, 82.62),
    "dropout": (26.32, 11.35, 16.14, 14.05),
    "heterofl": (98.44, 91.04, 80.71, 61.66),
    "mfl": (98.41, 92.43, 80.70, 66.81),
    "fedrolex": (97.55, 91.17, 82.18, 67.67),
    "fjord": (98.72, 96.82, 83.89, 40.20),
    "largest_only": (98.67, 97.38, 80.44, 65.43),
}
_COLUMNS = [(dataset, split) for dataset in ("mnist", "cifar10") for split in SPLITS]
TABLE = {
    (*column, method): value
    for method, values in README.items()
    for column, value in zip(_COLUMNS, values, strict=True)
}
"""What the README prints, in percent, by data set, split and method."""

_EXAMPLES: dict[str, Any] = {
    "mode": "fedavg",
    "num_clients": 8,
    "clients_per_round": 8,
    "availability": "always",
    "tiers": ",".join(TIERS),
    "num_rounds": 50,
    "local_epochs": 1,
    "batch_size": 64,
    "optimizer": "adam",
    "learning_rate": 0.001,
    "lr_decay": 1.0,
    "dirichlet_alpha": 0.5,
    "eval_every": 10,
}
_MODELS = {"mnist": "lenet", "cifar10": "resnet18-batchnorm", "digits": "digits"}


@dataclass(frozen=True)
class Scale:
    """Which data set stands for the README's, the seeds, and what is set otherwise."""

    datasets: Mapping[str, str]
    seeds: tuple[int, ...]
    changes: Mapping[str, Any]


SIZES = {
    "small": Scale({"mnist": "digits"}, (0, 1, 2), {"batch_size": 8}),
    "full": Scale({"mnist": "mnist", "cifar10": "cifar10"}, (0,), {}),
}


def settings(scale: str, dataset: str, split: str, method: str) -> dict[str, Any]:
    """Return the settings of a run; what a method itself decides (`method_defaults`) stays so."""
    used = SIZES[scale].datasets[dataset]
    common = {
        **_EXAMPLES,
        **SIZES[scale].changes,
        "dataset": used,
        "partition": split,
        "model": _MODELS[used],
    }
    return {**common, "method": method, **method_defaults(method, common["mode"])}


def rows(scale: str) -> dict[tuple[str, str, str], list[Cell]]:
    """Return the cells by the README's data set, split and method."""
    size = SIZES[scale]
    return {
        (dataset, split, method): [
            Cell(
                f"{split}-{used}-{method}-seed{seed}",
                settings(scale, dataset, split, method),
                seed,
            )
            for seed in size.seeds
        ]
        for dataset, used in size.datasets.items()
        for split in SPLITS
        for method in METHODS
    }


def cells(scale: str, parts: Sequence[str] = PARTS) -> list[Cell]:
    """Return the cells of some splits."""
    return [
        cell for (_, split, _), found in rows(scale).items() if split in parts for cell in found
    ]
