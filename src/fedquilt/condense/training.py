"""Training a model on synthetic images."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedquilt.common import checks
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.embeds import reinitialised
from fedquilt.condense.matching import SyntheticSet
from fedquilt.config.choices import MODEL_SCHEDULES
from fedquilt.method import Progress
from fedquilt.training import FlatModel


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
        How many families of augmentation a batch goes through, one after the other.

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

    def __post_init__(self) -> None:
        checks.integer("model_epochs", self.epochs, at_least=1)
        checks.integer("batch_size", self.batch_size, at_least=1)
        checks.number("model_lr", self.learning_rate, above=0)
        checks.choice("model_schedule", self.schedule, MODEL_SCHEDULES)
        checks.number("cutmix", self.cutmix, at_least=0, at_most=1)
        checks.integer("model_families", self.families, at_least=1)

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
    """Return a batch under so many families, all different, in the order they are drawn.

    Each has parameters of its own for every image (DSA's way of training, which has one).
    """
    seen: set[str] = set()
    while len(seen) < min(families, len(augmentation.families)):
        transform = augmentation.draw(source, len(images))
        if transform.family not in seen:
            seen.add(transform.family)
            images = transform.apply(images)
    return images


def train_on(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    settings: TrainingSettings,
    augmentation: Augmentation,
    source: np.random.Generator,
    progress: Callable[[int], None] | None = None,
) -> float:
    """Train in place with the cross-entropy; return the mean loss of all batches.

    Labels are places of the model's outputs, or shares of all of them [N, K].
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
            loss = functional.cross_entropy(scores, wanted)
            if other is not None:
                loss = (1 - share) * loss + share * functional.cross_entropy(scores, wanted[other])
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


class Learner:
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
        report = None
        if progress is not None:
            total = self.settings.epochs
            report = lambda done: progress("training", done / total)  # noqa: E731
        loss = self._train(synthetic, self.settings, "training", (round_index,), report)
        return self._flat.read().clone(), loss

    def train_pool(
        self, synthetic: SyntheticSet, round_index: int, settings: PoolSettings
    ) -> torch.Tensor:
        """Return the weights [models, parameters] of models trained for a few epochs.

        Each starts with weights of its own; the last trains for `epochs`, the others for
        less in equal steps, so that they range from nearly random to half trained.
        """
        pool = []
        for number in range(settings.count):
            seed = torch_seed(self._seed, "pool", round_index, number)
            self._flat.module.load_state_dict(reinitialised(self._flat.module, seed).state_dict())
            epochs = max(1, round(settings.epochs * (number + 1) / settings.count))
            short = replace(self.settings, epochs=epochs, schedule="constant")
            self._train(synthetic, short, "pool training", (round_index, number))
            pool.append(self._flat.read().clone())
        return torch.stack(pool)

    def _train(
        self,
        synthetic: SyntheticSet,
        settings: TrainingSettings,
        purpose: str,
        keys: tuple[int, ...],
        report: Callable[[int], None] | None = None,
    ) -> float:
        """Train the flat model, where it stands, on the expanded images."""
        images, device = synthetic.expanded(), synthetic.images.device
        # Layers that drop out draw from torch's global generator.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(torch_seed(self._seed, "dropout", *keys))
            return train_on(
                self._flat.module,
                images.images,
                images.labels,
                settings,
                self.augmentation,
                generator(self._seed, purpose, *keys),
                report,
            )
