"""Many clients as one tensor program: the fast engine for small models and for GPUs.

The weights of K clients are stacked, one leading axis for the clients, and the
model runs on the stack through `torch.func.vmap`.  Client k's loss depends on
client k's weights alone, so the gradient of the *sum* of the K losses with
respect to the stack is every client's own gradient, in one backward pass.

Clients hold different numbers of samples.  A batch that is shorter than the
program is wide is padded with samples of weight zero, and a client with no step
left drops out of the program: rows are sorted by number of steps, so the clients
still training are always the first ones.

A client's row must be the same whoever stands beside it, or the others' data would
show in its update.  Its batches and its random layers follow from its own seed
(`draws`).  Where clients are protected the program's shape and a client's row in it follow
public numbers alone: everybody keeps its place in the cohort, and whoever has no step left stays,
without moving.  Elsewhere the program shrinks to shapes that were seen to compute alike (`stack`).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common import checks, trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.training.draws import draw_keys
from fedquilt.training.flat import FlatModel
from fedquilt.training.optimizers import RuleState
from fedquilt.training.state import ModuleState
from fedquilt.training.task import ClientUpdate, LocalSettings, Task
from fedquilt.training.trainers.autograd import (
    client_seed,
    find_draws,
    refuse_hidden_state,
    seeded_layers,
)
from fedquilt.training.trainers.batches import Shuffles
from fedquilt.training.trainers.gpu import PlannedTraining, Running
from fedquilt.training.trainers.manual import CpuTraining, hand_training
from fedquilt.training.trainers.plan import NoPlanError, Tables, is_interpreted
from fedquilt.training.trainers.stack import Batch, ModelStack, ProgramShapes, group_size, obstacle

_log = logging.getLogger(__name__)

# A batch size up to this is a program's width whoever is in it; a larger one, which
# stands for "all samples", is cut down to the next power of two of what a client holds.
_COMMON_WIDTH = 128
# How many numbers are laid out at once: places of samples, draws of random layers.
_LAID_OUT = 2**24


class BatchedEngine:
    """Train many clients at once; memory is one model and one batch a client.

    Batches and dropout masks are those of the sequential engine, so updates agree with
    it up to floating-point rounding.  A client's update does not depend on which other
    clients are in its group, nor on how many samples they hold.

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
        self.task = task
        self.settings = settings
        if max_clients_per_group is not None:
            checks.integer("max_clients_per_group", max_clients_per_group, at_least=1)
        self._by_hand = self._make_by_hand(model)
        self._planned = self._make_planned(model) if self._by_hand is None else None
        if self._by_hand is not None:
            self.max_clients_per_group = 1
            return
        if self._planned is not None:
            self.max_clients_per_group = max_clients_per_group or self._planned.most_clients
            return
        reason = engine_obstacle(model, task, settings)
        if reason:
            raise InvalidValueError(
                f"engine='batched' cannot train this model: {reason}; "
                "use engine='sequential' or engine='processes'"
            )
        self._stack = ModelStack(model, task)
        self._flat = self._stack.flat
        self._shapes = ProgramShapes(self._stack, settings.optimizer)
        stack = self._stack
        refuse_hidden_state(stack.flat, stack.public, settings, stack.draws)
        stack.reset()
        if max_clients_per_group is None:
            copies = 4 if settings.optimizer.is_plain else 8
            max_clients_per_group = group_size(self._stack, settings.batch_size, copies)
        self.max_clients_per_group = max_clients_per_group

    @staticmethod
    def supports(model: nn.Module, task: Task, settings: LocalSettings | None = None) -> bool:
        """Tell whether the model can run as a stack of clients."""
        return engine_obstacle(model, task, settings) is None

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the cohort, in its order.

        With `starts_early` the first group is training on the device when this returns.
        """
        clients = [int(client) for client in cohort]
        if self._by_hand is not None:
            by_hand, window = self._by_hand, self._by_hand.window
            parts = (clients[at : at + window] for at in range(0, len(clients), window))
            return self._put_back_after(
                update
                for part in parts
                for update in by_hand.updates_of(start, part, round_index, learning_rate)
            )
        most = self.settings.group_rows or len(clients)
        rows = max(1, min(self.max_clients_per_group, most))
        groups = [clients[first : first + rows] for first in range(0, len(clients), rows)]
        if self._planned is not None:
            planned = self._planned

            def begin(members: list[int]) -> Running:
                return self._begin(planned, start, members, round_index, learning_rate)

            return self._arriving(groups, begin, begin(groups[0]) if groups else None)
        updates = self._train_groups(start, groups, rows, round_index, learning_rate)
        return self._put_back_after(updates)

    def _put_back_after(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """Yield updates; what is made or evaluated next sees nothing of the last clients."""
        try:
            yield from updates
        finally:
            self._flat.restore()
            self.task.objective.begin()

    @property
    def is_small(self) -> bool:
        """Whether a round is so short that a second thread only costs time."""
        return self._by_hand is not None and self._by_hand.is_small

    @property
    def starts_early(self) -> bool:
        """Whether `train` queues work on a device and returns while it is done there."""
        return self._planned is not None and self.task.device.type == "cuda"

    def _begin(
        self,
        planned: PlannedTraining,
        start: torch.Tensor,
        members: list[int],
        round_index: int,
        learning_rate: float,
    ) -> Running:
        """Queue the training of some clients, as one program."""
        table = BatchTable(self.task, members, self.settings, round_index, True, set(members))
        return planned.begin(start, table, learning_rate)

    def _arriving(
        self,
        groups: list[list[int]],
        begin: Callable[[list[int]], Running],
        running: Running | None,
    ) -> Iterator[ClientUpdate]:
        """Yield the updates of all groups; the first one is `running`."""
        for members in groups:
            part, running = running or begin(members), None
            done: dict[int, ClientUpdate] = {}
            deltas, losses = part.result()
            for delta, loss, client in zip(deltas, losses, part.clients, strict=True):
                size = len(self.task.clients[client])
                done[client] = ClientUpdate(client, delta, size, loss if size else math.nan)
            del part, deltas
            for client in members:
                yield done.pop(client)

    def _widths(self, members: list[int]) -> list[int]:
        sizes = [len(self.task.clients[client]) for client in members]
        return [program_width(size, self.settings.batch_size) for size in sizes]

    def _train_groups(
        self,
        start: torch.Tensor,
        groups: list[list[int]],
        rows: int,
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        for members in groups:
            full = rows if self.settings.group_rows else len(members)
            yield from self._train_members(start, members, full, round_index, learning_rate)

    def _train_members(
        self,
        start: torch.Tensor,
        members: list[int],
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
                table = BatchTable(self.task, some, self.settings, round_index, alike, set(group))
                deltas, losses = self._train_group(start, table, count, width, learning_rate)
                for row, client in enumerate(table.clients):
                    if client not in table.training:
                        continue
                    size = len(self.task.clients[client])
                    loss = losses[row] if size else math.nan
                    done[client] = ClientUpdate(client, deltas[row], size, loss)
        for client in members:
            yield done.pop(client)

    def _train_group(
        self,
        start: torch.Tensor,
        table: BatchTable,
        rows: int,
        width: int,
        learning_rate: float,
    ) -> tuple[torch.Tensor, list[float]]:
        """Run all steps of a group; nothing waits for the device until the end."""
        with seeded_layers(start.device, self.settings.seed):
            return self._train_rows(start, table, rows, width, learning_rate)

    def _train_rows(
        self,
        start: torch.Tensor,
        table: BatchTable,
        rows: int,
        width: int,
        learning_rate: float,
    ) -> tuple[torch.Tensor, list[float]]:
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

    def _make_planned(self, model: nn.Module) -> PlannedTraining | None:
        """Return the fast way of a network of standard layers; None: it takes the general one."""
        public = self.task.public()
        flat = FlatModel(model, public.inputs)
        first = flat.read().clone()
        try:
            draws = find_draws(flat, public)
            planned = PlannedTraining(flat, self.task, self.settings, draws)
        except NoPlanError as error:
            _log.info("the model takes the general way, torch.func.vmap: %s", error)
            return None
        finally:
            flat.write(first)  # following the forward pass may have left something behind
        flat.module.train()
        refuse_hidden_state(flat, public, self.settings, draws)
        return planned

    def _make_by_hand(self, model: nn.Module) -> CpuTraining | None:
        """Return the steps of one client after the other, faster than a stack on a CPU."""
        if self.task.device.type != "cpu" or is_interpreted():
            return None
        public = self.task.public()
        flat = FlatModel(model, public.inputs)
        draws = find_draws(flat, public)
        training = hand_training(flat, self.task, self.settings, draws)
        if training is not None:
            self._flat = flat
            refuse_hidden_state(flat, public, self.settings, draws)
        return training

    def _program(self, table: BatchTable, rows: int, width: int) -> list[tuple[int, int]]:
        """Return the shape of each step's program, at most rows x width."""
        if not table.sorted_rows:
            return [(rows, width)] * len(table.active)
        return [
            self._shapes.fit(active, widest, rows, width)
            for active, widest in zip(table.active, table.widths, strict=True)
        ]

    def close(self) -> None:
        """Hold nothing beyond the working model, give nothing back."""


def engine_obstacle(model: nn.Module, task: Task, settings: LocalSettings | None) -> str | None:
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


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a program: rows beyond `active` and samples of share 0 only fill it up.

    `moving` [active] says who has samples in this step, None where all of them have;
    `shares` is 1/(counted elements of the batch) for a sample of the batch; `sizes` [active]
    are the sizes of the batches, `bits` what the random layers draw from.
    """

    active: int
    samples: torch.Tensor
    shares: torch.Tensor
    sizes: torch.Tensor
    moving: torch.Tensor | None
    bits: list[torch.Tensor]
    hidden: torch.Tensor | None

    def moving_rows(self, count: int) -> torch.Tensor | None:
        """Return who moves, as a mask of the program's rows; None where all of them do."""
        if self.moving is None and self.active == count:
            return None
        mask = torch.zeros(count, dtype=torch.bool, device=self.samples.device)
        mask[: self.active] = True if self.moving is None else self.moving
        return mask


class BatchTable:
    """All local steps of a group: who trains on which samples when.

    Rows are clients, those with most samples first where rows may be sorted.
    """

    def __init__(
        self,
        task: Task,
        clients: list[int],
        settings: LocalSettings,
        round_index: int,
        sorted_rows: bool,
        training: set[int],
    ) -> None:
        self.training = training
        held = [len(task.clients[client]) if client in training else 0 for client in clients]
        counts = np.array(held, dtype=np.int64)
        order = np.argsort(-counts, kind="stable") if sorted_rows else np.arange(len(clients))
        self.clients = [clients[member] for member in order]
        self.sorted_rows = sorted_rows
        self._task = task
        seeds = [client_seed(settings, round_index, client) for client in self.clients]
        self._seeds = np.array(seeds, dtype=np.uint64)
        nothing = np.zeros(0, dtype=np.int64)
        parts = [task.clients[client] if client in training else nothing for client in self.clients]
        self._shuffles = Shuffles(
            [np.asarray(part, dtype=np.int64) for part in parts],
            seeds,
            settings.batch_size,
            settings.epochs,
        )
        self._begins, self._sizes = _batch_table(self._shuffles, settings)
        self.active: list[int] = (self._sizes > 0).sum(axis=1).tolist()
        self.widths: list[int] = self._sizes.max(axis=1, initial=0).tolist()
        self.seen = torch.from_numpy(self._sizes.sum(axis=0)).clamp(min=1)

    @functools.cached_property
    def _shuffled(self) -> NDArray[np.int64]:
        return self._shuffles.table()

    def steps(
        self, shapes: list[tuple[int, int]], rows: int, columns: int, stack: ModelStack
    ) -> Iterator[Step]:
        """Yield the steps, each in its shape (at most rows x columns), with its draws."""
        block = max(1, _LAID_OUT // (rows * columns * max(1, stack.draws_a_sample)))
        for first in range(0, len(shapes), block):
            yield from self._block(first, shapes[first : first + block], rows, columns, stack)

    def _block(
        self,
        first: int,
        shapes: list[tuple[int, int]],
        rows: int,
        columns: int,
        stack: ModelStack,
    ) -> Iterator[Step]:
        """Lay out a stretch of steps on the host and move it to the device at once."""
        device = self._task.device
        steps = slice(first, first + len(shapes))
        missing = ((0, 0), (0, rows - len(self.clients)))
        sizes = np.pad(self._sizes[steps], missing)[..., None]
        place = np.pad(self._begins[steps], missing)[..., None]
        place = place + np.minimum(np.arange(columns), np.maximum(sizes - 1, 0))
        # Rows without samples point at one sample, never at what another client holds next.
        samples = self._shuffled[np.where(sizes > 0, place, len(self._shuffled) - 1)]
        there = torch.from_numpy(samples).to(device)
        lengths = torch.from_numpy(sizes).to(device)
        inside = torch.arange(columns, device=device) < lengths
        counted = torch.where(inside, self._task.counts[there], 0)
        elements = counted.sum(-1, keepdim=True)
        shares = torch.where(counted > 0, 1.0 / elements.clamp(min=1), 0.0)
        number = np.arange(first, first + len(shapes))[:, None]
        seeds = np.pad(self._seeds, (0, rows - len(self._seeds)))
        draws = range(len(stack.draw_shapes))
        keys = [torch.from_numpy(draw_keys(seeds, number, draw)).to(device) for draw in draws]
        bits = stack.bits(keys, columns)
        hidden = self._hidden(rows)
        has_samples = sizes[..., 0] > 0
        trains = torch.from_numpy(has_samples).to(device)
        for t, (count, width) in enumerate(shapes):
            # Unsorted rows all count, and all are masked: how many train is not for others to see.
            active = self.active[first + t] if self.sorted_rows else rows
            all_train = self.sorted_rows and bool(has_samples[t, :active].all())
            yield Step(
                active,
                there[t, :count, :width],
                shares[t, :count, :width],
                lengths[t, :active, 0].float(),
                None if all_train else trains[t, :active],
                [part[t, :count, :width] for part in bits],
                None if hidden is None else hidden[:count],
            )

    def tables(self, draws: int) -> Tables:
        """Return the whole table, for a program that reads it on the device."""
        number = np.arange(len(self._sizes))[:, None]
        keys = [draw_keys(self._seeds, number, draw) for draw in range(draws)]
        shuffles = self._shuffles
        hidden = self._hidden(len(self.clients))
        return Tables(self._begins, self._sizes, shuffles.length, shuffles.stretches, keys, hidden)

    def _hidden(self, rows: int) -> torch.Tensor | None:
        """Return the clients' rows of the class mask; rows that fill up hide nothing."""
        mask = self._task.class_mask
        if mask is None:
            return None
        nothing = mask.hidden.new_zeros(rows - len(self.clients), mask.hidden.shape[1])
        return torch.cat([mask.hidden[self.clients], nothing])


def _batch_table(
    shuffles: Shuffles, settings: LocalSettings
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each batch begins in the shuffled samples, and its size, as [steps, clients].

    A client of n samples has ceil(n / B) steps an epoch; batch j of an epoch
    begins at j * B and holds min(B, n - j * B) samples.  A client with no step
    left has size 0.
    """
    batch_size, epochs, counts = settings.batch_size, settings.epochs, shuffles.counts
    step = np.arange(epochs * int(shuffles.steps.max(initial=0)))[:, None]
    epoch, batch = np.divmod(step, np.maximum(shuffles.steps, 1))
    sizes = np.where(epoch < epochs, np.minimum(batch_size, counts - batch * batch_size), 0)
    places = shuffles.places[np.minimum(epoch, epochs - 1), np.arange(len(counts))]
    return places + batch * batch_size, sizes
