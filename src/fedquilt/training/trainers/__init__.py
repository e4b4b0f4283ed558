"""How clients take their steps, in one process: what a trainer is.

| trainer | steps | for |
|---|---|---|
| `autograd` | one client after the other, by autograd | every model and loss |
| `captured` | one client after the other, by CUDA graphs | other models on a GPU |
| `manual` | gradients written by hand, a few small clients at a time | plain networks on a CPU |
| `vmap` | many clients as one stacked program | models without state, mostly on a GPU |
| `gpu` | many clients as one program of our own kernels | plain networks on a GPU |

All of them draw the same batches and masks from the same seeds, so updates agree up to rounding.
A faster trainer is used where nothing speaks against it and a trial agrees with autograd (`trial`).
Where clients train (here, in workers, on devices) is the engine's matter (`training.engines`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from fedquilt.training.task import ClientUpdate, LocalSettings, Task

NEVER_SILENT = (MemoryError, torch.OutOfMemoryError)
"""Errors of the machine, which say nothing of a client's data."""


class Trainer(ABC):
    """Trains groups of clients; what it can do is declared, from public numbers alone."""

    name: ClassVar[str]
    task: Task
    settings: LocalSettings
    group_size: int = 1
    """How many clients it takes at once."""
    together: int = 1
    """How many of them share each step, so that fewer at once are slower."""
    is_small: bool = False
    """Whether a round is so short that a second thread of torch only costs time."""

    starts_early: bool = False
    """Whether `train` queues the work on a device and returns while it is done there."""

    @abstractmethod
    def train(
        self,
        start: torch.Tensor,
        clients: Sequence[int],
        round_index: int,
        learning_rate: float,
        out: Sequence[torch.Tensor] | None = None,
    ) -> Iterator[ClientUpdate]:
        """Yield the updates of at most `group_size` clients, in their order.

        `out` is memory that updates may be put into, one vector a client.
        """

    def lend_updates(self) -> None:  # noqa: B027 (most have memory for each update)
        """Let an update lie in the working model's memory until the next client trains."""

    def restore(self) -> None:  # noqa: B027 (a program leaves nothing behind)
        """Restore what training has changed in the model, the loss and the optimizer."""


def failed_update(
    error: Exception, settings: LocalSettings, client: int, out: torch.Tensor, num_examples: int
) -> ClientUpdate:
    """Raise the error of a client, or return NaN for it where clients are protected."""
    if not settings.silent or isinstance(error, NEVER_SILENT):
        raise error
    return ClientUpdate(client, out.fill_(math.nan), num_examples, math.nan)
