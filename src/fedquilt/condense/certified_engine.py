"""The parts of a condensation that claims a bound: one vector a client and round.

The first rounds ask for class means, the others for what the head built so far does
not explain (`fedquilt.condense.certified_statistics`).  Which round asks for what is public.  The
mechanism clips, sums and noises the vectors like any others; what the server makes of
a release - head, images, model - costs nothing more.
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

from fedquilt.common.randomness import torch_seed
from fedquilt.condense.certified_statistics import (
    GrowingSettings,
    Released,
    mean_table,
    pick,
    refine,
    residual_table,
)
from fedquilt.condense.server import load_like
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.condense.training import Trainer
from fedquilt.method import Progress
from fedquilt.models.features import draw, precompute
from fedquilt.training import ClientUpdate, Engine, Task

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
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
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

    def close(self) -> None:
        """Required of an engine; this one holds no resources."""


class GrowingServer:
    """Keeps what was released; grows images from it and trains the model on them.

    Parameters
    ----------
    trainer : Trainer
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
        trainer: Trainer,
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
