"""Clients that began at older models: they train from those, and count less.

An update from the model of tau releases ago is scaled by (1 + tau)^(-1/2) (FedBuff, Nguyen et al.
2022) when it arrives and before its clip, so that a client's vector is within its clip whatever
its age.  The models are releases of earlier rounds, which are public.

    AgedEngine    innermost: each client trains from the model that it began at
    StaleEngine   outermost: what arrives is scaled

What clients do to what they send (compression, attacks) lies between, and sees the whole buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.training.task import ClientIds, ClientUpdate, Engine, WrappedEngine


class PastModels:
    """A server's step that keeps the models with which the last rounds began.

    Parameters
    ----------
    weights
        The model in the beginning.
    most
        How many models are kept.
    clock
        The simulated seconds at the end of a round.
    """

    def __init__(self, weights: torch.Tensor, most: int, clock: Callable[[int], float]) -> None:
        self._clock = clock
        self._models = weights.new_zeros((most, weights.numel()))
        self._rounds = np.full(most, -1, dtype=np.int64)

    def serve(self, server: Any) -> PastModels:
        """Learn what moves the model; return this step, which takes its place."""
        self._server = server
        return self

    def note(self, round_index: int, weights: torch.Tensor) -> None:
        """Keep the model with which a round begins."""
        slot = round_index % len(self._rounds)
        self._models[slot], self._rounds[slot] = weights, round_index

    def at(self, round_index: int) -> torch.Tensor:
        """Return the model with which a round began; a round without release left it alone."""
        later = np.where(self._rounds >= round_index, self._rounds, np.iinfo(np.int64).max)
        return self._models[int(later.argmin())].clone()

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Move the model."""
        return self._server.step(weights, update)  # type: ignore[no-any-return]

    def report(self) -> dict[str, float]:
        """Return what the server says, and the simulated time."""
        return {**self._server.report(), "clock": self._clock(int(self._rounds.max()))}

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the server's state and the models."""
        kept = {"past_models": self._models.cpu().numpy(), "past_rounds": self._rounds.copy()}
        return {**self._server.state(), **kept}

    def load_state(self, state: dict[str, NDArray[Any]], device: torch.device) -> None:
        """Restore what `state` returned."""
        self._server.load_state(state, device)
        self._models.copy_(torch.from_numpy(np.array(state["past_models"])))
        self._rounds = np.array(state["past_rounds"], dtype=np.int64)


def discount(age: int) -> float:
    """Return the weight of an update that began so many releases ago."""
    return float((1 + age) ** -0.5)


class AgedEngine(WrappedEngine):
    """An engine whose clients begin at the models of their ages."""

    def __init__(
        self, engine: Engine, past: PastModels, ages: Callable[[int], Mapping[int, int]]
    ) -> None:
        self._engine, self._past, self._ages = engine, past, ages

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the updates, the oldest models' first: one training for each model."""
        self._past.note(round_index, start)
        ages = self._ages(round_index)
        for age in sorted({ages[int(client)] for client in cohort}, reverse=True):
            clients = [int(client) for client in cohort if ages[int(client)] == age]
            model = self._past.at(round_index - age)
            yield from self._engine.train(model, clients, round_index, learning_rate)


class StaleEngine(WrappedEngine):
    """An engine whose updates count less the older the model is that they began at."""

    def __init__(self, engine: Engine, ages: Callable[[int], Mapping[int, int]]) -> None:
        self._engine, self._ages = engine, ages

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the updates as the server counts them."""
        ages = self._ages(round_index)
        for update in self._engine.train(start, cohort, round_index, learning_rate):
            scaled = update.delta * discount(ages[update.client])
            yield dataclasses.replace(update, delta=scaled)
