"""Networks of standard layers on a GPU, many clients as one program (`plan`, `program`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedquilt.common.vectors import cache_norm
from fedquilt.training.draws import ClientDraws, draw_keys
from fedquilt.training.flat import FlatModel
from fedquilt.training.task import ClientUpdate, LocalSettings, Task, public_inputs
from fedquilt.training.trainers import Trainer
from fedquilt.training.trainers.batches import BatchTable, IndexChunk, Tables
from fedquilt.training.trainers.plan import LayerPlan, NoPlanError
from fedquilt.training.trainers.stack import clients_that_fit
from fedquilt.training.trainers.trial import (
    BFLOAT16,
    SCALES,
    TF32,
    Trial,
    autograd_gradients,
    drawn_tokens,
    plan_for,
    refuse_disagreement,
)

if TYPE_CHECKING:
    from fedquilt.training.trainers.gpu.program import Program

TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
_UNITS = {torch.float32: TF32, torch.bfloat16: BFLOAT16}
_TRIAL_CLIENTS, _TRIAL_STEPS, _TRIAL_RATE = 5, 2, 0.1
_REPEATS = 4


@dataclass(frozen=True, eq=False)
class Running:
    """A group of clients that trains on a device, or has trained there.

    `figures` are each client's mean loss and the length of its update.
    """

    clients: list[int]
    updates: torch.Tensor
    figures: torch.Tensor

    def result(self) -> tuple[list[torch.Tensor], list[float]]:
        """Wait for the device; return each client's update, its length noted, and mean loss."""
        losses, lengths = self.figures.tolist()
        rows = list(self.updates)
        for row, length in zip(rows, lengths, strict=True):
            cache_norm(row, length)
        return rows, losses


class GpuTrainer(Trainer):
    """Trains groups of clients with the plan of their network.

    What a client gets depends on its own row alone: kernels work for one client at a time
    (`kernels`), and a trial on this device looks whether it is so.

    Raises
    ------
    NoPlanError
        It cannot be used here; the message says why.
    """

    name = "gpu"

    def __init__(
        self, flat: FlatModel, task: Task, settings: LocalSettings, draws: ClientDraws | None
    ) -> None:
        self.plan: LayerPlan = plan_for("gpu", flat, task, settings)
        self.task, self.settings = task, settings
        self.starts_early = task.device.type == "cuda"
        self._flat, self._width = flat, settings.batch_size
        mask = task.class_mask
        if mask is not None and self.plan.normalised and mask.value != -math.inf:
            raise NoPlanError("it ends in log-probabilities, of which some are set to a number")
        self._type = TYPES[settings.precision]
        self._prox = settings.fedprox_mu
        self._inputs = self._laid_out(task.inputs)
        self._program: Program | None = None
        self._try(draws)
        self.group_size = min(self.group_size, settings.group_rows or self.group_size)

    def train(
        self,
        start: torch.Tensor,
        clients: Sequence[int],
        round_index: int,
        learning_rate: float,
        out: Sequence[torch.Tensor] | None = None,
    ) -> Iterator[ClientUpdate]:
        """Queue the training of a group as one program; yield its updates once they are there."""
        members = list(clients)
        table = BatchTable(self.task, members, self.settings, round_index, True, set(members))
        return self._arriving(members, [self.begin(start, table, learning_rate)])

    def _arriving(self, members: list[int], running: list[Running]) -> Iterator[ClientUpdate]:
        """Yield updates in the order of `members`; what is yielded is no longer held here."""
        part = running.pop()
        done: dict[int, ClientUpdate] = {}
        deltas, losses = part.result()
        for delta, loss, client in zip(deltas, losses, part.clients, strict=True):
            size = len(self.task.clients[client])
            done[client] = ClientUpdate(client, delta, size, loss if size else math.nan)
        del part, deltas, delta
        for client in members:
            yield done.pop(client)

    def begin(self, start: torch.Tensor, group: BatchTable, learning_rate: float) -> Running:
        """Queue all steps of a group and what is read of them; nothing waits for the device."""
        count = len(group.clients)
        if self._program is None or self._program.rows < count:
            self._program = None  # its memory first
            self._program = self._make_program(self._inputs, self.task.targets, count)
        tables = group.tables(self.plan.num_draws)
        # Before the program is queued: what comes from the host waits for what is queued.
        seen = group.seen.to(start.device)
        sums = self._run(self._program, start, tables, learning_rate)
        updates = self._updates(self._program, start, count)
        # One by one, as `common.vectors.norm` computes them: a row's bits are its own affair.
        lengths = [torch.linalg.vector_norm(row, dtype=torch.float64) for row in updates]
        figures = torch.stack([(sums / seen).to(torch.float64), torch.stack(lengths)])
        return Running(group.clients, updates, figures)

    def _laid_out(self, inputs: torch.Tensor) -> torch.Tensor:
        laid_out = self.plan.lay_out(inputs)
        return (laid_out if self.plan.vocabulary else laid_out.to(self._type)).contiguous()

    def _make_program(self, inputs: torch.Tensor, targets: torch.Tensor, rows: int) -> Program:
        from fedquilt.training.trainers.gpu.program import Program

        mask = self.task.class_mask
        return Program(
            self.plan,
            inputs,
            targets,
            rows,
            self._width,
            self._type,
            prox=self._prox,
            mask_value=None if mask is None else mask.value,
        )

    def _run(
        self, program: Program, start: torch.Tensor, tables: Tables, learning_rate: float
    ) -> torch.Tensor:
        segments = self._flat.segments
        program.load({s.name: start[s.start : s.stop].view(1, *s.shape) for s in segments})
        return program.train(tables, learning_rate)

    def _updates(self, program: Program, start: torch.Tensor, count: int) -> torch.Tensor:
        """Return weights minus `start`, as the flat model lays them out."""
        rows = start.new_empty(count, len(start))
        ways = {weights.name: weights.to_model for weights in self.plan.weights}
        for segment in self._flat.segments:
            part = slice(segment.start, segment.stop)
            tensor = ways[segment.name](program.weight(segment.name, count))
            torch.sub(tensor.reshape(count, -1), start[part], out=rows[:, part])
        return rows

    def _try(self, draws: ClientDraws | None) -> None:
        """Refuse a plan whose rows mix, or that does not compute what the network does."""
        like, width = self.task.public(), self._width
        inputs = _trial_inputs(self.plan, like.inputs, 4 * width)
        targets = torch.arange(len(inputs), device=inputs.device) % self.plan.classes
        targets = targets.to(like.targets.dtype)
        start = self._flat.read().clone()
        tables = _trial_tables(width, self.plan.num_draws)
        given = self._laid_out(inputs)
        program = self._make_program(given, targets, _TRIAL_CLIENTS)

        def updates(
            rows: list[int], weights: torch.Tensor = start, rate: float = _TRIAL_RATE
        ) -> torch.Tensor:
            self._run(program, weights, tables.of(rows), rate)
            return self._updates(program, weights, len(rows))

        # Its weights, those in the products' type, and its update.
        client_bytes = program.bytes_a_row + 3 * start.nbytes
        self.group_size = clients_that_fit(client_bytes, start.device)
        everybody, turned = [0, 1, 2, 3, 4], [1, 0, 3, 2, 4]
        first = updates(everybody)
        for rows in [turned, [2], *([everybody] * _REPEATS)]:
            if not torch.equal(first[rows], updates(rows)):
                raise NoPlanError("its rows do not compute alike on this device")

        def by_hand(weights: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
            given.copy_(self._laid_out(samples))
            return updates([0], weights, _rate(samples))[0]

        def by_autograd(weights: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
            return self._by_autograd(weights, samples, targets, tables, draws)

        refuse_disagreement(
            *("its steps by hand are", by_hand, by_autograd, self._flat),
            *([Trial(inputs, len(inputs), SCALES)], _UNITS[self._type], draws),
            vocabulary=self.plan.vocabulary,
        )

    def _by_autograd(
        self,
        start: torch.Tensor,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        tables: Tables,
        draws: ClientDraws | None,
    ) -> torch.Tensor:
        """Return the update of the first row of a trial."""
        flat, rate, objective = self._flat, _rate(inputs), self.task.objective
        flat.write(start)
        for step, begin in enumerate(tables.begins[:, 0].tolist()):
            batch = slice(begin, begin + self._width)
            gradients = autograd_gradients(
                flat, objective, inputs[batch], targets[batch], draws, step
            )
            with torch.no_grad():
                if self._prox:
                    flat.vector.lerp_(start, rate * self._prox)
                torch._foreach_add_(flat.parameters, gradients, alpha=-rate)
        return flat.read() - start


def _rate(samples: torch.Tensor) -> float:
    """Return a rate with which a trial moves scores, not inputs' size, by a part of themselves."""
    size = float(samples.abs().mean()) if samples.is_floating_point() else 1.0
    return _TRIAL_RATE / max(1.0, size) ** 2


def _trial_inputs(plan: LayerPlan, like: torch.Tensor, count: int) -> torch.Tensor:
    """Return made-up samples; tokens of the whole vocabulary, another at every place."""
    inputs: torch.Tensor = public_inputs(like, count)
    return inputs if not plan.vocabulary else drawn_tokens(inputs, plan.vocabulary, 0)


def _trial_tables(width: int, draws: int) -> Tables:
    """Return two steps of clients with full, part and no batches in the second."""
    sizes = np.full((_TRIAL_STEPS, _TRIAL_CLIENTS), width)
    sizes[1] = [width, width, max(1, width // 2), 1, 0]
    begins = (np.arange(sizes.size) * 7 % (3 * width)).reshape(sizes.shape)
    seeds, steps = np.arange(_TRIAL_CLIENTS, dtype=np.uint64), np.arange(_TRIAL_STEPS)[:, None]
    keys = [draw_keys(seeds, steps, draw) for draw in range(draws)]
    all_of_them = IndexChunk(0, 0, np.arange(4 * width))
    return Tables(begins, sizes, 4 * width + 1, lambda: iter([all_of_them]), keys)
