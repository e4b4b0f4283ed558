"""Matching where the images lie, as DM and FedDM do it.

DM (Zhao and Bilen 2023) and FedDM (Xiong et al. 2023) hold the real images at the place
where synthetic ones are made.  Nothing has to be sent ahead, so every step has a model,
an augmentation and a batch of real images of its own; with f and z the mean embedding
and the mean scores of a class,

    DM      sum_c |f_syn - f_real|^2,                        w drawn anew
    FedDM   sum_c |f_syn - f_real|^2 + |z_syn - z_real|^2,   w at distance rho of the global model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.condense.augment import Augmentation
from fedquilt.condense.matching import Matcher, MatchingSettings, View
from fedquilt.condense.statistics import group_means
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.condense.table import StatisticsTable
from fedquilt.condense.targets import ClassTargets


@dataclass(frozen=True, eq=False)
class RealImages:
    """The images at hand: all of a data set, and which of them, by class in ascending order."""

    images: torch.Tensor
    classes: Mapping[int, NDArray[np.int64]]

    def batch(self, size: int, source: np.random.Generator) -> list[NDArray[np.int64]]:
        """Draw `size` samples of each class without replacement, all where there are fewer."""
        return [
            source.choice(samples, size, replace=False) if len(samples) > size else samples
            for samples in self.classes.values()
        ]


def real_view(
    model: nn.Module,
    real: RealImages,
    batch: int,
    augmentation: Augmentation,
    source: np.random.Generator,
    with_logits: bool,
) -> View:
    """Look at a batch of each class through a model, under one draw of the augmentation.

    The draw has a row of parameters for each class; synthetic images of the same classes
    meet the same ones (siamese augmentation).
    """
    device = real.images.device
    drawn = real.batch(batch, source)
    counts = torch.tensor([len(samples) for samples in drawn])
    places = torch.arange(len(drawn), device=device)
    transform = augmentation.draw(source, len(drawn))
    features, logits = group_means(
        model,
        real.images,
        torch.from_numpy(np.concatenate(drawn)).to(device),
        counts,
        transform=transform,
        rows=places.repeat_interleave(counts.to(device)),
        with_logits=with_logits,
    )
    labels = torch.tensor(list(real.classes), device=device)
    table = StatisticsTable(torch.zeros_like(labels), labels, counts.to(device), features, logits)
    return View(model, ClassTargets(table), transform)


def match_real(
    synthetic: SyntheticSet,
    real: RealImages,
    model_at: Callable[[int], nn.Module],
    settings: MatchingSettings,
    batch: int,
    augmentation: Augmentation,
    source: np.random.Generator,
    progress: Callable[[int], None] | None = None,
) -> list[float]:
    """Match the set to real images of its classes; return the loss before each step.

    Parameters
    ----------
    synthetic
        Its images change in place; its classes are those of `real`.
    model_at
        The feature model of a step, frozen.
    batch
        Real images of a class that a step sees.
    """
    with_logits = settings.logit_loss_type != "none"
    views: list[View] = []
    matcher = None
    losses = []
    for done in range(settings.iterations):
        view = real_view(model_at(done), real, batch, augmentation, source, with_logits)
        # The matcher keeps the momentum; what it looks at is another view of the same classes.
        views[:] = [view]
        matcher = matcher or Matcher(synthetic, views, settings)
        losses.append(matcher.step(0, source))
        if progress is not None:
            progress(done + 1)
    return torch.stack(losses).tolist()
