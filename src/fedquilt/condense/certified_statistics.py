"""Class statistics for a certified release, and synthetic images grown from them.

A client sends one vector over all classes.  With features phi(x) from a public front,
|phi(x)| = sqrt(D), and K classes known in advance, the vector is a K x (D + 1) table,
clipped and noised as a whole by the mechanism of the round.  There are two kinds:

means
    row c = ( mean of phi over the client's samples of class c / sqrt(D), kappa ),
    zero for a class it does not hold.  Means, not sums: a client with many samples
    says no more than another, and clipping would only undo the difference.  The last
    column counts who holds the class.

residuals
    row c = ( sum_x n_{y(x)}^(-1/2) (1[y(x) = c] - p_c(x)) phi(x), 0 ),
    p = softmax(W phi) for the released head W so far, n_y the client's samples of
    class y.  These are the class sums of what W does not explain yet: at W = 0 class
    sums around the common mean, later of the samples that are still wrong.  It is the
    negative gradient of the cross-entropy of a linear head, weighted so that large
    classes of a client do not drown its small ones.

Both depend on one client's data and on what was released before, nothing else.

Images are then grown from the released head and class means alone.  A head trained on
them should be the released one.  Softmax regression with penalty w |W|^2
on images x_j with labels y_j has its optimum at W where

    (1/n) sum_j (1[y_j = c] - p_c(x_j)) phi(x_j) = 2 w W_c     for all classes c,

so images are moved until this holds for the released head.  The condition says nothing
of how images look, so they begin as public drawings that the head classifies as the class
and that lie near its mean, stay near them, and are kept smooth (total variation).  All of
it is post-processing: it is computed from releases and public drawings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

KAPPA = 0.3
"""Weight of a held class in the count column; a mean of D features has a norm below 1."""


def mean_table(features: torch.Tensor, places: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the class means of a client's samples, [K, D + 1]; see the module.

    `places` [n] says which row a sample's class is.
    """
    counts = torch.bincount(places, minlength=classes)
    held = (counts > 0).to(features)
    sums = _class_sums(features, places, classes)
    means = sums / counts.clamp(min=1)[:, None] / math.sqrt(features.shape[1])
    return torch.cat([means, (KAPPA * held)[:, None]], dim=1)


def residual_table(
    features: torch.Tensor, places: torch.Tensor, head: torch.Tensor
) -> torch.Tensor:
    """Return what the head [K, D] leaves unexplained, [K, D + 1]; see the module."""
    classes = len(head)
    counts = torch.bincount(places, minlength=classes).to(features)
    wanted = functional.one_hot(places, classes).to(features)
    residual = wanted - functional.softmax(features @ head.T, dim=1)
    weighted = residual / counts[places].sqrt()[:, None]
    return functional.pad(weighted.T @ features, (0, 1))


def _class_sums(features: torch.Tensor, places: torch.Tensor, classes: int) -> torch.Tensor:
    return functional.one_hot(places, classes).to(features).T @ features


@dataclass(eq=False)
class Released:
    """What the server knows: releases, and what it has computed from them.

    Attributes
    ----------
    means_total : [K, D + 1]
        Sum of the released tables of means.
    means_seen, residuals_seen : int
        How many releases of each kind there were.
    head : [K, D]
        The linear head that the residuals have built.
    """

    means_total: torch.Tensor
    head: torch.Tensor
    means_seen: int = 0
    residuals_seen: int = 0

    @classmethod
    def nothing(cls, classes: int, features: int, device: torch.device) -> Released:
        """Start without any release."""
        return cls(
            torch.zeros(classes, features + 1, dtype=torch.float64, device=device),
            torch.zeros(classes, features, device=device),
        )

    def take_means(self, table: torch.Tensor) -> None:
        """Add a release of means; the head starts over from all of them.

        Repeated releases of one statistic are averaged, which lowers their noise.
        """
        self.means_total += table
        self.means_seen += 1
        means = self.means()
        self.head = _START * (means - means.mean(dim=0))

    def take_residuals(self, table: torch.Tensor, step: float) -> None:
        """Move the head along a release of residuals."""
        self.head = (self.head + step * table[:, :-1]).to(self.head.dtype)
        self.residuals_seen += 1

    def means(self) -> torch.Tensor:
        """Return the class means, [K, D], of norm about sqrt(D).

        The noisy counts are pulled half way to their average: a class that few hold
        has a count that is mostly noise, and dividing by it would be worse than not.
        """
        table = self.means_total / max(1, self.means_seen)
        counts = table[:, -1] / KAPPA
        least = 0.05 * counts.mean().abs().clamp(min=1e-12)
        divisor = (0.5 * counts + 0.5 * counts.mean()).clamp(min=float(least))
        means = table[:, :-1] / divisor[:, None] * math.sqrt(table.shape[1] - 1)
        return means.to(self.head.dtype)

    def direction(self) -> torch.Tensor:
        """Return the head centred over classes, its rows of norm 1 on average.

        While only means are known, the head is their directions: a linear rule on rows
        of unequal length would prefer the classes whose means happen to be long.
        """
        head = self.head
        if not self.residuals_seen:
            head = functional.normalize(self.means(), dim=1)
        centred = head - head.mean(dim=0)
        size = torch.linalg.vector_norm(centred, dim=1).mean()
        direction: torch.Tensor = centred / size.clamp(min=1e-12)
        return direction


# The first head from the means; small, because residuals then do the work.
_START = 0.1

Embed = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class GrowingSettings:
    """Weights and steps; chosen on held-out training images of MNIST, and statements say so."""

    steps: int = 300
    step_size: float = 0.1
    penalty: float = 1e-2
    nearness: float = 0.01
    smoothness: float = 0.3
    candidates: int = 300
    distance: float = 1.0
    variety: float = 0.1


def pick(
    pool: torch.Tensor,
    head: torch.Tensor,
    means: torch.Tensor,
    ipc: int,
    settings: GrowingSettings,
) -> torch.Tensor:
    """Return the places [K * ipc] of the drawings to begin with, class after class.

    A drawing with features f is good for class c when log p_c(f) - |f - m_c|^2 / D is
    large; among the best ones, those far from the ones already taken come first.
    """
    score = functional.log_softmax(pool @ head.T, dim=1)
    score = score - settings.distance * torch.cdist(pool, means).square() / pool.shape[1]
    return torch.cat([_varied(pool, column, ipc, settings) for column in score.T])


def _varied(
    pool: torch.Tensor, score: torch.Tensor, count: int, settings: GrowingSettings
) -> torch.Tensor:
    best = score.topk(min(len(pool), max(count, settings.candidates))).indices
    taken = [0]
    nearest = torch.full((len(best),), torch.inf, device=pool.device)
    while len(taken) < count:
        newest = pool[best[taken[-1]]][None]
        nearest = torch.minimum(nearest, torch.cdist(pool[best], newest)[:, 0])
        merit = score[best] + settings.variety * nearest
        merit[taken] = -torch.inf
        taken.append(int(merit.argmax()))
    return best[taken]


def optimality_gap(
    features: torch.Tensor, places: torch.Tensor, head: torch.Tensor, penalty: float
) -> torch.Tensor:
    """Return how far the head is from the optimum of these samples, relative to its size."""
    wanted = functional.one_hot(places, len(head)).to(features)
    residual = wanted - functional.softmax(features @ head.T, dim=1)
    target = 2 * penalty * head
    gap = residual.T @ features / len(features) - target
    return gap.square().sum() / target.square().sum()


def roughness(pixels: torch.Tensor) -> torch.Tensor:
    """Return the total variation: mean absolute differences of neighbours, both ways."""
    down = (pixels[..., 1:, :] - pixels[..., :-1, :]).abs().mean()
    right = (pixels[..., 1:] - pixels[..., :-1]).abs().mean()
    return down + right


def refine(
    drawings: torch.Tensor,
    places: torch.Tensor,
    head: torch.Tensor,
    embed: Embed,
    settings: GrowingSettings,
    progress: Callable[[int], None] | None = None,
) -> tuple[torch.Tensor, float]:
    """Move drawings, pixels in [0, 1], towards the optimality condition.

    Returns the pixels and the relative gap that is left.  Pixels stay in (0, 1)
    because they are the logistic function of what Adam moves.
    """
    raw = torch.logit(drawings.clamp(0.02, 0.98)).requires_grad_(True)
    optimizer = torch.optim.Adam([raw], lr=settings.step_size)
    gap = torch.zeros(())
    for step in range(settings.steps):
        optimizer.param_groups[0]["lr"] = settings.step_size * (1 - step / settings.steps)
        pixels = torch.sigmoid(raw)
        gap = optimality_gap(embed(pixels), places, head, settings.penalty)
        away = (pixels - drawings).square().flatten(1).sum(dim=1).mean()
        loss = gap + settings.nearness * away + settings.smoothness * roughness(pixels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if progress is not None:
            progress(step + 1)
    return torch.sigmoid(raw).detach(), float(gap.detach())
