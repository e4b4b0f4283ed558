"""Training a model on the synthetic set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedquilt import validate
from fedquilt.condense.augment import Augmentation


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
        validate.integer("model_epochs", self.epochs, at_least=1)
        validate.integer("batch_size", self.batch_size, at_least=1)
        validate.number("model_lr", self.learning_rate, above=0)


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
