"""Local training of one client after another, and evaluation."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import torch_seed
from fedquilt.common.trees import Tree
from fedquilt.common.vectors import chunks
from fedquilt.training.draws import ClientDraws, RandomCalls, bits_of, own_draws
from fedquilt.training.flat import FlatModel
from fedquilt.training.metrics import Accuracy, measure
from fedquilt.training.objective import CROSS_ENTROPY, outputs_of
from fedquilt.training.task import (
    ClientUpdate,
    LocalSettings,
    Loss,
    LossOf,
    StepLoss,
    Task,
    public_inputs,
)
from fedquilt.training.trainers.stepped import find_stepped, stepping

NEVER_SILENT = (MemoryError, torch.OutOfMemoryError)
"""Errors of the machine, which say nothing of a client's data."""
LARGE = 1 << 22
"""Parameters above which memory counts; below it calls do."""
_TRIAL_STEPS = 3
_OTHER_STEPS = (5, 7, 3, 2)
_WIDEST = 64


def client_seed(settings: LocalSettings, round_index: int, client: int) -> int:
    """Return the seed of everything random that a client does in a round."""
    return torch_seed(settings.seed, "local", round_index, client)


def epoch_order(count: int, shuffle: torch.Generator) -> torch.Tensor:
    """Return the order in which an epoch takes a client's samples."""
    return torch.randperm(count, generator=shuffle)


def epoch_batches(
    index: torch.Tensor, batch_size: int, shuffle: torch.Generator, smallest: int
) -> tuple[torch.Tensor, ...]:
    """Return one epoch of a client's samples as shuffled batches, the last one kept.

    A last batch below `smallest` is left out: BatchNorm cannot train on one sample.
    """
    order = epoch_order(len(index), shuffle)
    batches = torch.split(index[order.to(index.device)], batch_size)
    return batches if len(batches[-1]) >= smallest else batches[:-1]


def train_client(
    flat: FlatModel,
    start: torch.Tensor,
    inputs: Tree,
    targets: Tree,
    index: torch.Tensor,
    learning_rate: float,
    settings: LocalSettings,
    seed: int,
    loss_of_batch: Loss = CROSS_ENTROPY,
    draws: ClientDraws | None = None,
) -> float:
    """Train from `start` on the samples in `index`; return the mean loss, NaN without samples.

    By the settings' optimiser; plain SGD is w <- w - lr * (grad + mu * (w - w_start)).
    Cross-entropy of log-probabilities equals their negative log-likelihood, so
    models may end in logits or in log-probabilities.

    The module starts from the same complete state for every client, and everything
    random follows from `seed`: nothing of another client can reach this one.
    """
    flat.write(start)
    flat.module.train()
    parameters = flat.parameters
    anchors = parameter_views(flat, start) if settings.fedprox_mu else None
    device = trees.device_of(inputs)
    loss_sum = torch.zeros((), device=device)
    seen = 0
    steps = settings.optimizer.begin(parameters, anchors, learning_rate, settings.fedprox_mu)
    plain = settings.optimizer.is_plain and anchors is None
    in_backward = plain and flat.vector.numel() > LARGE
    stepped = flat.stepped if in_backward else ()
    with seeded_layers(device, seed), own_draws(draws), stepping(stepped, learning_rate):
        for step, batch in enumerate(local_batches(index, settings, seed, flat)):
            if draws is not None:
                draws.begin(bits_of(seed, step))
            samples = trees.take(inputs, batch)
            loss = loss_of_batch(flat.module, samples, trees.take(targets, batch))
            if in_backward:
                step_in_backward(loss, parameters, learning_rate)
            else:
                steps.step(torch.autograd.grad(loss, parameters, allow_unused=True))
            loss_sum += loss.detach() * len(batch)
            seen += len(batch)
    return float(loss_sum) / seen if seen else math.nan


def step_in_backward(
    loss: torch.Tensor, parameters: list[torch.Tensor], learning_rate: float
) -> None:
    """Take a step of plain SGD, each tensor as soon as its gradient is there, which then goes.

    The same numbers as after the whole backward pass, without a second model of gradients: when
    a tensor's gradient is complete, everything that needed its value has been computed.
    """

    def move(parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # its layer has stepped
            return
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-learning_rate)
        parameter.grad = None

    hooks: list[Any] = [
        parameter.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
        for parameter in parameters
    ]
    try:
        loss.backward(inputs=parameters)  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()


def local_batches(
    index: torch.Tensor, settings: LocalSettings, seed: int, flat: FlatModel
) -> Iterator[torch.Tensor]:
    """Yield the batches of all epochs; none for a client without samples."""
    shuffle = torch.Generator().manual_seed(seed)
    smallest = 2 if flat.needs_pairs else 1
    for _ in range(settings.epochs if len(index) else 0):
        yield from epoch_batches(index, settings.batch_size, shuffle, smallest)


def find_draws(flat: FlatModel, public: Task) -> ClientDraws | None:
    """Return the draws of a model whose layers draw random numbers, None where none does.

    None too for a model that draws again in its backward pass (`torch.utils.checkpoint`):
    there torch itself sees to it that both passes draw alike.
    """
    before = flat.read().clone()
    draws = ClientDraws()
    draws.begin(bits_of(0, 0))
    flat.restore()
    flat.module.train()
    again = RandomCalls()
    with seeded_layers(public.device, 0):
        with draws:
            answer = _trial_number(flat.module, public)
        if draws.shapes and answer.requires_grad:
            with again:
                torch.autograd.grad(answer, flat.parameters, allow_unused=True)
    flat.write(before)
    return draws if draws.shapes and not again.count else None


def find_steps(flat: FlatModel, public: Task, settings: LocalSettings) -> None:
    """Look for the layers of a large model that can step while its gradient passes."""
    plain = settings.optimizer.is_plain and not settings.fedprox_mu
    if not plain or flat.vector.numel() <= LARGE:
        return
    before = flat.read().clone()
    flat.restore()
    flat.module.train()
    with seeded_layers(public.device, 0):
        trial = partial(_trial_number, flat.module, public)
        flat.stepped = tuple(find_stepped(flat.module, flat.parameters, trial))
    flat.write(before)


def _trial_number(module: nn.Module, public: Task) -> torch.Tensor:
    """Return one number that a pass of the model makes of public samples."""
    if public.objective.on_batches or public.objective.loss == "model":
        return public.objective(module, public.inputs, public.targets)
    return outputs_of(trees.call_with(module, public.inputs)).sum()


def default_loss_of(task: Task) -> LossOf:
    """Return the loss of every client: the task's objective, as it was before any of them."""

    def loss_of(client: int, round_index: int) -> Loss:
        task.objective.begin()
        return task.objective

    return loss_of


def refuse_hidden_state(
    flat: FlatModel,
    public: Task,
    settings: LocalSettings,
    draws: ClientDraws | None,
    loss_of: LossOf | None = None,
) -> None:
    """Refuse a model that does not train alike after it has trained somebody else.

    What `FlatModel.restore` cannot see, a global variable or an object of another
    library, would carry one client's data over to the next.  This is a trial: a few steps
    with batches of several sizes, other ones in between, the same again.
    """
    before = flat.read().clone()
    smallest = 2 if flat.needs_pairs else 1
    loss_of = loss_of or default_loss_of(public)

    def train(samples: Tree, batch_size: int, epochs: int) -> torch.Tensor:
        size = max(batch_size, smallest)
        how = dataclasses.replace(settings, epochs=epochs, batch_size=size)
        count = trees.length(samples)
        index = torch.arange(count, device=public.device)
        targets = trees.mapped(public.targets, lambda t: t[:1].expand(count, *t.shape[1:]))
        loss = loss_of(0, 0)
        with repeatable():
            train_client(flat, before, samples, targets, index, 0.1, how, 0, loss, draws)
        return flat.read()

    # Sums of a GPU may come in another order each time; state that moves shows more.
    picture = torch.Tensor.clone if public.device.type == "cuda" else _fingerprint
    sizes = sorted({1, 2, 7, min(settings.batch_size, _WIDEST)})
    inputs = [public_inputs(public.inputs, size) for size in sizes]
    trials = list(zip(inputs, sizes, strict=True))
    first = [picture(train(x, size, _TRIAL_STEPS)) for x, size in trials]
    for size, steps in zip(sizes, _OTHER_STEPS, strict=False):
        train(public_inputs(public.inputs, size * steps, seed=5), size, 1)
    alike = all(
        _is_alike(one, picture(train(x, size, _TRIAL_STEPS)))
        for one, (x, size) in zip(first, trials, strict=True)
    )
    flat.write(before)
    opaque = [*flat.state.opaque, *public.objective.opaque, *settings.optimizer.opaque]
    if opaque or not alike:
        what = ", ".join(opaque) if opaque else "a global variable, or one of another library"
        raise InvalidValueError(
            "the model must train alike from the same state, whoever was trained before; it does "
            "not: its forward pass, the loss or the optimizer may change something that cannot be "
            f"put back ({what}). Keep such state in tensors, numbers or lists of the module"
        )


@contextmanager
def repeatable() -> Iterator[None]:
    """Let convolutions on a GPU add up in the same order each time, within."""
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def _fingerprint(vector: torch.Tensor) -> bytes:
    """Return what stands for the values of a vector; all NaN are one, and both zeros."""
    digest = hashlib.sha256()
    for chunk in chunks(vector.numel()):
        values = vector[chunk] + 0.0
        values = torch.where(values.isnan(), math.nan, values)
        digest.update(values.cpu().numpy().data)
    return digest.digest()


def _is_alike(one: torch.Tensor | bytes, other: torch.Tensor | bytes) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.allclose(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)
    return one == other


def parameter_views(flat: FlatModel, vector: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters' places in a vector of the same layout."""
    return [vector[s.start : s.stop].view(s.shape) for s in flat.segments if not s.is_buffer]


@contextmanager
def seeded_layers(device: torch.device, seed: int) -> Iterator[None]:
    """Let all global generators draw from `seed`, and put their own state back after.

    Those of torch, and those of Python and NumPy, which a user's layer may use.
    """
    on_gpu = device.type == "cuda"
    cpu_state = torch.get_rng_state()
    gpu_state = torch.cuda.get_rng_state(device) if on_gpu else None
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if on_gpu:
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state, device)


def evaluate(
    module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, batch_size: int = 1024
) -> tuple[float, float]:
    """Return (accuracy, mean cross-entropy), with the model in evaluation mode."""
    metrics = {"accuracy": Accuracy}
    measured = measure(module, CROSS_ENTROPY, metrics, inputs, targets, batch_size)
    return measured["accuracy"], measured["loss"]


class SequentialEngine:
    """Train clients one by one; memory is one model beside the updates.

    Given a `FlatModel`, it trains in that one's memory, and nobody may read it without
    writing it first.
    """

    def __init__(
        self,
        model: nn.Module | FlatModel,
        task: Task,
        settings: LocalSettings,
        loss_of: LossOf | None = None,
    ) -> None:
        self.task = task
        self.settings = settings
        self.lends_updates = False
        """Whether an update lies in the working model's memory, until the next client trains."""
        self._loss_of = loss_of or self._default_loss
        mask = None if loss_of is not None else task.class_mask
        self._hidden = None if mask is None else mask.hidden[0].clone()
        """The classes that the running client's loss leaves alone, always in one place."""
        public = task.public()
        if isinstance(model, FlatModel):
            self._flat = model.twin()
        else:
            self._flat = FlatModel(model, public.inputs)
        self._draws = find_draws(self._flat, public)
        find_steps(self._flat, public, settings)
        refuse_hidden_state(self._flat, public, settings, self._draws, self._loss_of)

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the cohort, in its order."""
        try:
            for client in cohort:
                yield self.train_one(start, int(client), round_index, learning_rate)
        finally:
            self._put_back()  # what is made or evaluated next sees nothing of the last client

    def train_one(
        self, start: torch.Tensor, client: int, round_index: int, learning_rate: float
    ) -> ClientUpdate:
        """Train one client and return its update."""
        index = self.task.index(client)
        try:
            seed = client_seed(self.settings, round_index, client)
            client_loss = self._loss_of(client, round_index)
            loss = self._train(start, index, learning_rate, seed, client_loss)
        except Exception as error:
            if not self.settings.silent or isinstance(error, NEVER_SILENT):
                raise
            return ClientUpdate(client, torch.full_like(start, math.nan), len(index), math.nan)
        trained = self._flat.read()
        delta = trained.sub_(start) if self.lends_updates else trained - start
        return ClientUpdate(client, delta, len(index), loss)

    def _train(
        self,
        start: torch.Tensor,
        index: torch.Tensor,
        learning_rate: float,
        seed: int,
        loss: Loss,
    ) -> float:
        """Train the working model on some samples and return the mean loss."""
        inputs, targets = self.task.inputs, self.task.targets
        return train_client(
            *(self._flat, start, inputs, targets, index, learning_rate),
            *(self.settings, seed, loss, self._draws),
        )

    def _default_loss(self, client: int, round_index: int) -> Loss:
        """Return the objective, with the client's hidden classes where there are any."""
        mask = self.task.class_mask
        if mask is None or self._hidden is None:
            self.task.objective.begin()
            return self.task.objective
        self._hidden.copy_(mask.hidden[client])
        return StepLoss(self._masked_loss, lambda: None)

    def _masked_loss(
        self, module: nn.Module, inputs: Tree, targets: torch.Tensor, decision: None
    ) -> torch.Tensor:
        mask, ignored = self.task.class_mask, self.task.objective.ignore_index
        assert mask is not None
        assert self._hidden is not None
        outputs = mask.apply(outputs_of(trees.call_with(module, inputs)), self._hidden)
        return functional.cross_entropy(outputs, targets, ignore_index=ignored)

    def close(self) -> None:
        """Restore what training has changed outside the model, such as attributes of its class."""
        self._put_back()

    def _put_back(self) -> None:
        self._flat.restore()
        self.task.objective.begin()
        self.settings.optimizer.restore()
