"""Matching with real images at hand: DM, FedDM, and first images that clients condense.

Data that lie beside the matching need no statistics: every step has a model, an
augmentation and a batch of real images of its own (`match_real`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common.randomness import generator, torch_seed
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.embeds import embedding_model, perturbed
from fedquilt.condense.matching import Matcher, MatchingSettings, View
from fedquilt.condense.statistics import ClassTargets, StatisticsTable, group_means
from fedquilt.condense.synthetic import SyntheticSet, shrink_to_tiles
from fedquilt.config import CondenseConfig


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
        # The matcher keeps the momentum; its view is another one of the same classes.
        views[:] = [view]
        matcher = matcher or Matcher(synthetic, views, settings)
        losses.append(matcher.step(0, source))
        if progress is not None:
            progress(done + 1)
    return torch.stack(losses).tolist()


BATCH_OF_CLIENT = 32
"""Real images of a class that a client's step sees, as in the published FedNum code."""


def condensed_by_clients(
    config: CondenseConfig,
    model: nn.Module,
    held: Iterable[Mapping[int, torch.Tensor]],
    settings: MatchingSettings,
    first: SyntheticSet,
) -> int:
    """Replace first images by ones that clients have condensed (`init_method="dm"`, FedDM).

    Every client moves `ipc` images of each class that it holds enough of, which begin as
    its own, around the untrained model for `dc_iterations` steps, and sends them; of all that
    were sent for a class, `first` takes some at random.

    Parameters
    ----------
    held
        The images of each client by class.
    settings
        How images are moved.
    first
        Its images change in place; a class that nobody holds keeps its own.

    Returns the bytes that clients sent.
    """
    sent: dict[int, list[torch.Tensor]] = {}
    for number, by_class in enumerate(held):
        least = config.min_group
        kept = {c: images for c, images in sorted(by_class.items()) if len(images) >= least}
        if kept:
            made = _condensed(config, model, number, kept, settings)
            for label, images in zip(made.classes, made.by_class(), strict=True):
                sent.setdefault(label, []).append(images)
    source = generator(config.seed, "first of condensed")
    for label, images in zip(first.classes, first.by_class(), strict=True):
        if label in sent:
            pool = torch.cat(sent[label])
            chosen = np.resize(source.permutation(len(pool)), first.ipc * first.tiles**2)
            images.copy_(
                shrink_to_tiles(pool[torch.from_numpy(chosen).to(pool.device)], first.tiles)
            )
    return 4 * sum(images.numel() for parts in sent.values() for images in parts)


def _condensed(
    config: CondenseConfig,
    model: nn.Module,
    number: int,
    by_class: Mapping[int, torch.Tensor],
    settings: MatchingSettings,
) -> SyntheticSet:
    """Return the images that one client makes of its own."""
    source = generator(config.seed, "client condenses", number)
    ends = np.cumsum([0, *(len(images) for images in by_class.values())])
    places = {c: np.arange(ends[i], ends[i + 1]) for i, c in enumerate(by_class)}
    real = RealImages(torch.cat(list(by_class.values())), places)
    begin = [np.resize(source.permutation(at), config.ipc) for at in places.values()]
    index = torch.from_numpy(np.concatenate(begin)).to(real.images.device)
    made = SyntheticSet(real.images[index], tuple(by_class), config.ipc)

    def model_at(step: int) -> nn.Module:
        seed = torch_seed(config.seed, "client condenses", number, step)
        moved = perturbed(model, config.rho, seed).eval().requires_grad_(False)
        return embedding_model(moved, config.embed_layer)

    match_real(made, real, model_at, settings, BATCH_OF_CLIENT, Augmentation("none"), source)
    return made
