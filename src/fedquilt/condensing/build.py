"""From a configuration to the parts of a condensation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedquilt.aggregation import EndToEnd, Total
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.feature_models import FeatureModels
from fedquilt.condense.matching import MatchingSettings
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.condense.training import TrainingSettings
from fedquilt.condensing.engine import StatisticsEngine
from fedquilt.condensing.lens import Lens
from fedquilt.condensing.server import CondensingServer
from fedquilt.config import CondenseConfig
from fedquilt.errors import InvalidValueError
from fedquilt.learning import Task
from fedquilt.randomness import generator


@dataclass(frozen=True, eq=False)
class Condensing:
    """The parts that stand in for training: what clients do, what the server does."""

    engine: StatisticsEngine
    server: CondensingServer
    gather: Callable[[], Total]
    notes: tuple[str, ...]
    names: tuple[str, ...]


def make_condensing(config: CondenseConfig, model: nn.Module, task: Task) -> Condensing:
    """Build engine and server for data and a model; raise where they do not fit."""
    _check(config, model, task)
    classes = tuple(int(label) for label in np.unique(task.targets.cpu().numpy()[_held(task)]))
    augmentation = Augmentation(augmentation_of(config, task.inputs.shape[1]))
    lens = Lens(
        model,
        task.inputs[:2],
        FeatureModels(config.feature_model, config.feature_models, config.rho, config.seed),
        augmentation,
        classes,
        embed_layer=config.embed_layer,
        with_logits=config.logit_loss != "none",
        seed=config.seed,
    )
    engine = StatisticsEngine(
        task,
        lens,
        avg_num=config.avg_num,
        min_group=config.min_group,
        max_samples=config.max_samples,
        seed=config.seed,
    )
    server = CondensingServer(
        model,
        first_images(config, task, classes),
        lens,
        MatchingSettings(
            config.dc_iterations,
            config.image_step,
            config.image_momentum,
            config.logit_loss,
            config.loss_computation,
        ),
        TrainingSettings(config.model_epochs, config.batch_size, config.model_lr),
        augmentation,
        groups_per_step=groups_per_step(config.batch_num, config.avg_num),
        trains_in=_trains_in(config),
        restarts=config.feature_model == "random_pool",
        seed=config.seed,
    )
    device = task.inputs.device
    return Condensing(engine, server, lambda: EndToEnd(device), _notes(config), ("statistics",))


def augmentation_of(config: CondenseConfig, channels: int) -> str:
    """Return the families; `auto` never mirrors grey images, where digits would change."""
    if config.augmentation != "auto":
        return config.augmentation
    return "color_crop_cutout_scale_rotate" + ("_flip" if channels == 3 else "")


def groups_per_step(batch_num: int | None, avg_num: int) -> int | None:
    """Return how many groups hold `batch_num` samples, at least one; None: all groups."""
    return None if batch_num is None else max(1, batch_num // avg_num)


def first_images(config: CondenseConfig, task: Task, classes: tuple[int, ...]) -> SyntheticSet:
    """Return the images to begin with.

    `real_sample` reads clients' images: for each class `ipc` of those that somebody
    holds, drawn without replacement, repeated where there are fewer.
    """
    source = generator(config.seed, "first images")
    shape, device = task.inputs.shape[1:], task.inputs.device
    synthetic = SyntheticSet.random(classes, config.ipc, shape, source, device)
    if config.init_method == "real_sample":
        held = _held(task)
        labels = task.targets.cpu().numpy()[held]
        chosen = np.concatenate(
            [np.resize(source.permutation(held[labels == label]), config.ipc) for label in classes]
        )
        synthetic.images.copy_(task.inputs[torch.from_numpy(chosen).to(device)])
    return synthetic


def _held(task: Task) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the samples that some client holds."""
    return np.unique(np.concatenate([np.asarray(part) for part in task.clients]))


def _trains_in(config: CondenseConfig) -> Callable[[int], bool]:
    """Return in which rounds the model is trained.

    Random feature models do not depend on it: it is trained when it is looked at.
    """
    if config.feature_model != "random_pool":
        return lambda round_index: True
    every, last = config.eval_every, config.num_rounds - 1
    return lambda round_index: (round_index + 1) % every == 0 or round_index == last


def _check(config: CondenseConfig, model: nn.Module, task: Task) -> None:
    if task.inputs.ndim != 4:
        raise InvalidValueError(
            f"inputs of shape {tuple(task.inputs.shape[1:])} must be images "
            "(channels, height, width) to be condensed"
        )


def _notes(config: CondenseConfig) -> tuple[str, ...]:
    least = min(config.min_group, config.avg_num)
    notes = [
        f"clients send means over groups of at least {least} samples: no sample leaves as it is, "
        "but a mean is no guarantee",
    ]
    if least == 1:
        notes[0] = "groups of one sample leave the clients: their embeddings are sent as they are"
    if config.init_method == "real_sample":
        notes.append(
            "init_method=real_sample: images of clients leave them and are the first synthetic "
            "images; for comparison only"
        )
    return tuple(notes)
