"""Growing images from a released head and class means, without looking at data again.

The images should teach what the head knows.  Softmax regression with penalty w |W|^2
on images x_j with labels y_j has its optimum at W where

    (1/n) sum_j (1[y_j = c] - p_c(x_j)) phi(x_j) = 2 w W_c     for all classes c,

so images are moved until this holds for the released head: whoever trains a head on
them finds it again.  The condition says nothing of how images look, so they begin as
public drawings that the head takes for the class and that lie near its mean, stay near
them, and are kept smooth (total variation).

All of it is computed from releases and public drawings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

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
