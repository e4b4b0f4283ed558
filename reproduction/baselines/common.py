"""What baselines share: real samples, matching, training, byte counts.

Data, split, images per class, first weights, augmentation, training settings and the
evaluation are those of the configuration; the streams of random numbers are named, so
that a baseline neither disturbs nor depends on a run.

DM (Zhao and Bilen 2023) and FedDM (Xiong et al. 2023) match with the real images at hand
(`match_real`).  No statistics have to be sent first, so every step has a model,
an augmentation and a batch of real images of its own; with f and z the mean embedding
and the mean scores of a class,

    DM      sum_c |f_syn - f_real|^2,                        w drawn anew
    FedDM   sum_c |f_syn - f_real|^2 + |z_syn - z_real|^2,   w at distance rho of the global model
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.randomness import generator, torch_seed
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.embeds import embed_and_forward, embedding_model
from fedquilt.condense.matching import MatchingSettings, SyntheticSet
from fedquilt.condense.method import augmentation_of, training_of
from fedquilt.condense.training import TrainingSettings, train_on
from fedquilt.config import CondenseConfig
from fedquilt.data.condensed import shrink_to_tiles
from fedquilt.method import Progress
from fedquilt.setup.task import FederatedTask
from fedquilt.training import FlatModel, Task, evaluate

FLOAT_BYTES = 4


@dataclass(frozen=True)
class BaselineResult:
    """One row of the table.

    Attributes
    ----------
    accuracy, loss
        On the test data.
    bytes_up, bytes_down
        What all clients sent and received, in float32; labels are not counted.
    rounds
        Times that clients and server spoke.
    seconds
        Wall time, the evaluation included.
    raw
        Whether clients' images leave them as they are.
    note
        One sentence on what was done.
    """

    name: str
    accuracy: float
    loss: float
    bytes_up: int
    bytes_down: int
    rounds: int
    seconds: float
    raw: bool
    note: str


def held_by_class(task: Task) -> dict[int, NDArray[np.int64]]:
    """Return the samples that some client holds, by class in ascending order."""
    held = np.unique(np.concatenate([np.asarray(part) for part in task.clients]))
    return by_class(task.targets.cpu().numpy(), held)


def by_class(
    labels: NDArray[np.int64], samples: NDArray[np.int64], at_least: int = 1
) -> dict[int, NDArray[np.int64]]:
    """Return samples by class in ascending order; classes with fewer are left out."""
    classes, counts = np.unique(labels[samples], return_counts=True)
    return {
        int(label): samples[labels[samples] == label]
        for label, count in zip(classes, counts, strict=True)
        if count >= at_least
    }


def real_sample(
    images: torch.Tensor,
    classes: Mapping[int, NDArray[np.int64]],
    ipc: int,
    source: np.random.Generator,
    tiles: int = 1,
) -> SyntheticSet:
    """Return `ipc` images of each class, drawn without replacement, repeated where fewer.

    With `tiles`, each holds so many smaller ones, row and column.
    """
    count = ipc * tiles**2
    chosen = [np.resize(source.permutation(samples), count) for samples in classes.values()]
    index = torch.from_numpy(np.concatenate(chosen)).to(images.device)
    return SyntheticSet(shrink_to_tiles(images[index], tiles), tuple(classes), ipc, tiles)


def image_bytes(task: Task) -> int:
    """Return the bytes of one image in float32."""
    return FLOAT_BYTES * int(math.prod(task.inputs.shape[1:]))


def model_bytes(problem: FederatedTask) -> int:
    """Return the bytes of what travels of the model in float32."""
    return FLOAT_BYTES * problem.flat.vector.numel()


def own_model(problem: FederatedTask) -> FlatModel:
    """Return a copy of the model with its first weights; the problem's stays as it is."""
    return FlatModel(problem.flat.module, problem.task.public().inputs)


def augmentation(config: CondenseConfig, task: Task) -> Augmentation:
    """Return the augmentation of the condensation."""
    return Augmentation(augmentation_of(config, task.inputs.shape[1]))


def matching_settings(
    config: CondenseConfig, problem: FederatedTask, steps: int, logit_loss_type: str
) -> MatchingSettings:
    """Return how the condensation moves its images, for another number of steps."""
    sample = problem.task.public().inputs[:1]
    with torch.no_grad():
        model = embedding_model(problem.flat.module, config.embed_layer)
        features = embed_and_forward(model, sample)[0].shape[1]
    step = config.image_step(sample.numel(), features)
    moved_by = config.image_optimizer
    return MatchingSettings(steps, step, config.image_momentum, logit_loss_type, optimizer=moved_by)


def train(
    config: CondenseConfig,
    flat: FlatModel,
    images: torch.Tensor,
    labels: torch.Tensor,
    settings: TrainingSettings,
    families: Augmentation,
    index: int,
    progress: Progress | None = None,
) -> None:
    """Train the model on images as the condensation does in round `index`."""
    devices = [images.device] if images.device.type == "cuda" else []
    # Layers that drop out draw from torch's global generator.
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(torch_seed(config.seed, "dropout", index))
        source = generator(config.seed, "training", index)
        report = progress_of(progress, "training", settings.epochs)
        train_on(flat.module, images, labels, settings, families, source, report)


def accuracy_of_images(
    config: CondenseConfig,
    problem: FederatedTask,
    images: torch.Tensor,
    labels: torch.Tensor,
    progress: Progress | None = None,
) -> tuple[float, float]:
    """Train the first weights on images; return (accuracy, loss) on the test data.

    The random numbers are those of the condensation's last training, so that as many
    images come in the same order and under the same augmentations.
    """
    flat = own_model(problem)
    families, last = augmentation(config, problem.task), config.num_rounds - 1
    train(config, flat, images, labels, training_of(config), families, last, progress)
    return evaluate(flat.module, *problem.test_data)


def progress_of(progress: Progress | None, what: str, total: int) -> Callable[[int], None] | None:
    """Return a callback for a loop of `total` steps, None without `progress`."""
    if progress is None:
        return None
    return lambda done: progress(what, done / total)
