"""Training a model on synthetic images."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedquilt.common import checks
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.embeds import reinitialised
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.config.choices import MODEL_SCHEDULES
from fedquilt.learning import FlatModel
from fedquilt.method import Progress


@dataclass(frozen=True)
class TrainingSettings:
    """SGD with momentum and weight decay.

    schedule
        How the rate falls: "step", tenfold half way; "cosine", to 0 at the end;
        "constant".
    cutmix
        Share of the batches in which a rectangle of every image is another's, and its
        label in proportion (Yun et al. 2019).

    families
        How many families of augmentation a batch goes through, one after the other; they
        are drawn anew for each.
    teachers
        How many networks are trained first, on the same images; the model then learns
        their answers (`learn`).
    temperature
        What scores are divided by where answers are learned.

    The numbers are those of the FedNum and DM references (0.01, 0.9, 5e-4).
    """

    epochs: int = 500
    batch_size: int = 256
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "step"
    cutmix: float = 0.0
    families: int = 1
    teachers: int = 0
    temperature: float = 2.0

    def __post_init__(self) -> None:
        checks.integer("model_epochs", self.epochs, at_least=1)
        checks.integer("batch_size", self.batch_size, at_least=1)
        checks.number("model_lr", self.learning_rate, above=0)
        checks.choice("model_schedule", self.schedule, MODEL_SCHEDULES)
        checks.number("cutmix", self.cutmix, at_least=0, at_most=1)
        checks.integer("model_families", self.families, at_least=1)
        checks.integer("teachers", self.teachers, at_least=0)
        checks.number("temperature", self.temperature, above=0)

    def rate_at(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0."""
        if self.schedule == "cosine":
            return self.learning_rate * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        late = self.schedule == "step" and self.epochs > 1 and epoch >= self.epochs // 2
        return self.learning_rate / 10 if late else self.learning_rate


def cut_and_mix(
    images: torch.Tensor, source: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Put a rectangle of another image of the batch into each; return which, and its share.

    The rectangle has a share 1 - u of the area, u uniform (Yun et al. 2019 with
    Beta(1, 1)), and a uniform centre; what is outside is cut off, and counts for nothing.
    """
    height, width = images.shape[2:]
    side = math.sqrt(1 - source.random())
    top, bottom = _span(int(source.integers(height)), side * height, height)
    left, right = _span(int(source.integers(width)), side * width, width)
    other = torch.from_numpy(source.permutation(len(images))).to(images.device)
    patched = images.clone()
    patched[:, :, top:bottom, left:right] = images[other][:, :, top:bottom, left:right]
    return patched, other, (bottom - top) * (right - left) / (height * width)


def _span(centre: int, length: float, size: int) -> tuple[int, int]:
    return max(0, round(centre - length / 2)), min(size, round(centre + length / 2))


def augmented(
    images: torch.Tensor, augmentation: Augmentation, families: int, source: np.random.Generator
) -> torch.Tensor:
    """Return a batch under so many families, all different, in the order they are drawn."""
    seen: set[str] = set()
    while len(seen) < min(families, len(augmentation.families)):
        transform = augmentation.draw(source, len(images))
        if transform.family not in seen:
            seen.add(transform.family)
            images = transform.apply(images)
    return images


def answered(
    scores: torch.Tensor, teachers: Sequence[nn.Module], batch: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return T^2 times the cross-entropy of the teachers' mean answers, softmax(z / T).

    T^2 makes up for what T takes from the gradient (Hinton, Vinyals and Dean 2015).
    """
    with torch.no_grad():
        answers = [functional.softmax(one(batch) / temperature, dim=1) for one in teachers]
    wanted = torch.stack(answers).mean(dim=0)
    return temperature**2 * functional.cross_entropy(scores / temperature, wanted)


def learn(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    settings: TrainingSettings,
    augmentation: Augmentation,
    seed: int,
    keys: tuple[int, ...],
    progress: Callable[[float], None] | None = None,
) -> float:
    """Train in place, after the teachers that the settings ask for; return the mean loss.

    Teachers are networks like the model with weights of their own, trained in the same way.
    Their mean is better than any of them, and says more of a batch than its labels (networks
    born again, Furlanello et al. 2018).  All of them have seen the images alone.

    Parameters
    ----------
    seed, keys
        Name the streams of random numbers.
    progress
        Told which part of all epochs is done, from 0 to 1.
    """
    alone, teachers = replace(settings, teachers=0), list[nn.Module]()
    total = settings.epochs * (settings.teachers + 1)

    def report(before: int) -> Callable[[int], None] | None:
        done = before * settings.epochs
        return None if progress is None else lambda epoch: progress((done + epoch) / total)

    for number in range(settings.teachers):
        fresh = reinitialised(model, torch_seed(seed, "teacher", *keys, number))
        source = generator(seed, "teaching", *keys, number)
        train_on(fresh, images, labels, alone, augmentation, source, report(number))
        teachers.append(fresh.requires_grad_(False))
    source = generator(seed, "training", *keys)
    last = report(settings.teachers)
    return train_on(model, images, labels, alone, augmentation, source, last, teachers)


def train_on(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    settings: TrainingSettings,
    augmentation: Augmentation,
    source: np.random.Generator,
    progress: Callable[[int], None] | None = None,
    teachers: Sequence[nn.Module] = (),
) -> float:
    """Train in place with the cross-entropy; return the mean loss of all batches.

    Labels are places of the model's outputs, or shares of all of them [N, K].  Augmentation
    draws a family a batch (or several) and parameters for each image (DSA's way of training).
    With teachers the labels are theirs, of the batch as it is after all that (`answers`).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(
        parameters,
        settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    model.train()
    total, batches = torch.zeros((), device=images.device), 0
    for epoch in range(settings.epochs):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate_at(epoch)
        order = torch.from_numpy(source.permutation(len(images))).to(images.device)
        for part in torch.split(order, settings.batch_size):
            batch = augmented(images[part], augmentation, settings.families, source)
            other, share = None, 0.0
            if settings.cutmix and source.random() < settings.cutmix:
                batch, other, share = cut_and_mix(batch, source)
            scores, wanted = model(batch), labels[part]
            if teachers:
                loss = answered(scores, teachers, batch, settings.temperature)
            else:
                loss = functional.cross_entropy(scores, wanted)
                if other is not None:
                    mixed = functional.cross_entropy(scores, wanted[other])
                    loss = (1 - share) * loss + share * mixed
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
            batches += 1
        if progress is not None:
            progress(epoch + 1)
    model.eval()
    return float(total) / max(1, batches)


@dataclass(frozen=True)
class PoolSettings:
    """How many feature models the server trains for a round, and the last one's epochs."""

    count: int = 1
    epochs: int = 50

    def __post_init__(self) -> None:
        checks.integer("trained_n", self.count, at_least=1)
        checks.integer("pool_epochs", self.epochs, at_least=1)


class Trainer:
    """Trains copies of a model on images, from its first weights or from given ones."""

    def __init__(
        self,
        model: nn.Module,
        sample: torch.Tensor,
        settings: TrainingSettings,
        augmentation: Augmentation,
        seed: int,
    ) -> None:
        self._flat = FlatModel(copy.deepcopy(model), sample[:2])
        self._first = self._flat.read().clone()
        self.settings = settings
        self.augmentation = augmentation
        self._seed = seed

    def train(
        self,
        weights: torch.Tensor | None,
        synthetic: SyntheticSet,
        round_index: int,
        progress: Progress | None = None,
    ) -> tuple[torch.Tensor, float]:
        """Return the trained weights and the mean loss of an epoch; None: from the first."""
        self._flat.write(self._first if weights is None else weights)
        report = None if progress is None else lambda done: progress("training", done)
        images = synthetic.expanded()
        with self._seeded(images.images.device, (round_index,)):
            loss = learn(
                self._flat.module,
                images.images,
                images.labels,
                self.settings,
                self.augmentation,
                self._seed,
                (round_index,),
                report,
            )
        return self._flat.read().clone(), loss

    def train_pool(
        self, synthetic: SyntheticSet, round_index: int, settings: PoolSettings
    ) -> torch.Tensor:
        """Return the weights [models, parameters] of models trained for a few epochs.

        Each starts with weights of its own; the last trains for `epochs`, the others for
        less in equal steps, so that they range from nearly random to half trained.
        """
        pool, images = [], synthetic.expanded()
        for number in range(settings.count):
            seed = torch_seed(self._seed, "pool", round_index, number)
            self._flat.module.load_state_dict(reinitialised(self._flat.module, seed).state_dict())
            epochs = max(1, round(settings.epochs * (number + 1) / settings.count))
            short = replace(self.settings, epochs=epochs, schedule="constant", teachers=0)
            source = generator(self._seed, "pool training", round_index, number)
            with self._seeded(images.images.device, (round_index, number)):
                train_on(
                    self._flat.module,
                    images.images,
                    images.labels,
                    short,
                    self.augmentation,
                    source,
                )
            pool.append(self._flat.read().clone())
        return torch.stack(pool)

    @contextmanager
    def _seeded(self, device: torch.device, keys: tuple[int, ...]) -> Iterator[None]:
        """Let layers that drop out, and draw from torch's global generator, draw from the seed."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(torch_seed(self._seed, "dropout", *keys))
            yield
