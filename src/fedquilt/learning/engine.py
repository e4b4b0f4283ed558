"""What an engine is: it trains a cohort and yields one update per client.

Every engine runs the same local steps on the same batches, drawn from the same
per-client seeds, so engines differ in speed and floating-point rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn


@dataclass(frozen=True)
class LocalSettings:
    """How a client trains: plain SGD, with the FedProx term when mu > 0.

    FedProx (Li et al. 2020) adds mu/2 * ||w - w_global||^2 to the local loss.
    """

    epochs: int
    batch_size: int
    fedprox_mu: float
    seed: int
    group_rows: int | None = None
    """How many clients a program of the batched engine is made for; None: those it is given.

    Where a secret coin decides who is given to the engine, the number must not follow it.
    """


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""The loss of a model in training on a batch: (model, inputs, targets) -> a number."""

LossOf = Callable[[int, int], Loss]
"""The loss that a client minimises in a round: (client, round) -> loss."""


@dataclass(frozen=True, eq=False)
class ClassMask:
    """Which outputs a client's loss leaves alone: `hidden[client, class]` have this value."""

    hidden: torch.Tensor
    value: float

    def apply(self, outputs: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return outputs with the hidden classes set; `hidden` are rows of the mask."""
        return outputs.masked_fill(hidden, self.value)


@dataclass(frozen=True, eq=False)
class Task:
    """The training data of all clients: one tensor, and an index array a client."""

    inputs: torch.Tensor
    targets: torch.Tensor
    clients: Sequence[NDArray[np.int64]] = field(repr=False)
    class_mask: ClassMask | None = None
    elsewhere: bool = False
    """Whether the data of some clients, or of all, are on other machines."""

    def public(self) -> Task:
        """Return two made-up samples in the shape of the real ones, held by one client.

        Whatever is tried on a model before it trains (which buffers move, whether it can
        run as a stack) is decided for all clients, so no client's data may decide it.
        """
        inputs = public_inputs(self.inputs, 2)
        targets = self.targets.new_zeros(2, *self.targets.shape[1:])
        return Task(inputs, targets, [np.arange(2)])

    def index(self, client: int) -> torch.Tensor:
        """Return the sample numbers of a client, on the data's device."""
        return torch.as_tensor(self.clients[client], device=self.inputs.device)


def public_inputs(like: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    """Return samples that nobody holds, in shape, type and place like those of `like`.

    Normal numbers; where samples are whole numbers (token ids), zeros and ones in turn.
    """
    shape = (count, *like.shape[1:])
    if not like.is_floating_point():
        turns = torch.arange(count, device=like.device) % 2
        return turns.to(like.dtype).view(count, *(1,) * (len(shape) - 1)).expand(shape).clone()
    draws = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return draws.to(device=like.device, dtype=like.dtype)


@dataclass(frozen=True, eq=False)
class ClientUpdate:
    """What a client sends: local minus global weights, and how it got there."""

    client: int
    delta: torch.Tensor
    num_examples: int
    loss: float


class Engine(Protocol):
    """Trains the clients of a cohort."""

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the cohort, in its order.

        A client of whom nothing arrived may be left out: it is not in the sum, and it is not
        charged.  Whatever arrived is yielded, unusable or not (then as NaN): who is charged
        must not depend on what is in it.
        """

    def close(self) -> None:
        """Release the resources of the engine: processes, memory."""
