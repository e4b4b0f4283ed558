"""The batched engine's fast way: networks of standard layers on a GPU (`plan`, `program`)."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.nn import functional

from fedquilt.common.vectors import cache_norm
from fedquilt.training.draws import ClientDraws, bits_of, draw_keys, own_draws
from fedquilt.training.flat import FlatModel
from fedquilt.training.objective import IGNORED
from fedquilt.training.task import LocalSettings, Task, public_inputs
from fedquilt.training.trainers.batches import Stretch
from fedquilt.training.trainers.plan import NoPlanError, Plan, Tables, is_interpreted, make_plan
from fedquilt.training.trainers.stack import clients_that_fit
from fedquilt.training.trainers.trial import (
    BFLOAT16,
    SCALES,
    TF32,
    disagreement,
    drawn_tokens,
    moved_by_a_pass,
)

if TYPE_CHECKING:
    from fedquilt.training.trainers.gpu.program import Program

_TOKENS = (torch.int32, torch.int64)  # what `nn.Embedding` takes
TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
_UNITS = {torch.float32: TF32, torch.bfloat16: BFLOAT16}
_WIDEST = 256
_TRIAL_CLIENTS, _TRIAL_STEPS, _TRIAL_RATE = 5, 2, 0.1
_REPEATS = 4


class Group(Protocol):
    """All local steps of a group of clients: see `batched.BatchTable`."""

    clients: list[int]
    seen: torch.Tensor

    def tables(self, draws: int) -> Tables:
        """Return the whole table."""


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


class PlannedTraining:
    """Trains groups of clients with the plan of their network.

    What a client gets depends on its own row alone: kernels work for one client at a time
    (`kernels`), and a trial on this device looks whether it is so.

    Raises
    ------
    NoPlanError
        It cannot be used here; the message says why.
    """

    def __init__(
        self, flat: FlatModel, task: Task, settings: LocalSettings, draws: ClientDraws | None
    ) -> None:
        reason = _unsuited(flat, task, settings)
        if reason:
            raise NoPlanError(reason)
        self._flat, self._task, self._width = flat, task, settings.batch_size
        flat.module.train()
        self.plan: Plan = make_plan(flat.module, task.public().inputs)
        if {weights.name for weights in self.plan.weights} != set(flat.names):
            raise NoPlanError("it has parameters outside its layers, or frozen ones")
        mask = task.class_mask
        if mask is not None and self.plan.normalised and mask.value != -math.inf:
            raise NoPlanError("it ends in log-probabilities, of which some are set to a number")
        self._type = TYPES[settings.precision]
        self._prox = settings.fedprox_mu
        self.most_clients = 1
        self._inputs = self._laid_out(task.inputs)
        self._program: Program | None = None
        self._try(draws)

    def begin(self, start: torch.Tensor, group: Group, learning_rate: float) -> Running:
        """Queue all steps of a group and what is read of them; nothing waits for the device."""
        count = len(group.clients)
        if self._program is None or self._program.rows < count:
            self._program = None  # its memory first
            self._program = self._make_program(self._inputs, self._task.targets, count)
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

        mask = self._task.class_mask
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
        like, width = self._task.public(), self._width
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
        self.most_clients = clients_that_fit(client_bytes, start.device)
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

        reason = disagreement(
            *(by_hand, by_autograd, start, inputs, len(inputs), _UNITS[self._type]),
            vocabulary=self.plan.vocabulary,
            scales=SCALES,
        )
        moved = moved_by_a_pass(self._flat, like.inputs, draws)
        self._flat.write(start)
        if reason:
            raise NoPlanError(f"its steps by hand are {reason}")
        if moved:
            raise NoPlanError(f"a pass changes {', '.join(moved)}, which steps by hand do not")

    def _by_autograd(
        self,
        start: torch.Tensor,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        tables: Tables,
        draws: ClientDraws | None,
    ) -> torch.Tensor:
        """Return the update of the first row of a trial."""
        flat, rate = self._flat, _rate(inputs)
        flat.write(start)
        flat.module.train()
        with own_draws(draws):
            for step, begin in enumerate(tables.begins[:, 0].tolist()):
                if draws is not None:
                    draws.begin(bits_of(0, step))
                some = slice(begin, begin + self._width)
                loss = functional.cross_entropy(flat.module(inputs[some]), targets[some])
                gradients = torch.autograd.grad(loss, flat.parameters)
                with torch.no_grad():
                    if self._prox:
                        flat.vector.lerp_(start, rate * self._prox)
                    torch._foreach_add_(flat.parameters, gradients, alpha=-rate)
        return flat.read() - start


def _rate(samples: torch.Tensor) -> float:
    """Return a rate with which a trial moves scores, not inputs' size, by a part of themselves."""
    size = float(samples.abs().mean()) if samples.is_floating_point() else 1.0
    return _TRIAL_RATE / max(1.0, size) ** 2


def _trial_inputs(plan: Plan, like: torch.Tensor, count: int) -> torch.Tensor:
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
    all_of_them = Stretch(0, 0, np.arange(4 * width))
    return Tables(begins, sizes, 4 * width + 1, lambda: iter([all_of_them]), keys)


def _unsuited(flat: FlatModel, task: Task, settings: LocalSettings) -> str | None:
    """Return why no plan is tried here, None where one is."""
    if flat.vector.device.type != "cuda" and not is_interpreted():
        return "plans run on a GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not _has_classes(task):
        return "its inputs are not one tensor of numbers or tokens, or its targets not one class"
    if not settings.optimizer.is_plain or settings.batch_size > _WIDEST:
        return f"other steps than plain SGD and batches above {_WIDEST} have no plan"
    if flat.buffer_names or flat.vector.dtype != torch.float32 or flat.is_lossy:
        return "it has buffers that move, or other types than float32"
    return None


def _has_classes(task: Task) -> bool:
    """Whether the loss is the cross-entropy of one class a sample."""
    tensors = isinstance(task.inputs, torch.Tensor) and isinstance(task.targets, torch.Tensor)
    if not tensors:
        return False
    if not task.inputs.is_floating_point() and task.inputs.dtype not in _TOKENS:
        return False
    is_label = task.targets.dim() == 1 and not task.targets.is_floating_point()
    objective = task.objective
    return is_label and objective.loss == "cross_entropy" and objective.ignore_index == IGNORED
