"""From a configuration to the parts of a condensation."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fedquilt.aggregation import Accumulator, Concatenation, RunningMean
from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.certified import (
    CertifiedEngine,
    GrowingServer,
    GrowingSettings,
    Released,
    Schedule,
)
from fedquilt.condense.embeds import FeatureModels, embed_and_forward, embedding_model
from fedquilt.condense.engine import RoundModels, StatisticsEngine
from fedquilt.condense.matching import (
    MatchingSettings,
    SyntheticSet,
    condensed_by_clients,
)
from fedquilt.condense.server import CondensingServer
from fedquilt.condense.training import Learner, PoolSettings, TrainingSettings
from fedquilt.config import CondenseConfig, RunConfig
from fedquilt.data import DATASETS, ImageDataset, save_condensed
from fedquilt.data.condensed import shrink_to_tiles
from fedquilt.method import Files, Method, Progress
from fedquilt.models.features import CHOSEN_ON, choice_note, make_feature_model
from fedquilt.models.features.frozen import count_features
from fedquilt.training import ClientUpdate, Engine, Task
from fedquilt.training.hardware import freed_memory_kept


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


class StatisticsSource(Engine, Protocol):
    """An engine whose clients send statistics: how many bytes, and whom it tells."""

    bytes_up: int
    bytes_down: int
    progress: Progress | None

    @property
    def table_size(self) -> int | None:
        """How many numbers a client sends in a round; None: as many as its rows need."""

    def outgoing(self, weights: torch.Tensor) -> torch.Tensor:
        """Return what clients elsewhere must be sent for a round."""

    def incoming(self, sent: torch.Tensor) -> torch.Tensor:
        """Take in what was sent; return the weights to begin with."""

    def objection(self, vector: torch.Tensor) -> str | None:
        """Return why a vector from elsewhere is no table of the round; None: it is one."""


class Condensation(Method):
    """Clients send class statistics; the server grows images and trains the model on them."""

    clients_train = False

    def __init__(
        self,
        config: CondenseConfig,
        engine: StatisticsSource,
        server: CondensingServer | GrowingServer,
        new_sum: Callable[[], Accumulator],
        notes: Sequence[str],
        *,
        channels: int,
        num_classes: int,
        trains_late: bool = True,
        too_small: Sequence[int] | None = None,
    ) -> None:
        super().__init__(engine, server, released=RELEASED, notes=notes)
        self.source = engine
        self.images = server
        self.evaluates_slowly = True
        self._config = config
        self._new_sum = new_sum
        self._channels, self._num_classes = channels, num_classes
        self._trains_late = trains_late
        self._too_small = too_small

    def outgoing(self, weights: torch.Tensor, client: int, round_index: int) -> torch.Tensor:
        """Return what the statistics of the round depend on."""
        return self.source.outgoing(weights)

    def work(
        self, sent: torch.Tensor, client: int, round_index: int, learning_rate: float
    ) -> ClientUpdate:
        """Compute the statistics of a client where its data are."""
        start = self.source.incoming(sent)
        return super().work(start, client, round_index, learning_rate)

    def update_size(self, client: int, round_index: int) -> int | None:
        """Return the size of a table that is summed; others have as many rows as they need."""
        return self.source.table_size

    def objection(self, vector: torch.Tensor) -> str | None:
        """Refuse what is no table of this round."""
        return self.source.objection(vector)

    def count_traffic(self, up: int, down: int) -> None:
        """Report what really travelled."""
        self.source.bytes_up, self.source.bytes_down = up, down

    def new_sum(self) -> Accumulator:
        """Return tables laid end to end, or a sum of bounded ones."""
        return self._new_sum()

    def before_evaluation(self, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """Let the model know all images.

        It is trained in the rounds that are evaluated; where nobody came to such a round,
        or the run ended before one, that is made up for.
        """
        return self.images.train_if_stale(weights) if self._trains_late else (weights, {})

    def save_artifacts(self, files: Files, rounds: int | None = None) -> Path | None:
        """Write the images after so many rounds; None: the final ones."""
        # On the way all images are kept: those of one round must fit those of another.
        stored = self.images.grown() if rounds is None else self.images.synthetic
        path = files.room_for_synthetic(rounds)
        mean, std = normalisation(self._config, self._channels)
        about: dict[str, str | int | float] = {
            "dataset": self._config.dataset,
            "mode": self._config.mode,
            "seed": self._config.seed,
            "rounds": self._config.num_rounds if rounds is None else rounds,
        }
        dataset = self._as_dataset(stored)
        save_condensed(path, dataset, mean=mean, std=std, tiles=stored.tiles, about=about)
        return path

    def synthetic(self) -> ImageDataset:
        """Return the images of the classes that somebody has sent, as they are trained on."""
        return self._as_dataset(self.images.grown().expanded())

    def _as_dataset(self, synthetic: SyntheticSet) -> ImageDataset:
        return ImageDataset(
            synthetic.images.detach().cpu().clone(),
            synthetic.labels.cpu(),
            f"{self._config.dataset}-condensed",
            self._num_classes,
        )

    def result(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Return how many images there are and what they cost."""
        seconds = [line["seconds"] for line in lines]
        record = {
            "ipc": self._config.ipc,
            "images": len(self.images.grown().images),
            "bytes_up": sum(line.get("bytes_up", 0) for line in lines),
            "bytes_down": sum(line.get("bytes_down", 0) for line in lines),
            "classes_not_sent": self.images.not_sent(),
            "seconds": None if None in seconds else sum(seconds),
        }
        if self._too_small is not None:
            record["classes_too_small"] = list(self._too_small)
        return {"condensation": record}

    def report_to(self, progress: Progress) -> None:
        """Report the progress of clients and server."""
        self.source.progress = progress
        self.images.progress = progress

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Let freed memory stay with the process while images are matched."""
        return freed_memory_kept()


def make_condensation(
    config: CondenseConfig, model: nn.Module, task: Task, num_classes: int
) -> Condensation:
    """Build the method for data and a model; raise where they do not fit."""
    if not task.is_classification:
        raise InvalidValueError(
            "method='condense' must be used with one class a sample and loss='cross_entropy', not "
            f"with loss={task.objective.name!r}: clients send statistics of classes"
        )
    if not isinstance(task.inputs, torch.Tensor) or task.inputs.ndim != 4:
        raise InvalidValueError(
            f"inputs of shape {trees.described(task.inputs)} must be images "
            "(channels, height, width) to be condensed"
        )
    augmentation = Augmentation(augmentation_of(config, task.inputs.shape[1]))
    trainer = Learner(model, task.public().inputs, training_of(config), augmentation, config.seed)
    if config.is_bounded(covered=True):
        return _make_bounded(config, task, trainer, num_classes)
    return _make_grouped(config, model, task, trainer, num_classes)


def _make_grouped(
    config: CondenseConfig, model: nn.Module, task: Task, trainer: Learner, num_classes: int
) -> Condensation:
    """Build FedNum: tables of means over groups, matching."""
    held = np.unique(task.targets.cpu().numpy()[_held(task)])
    # Where clients' data are elsewhere, every class of the model may be somebody's.
    classes = tuple(map(int, range(num_classes) if task.is_remote else held))
    too_small = None if task.is_remote else classes_too_small(task, classes, config.min_group)
    round_models = make_round_models(
        config, model, task.public().inputs, trainer.augmentation, classes
    )
    engine = StatisticsEngine(
        task,
        round_models,
        avg_num=config.avg_num,
        min_group=config.min_group,
        max_samples=config.max_samples,
        seed=config.seed,
    )
    return assemble_condensation(
        config,
        trainer,
        engine,
        first_images(config, task, classes, model),
        notes=statistics_notes(min(config.min_group, config.avg_num), config.init_method),
        num_classes=num_classes,
        trains_in=_trains_in(config),
        too_small=too_small,
    )


class TablesOfMeans(StatisticsSource, Protocol):
    """An engine whose clients send tables of means over groups."""

    round_models: RoundModels


def assemble_condensation(
    config: CondenseConfig,
    trainer: Learner,
    engine: TablesOfMeans,
    first: tuple[SyntheticSet, int],
    *,
    notes: Sequence[str],
    num_classes: int,
    trains_in: Callable[[int], bool] = lambda round_index: True,
    trains_late: bool = True,
    too_small: Sequence[int] | None = None,
) -> Condensation:
    """Put FedNum together: clients that send tables, a server that matches images to them.

    Parameters
    ----------
    first
        The images to begin with, and the bytes that clients sent for them.
    trains_in
        Whether the model is trained in a round.
    trains_late
        Whether training that was left out is made up for at an evaluation; otherwise a round in
        which nobody sent anything leaves the model alone.
    too_small
        The classes that no client holds enough samples of, where that is known.
    """
    (synthetic, first_bytes), round_models = first, engine.round_models
    server = CondensingServer(
        trainer,
        synthetic,
        round_models,
        matching_of(config, synthetic.images[0].numel(), round_models.num_features),
        groups_per_step=groups_per_step(config.batch_num, config.avg_num),
        source=engine,
        trains_in=trains_in,
        skips_empty=not trains_late,
        restarts=config.feature_model in POOLS,
        pool=pool_of(config),
        first_bytes=first_bytes,
        seed=config.seed,
    )
    return Condensation(
        config,
        engine,
        server,
        partial(Concatenation, synthetic.images.device),
        notes,
        channels=synthetic.images.shape[1],
        num_classes=num_classes,
        trains_late=trains_late,
        too_small=too_small,
    )


def classes_too_small(task: Task, classes: Sequence[int], min_group: int) -> list[int]:
    """Return the classes that no client holds `min_group` samples of; raise where all are."""
    labels = task.targets.cpu().numpy()
    sent: set[int] = set()
    for samples in task.clients:
        held, counts = np.unique(labels[np.asarray(samples)], return_counts=True)
        sent |= set(held[counts >= min_group].tolist())
    if not sent:
        raise InvalidValueError(
            f"min_group={min_group} must be smaller: no client holds so many samples of a class, "
            "and nobody would send anything"
        )
    return [label for label in classes if label not in sent]


def _make_bounded(
    config: CondenseConfig, task: Task, trainer: Learner, num_classes: int
) -> Condensation:
    """Build the certified form: bounded tables through a public front, images grown from them."""
    if num_classes < 2:
        raise InvalidValueError(
            "mode='certified' needs data of at least two classes: the head of one class is zero, "
            "and no images follow from it"
        )
    shape, device = tuple(task.inputs.shape[1:]), task.inputs.device
    front = make_feature_model(config.feature_extractor, shape, num_classes).front.to(device)
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
        drawings=config.synthetic_images,
        growing=GrowingSettings(),
        seed=config.seed,
    )
    notes = (
        "clients send one bounded vector a round, over all classes; the synthetic images and "
        "the model are computed from the noised sums alone",
        f"features come from a public front ({config.feature_extractor}) and images begin as "
        "public drawings",
        *_choice_notes(config),
    )
    size = released.means_total.numel()
    return Condensation(
        config,
        engine,
        server,
        partial(RunningMean, size, device),
        notes,
        channels=shape[0],
        num_classes=num_classes,
    )


def _choice_notes(config: CondenseConfig) -> tuple[str, ...]:
    """Say on which data the front and the defaults of a condensation were chosen."""
    chosen = {
        "the front's settings": CHOSEN_ON[config.feature_extractor],
        "the condensation's default settings": CHOSEN_ON["condensation"],
    }
    notes = (choice_note(what, where, config.dataset) for what, where in chosen.items())
    return tuple(note for note in notes if note is not None)


def make_round_models(
    config: CondenseConfig,
    model: nn.Module,
    sample: torch.Tensor,
    augmentation: Augmentation,
    classes: tuple[int, ...],
) -> RoundModels:
    """Build the feature models of a round, shared by clients and server."""
    return RoundModels(
        model,
        sample,
        FeatureModels(config.feature_model, config.feature_models, config.rho, config.seed),
        augmentation,
        classes,
        embed_layer=config.embed_layer,
        with_logits=config.logit_loss != "none",
        moments=config.moments,
        half=config.precision == "bf16",
        row_bits=config.row_bits,
        seed=config.seed,
    )


def matching_of(config: CondenseConfig, pixels: int, features: int) -> MatchingSettings:
    """Return the numbers of the matching, for images and embeddings of so many numbers."""
    return MatchingSettings(
        config.dc_iterations,
        config.image_step(pixels, features // config.moments),
        config.image_momentum,
        config.logit_loss,
        config.loss_computation,
        config.moments,
        config.discrimination,
        config.image_optimizer,
    )


def training_of(config: CondenseConfig) -> TrainingSettings:
    """Return the numbers of training on the images."""
    return TrainingSettings(
        config.model_epochs,
        config.batch_size,
        config.model_lr,
        weight_decay=config.model_weight_decay,
        schedule=config.model_schedule,
        cutmix=config.cutmix,
        families=config.model_families,
    )


POOLS = ("random_pool", "trained_pool")
"""Feature models that do not depend on the global model."""


def pool_of(config: CondenseConfig) -> PoolSettings | None:
    """Return which feature models the server trains; None: none."""
    if config.feature_model != "trained_pool":
        return None
    return PoolSettings(config.trained_n, config.pool_epochs)


def augmentation_of(config: CondenseConfig, channels: int) -> str:
    """Return the families; `auto` never mirrors grey images, where digits would change."""
    if config.augmentation != "auto":
        return config.augmentation
    return "color_crop_cutout_scale_rotate" + ("_flip" if channels == 3 else "")


def groups_per_step(batch_num: int | None, avg_num: int) -> int | None:
    """Return how many groups hold `batch_num` samples, at least one; None: all groups."""
    return None if batch_num is None else max(1, batch_num // avg_num)


def first_images(
    config: CondenseConfig, task: Task, classes: tuple[int, ...], model: nn.Module
) -> tuple[SyntheticSet, int]:
    """Return the images to begin with (`begin_images`), of clients that hold samples here."""
    if task.is_remote and config.init_method in ("real_sample", "dm"):
        raise InvalidValueError(
            f"init_method={config.init_method!r} must be 'random', 'smooth' or 'leaves' where "
            "clients' data are elsewhere"
        )
    labels, inputs = task.targets.cpu().numpy(), task.inputs

    def images_of(held: np.ndarray[Any, np.dtype[np.int64]], label: int) -> torch.Tensor:
        picked: torch.Tensor = inputs[torch.from_numpy(held[labels[held] == label]).to(task.device)]
        return picked

    held_by = ({c: images_of(at, c) for c in classes} for at in map(np.asarray, task.clients))
    sample = task.public().inputs[:1]
    return begin_images(
        config, classes, sample, model, held_by, lambda label: images_of(_held(task), label)
    )


def begin_images(
    config: CondenseConfig,
    classes: tuple[int, ...],
    sample: torch.Tensor,
    model: nn.Module,
    held_by: Iterable[Mapping[int, torch.Tensor]],
    images_of: Callable[[int], torch.Tensor],
) -> tuple[SyntheticSet, int]:
    """Return the images to begin with, and the bytes that clients sent for them.

    `real_sample` asks clients for their images (`images_of` a class): for each class as many as are
    needed, drawn without replacement, repeated where there are fewer; a class that nobody holds
    begins with noise.  `dm` lets clients condense images first, of those that they are `held_by`
    (`fedquilt.condense.matching`).
    """
    source, device = generator(config.seed, "first images"), sample.device
    tiles = config.tiles_in(*sample.shape[2:])
    first = SyntheticSet.random(classes, config.ipc, sample.shape[1:], source, device, tiles)
    if config.init_method == "dm":
        own = copy.deepcopy(model).to(device)
        moves = moves_of_clients(config, own, sample[:1])
        return first, condensed_by_clients(config, own, held_by, moves, first)
    begun = begun_without_data(first, config)
    if begun is not None:
        return begun, 0
    sent = 0
    for label, images in zip(first.classes, first.by_class(), strict=True):
        held = images_of(label)
        if len(held):
            chosen = np.resize(source.permutation(len(held)), config.ipc * tiles**2)
            images.copy_(shrink_to_tiles(held[torch.from_numpy(chosen).to(device)], tiles))
            sent += 4 * len(chosen) * sample[0].numel()
    return first, sent


def begun_without_data(synthetic: SyntheticSet, config: CondenseConfig) -> SyntheticSet | None:
    """Return first images that follow from the seed alone; None: clients are asked for them."""
    if config.init_method == "random":
        return synthetic
    if config.init_method == "smooth":
        return synthetic.smoothed()
    if config.init_method == "leaves":
        return synthetic.drawn(torch_seed(config.seed, "first drawings"))
    return None


@torch.no_grad()
def moves_of_clients(
    config: CondenseConfig, model: nn.Module, sample: torch.Tensor
) -> MatchingSettings:
    """Return how clients move images of their own: as FedDM does, by embeddings and logits."""
    features = embed_and_forward(embedding_model(model, config.embed_layer), sample)[0].shape[1]
    step = config.image_step(sample[0].numel(), features)
    moved_by = config.image_optimizer
    return MatchingSettings(
        config.dc_iterations, step, config.image_momentum, "l2", optimizer=moved_by
    )


def _held(task: Task) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the samples that some client holds."""
    return np.unique(np.concatenate([np.asarray(part) for part in task.clients]))


def _trains_in(config: CondenseConfig) -> Callable[[int], bool]:
    """Return in which rounds the model is trained.

    Random feature models do not depend on it: it is trained when it is evaluated.
    """
    if config.feature_model not in POOLS:
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
    """Return a note where the first images are the clients' own."""
    if init_method == "real_sample":
        return [
            "init_method=real_sample: images of clients leave them and are the first synthetic "
            "images; for comparison only"
        ]
    if init_method == "dm":
        return [
            "init_method=dm: the first synthetic images are clients' own, moved by them before "
            "they are sent; what is left of an image in them is not bounded; for comparison only"
        ]
    return []
