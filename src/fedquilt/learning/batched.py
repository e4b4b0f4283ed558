"""Many clients as one tensor program: the fast engine for small models and for GPUs.

The weights of K clients are stacked, one leading axis for the clients, and the
model runs on the stack through `torch.func.vmap`.  Client k's loss depends on
client k's weights alone, so the gradient of the *sum* of the K losses with
respect to the stack is every client's own gradient, in one backward pass.

Clients hold different numbers of samples.  A batch that is shorter than the
widest one of its step is padded with samples of weight zero, and a client with
no step left drops out of the program: rows are sorted by number of steps, so
the clients still training are always the first ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.learning.engine import ClientUpdate, LocalSettings, Task
from fedquilt.learning.local import client_seed, epoch_batches, seeded_layers
from fedquilt.learning.stack import ModelStack, group_size, obstacle
from fedquilt.randomness import torch_seed


class BatchedEngine:
    """Train many clients at once; memory is one model and one batch a client.

    The batches are those of the sequential engine, so updates agree with it up
    to floating-point rounding.  The exception is a model that draws random
    numbers while it trains (dropout): its masks are drawn for the whole group,
    so the two engines agree in distribution only.  The draw is seeded by
    (seed, round, group); the same run on this engine repeats exactly, as long
    as the clients fall into the same groups.

    The updates of one group are rows of one matrix, which lives as long as one
    of them does.

    Parameters
    ----------
    max_clients_per_group : int, optional
        How many clients run as one program; the cohort is worked off in groups
        of consecutive clients.  By default as many as fit into a part of the
        device's memory, whatever else uses it at the moment, so that the
        groups of a run do not depend on that.

    Raises
    ------
    InvalidValueError
        The model cannot run as a stack; the message says why.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: LocalSettings,
        max_clients_per_group: int | None = None,
    ) -> None:
        reason = obstacle(model, task)
        if reason:
            raise InvalidValueError(
                f"engine='batched' cannot train this model: {reason}; "
                "use engine='sequential' or engine='processes'"
            )
        self.task = task
        self.settings = settings
        self._stack = ModelStack(model, task)
        if max_clients_per_group is None:
            max_clients_per_group = group_size(self._stack, settings.batch_size)
        self.max_clients_per_group = validate.integer(
            "max_clients_per_group", max_clients_per_group, at_least=1
        )

    @staticmethod
    def supports(model: nn.Module, task: Task) -> bool:
        """Tell whether the model can run as a stack of clients."""
        return obstacle(model, task) is None

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the cohort, in its order."""
        clients = [int(client) for client in cohort]
        for group, first in enumerate(range(0, len(clients), self.max_clients_per_group)):
            members = clients[first : first + self.max_clients_per_group]
            plan = _plan(self.task, members, self.settings, round_index)
            with seeded_layers(
                self.task.inputs.device, torch_seed(self.settings.seed, "group", round_index, group)
            ):
                deltas, losses = self._train_group(start, plan, learning_rate)
            for client, row in zip(members, plan.row_of, strict=True):
                size = len(self.task.clients[client])
                yield ClientUpdate(client, deltas[row], size, losses[row])

    def _train_group(
        self, start: torch.Tensor, plan: _Plan, learning_rate: float
    ) -> tuple[torch.Tensor, list[float]]:
        """Run all steps of a group; nothing waits for the device until the end."""
        stack, count = self._stack, len(plan.row_of)
        weights = stack.spread(start, count)
        pull = learning_rate * self.settings.fedprox_mu
        anchors = stack.spread(start, 1) if pull else []
        loss_sum = torch.zeros(count, device=start.device)
        leaves: list[torch.Tensor] = []
        for step, (active, width) in enumerate(zip(plan.active, plan.widths, strict=True)):
            if not leaves or len(leaves[0]) != active:
                leaves = [tensor[:active].detach().requires_grad_() for tensor in weights]
            samples = plan.samples[step, :active, :width]
            losses = (stack.losses(leaves, samples) * plan.shares[step, :active, :width]).sum(1)
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
            _move(leaves, gradients, anchors, learning_rate, pull)
            loss_sum[:active].addcmul_(losses.detach(), plan.sizes[step, :active])
        return stack.gather(weights, start), (loss_sum / plan.seen).tolist()

    def close(self) -> None:
        """Hold nothing beyond the working model, give nothing back."""


@torch.no_grad()
def _move(
    leaves: list[torch.Tensor],
    gradients: tuple[torch.Tensor | None, ...],
    anchors: list[torch.Tensor],
    learning_rate: float,
    pull: float,
) -> None:
    """Take one step in place: w <- w + pull * (w_start - w) - lr * gradient."""
    if anchors:
        for leaf, anchor in zip(leaves, anchors, strict=True):
            leaf.lerp_(anchor, pull)
    used = [(w, g) for w, g in zip(leaves, gradients, strict=True) if g is not None]
    torch._foreach_add_([w for w, _ in used], [g for _, g in used], alpha=-learning_rate)


@dataclass(frozen=True, eq=False)
class _Plan:
    """All local steps of a group, laid out before the first one runs.

    At step t the first `active[t]` rows train, each on the samples
    `samples[t, row, :widths[t]]`; `shares` is 1/(batch size) for a sample of the
    batch and 0 for padding.  Padding repeats the last sample of the batch, so it
    cannot bring in a value that the client does not have.
    """

    row_of: list[int]
    active: list[int]
    widths: list[int]
    samples: torch.Tensor
    shares: torch.Tensor
    sizes: torch.Tensor
    seen: torch.Tensor


def _plan(task: Task, clients: list[int], settings: LocalSettings, round_index: int) -> _Plan:
    """Lay out a group's steps on the host and move them to the device at once."""
    batches = [
        _batches(task.clients[client], settings, client_seed(settings, round_index, client))
        for client in clients
    ]
    order = sorted(range(len(clients)), key=lambda place: -len(batches[place]))
    sizes, samples = _tables([batches[place] for place in order])
    device = task.inputs.device
    sizes_there = torch.from_numpy(sizes).to(device)
    inside = torch.arange(samples.shape[2], device=device) < sizes_there[..., None]
    return _Plan(
        row_of=np.argsort(order).tolist(),
        active=(sizes > 0).sum(1).tolist(),
        widths=sizes.max(1, initial=0).tolist(),
        samples=torch.from_numpy(samples).to(device),
        shares=inside / sizes_there[..., None].clamp(min=1),
        sizes=sizes_there.float(),
        seen=sizes_there.sum(0).clamp(min=1),
    )


def _batches(samples: NDArray[np.int64], settings: LocalSettings, seed: int) -> list[torch.Tensor]:
    """Return a client's batches of all epochs, as the sequential engine draws them."""
    shuffle = torch.Generator().manual_seed(seed)
    index = torch.as_tensor(samples, dtype=torch.int64)
    return [
        batch
        for _ in range(settings.epochs)
        for batch in epoch_batches(index, settings.batch_size, shuffle, 1)
    ]


def _tables(rows: list[list[torch.Tensor]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the batch sizes [steps, rows] and the padded samples [steps, rows, widest]."""
    steps = np.array([len(batches) for batches in rows], dtype=np.int64)
    flat = [batch for batches in rows for batch in batches]
    lengths = np.array([batch.shape[0] for batch in flat], dtype=np.int64)
    row = np.repeat(np.arange(len(rows)), steps)
    step = np.arange(len(flat)) - np.repeat(np.cumsum(steps) - steps, steps)
    sizes = np.zeros((steps.max(initial=0), len(rows)), dtype=np.int64)
    sizes[step, row] = lengths
    column = np.arange(lengths.max(initial=0))
    samples = np.zeros((*sizes.shape, len(column)), dtype=np.int64)
    if flat:
        first = np.cumsum(lengths) - lengths
        place = first[:, None] + np.minimum(column, lengths[:, None] - 1)
        samples[step, row] = torch.cat(flat).numpy()[place]
    return sizes, samples
