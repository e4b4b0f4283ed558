"""Many clients as one tensor program: for models that are no plain network, mostly on a GPU.

The weights of K clients are stacked, one leading axis for the clients, and the
model runs on the stack through `torch.func.vmap`.  Client k's loss depends on
client k's weights alone, so the gradient of the *sum* of the K losses with
respect to the stack is every client's own gradient, in one backward pass.

Clients hold different numbers of samples.  A batch that is shorter than the
program is wide is padded with samples of weight zero, and a client with no step
left drops out of the program: rows are sorted by number of steps, so the clients
still training are always the first ones.

A client's update must not depend on which other clients train in the same program, or their data
would show in it.  Its batches and its random layers follow from its own seed
(`draws`).  Where clients are protected the program's shape and a client's row in it follow
public numbers alone: everybody keeps its place in the cohort, and whoever has no step left stays,
without moving.  Elsewhere the program shrinks to shapes that were seen to compute alike (`stack`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from fedquilt.common import checks, trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.training.draws import seeded_layers
from fedquilt.training.optimizers import RuleState
from fedquilt.training.state import ModuleState
from fedquilt.training.task import ClientUpdate, LocalSettings, Task
from fedquilt.training.trainers import Trainer
from fedquilt.training.trainers.autograd import refuse_hidden_state
from fedquilt.training.trainers.batches import BatchTable, Step
from fedquilt.training.trainers.stack import Batch, ModelStack, ProgramShapes, group_size, obstacle

# A batch size up to this is a program's width whoever is in it; a larger one, which
# stands for "all samples", is cut down to the next power of two of what a client holds.
_COMMON_WIDTH = 128


class VmapTrainer(Trainer):
    """Trains many clients at once; memory is one model and one batch a client.

    The updates of one group are rows of one matrix, which lives as long as one of them does.

    Parameters
    ----------
    max_clients_per_group : int, optional
        How many clients run as one program.  By default as many as fit into a part of the
        device's memory, whatever else uses it at the moment, so that the
        groups of a run do not depend on that.

    Raises
    ------
    InvalidValueError
        The model cannot run as a stack; the message says why.
    """

    name = "vmap"

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: LocalSettings,
        max_clients_per_group: int | None = None,
    ) -> None:
        if max_clients_per_group is not None:
            checks.integer("max_clients_per_group", max_clients_per_group, at_least=1)
        reason = why_not_stacked(model, task, settings)
        if reason:
            raise InvalidValueError(
                f"engine='batched' cannot train this model: {reason}; "
                "use engine='sequential' or engine='processes'"
            )
        self.task, self.settings = task, settings
        stack = self._stack = ModelStack(model, task)
        self._shapes = ProgramShapes(stack, settings.optimizer)
        refuse_hidden_state(stack.flat, stack.public, settings, stack.draws)
        stack.reset()
        if max_clients_per_group is None:
            copies = 4 if settings.optimizer.is_plain else 8
            max_clients_per_group = group_size(stack, settings.batch_size, copies)
        self.max_clients_per_group = max_clients_per_group
        self.group_size = min(max_clients_per_group, settings.group_rows or max_clients_per_group)

    def train(
        self,
        start: torch.Tensor,
        clients: Sequence[int],
        round_index: int,
        learning_rate: float,
        out: Sequence[torch.Tensor] | None = None,
    ) -> Iterator[ClientUpdate]:
        """Yield the updates of a group, in its order; they are rows of one matrix."""
        rows = self.group_size if self.settings.group_rows else len(clients)
        return self._train_members(start, clients, rows, round_index, learning_rate)

    def restore(self) -> None:
        """Restore what training has changed in the model and the loss."""
        self._stack.flat.restore()
        self.task.objective.begin()

    def _widths(self, members: Sequence[int]) -> list[int]:
        sizes = [len(self.task.clients[client]) for client in members]
        return [program_width(size, self.settings.batch_size) for size in sizes]

    def _train_members(
        self,
        start: torch.Tensor,
        members: Sequence[int],
        rows: int,
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Train clients in programs of `rows` rows, one for each width they need."""
        done: dict[int, ClientUpdate] = {}
        widths = self._widths(members)
        for width in sorted(set(widths)):
            group = [c for c, w in zip(members, widths, strict=True) if w == width]
            # What one step shows to be alike need not be so in all: a claim does not rest on it.
            alike = not self.settings.silent and self._shapes.rows_are_alike(rows, width)
            # Under a secret coin a client's row would follow who else was kept: one by one.
            alone = self.settings.group_rows and not alike
            # Where a row's place matters, everybody keeps its own in programs of all widths.
            place = group if alike else members
            programs = [([client], 1) for client in group] if alone else [(place, rows)]
            for some, count in programs:
                table = BatchTable(
                    self.task, list(some), self.settings, round_index, alike, set(group)
                )
                with seeded_layers(start.device, self.settings.seed):
                    deltas, losses = self._train_rows(start, table, count, width, learning_rate)
                for row, client in enumerate(table.clients):
                    if client not in table.training:
                        continue
                    size = len(self.task.clients[client])
                    loss = losses[row] if size else math.nan
                    done[client] = ClientUpdate(client, deltas[row], size, loss)
        for client in members:
            yield done.pop(client)

    def _train_rows(
        self, start: torch.Tensor, table: BatchTable, rows: int, width: int, learning_rate: float
    ) -> tuple[torch.Tensor, list[float]]:
        """Run all steps of a group; nothing waits for the device until the end."""
        stack, count = self._stack, len(table.clients)
        stack.reset()
        weights = stack.spread(start, rows)
        self.task.objective.begin()
        optimizer, mu = self.settings.optimizer, self.settings.fedprox_mu
        pull = learning_rate * mu
        anchors = stack.spread(start, 1) if pull else []
        state = None if optimizer.is_plain else RuleState(optimizer, weights, stacked=True)
        loss_sum = torch.zeros(rows, device=start.device)
        leaves: list[torch.Tensor] = []
        program = self._program(table, rows, width)
        for step in table.steps(program, rows, width, stack):
            if not leaves or len(leaves[0]) != len(step.samples):
                some = slice(len(step.samples))
                leaves = [tensor[some].detach().requires_grad_() for tensor in weights]
            inputs = trees.take(self.task.inputs, step.samples)
            targets = trees.take(self.task.targets, step.samples)
            batch = Batch(inputs, targets, step.bits, step.hidden)
            losses = (stack.losses(leaves, batch) * step.shares).sum(1)
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
            if state is None:
                _move(leaves, gradients, anchors, learning_rate, pull, step)
            else:
                moving = step.moving_rows(len(leaves[0]))
                state.step(leaves, gradients, anchors or None, learning_rate, mu, moving)
            seen = losses.detach()[: step.active] * step.sizes
            if step.moving is not None:
                seen = torch.where(step.moving, seen, 0.0)
            loss_sum[: step.active] += seen
        deltas = stack.gather([tensor[:count] for tensor in weights], start)
        return deltas, (loss_sum[:count] / table.seen.to(start.device)).tolist()

    def _program(self, table: BatchTable, rows: int, width: int) -> list[tuple[int, int]]:
        """Return the shape of each step's program, at most rows x width."""
        if not table.sorted_rows:
            return [(rows, width)] * len(table.active)
        return [
            self._shapes.fit(active, widest, rows, width)
            for active, widest in zip(table.active, table.widths, strict=True)
        ]


def why_not_stacked(
    model: nn.Module, task: Task, settings: LocalSettings | None = None
) -> str | None:
    """Return why model, loss or optimiser cannot run as a stack, or None when they can."""
    if settings is not None and settings.optimizer.factory is not None:
        return "its optimizer is your own, which steps one client at a time"
    state = ModuleState(model, model.parameters())  # copies share its class, closures and hooks
    try:
        return obstacle(model, task)
    finally:
        state.restore()


def program_width(size: int, batch_size: int) -> int:
    """Return how wide the program of a client of so many samples is.

    A function of the client's own size and of public numbers.
    """
    if batch_size <= _COMMON_WIDTH:
        return batch_size
    return min(batch_size, max(_COMMON_WIDTH, 1 << max(0, size - 1).bit_length()))


@torch.no_grad()
def _move(
    leaves: list[torch.Tensor],
    gradients: tuple[torch.Tensor | None, ...],
    anchors: list[torch.Tensor],
    learning_rate: float,
    pull: float,
    step: Step,
) -> None:
    """Take one step in place: w <- w + pull * (w_start - w) - lr * gradient.

    Only clients that have samples in this step move; the other rows fill the program up.
    A gradient of theirs is put aside, whatever it is: zero times NaN would be NaN.
    """
    rows = [leaf[: step.active] for leaf in leaves]
    moves = [None if g is None else g[: step.active] for g in gradients]
    pulls: list[float | torch.Tensor] = [pull] * len(rows)
    if step.moving is not None:
        masks = [step.moving.view(-1, *(1,) * (row.dim() - 1)) for row in rows]
        moves = [
            None if g is None else torch.where(mask, g, 0.0)
            for g, mask in zip(moves, masks, strict=True)
        ]
        pulls = [mask.to(row.dtype) * pull for mask, row in zip(masks, rows, strict=True)]
    if anchors:
        for row, anchor, share in zip(rows, anchors, pulls, strict=True):
            row.lerp_(anchor.expand_as(row), share)
    used = [(w, g) for w, g in zip(rows, moves, strict=True) if g is not None]
    if used:
        torch._foreach_add_([w for w, _ in used], [g for _, g in used], alpha=-learning_rate)
