"""FedNum against FedDM, DM, a coreset and FedAvg at equal bytes.

| part | what it is |
|---|---|
| default | `fedquilt condense --mode fednum` with its defaults, beside what it is compared with |
| document | the settings of the code published with the FedNum document (`fednum-document`) |
| colour | what the defaults for colour reach on CIFAR-10, with 10 and 50 images of a class |

10 images of a class.  Full: MNIST and CIFAR-10, 50 clients, Dirichlet 0.1, a ConvNet of width 128;
CIFAR-10 as in docs/condense.md.  Small: the embedded digits, 10 clients, because there are 1,437 of
them, width 32, and one seed; half of the default's matching steps, of the document's a tenth, and
a fifth of its training.
FedDM and FedAvg get as many rounds as the default's bytes pay for, at least one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedquilt.config.condense import CONDENSE_PRESETS
from reproduction.cells import Cell

PARTS = {
    "default": "FedNum, defaults here",
    "document": "FedNum, published settings",
    "colour": "FedNum, more models",
}
SCALES = ("small", "full")
BASELINES = {
    "coreset": "random real images",
    "dm": "DM, pooled data",
    "feddm": "FedDM",
    "fedavg": "FedAvg",
}
"""What stands beside the default."""

PUBLISHED = {("cifar10", "coreset"): "26.0", ("cifar10", "dm"): "48.9 ± 0.6"}
"""What is published for 10 images of a class, in percent (Zhao and Bilen 2023)."""


@dataclass(frozen=True)
class Scale:
    """The data sets with what is set for each, the seeds, and what the document's part changes."""

    datasets: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...]
    document: Mapping[str, Any]


_FULL: dict[str, Any] = {"num_clients": 50, "dirichlet_alpha": 0.1, "ipc": 10, "model": "convnet"}
_CIFAR10: dict[str, Any] = {
    "num_rounds": 6,
    "model_n": 15,
    "dc_iterations": 500,
    "max_samples": 100,
    "model_epochs": 1000,
}
COLOUR_EPOCHS = {10: 1000, 50: 800}
"""Images of a class of the part `colour`, and for how long a network learns from them."""
_COLOUR: dict[str, Any] = {
    **{key: _FULL[key] for key in ("num_clients", "dirichlet_alpha", "model")},
    "num_rounds": 6,
    "eval_every": 6,
    "model_n": 60,
    "dc_iterations": 400,
    "min_group": 64,
}
_SMALL: dict[str, Any] = {
    **_FULL,
    "num_clients": 10,
    "model": "convnet-32",
    "dc_iterations": 300,
}
SIZES = {
    "small": Scale(
        {"digits": _SMALL},
        (0,),
        {"num_clients": 10, "model": "convnet-32", "dc_iterations": 100, "model_epochs": 100},
    ),
    "full": Scale({"mnist": _FULL, "cifar10": {**_FULL, **_CIFAR10}}, (0, 1, 2), {}),
}


def settings(scale: str, dataset: str, part: str) -> dict[str, Any]:
    """Return the settings of a condensation."""
    size = SIZES[scale]
    common = {"method": "condense", "mode": "fednum", "dataset": dataset}
    if part == "document":
        return {**CONDENSE_PRESETS["fednum-document"], **size.document, **common}
    return {**common, **size.datasets[dataset]}


def rows(scale: str) -> dict[tuple[str, str], list[Cell]]:
    """Return the cells by data set and part."""
    size = SIZES[scale]
    return {
        (dataset, part): [
            Cell(
                f"{part}-{dataset}-seed{seed}",
                settings(scale, dataset, part),
                seed,
                tuple(BASELINES) if part == "default" else (),
            )
            for seed in size.seeds
        ]
        for dataset in size.datasets
        for part in ("default", "document")
    }


def colour(scale: str) -> dict[int, list[Cell]]:
    """Return the cells of the part `colour`, by images of a class; none in the small form."""
    common = {"method": "condense", "mode": "fednum", "dataset": "cifar10", **_COLOUR}
    if "cifar10" not in SIZES[scale].datasets:
        return {}
    return {
        ipc: [
            Cell(
                f"colour-{ipc}-cifar10-seed{seed}", {**common, "ipc": ipc, "model_epochs": n}, seed
            )
            for seed in SIZES[scale].seeds
        ]
        for ipc, n in COLOUR_EPOCHS.items()
    }


def cells(scale: str, parts: Sequence[str] = tuple(PARTS)) -> list[Cell]:
    """Return the cells of some parts."""
    found = [cell for (_, part), some in rows(scale).items() if part in parts for cell in some]
    more = colour(scale).values() if "colour" in parts else ()
    return [*found, *(cell for some in more for cell in some)]
