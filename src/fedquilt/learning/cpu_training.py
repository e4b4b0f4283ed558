"""Training of one client after the other on a CPU, with gradients by hand (`cpu_program`).

The same batches and the same dropout as `local.train_client`, so updates agree with the
sequential engine up to rounding; what a client computes depends on its own samples and seed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fedquilt.learning.cpu_program import CpuProgram, Frame, check_layers
from fedquilt.learning.cpu_update import Update
from fedquilt.learning.draws import ClientDraws, draw_keys, hashed_bits
from fedquilt.learning.engine import ClientUpdate, LocalSettings, Task, public_inputs
from fedquilt.learning.flat import FlatModel
from fedquilt.learning.local import NEVER_SILENT, client_seed, epoch_order, train_client
from fedquilt.learning.objective import IGNORED
from fedquilt.learning.plan import Conv, Dropout, NoPlanError, Plan, make_plan

_log = logging.getLogger(__name__)

# How far steps by hand may be from autograd's, relative to their length: another network would be
# a whole length away, rounding that flips a maximum or a rectifier some hundredths.
_AGREES = 0.1
_TRIAL_RATE = 0.1
_TRIAL_SEED = 0
# How many numbers of dropout masks are drawn at once.
_DRAWN = 2**20
# Batches above this stand for "all samples": memory for them is not kept.
_WIDEST = 1024
# Multiplications of a layer after another in a step, forward: a millisecond on one core.
_FEW_PRODUCTS = 2**25


@contextlib.contextmanager
def _one_thread(is_small: bool) -> Iterator[None]:
    """Compute on one thread where a step is so short that a second one only costs time."""
    threads = torch.get_num_threads()
    if not is_small or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class CpuTraining:
    """Trains clients by the plan of their network.

    Parameters
    ----------
    flat : FlatModel
        The model; its module trains those clients that a plan cannot: who holds labels that
        the loss leaves out, or labels out of range, is trained by autograd, or fails as there.

    Raises
    ------
    NoPlanError
        It cannot be used here; the message says why.
    """

    def __init__(
        self, flat: FlatModel, task: Task, settings: LocalSettings, draws: ClientDraws | None
    ) -> None:
        self._flat, self._task, self._settings, self._draws = flat, task, settings, draws
        self.plan: Plan = cpu_plan(flat, task, settings)
        self._fused = settings.optimizer.is_plain and not settings.fedprox_mu
        self._program = CpuProgram(self.plan, settings.batch_size, not self._fused)
        self._anchors: dict[str, torch.Tensor] = {}
        if settings.fedprox_mu:
            self._anchors = {n: torch.empty_like(t) for n, t in self._program.weights.items()}
        self._tensors = [self._program.weights[segment.name] for segment in flat.segments]
        self._sizes = [tensor.numel() for tensor in self._tensors]
        self._by_class = torch.arange(self.plan.classes)[:, None]
        weights = sum(tensor.numel() for tensor in self._program.weights.values())
        has_images = any(isinstance(layer, Conv) for layer in self.plan.layers)
        self._is_small = not has_images and weights * settings.batch_size < _FEW_PRODUCTS
        self._try()

    def update_of(
        self, start: torch.Tensor, client: int, round_index: int, learning_rate: float
    ) -> ClientUpdate:
        """Return what a client of the task sends in a round."""
        index, seed = self._task.index(client), client_seed(self._settings, round_index, client)
        try:
            delta, loss = self.train(start, index, learning_rate, seed)
        except Exception as error:
            if not self._settings.silent or isinstance(error, NEVER_SILENT):
                raise
            delta, loss = torch.full_like(start, math.nan), math.nan
        return ClientUpdate(client, delta, len(index), loss)

    @torch.no_grad()
    def train(
        self,
        start: torch.Tensor,
        index: torch.Tensor,
        learning_rate: float,
        seed: int,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, float]:
        """Return a client's update, in `out` where it is given, and its mean loss.

        Without samples the loss is NaN and the update zero.
        """
        update = torch.empty_like(start) if out is None else out
        task = self._task
        labels = task.targets[index]
        if len(index):
            least, largest = torch.aminmax(labels)
            if not 0 <= int(least) <= int(largest) < self.plan.classes:
                return update, self._by_autograd(start, index, learning_rate, seed, update)
        inputs = task.inputs.flatten(1)
        with _one_thread(self._is_small):
            begin = self._parts(start)
            loss = self._train(begin, inputs, labels, index, learning_rate, seed)
            for tensor, part, into in zip(self._tensors, begin, self._parts(update), strict=True):
                torch.sub(tensor, part, out=into)
            return update, loss

    def _parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a vector as the flat model lays tensors out, in the tensors' shapes."""
        parts = torch.split(vector, self._sizes)
        return [part.view(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)]

    def _train(
        self,
        begin: list[torch.Tensor],
        inputs: torch.Tensor,
        labels: torch.Tensor,
        index: torch.Tensor,
        learning_rate: float,
        seed: int,
    ) -> float:
        """Train from the tensors `begin`, leave the weights in the program, return the mean loss.

        `labels` are those of the client's samples, `index` their places in `inputs`.
        """
        program, settings = self._program, self._settings
        program.reset()
        for tensor, part in zip(self._tensors, begin, strict=True):
            tensor.copy_(part)
        rule = gradients = None
        if not self._fused:
            rule, gradients = self._begin_rule(learning_rate)
        shuffle = torch.Generator().manual_seed(seed)
        count, most = len(index), settings.batch_size
        epochs = settings.epochs if count else 0
        steps = -(-count // most)
        masks = self._masks(seed, epochs * steps)
        frames = [self._frame(most, rule, learning_rate)] * (steps - 1)
        if count:
            frames.append(self._frame(count - (steps - 1) * most, rule, learning_rate))
        loss_sum = 0.0
        for _ in range(epochs):
            order = epoch_order(count, shuffle)
            batches = torch.split(index[order], most)
            epoch = _Epoch(labels[order], most, self._by_class)
            for (frame, update), batch, places in zip(frames, batches, epoch.each, strict=True):
                program.step(frame, inputs, batch, *places, update, next(masks))
                if rule is not None:
                    rule.step(gradients)
            loss_sum += epoch.loss()
        return loss_sum / (epochs * count) if epochs else math.nan

    def _begin_rule(self, learning_rate: float) -> tuple[Any, list[torch.Tensor]]:
        """Return the optimizer of a client that begins at the program's weights."""
        program, mu, names = self._program, self._settings.fedprox_mu, self._flat.names
        parameters = [program.weights[name] for name in names]
        for name, anchor in self._anchors.items():
            anchor.copy_(program.weights[name])
        anchors = [self._anchors[name] for name in names] if self._anchors else None
        rule = self._settings.optimizer.begin(parameters, anchors, learning_rate, mu)
        return rule, [program.gradients[name] for name in names]

    def _frame(self, size: int, rule: Any, learning_rate: float) -> tuple[Frame, Update]:
        """Return the layers for batches of a size, and where their gradients go."""
        if rule is not None:  # it asks for the gradient itself
            return self._program.frame(size), Update(0.0, 1.0 / size)
        return self._program.frame(size), Update(1.0, -learning_rate * (1.0 / size))

    def _masks(self, seed: int, steps: int) -> Iterator[list[torch.Tensor]]:
        """Yield the dropout masks of each step, one row for a full batch each."""
        layers = [layer for layer in self.plan.layers if isinstance(layer, Dropout)]
        if not layers:
            while True:
                yield []
        counts = [_numbers(layer) * self._settings.batch_size for layer in layers]
        block = max(1, _DRAWN // max(counts))
        for first in range(0, steps, block):
            numbers = np.arange(first, min(first + block, steps))
            drawn = [
                _mask(layer, draw_keys(seed, numbers, layer.draw), count)
                for layer, count in zip(layers, counts, strict=True)
            ]
            for step in range(len(numbers)):
                yield [mask[step] for mask in drawn]

    def _by_autograd(
        self,
        start: torch.Tensor,
        index: torch.Tensor,
        learning_rate: float,
        seed: int,
        update: torch.Tensor,
    ) -> float:
        task, flat = self._task, self._flat
        task.objective.begin()
        with torch.enable_grad():
            loss = train_client(
                *(flat, start, task.inputs, task.targets, index, learning_rate),
                *(self._settings, seed, task.objective, self._draws),
            )
        torch.sub(flat.read(), start, out=update)
        return loss

    @torch.no_grad()
    def _try(self) -> None:
        """Refuse a plan that does not compute what the network does, on public samples."""
        flat, settings, like = self._flat, self._settings, self._task.public()
        count = settings.batch_size + max(1, settings.batch_size // 2)
        inputs = public_inputs(like.inputs, count)
        targets = (torch.arange(count) % self.plan.classes).to(like.targets.dtype)
        index, start = torch.arange(count), flat.read().clone()
        begin = self._parts(start)
        self._train(begin, inputs.flatten(1), targets, index, _TRIAL_RATE, _TRIAL_SEED)
        moved = [(t - part).flatten() for t, part in zip(self._tensors, begin, strict=True)]
        update = torch.cat(moved)
        like.objective.begin()
        with torch.enable_grad():
            train_client(
                *(flat, start, inputs, targets, index, _TRIAL_RATE, settings, _TRIAL_SEED),
                *(like.objective, self._draws),
            )
        wanted = flat.read() - start
        flat.restore()
        flat.write(start)
        far = float((update - wanted).norm() / wanted.norm().clamp(min=1e-12))
        if not far <= _AGREES:
            raise NoPlanError(f"its steps by hand are {far:.3g} away from autograd's")


class _Epoch:
    """What the batches of one epoch need beside their samples, made for all of them at once.

    Labels and scores are [steps, classes, samples]; a last, shorter batch leaves places free,
    which count nowhere.
    """

    def __init__(self, labels: torch.Tensor, most: int, by_class: torch.Tensor) -> None:
        count, classes = len(labels), len(by_class)
        steps = -(-count // most)
        self._true = torch.full((steps * most,), classes)
        self._true[:count] = labels
        self._true = self._true.view(steps, most)
        onehot = (self._true[:, None] == by_class).to(torch.float32)
        self._scores = torch.empty_like(onehot)
        blocks = (onehot, self._scores, self._scores.transpose(1, 2))
        self.each = list(zip(*(block.unbind() for block in blocks), strict=True))
        last = count - (steps - 1) * most
        if last < most:
            true, scores, turned = self.each[-1]
            self.each[-1] = true[:, :last], scores[:, :last], turned[:last]

    def loss(self) -> float:
        """Return the sum of the samples' losses, of the scores before each step."""
        free = self._scores.shape[1]  # the class of places where no sample is
        return float(
            functional.cross_entropy(self._scores, self._true, ignore_index=free, reduction="sum")
        )


def cpu_plan(flat: FlatModel, task: Task, settings: LocalSettings) -> Plan:
    """Return the plan of a model whose layers are all written here; else raise NoPlanError."""
    reason = _unsuited(flat, task, settings)
    if reason:
        raise NoPlanError(reason)
    flat.module.train()
    plan = make_plan(flat.module, task.public().inputs)
    if {weights.name for weights in plan.weights} != set(flat.names):
        raise NoPlanError("it has parameters outside its layers, or frozen ones")
    check_layers(plan)
    return plan


def hand_training(
    flat: FlatModel, task: Task, settings: LocalSettings, draws: ClientDraws | None
) -> CpuTraining | None:
    """Return the steps by hand; None, and the reason in the log, where there are none."""
    try:
        return CpuTraining(flat, task, settings, draws)
    except NoPlanError as error:
        _log.info("the model trains by autograd: %s", error)
        return None
    finally:
        flat.restore()  # following the forward pass may have left something behind


def _numbers(layer: Dropout) -> int:
    """Return how many numbers a dropout draws for one sample."""
    return layer.image[-1] if layer.by_channel else math.prod(layer.shape)


def _mask(layer: Dropout, keys: NDArray[np.int32], count: int) -> torch.Tensor:
    """Return 0 or 1 / (1 - p), [steps, count], as `draws` has it."""
    kept = hashed_bits(torch.from_numpy(keys), count) >= int(layer.share * 2**32) - 2**31
    return kept.to(torch.float32).mul_(1.0 / (1.0 - layer.share))


def _unsuited(flat: FlatModel, task: Task, settings: LocalSettings) -> str | None:
    """Return why no plan is tried here, None where one is."""
    tensors = isinstance(task.inputs, torch.Tensor) and isinstance(task.targets, torch.Tensor)
    if not tensors or task.class_mask is not None or task.inputs.dtype != torch.float32:
        return "its inputs are not one tensor of float32, or classes are hidden"
    objective = task.objective
    is_label = task.targets.dim() == 1 and not task.targets.is_floating_point()
    if not is_label or objective.loss != "cross_entropy" or objective.ignore_index != IGNORED:
        return "its loss is not the cross-entropy of one class a sample"
    if flat.vector.device.type != "cpu":
        return "it is not on a CPU"
    if settings.optimizer.factory is not None or settings.batch_size > _WIDEST:
        return f"own optimizers and batches above {_WIDEST} have no steps by hand"
    if flat.buffer_names or flat.vector.dtype != torch.float32 or flat.is_lossy:
        return "it has buffers that move, or other types than float32"
    return None
