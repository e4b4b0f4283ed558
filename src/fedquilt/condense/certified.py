"""The parts of a condensation that claims a bound: one vector a client and round.

The first rounds ask for class means, the others for what the head built so far does
not explain.  Which round asks for what is public.  The
mechanism clips, sums and noises the vectors like any others; what the server makes of
a release - head, images, model - costs nothing more.

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

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fedquilt.common.randomness import torch_seed
from fedquilt.condense.matching import SyntheticSet
from fedquilt.condense.server import load_like
from fedquilt.condense.training import Learner
from fedquilt.method import Progress
from fedquilt.models.features import draw, precompute
from fedquilt.training import ClientIds, ClientUpdate, Engine, Task

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Schedule:
    """What each round asks for: means in the first rounds, then residuals.

    The step of the head falls linearly from `head_step` to 0 over the residual rounds.
    """

    rounds: int
    mean_rounds: int
    head_step: float

    def asks_for_means(self, round_index: int) -> bool:
        """Tell whether a round asks for means."""
        return round_index < self.mean_rounds

    def step_at(self, round_index: int) -> float:
        """Return the step of the head in a residual round."""
        left = self.rounds - round_index
        return self.head_step * left / max(1, self.rounds - self.mean_rounds)


class CertifiedEngine(Engine):
    """Compute one table for each client from the features of a public front.

    Features do not change from round to round, so they are computed once, for all samples,
    whoever the first cohort is.  The size of a cohort may be secret, so progress is
    reported equally often, and in the same words, for every cohort.

    Parameters
    ----------
    task : Task
        All samples, and who holds which.
    front : nn.Module
        The public front.
    released : Released
        What was released so far, shared with the server.
    schedule : Schedule
        What each round asks for.
    senders : int, optional
        How many clients the traffic is counted for; None: those of the round.  A count
        of bytes must not reveal a cohort that a secret coin has drawn.
    """

    def __init__(
        self,
        task: Task,
        front: nn.Module,
        released: Released,
        schedule: Schedule,
        senders: int | None = None,
    ) -> None:
        self.task = task
        self.schedule = schedule
        self.released = released
        self.senders = senders
        self.round_index = -1
        self.bytes_up = 0
        self.bytes_down = 0
        self.progress: Progress | None = None
        self._front = front
        self._features: torch.Tensor | None = None

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the table of each client of the cohort as a vector, in its order."""
        self.round_index = round_index
        numbers = self.released.head.numel() + len(self.released.head)
        senders = len(cohort) if self.senders is None else self.senders
        self.bytes_up = senders * numbers * _FLOAT_BYTES
        self.bytes_down = senders * self.released.head.numel() * _FLOAT_BYTES
        self._report_progress(0.0)
        if self._features is None:
            self._features = precompute(self._front, self.task.inputs)
        for client in map(int, cohort):
            index = self.task.index(client)
            table = self._table(self._features[index], index, round_index)
            yield ClientUpdate(client, table.flatten(), len(index), math.nan)
        self._report_progress(1.0)

    def outgoing(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the head: residuals are about it, and nothing else changes between rounds."""
        return self.released.head.flatten()

    def incoming(self, sent: torch.Tensor) -> torch.Tensor:
        """Take the head; the model's weights decide nothing."""
        self.released.head = sent.view_as(self.released.head).to(self.released.head)
        return sent

    @property
    def table_size(self) -> int | None:
        """How many numbers a table has, the same for everybody."""
        return self.released.means_total.numel()

    def objection(self, vector: torch.Tensor) -> str | None:
        """Refuse nothing: any table of the right size is bounded by its clip."""
        return None

    def _report_progress(self, share: float) -> None:
        if self.progress is not None:
            self.progress("looking", share)

    def _table(self, features: torch.Tensor, index: torch.Tensor, round_index: int) -> torch.Tensor:
        labels = self.task.targets[index]
        if self.schedule.asks_for_means(round_index):
            return mean_table(features, labels, len(self.released.head))
        return residual_table(features, labels, self.released.head)


class GrowingServer:
    """Keeps what was released; grows images from it and trains the model on them.

    Parameters
    ----------
    trainer : Learner
        Trains the model on images.
    synthetic : SyntheticSet
        Holds the images; they are grown anew whenever the model is trained.
    engine : CertifiedEngine
        The clients' side, for the round and its traffic.
    front : nn.Module
        The public front, differentiable in the images.
    mean, std
        Normalisation of the images, one value a channel.
    drawings : int
        Public drawings to begin with.
    """

    def __init__(
        self,
        trainer: Learner,
        synthetic: SyntheticSet,
        engine: CertifiedEngine,
        front: nn.Module,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        drawings: int,
        growing: GrowingSettings,
        seed: int,
    ) -> None:
        self.synthetic = synthetic
        self.engine = engine
        self.progress: Progress | None = None
        self._trainer = trainer
        self._front = copy.deepcopy(front).requires_grad_(False)
        shape = (1, -1, 1, 1)
        device = synthetic.images.device
        self._mean = torch.tensor(mean, device=device).view(shape)
        self._std = torch.tensor(std, device=device).view(shape)
        self._drawings = drawings
        self._growing = growing
        self._seed = seed
        self._pool: tuple[torch.Tensor, torch.Tensor] | None = None
        self._report: dict[str, float] = {}
        # The round whose release is in neither images nor model yet; -1: none is open.
        self._untrained_round = -1

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Store a release.

        Images are grown from it later (`train_if_stale`), because that takes long: by then
        the release, which is paid for, is in a checkpoint.
        """
        index, released = self.engine.round_index, self.engine.released
        table = update.view(released.means_total.shape)
        if self.engine.schedule.asks_for_means(index):
            released.take_means(table)
        else:
            released.take_residuals(table, self.engine.schedule.step_at(index))
        self._report = {"bytes_up": self.engine.bytes_up, "bytes_down": self.engine.bytes_down}
        self._untrained_round = index
        return weights

    def train_if_stale(self, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """Grow images and train the model on them if neither was done since the last release.

        Returns the weights and the measurements of both.
        """
        if self._untrained_round < 0:
            return weights, {}
        gap = self._grow()
        trained, loss = self._trainer.train(
            None, self.synthetic, self._untrained_round, self.progress
        )
        self._untrained_round = -1
        return trained, {"matching_loss": gap, "epoch_avg_loss": loss}

    def grown(self) -> SyntheticSet:
        """Return all images: which classes there are is public, who holds them is not."""
        return self.synthetic

    def not_sent(self) -> list[int]:
        """Return nothing: noise hides whether a class was sent."""
        return []

    def _grow(self) -> float:
        """Pick drawings and refine them; return the relative gap that is left."""
        released, ipc = self.engine.released, self.synthetic.ipc
        head = released.direction()
        drawings, features = self._drawn()
        chosen = pick(features, head, released.means(), ipc, self._growing)
        places = torch.arange(len(head), device=head.device).repeat_interleave(ipc)
        report = self._progress_of_growing()
        pixels, gap = refine(drawings[chosen], places, head, self._embed, self._growing, report)
        self.synthetic.images.copy_((pixels - self._mean) / self._std)
        return gap

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._front((pixels - self._mean) / self._std).flatten(1)
        return embedded

    def _drawn(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return public drawings and their features; drawn once."""
        if self._pool is None:
            shape = tuple(self.synthetic.images.shape[1:])
            kind = "strokes" if shape[0] == 1 else "leaves"
            seed = torch_seed(self._seed, "drawings")
            images = draw(kind, shape, self._drawings, seed).to(self.synthetic.images.device)
            features = precompute(self._front, (images - self._mean) / self._std)
            self._pool = (images, features)
        return self._pool

    def _progress_of_growing(self) -> Callable[[int], None] | None:
        progress, total = self.progress, self._growing.steps
        if progress is None:
            return None
        return lambda done: progress("growing", done / total)

    def report(self) -> dict[str, float]:
        """Return the bytes of the round."""
        return dict(self._report)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return images, means and head: all of it released, or computed from releases."""
        released = self.engine.released
        return {
            "images": self.synthetic.images.detach().cpu().numpy(),
            "means_total": released.means_total.cpu().numpy(),
            "seen": np.array([released.means_seen, released.residuals_seen]),
            "head": released.head.cpu().numpy(),
            "behind": np.array(self._untrained_round),
        }

    def load_state(self, state: dict[str, NDArray[Any]], device: torch.device) -> None:
        """Restore what `state` returned."""
        released = self.engine.released
        self.synthetic.images.copy_(load_like(state, "images", self.synthetic.images))
        released.means_total = load_like(state, "means_total", released.means_total)
        released.means_seen, released.residuals_seen = map(int, state["seen"])
        released.head = load_like(state, "head", released.head)
        self._untrained_round = int(state["behind"])


KAPPA = 0.3
"""Weight of a held class in the count column; a mean of D features has a norm below 1."""


def mean_table(features: torch.Tensor, places: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the class means of a client's samples, [K, D + 1]; see the module.

    `places` [n] says which row a sample's class is.
    """
    counts = torch.bincount(places, minlength=classes)
    held = (counts > 0).to(features)
    sums = functional.one_hot(places, classes).to(features).T @ features
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
    pool: torch.Tensor, head: torch.Tensor, means: torch.Tensor, ipc: int, settings: GrowingSettings
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
