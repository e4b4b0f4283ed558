"""Training a model on synthetic images."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedquilt.common import checks
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.learning import FlatModel
from fedquilt.method import Progress


@dataclass(frozen=True)
class TrainingSettings:
    """SGD with momentum and weight decay; the rate falls tenfold once, half way.

    The numbers are those of the FedNum and DM references (0.01, 0.9, 5e-4).
    """

    epochs: int = 500
    batch_size: int = 256
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    drop: bool = True

    def __post_init__(self) -> None:
        checks.integer("model_epochs", self.epochs, at_least=1)
        checks.integer("batch_size", self.batch_size, at_least=1)
        checks.number("model_lr", self.learning_rate, above=0)


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

    Labels are places of the model's outputs.  Augmentation draws one family a batch
    and parameters for each image (DSA's way of training).
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
        if settings.drop and settings.epochs > 1 and epoch == settings.epochs // 2:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate / 10
        order = torch.from_numpy(source.permutation(len(images))).to(images.device)
        for part in torch.split(order, settings.batch_size):
            batch = augmentation.draw(source, len(part)).apply(images[part])
            loss = functional.cross_entropy(model(batch), labels[part])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
            batches += 1
        if progress is not None:
            progress(epoch + 1)
    model.eval()
    return float(total) / max(1, batches)


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
        device = synthetic.images.device
        report = None
        if progress is not None:
            total = self.settings.epochs
            report = lambda done: progress("training", done / total)  # noqa: E731
        # Layers that drop out draw from torch's global generator.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(torch_seed(self._seed, "dropout", round_index))
            loss = train_on(
                self._flat.module,
                synthetic.images,
                synthetic.labels,
                self.settings,
                self.augmentation,
                generator(self._seed, "training", round_index),
                report,
            )
        return self._flat.read().clone(), loss
