"""What anybody may make of a certified release: soft labels of the released head.

Everything after the noise is free.  The released head W says for any image x how likely
each class is, softmax(W phi(x)); so a network of any kind can learn from as many public
drawings as it likes, each labelled by the head, and from the synthetic images besides
(distillation, Hinton, Vinyals and Dean 2015).  Drawings come from a seed; what the network
learns of the clients it learns from the releases alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from fedquilt.common import checks
from fedquilt.models.features import draw, precompute


@dataclass(frozen=True, eq=False)
class Release:
    """What a certified condensation has released, and the public front it is about.

    Attributes
    ----------
    head : [K, D]
        The head that the residuals have built.
    front
        The public front phi.
    images : [N, C, H, W]
        The synthetic images, normalised.
    mean, std
        What images are normalised with, one value a channel.
    """

    head: torch.Tensor
    front: nn.Module
    images: torch.Tensor
    mean: Sequence[float]
    std: Sequence[float]

    def scores(self, images: torch.Tensor) -> torch.Tensor:
        """Return W phi(x), [N, K]."""
        return precompute(self.front, images) @ self.head.T

    def shares(self, images: torch.Tensor) -> torch.Tensor:
        """Return how likely the head holds each class, [N, K]."""
        return functional.softmax(self.scores(images), dim=1)


def transfer_set(release: Release, drawings: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images to train on and their soft labels: public drawings, then the synthetic ones.

    Parameters
    ----------
    drawings
        Public drawings; 0: the synthetic images alone.
    seed
        Draws them.
    """
    checks.integer("drawings", drawings, at_least=0)
    images = release.images
    if drawings:
        channels, *_ = shape = tuple(images.shape[1:])
        drawn = draw("strokes" if channels == 1 else "leaves", shape, drawings, seed)
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (release.mean, release.std))
        images = torch.cat([((drawn - mean) / std).to(images), images])
    return images, release.shares(images)
