"""Hostile clients in a simulation, to try robust rules and clips on.

A share of the clients, drawn from the run's seed, does one of these in every round it joins
(s = `attack_strength`, u its own update, m and d mean and deviation of the honest updates):

| name | what a hostile client sends | source |
|---|---|---|
| `sign_flip` | -s u | Li et al. 2019 (RSA) |
| `scaling` | s u | Bagdasaryan et al. 2020 |
| `label_flip` | s times what it learns from labels C - 1 - y | Tolpegin et al. 2020 |
| `backdoor` | s times what it learns of half its images with a square, label 0 | Gu et al. 2017 |
| `little_is_enough` | m - s d, coordinate by coordinate | Baruch et al. 2019 |
| `inner_product` | -s m | Xie et al. 2020 |

The last two look at the honest updates of the round: the strongest attacker there is.  What they
send follows from other clients' data, so no bound may be claimed of such a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator
from fedquilt.config.choices import COLLUDING_ATTACKS
from fedquilt.training.task import ClientIds, ClientUpdate, Engine, WrappedEngine

BACKDOOR_CLASS = 0


def hostile_clients(num_clients: int, share: float, seed: int) -> frozenset[int]:
    """Return who is hostile: so large a share of the clients, to the nearest number."""
    order = generator(seed, "attackers").permutation(num_clients)
    return frozenset(order[: round(share * num_clients)].tolist())


def with_trigger(images: torch.Tensor) -> torch.Tensor:
    """Return images with a bright square in the corner, a quarter of their side long.

    It is as bright as the brightest value among them.
    """
    if images.dim() != 4 or not images.is_floating_point():
        raise InvalidValueError(
            f"attack='backdoor' needs images [samples, channels, height, width], not inputs of "
            f"shape {tuple(images.shape)}"
        )
    high, wide = (max(1, size // 4) for size in images.shape[-2:])
    marked = images.clone()
    marked[..., -high:, -wide:] = images.max() if images.numel() else 0.0
    return marked


def poisoned(
    attack: str,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    num_classes: int | None,
    held: Sequence[NDArray[np.int64]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets as hostile clients train on them; `held` are their samples."""
    if num_classes is None or not isinstance(targets, torch.Tensor) or targets.dim() != 1:
        raise InvalidValueError(
            f"attack={attack!r} needs data with one class a sample and a known number of classes"
        )
    targets = targets.clone()
    if attack == "backdoor":
        inputs = inputs.clone()
    for client in held:
        samples = torch.as_tensor(client)
        if attack == "label_flip":
            targets[samples] = num_classes - 1 - targets[samples]
        elif len(samples):
            inputs[samples[::2]] = with_trigger(inputs[samples])[::2]
            targets[samples[::2]] = BACKDOOR_CLASS
    return inputs, targets


class AttackedEngine(WrappedEngine):
    """An engine some of whose clients are hostile."""

    def __init__(self, engine: Engine, attack: str, strength: float, who: frozenset[int]) -> None:
        self._engine, self._attack, self._strength, self._who = engine, attack, strength, who

    @property
    def starts_early(self) -> bool:
        """As the engine says."""
        return self._engine.starts_early

    def lend_updates(self) -> None:
        """Let updates lie in lent memory, unless attackers look at all of them."""
        if self._attack not in COLLUDING_ATTACKS:
            self._engine.lend_updates()

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield each client's update, those of hostile clients as the attack has them."""
        updates = self._engine.train(start, cohort, round_index, learning_rate)
        if self._attack in COLLUDING_ATTACKS:
            return self._together(updates)
        factor = -self._strength if self._attack == "sign_flip" else self._strength
        return (
            dataclasses.replace(update, delta=update.delta * factor)
            if update.client in self._who
            else update
            for update in updates
        )

    def _together(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """Wait for the cohort, and let its hostile clients agree on one vector."""
        cohort = list(updates)
        honest = [u.delta for u in cohort if u.client not in self._who]
        honest = [delta for delta in honest if bool(delta.isfinite().all())]
        if not honest:
            yield from cohort
            return
        sent = self._agreed(torch.stack(honest))
        for update in cohort:
            hostile = update.client in self._who
            yield dataclasses.replace(update, delta=sent.clone()) if hostile else update

    def _agreed(self, honest: torch.Tensor) -> torch.Tensor:
        mean = honest.mean(dim=0)
        if self._attack == "inner_product":
            return -self._strength * mean
        return mean - self._strength * honest.std(dim=0, correction=0)
