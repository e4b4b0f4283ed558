"""From a configuration to the parts of a condensation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedquilt.aggregation import Accumulator, Concatenation, RunningMean
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.certified_engine import CertifiedEngine, GrowingServer, Schedule
from fedquilt.condense.certified_statistics import GrowingSettings, Released
from fedquilt.condense.embeds import FeatureModels
from fedquilt.condense.engine import RoundModels, StatisticsEngine
from fedquilt.condense.matching import MatchingSettings
from fedquilt.condense.server import CondensingServer
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.condense.training import Trainer, TrainingSettings
from fedquilt.config import CondenseConfig, RunConfig
from fedquilt.data import DATASETS
from fedquilt.learning import Task
from fedquilt.models.features import CHOSEN_ON, choice_note, make_feature_model
from fedquilt.models.features.frozen import count_features


def normalisation(config: RunConfig, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation that took pixels in [0, 1] to inputs.

    What the configuration says, else what is known of its data set, else (0, 1).
    """
    given = config.pixels(channels) if isinstance(config, CondenseConfig) else None
    if given is not None:
        return given
    spec = DATASETS.get(config.dataset)
    if spec is None or len(spec.mean) != channels:
        return (0.0,) * channels, (1.0,) * channels
    return spec.mean, spec.std


RELEASED = ("class statistics", "synthetic images", "the model trained on them")
"""What a condensation lets others see."""


@dataclass(frozen=True, eq=False)
class Condensing:
    """The parts that stand in for training: what clients do, what the server does.

    `gather` makes what a round's vectors are put into; `released` names what leaves the
    clients, and `notes` go into the statement.
    """

    engine: StatisticsEngine | CertifiedEngine
    server: CondensingServer | GrowingServer
    gather: Callable[[], Accumulator]
    released: tuple[str, ...]
    notes: tuple[str, ...]


def make_condensing(
    config: CondenseConfig, model: nn.Module, task: Task, num_classes: int
) -> Condensing:
    """Build engine and server for data and a model; raise where they do not fit."""
    if task.inputs.ndim != 4:
        raise InvalidValueError(
            f"inputs of shape {tuple(task.inputs.shape[1:])} must be images "
            "(channels, height, width) to be condensed"
        )
    augmentation = Augmentation(augmentation_of(config, task.inputs.shape[1]))
    trainer = Trainer(model, task.public().inputs, training_of(config), augmentation, config.seed)
    if config.mode == "certified":
        return _make_bounded(config, task, trainer, num_classes)
    return _make_grouped(config, model, task, trainer)


def _make_grouped(
    config: CondenseConfig, model: nn.Module, task: Task, trainer: Trainer
) -> Condensing:
    """Build FedNum: tables of means over groups, matching."""
    classes = tuple(int(label) for label in np.unique(task.targets.cpu().numpy()[_held(task)]))
    lens = make_lens(config, model, task.public().inputs, trainer.augmentation, classes)
    engine = StatisticsEngine(
        task,
        lens,
        avg_num=config.avg_num,
        min_group=config.min_group,
        max_samples=config.max_samples,
        seed=config.seed,
    )
    server = CondensingServer(
        trainer,
        first_images(config, task, classes),
        lens,
        matching_of(config, task.inputs[0].numel(), lens.num_features),
        traffic=lambda: (engine.bytes_up, engine.bytes_down),
        groups_per_step=groups_per_step(config.batch_num, config.avg_num),
        trains_in=_trains_in(config),
        restarts=config.feature_model == "random_pool",
        seed=config.seed,
    )
    device = task.inputs.device
    released = RELEASED
    notes = statistics_notes(min(config.min_group, config.avg_num), config.init_method)
    return Condensing(engine, server, lambda: Concatenation(device), released, tuple(notes))


def _make_bounded(
    config: CondenseConfig, task: Task, trainer: Trainer, num_classes: int
) -> Condensing:
    """Build the certified form: bounded tables through a public front, images grown from them."""
    if num_classes < 2:
        raise InvalidValueError(
            "mode='certified' needs data of at least two classes: the head of one class is zero, "
            "and no images follow from it"
        )
    shape, device = tuple(task.inputs.shape[1:]), task.inputs.device
    front = make_feature_model(config.front, shape, num_classes).front.to(device)
    released = Released.nothing(num_classes, count_features(front), device)
    # Updates are scaled to the clip, so the step is in units of it.
    step = config.head_step / config.clip_norm
    schedule = Schedule(config.num_rounds, config.rounds_of_means, step)
    senders = config.cohort_limit(len(task.clients)) if config.amplification else None
    engine = CertifiedEngine(task, front, released, schedule, senders)
    mean, std = normalisation(config, shape[0])
    source = generator(config.seed, "first images")
    server = GrowingServer(
        trainer,
        SyntheticSet.random(range(num_classes), config.ipc, shape, source, device),
        engine,
        front,
        mean=mean,
        std=std,
        drawings=config.drawings,
        growing=GrowingSettings(),
        seed=config.seed,
    )
    notes = (
        "clients send one bounded vector a round, over all classes; the synthetic images and "
        "the model are computed from the noised sums alone",
        f"features come from a public front ({config.front}) and images begin as public drawings",
        *_choice_notes(config),
    )
    size = released.means_total.numel()
    return Condensing(engine, server, lambda: RunningMean(size, device), RELEASED, notes)


def _choice_notes(config: CondenseConfig) -> tuple[str, ...]:
    """Say on which data the front and the defaults of a condensation were chosen."""
    chosen = {
        "the front's settings": CHOSEN_ON[config.front],
        "the condensation's default settings": CHOSEN_ON["condensation"],
    }
    notes = (choice_note(what, where, config.dataset) for what, where in chosen.items())
    return tuple(note for note in notes if note is not None)


def make_lens(
    config: CondenseConfig,
    model: nn.Module,
    sample: torch.Tensor,
    augmentation: Augmentation,
    classes: tuple[int, ...],
) -> RoundModels:
    """Build what clients and server look through."""
    return RoundModels(
        model,
        sample,
        FeatureModels(config.feature_model, config.feature_models, config.rho, config.seed),
        augmentation,
        classes,
        embed_layer=config.embed_layer,
        with_logits=config.logit_loss != "none",
        seed=config.seed,
    )


def matching_of(config: CondenseConfig, pixels: int, features: int) -> MatchingSettings:
    """Return the numbers of the matching, for images and embeddings of so many numbers."""
    return MatchingSettings(
        config.dc_iterations,
        config.image_step(pixels, features),
        config.image_momentum,
        config.logit_loss,
        config.loss_computation,
    )


def training_of(config: CondenseConfig) -> TrainingSettings:
    """Return the numbers of training on the images."""
    return TrainingSettings(
        config.model_epochs,
        config.batch_size,
        config.model_lr,
        weight_decay=config.model_weight_decay,
    )


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
    return _at_evaluations(config)


def _at_evaluations(config: CondenseConfig) -> Callable[[int], bool]:
    every, last = config.eval_every, config.num_rounds - 1
    return lambda round_index: (round_index + 1) % every == 0 or round_index == last


def statistics_notes(least: int, init_method: str) -> list[str]:
    """Say what leaves clients that send means over groups of at least so many samples."""
    notes = [
        f"clients send means over groups of at least {least} samples: no sample leaves as it is, "
        "but a mean is no guarantee"
        if least > 1
        else "groups of one sample leave the clients: their embeddings are sent as they are"
    ]
    return notes + init_notes(init_method)


def init_notes(init_method: str) -> list[str]:
    """Say it where the first images are the clients' own."""
    if init_method != "real_sample":
        return []
    return [
        "init_method=real_sample: images of clients leave them and are the first synthetic "
        "images; for comparison only"
    ]
