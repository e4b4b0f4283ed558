"""What clients do against drift: local steps on skewed data lead each client its own way.

With the released model x, a client's model y after K steps of rate r, and its update d = y - x:

| name | a step's gradient | a client keeps | it sends |
|---|---|---|---|
| `scaffold` | g - c_i + c | c_i <- c_i - c - d / (K r) | d, and how c_i moved |
| `feddyn` | g - h_i + alpha (y - x) | h_i <- h_i - alpha d | d |
| `fednova` | g | nothing | d / a_i, a_i |

`scaffold` is Karimireddy et al. 2020 (option II), `feddyn` Acar et al. 2021, `fednova` Wang et al.
2020, where a_i = K for plain SGD, (K - m (1 - m^K) / (1 - m)) / (1 - m) with momentum m and
(1 - (1 - r mu)^K) / (r mu) with FedProx's term.  What the server makes of it is in
`aggregation/rules.py`.  In `scaffold` and `feddyn` all clients weigh alike, as in the papers.

A linear term <v, w> in a client's loss adds v to every gradient: that is how they are corrected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fedquilt.common.errors import InvalidValueError
from fedquilt.training.flat import FlatModel, Segment
from fedquilt.training.task import (
    ClientIds,
    ClientUpdate,
    ClientVectors,
    Engine,
    LocalSettings,
    Loss,
    LossOf,
    Task,
    WrappedEngine,
)


class ShiftedLoss:
    """A loss whose gradient has v + mu (w - anchor) added; its value is that of the loss itself."""

    def __init__(
        self,
        loss: Loss,
        segments: Sequence[Segment],
        linear: torch.Tensor | None = None,
        anchor: torch.Tensor | None = None,
        mu: float = 0.0,
    ) -> None:
        self._loss, self._mu = loss, mu
        self._segments = [segment for segment in segments if not segment.is_buffer]
        self._linear, self._anchor = linear, anchor

    def __call__(self, module: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self._loss(module, inputs, targets)
        named, added = dict(module.named_parameters()), loss.new_zeros(())
        for segment in self._segments:
            weights = named[segment.name]
            if self._linear is not None:
                added = added + (weights * self._part(self._linear, segment, weights)).sum()
            if self._anchor is not None:
                away = weights - self._part(self._anchor, segment, weights)
                added = added + 0.5 * self._mu * away.square().sum()
        return loss + (added - added.detach())

    @staticmethod
    def _part(vector: torch.Tensor, segment: Segment, like: torch.Tensor) -> torch.Tensor:
        return vector[segment.start : segment.stop].view(segment.shape).to(like.dtype)


def local_steps(samples: int, settings: LocalSettings, *, needs_pairs: bool) -> int:
    """Return how many steps a client with so many samples takes in a round."""
    whole, rest = divmod(samples, settings.batch_size)
    return settings.epochs * (whole + (rest >= (2 if needs_pairs else 1)))


def normaliser(steps: int, settings: LocalSettings, learning_rate: float) -> float:
    """Return FedNova's |a_i|_1: the weight of one gradient's direction in so many steps."""
    if settings.optimizer.momentum:
        m = settings.optimizer.momentum
        return (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)
    shrunk = learning_rate * settings.fedprox_mu
    return (1 - (1 - shrunk) ** steps) / shrunk if shrunk else float(steps)


class CorrectedEngine(WrappedEngine):
    """An engine whose clients correct their steps, and what they send.

    Parameters
    ----------
    name : str
        scaffold, feddyn or fednova.
    make : callable
        Makes the engine that trains, given what each client minimises (None: the usual).
    flat, task, settings
        The model, the samples, and how clients train.
    control : callable
        Returns the server's control variate, which clients receive; None: zero.
    """

    is_small = starts_early = False

    def __init__(
        self,
        name: str,
        make: Callable[[LossOf | None], Engine],
        flat: FlatModel,
        task: Task,
        settings: LocalSettings,
        base_loss: LossOf,
        control: Callable[[], torch.Tensor | None],
    ) -> None:
        self._name, self._task, self._settings = name, task, settings
        self._segments, self._base, self._control = flat.segments, base_loss, control
        if flat.buffer_names:
            raise InvalidValueError(
                f"correction={name!r} must be 'none' for a model with {flat.buffer_names[0]!r}: a "
                "running statistic has no gradient to correct (GroupNorm has none)"
            )
        self._needs_pairs, self._zero = flat.needs_pairs, torch.zeros_like(flat.vector)
        self.kept: ClientVectors | None = None
        if name != "fednova":
            size = flat.vector.numel()
            self.kept = ClientVectors(f"correction={name!r}", len(task.clients), size)
        self._engine = make(None if name == "fednova" else self._loss_of)

    def _loss_of(self, client: int, round_index: int) -> Loss:
        """Return a client's loss with its linear term: c - c_i, or -h_i."""
        assert self.kept is not None
        loss, own = self._base(client, round_index), self.kept.get(client)
        server = self._control() if self._name == "scaffold" else None
        if own is None and server is None:
            return loss
        linear = self._zero if server is None else server.to(self._zero)
        return ShiftedLoss(loss, self._segments, linear if own is None else linear - own)

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield what each client of the cohort sends."""
        for update in self._engine.train(start, cohort, round_index, learning_rate):
            count = len(self._task.clients[update.client])
            steps = local_steps(count, self._settings, needs_pairs=self._needs_pairs)
            yield self._sent(update, max(steps, 1), learning_rate)

    def _sent(self, update: ClientUpdate, steps: int, learning_rate: float) -> ClientUpdate:
        delta, client = update.delta, update.client
        if self._name == "fednova":
            share = normaliser(steps, self._settings, learning_rate)
            sent = torch.cat([delta / share, delta.new_tensor([share])])
            return dataclasses.replace(update, delta=sent)
        assert self.kept is not None
        own = self.kept.get(client)
        if self._name == "feddyn":
            moved = -self._settings.fedprox_mu * delta
        else:
            moved = delta / (-steps * learning_rate)
            server = self._control()
            if server is not None:
                moved -= server.to(moved)
        if update.num_examples:
            self.kept.put(client, moved if own is None else own + moved)
        sent = delta if self._name == "feddyn" else torch.cat([delta, moved])
        return dataclasses.replace(update, delta=sent, num_examples=min(1, update.num_examples))
