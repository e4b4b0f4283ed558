"""Training of one client after the other on a CPU, with gradients by hand (`cpu_program`).

The same batches and the same dropout as `local.train_client`, so updates agree with the
sequential engine up to rounding; what a client computes depends on its own samples and seed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fedquilt.learning.cpu_program import CpuProgram, check_layers
from fedquilt.learning.cpu_update import Update
from fedquilt.learning.draws import ClientDraws, draw_keys, hashed_bits
from fedquilt.learning.engine import ClientUpdate, LocalSettings, Task, public_inputs
from fedquilt.learning.flat import FlatModel
from fedquilt.learning.local import NEVER_SILENT, client_seed, epoch_batches, train_client
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
        self._eye = torch.eye(self.plan.classes)
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
        if len(index) and not 0 <= int(labels.min()) <= int(labels.max()) < self.plan.classes:
            return update, self._by_autograd(start, index, learning_rate, seed, update)
        inputs = task.inputs.flatten(1)
        with _one_thread(self._is_small):
            loss = self._train(start, inputs, task.targets, index, learning_rate, seed)
            return self._subtract(start, update), loss

    def _train(
        self,
        start: torch.Tensor,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        index: torch.Tensor,
        learning_rate: float,
        seed: int,
    ) -> float:
        """Train from `start`, leave the weights in the program, return the mean loss."""
        program, settings = self._program, self._settings
        program.reset()
        self._write(program.weights, start)
        rule = None
        if not self._fused:
            names = self._flat.names
            parameters = [program.weights[name] for name in names]
            gradients = [program.gradients[name] for name in names]
            self._write(self._anchors, start)
            anchors = [self._anchors[name] for name in names] if self._anchors else None
            mu = settings.fedprox_mu
            rule = settings.optimizer.begin(parameters, anchors, learning_rate, mu)
        shuffle = torch.Generator().manual_seed(seed)
        count, most = len(index), settings.batch_size
        epochs = settings.epochs if count else 0
        sizes = [min(most, count - first) for first in range(0, count, most)]
        masks = self._masks(seed, epochs * len(sizes))
        frames = {
            size: (program.frame(size), _update(1.0 / size, None if rule else learning_rate))
            for size in set(sizes)
        }
        loss_sum = 0.0
        for _ in range(epochs):
            batches = epoch_batches(index, most, shuffle, 1)
            labels = _blocks(targets[torch.cat(batches)].long(), most)
            onehots = [self._eye[part].transpose(1, 2).contiguous() for part in labels]
            scores = [torch.empty_like(part) for part in onehots]
            places = zip(_each(onehots), _each(scores), strict=True)
            for size, batch, (onehot, place) in zip(sizes, batches, places, strict=True):
                frame, update = frames[size]
                program.step(frame, inputs, batch, onehot, place, update, next(masks))
                if rule is not None:
                    rule.step(gradients)
            for part, true in zip(scores, labels, strict=True):
                loss_sum += float(functional.cross_entropy(part, true, reduction="sum"))
        return loss_sum / (epochs * count) if epochs else math.nan

    def _write(self, tensors: dict[str, torch.Tensor], start: torch.Tensor) -> None:
        for segment in self._flat.segments if tensors else ():
            tensor = tensors[segment.name]
            tensor.copy_(start[segment.start : segment.stop].view(tensor.shape))

    def _subtract(self, start: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Return weights minus `start` in `update`, as the flat model lays them out."""
        for segment in self._flat.segments:
            part = slice(segment.start, segment.stop)
            tensor = self._program.weights[segment.name]
            shape = tensor.shape
            torch.sub(tensor, start[part].view(shape), out=update[part].view(shape))
        return update

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
        self._train(start, inputs.flatten(1), targets, index, _TRIAL_RATE, _TRIAL_SEED)
        update = self._subtract(start, torch.empty_like(start))
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


def _blocks(labels: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return labels as [batches, size], and those of a last, shorter batch as [1, samples]."""
    whole = len(labels) // size * size
    parts = [labels[:whole].view(-1, size), labels[None, whole:]]
    return [part for part in parts if part.numel()]


def _each(blocks: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield what belongs to each batch."""
    for block in blocks:
        yield from block.unbind()


def _update(share: float, learning_rate: float | None) -> Update:
    """Return plain SGD with a rate; without one the gradient itself is asked for."""
    return Update(0.0, share) if learning_rate is None else Update(1.0, -learning_rate * share)


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
