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
        for samples, shares, sizes in plan.steps():
            if not leaves or len(leaves[0]) != len(samples):
                leaves = [tensor[: len(samples)].detach().requires_grad_() for tensor in weights]
            hidden = None if plan.hidden is None else plan.hidden[: len(samples)]
            losses = (stack.losses(leaves, samples, hidden) * shares).sum(1)
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
            _move(leaves, gradients, anchors, learning_rate, pull)
            loss_sum[: len(samples)].addcmul_(losses.detach(), sizes)
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

    `samples` holds one row a batch, those of the first step first; step t has
    `active[t]` rows, for the first so many clients of the group in the plan's
    order, and uses `widths[t]` columns of them.  `shares` is 1/(batch size) for a
    sample of the batch and 0 for padding.  Padding repeats the last sample of the
    batch, so it cannot bring in a value that the client does not have.  `hidden` are
    the clients' rows of the class mask, in the plan's order.
    """

    row_of: list[int]
    active: list[int]
    widths: list[int]
    samples: torch.Tensor
    shares: torch.Tensor
    sizes: torch.Tensor
    seen: torch.Tensor
    hidden: torch.Tensor | None

    def steps(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield the samples and shares [active, width] and the sizes [active] of each step."""
        parts = (torch.split(t, self.active) for t in (self.samples, self.shares, self.sizes))
        for width, samples, shares, sizes in zip(self.widths, *parts, strict=True):
            yield samples[:, :width], shares[:, :width], sizes


def _plan(task: Task, clients: list[int], settings: LocalSettings, round_index: int) -> _Plan:
    """Lay out a group's steps on the host and move them to the device at once."""
    counts = np.array([len(task.clients[client]) for client in clients])
    order = np.argsort(-counts, kind="stable")
    begins, sizes = _batch_table(counts[order], settings)
    step, row = np.nonzero(sizes)
    lengths = sizes[step, row][:, None]
    column = np.arange(sizes.max(initial=0))
    place = begins[step, row][:, None] + np.minimum(column, lengths - 1)
    in_order = [clients[member] for member in order]
    shuffled = _shuffled(task, in_order, settings, round_index)
    device = task.inputs.device
    lengths_there = torch.from_numpy(lengths).to(device)
    inside = torch.arange(len(column), device=device) < lengths_there
    return _Plan(
        row_of=np.argsort(order).tolist(),
        active=np.count_nonzero(sizes, axis=1).tolist(),
        widths=sizes.max(axis=1, initial=0).tolist(),
        samples=torch.from_numpy(shuffled[place]).to(device),
        shares=inside / lengths_there,
        sizes=lengths_there[:, 0].float(),
        seen=torch.from_numpy(sizes.sum(axis=0)).to(device).clamp(min=1),
        hidden=None if task.class_mask is None else task.class_mask.hidden[in_order],
    )


def _batch_table(
    counts: NDArray[np.int64], settings: LocalSettings
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each batch begins in `_shuffled`, and its size, as [steps, clients].

    A client of n samples has ceil(n / B) steps an epoch; batch j of an epoch
    begins at j * B and holds min(B, n - j * B) samples.  A client with no step
    left has size 0.
    """
    batch_size, epochs = settings.batch_size, settings.epochs
    steps = -(-counts // batch_size)
    step = np.arange(epochs * int(steps.max(initial=0)))[:, None]
    epoch, batch = np.divmod(step, np.maximum(steps, 1))
    sizes = np.where(epoch < epochs, np.minimum(batch_size, counts - batch * batch_size), 0)
    first = np.cumsum(epochs * counts) - epochs * counts
    return first + epoch * counts + batch * batch_size, sizes


def _shuffled(
    task: Task, clients: list[int], settings: LocalSettings, round_index: int
) -> NDArray[np.int64]:
    """Return the clients' samples of all epochs, as the sequential engine draws them.

    Each epoch is asked for as one batch, which `_batch_table` cuts up: on a GPU the
    steps of a small model take less time than handling every batch on the host.
    """
    shuffle = torch.Generator()
    epochs = [torch.empty(0, dtype=torch.int64)]
    for client in clients:
        shuffle.manual_seed(client_seed(settings, round_index, client))
        index = torch.as_tensor(task.clients[client], dtype=torch.int64)
        for _ in range(settings.epochs):
            epochs.extend(epoch_batches(index, max(1, index.shape[0]), shuffle, 1))
    return torch.cat(epochs).numpy()
