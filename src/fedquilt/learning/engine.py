"""What an engine is: it trains a cohort and yields one update per client.

Every engine runs the same local steps on the same batches, drawn from the same
per-client seeds, so engines differ in speed and floating-point rounding only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.errors import InvalidValueError


@dataclass(frozen=True)
class LocalSettings:
    """How a client trains: plain SGD, with the FedProx term when mu > 0.

    FedProx (Li et al. 2020) adds mu/2 * ||w - w_global||^2 to the local loss.
    """

    epochs: int
    batch_size: int
    fedprox_mu: float
    seed: int


@dataclass(frozen=True, eq=False)
class Task:
    """The training data of all clients: one tensor, and an index array a client."""

    inputs: torch.Tensor
    targets: torch.Tensor
    clients: Sequence[NDArray[np.int64]] = field(repr=False)

    def index(self, client: int) -> torch.Tensor:
        """Return the sample numbers of a client, on the data's device."""
        return torch.as_tensor(self.clients[client], device=self.inputs.device)


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
        """Yield the update of each client of the cohort, in its order."""

    def close(self) -> None:
        """Give back what the engine holds: processes, memory."""


def make_engine(name: str, model: nn.Module, task: Task, settings: LocalSettings) -> Engine:
    """Return the engine of a name; `auto` is batched on a GPU, else sequential."""
    from fedquilt.learning.sequential import SequentialEngine

    if name == "auto":
        on_gpu = task.inputs.device.type == "cuda"
        if on_gpu:
            from fedquilt.learning.batched import BatchedEngine

            if BatchedEngine.supports(model, task):
                return BatchedEngine(model, task, settings)
        return SequentialEngine(model, task, settings)
    if name == "sequential":
        return SequentialEngine(model, task, settings)
    if name == "batched":
        from fedquilt.learning.batched import BatchedEngine

        return BatchedEngine(model, task, settings)
    if name == "processes":
        from fedquilt.learning.processes import ProcessEngine

        return ProcessEngine(model, task, settings)
    raise InvalidValueError(
        f"engine={name!r} must be 'auto', 'sequential', 'batched' or 'processes'"
    )
