"""Steps by autograd, one client after the other: what every faster trainer is held against.

A step of plain SGD on a linear layer y = x W^T + b with the gradient g of y is

    W <- W - lr * g^T x,

one product that is added to W in place.  Autograd would first make g^T x, a tensor of the size of
W, so wide linear layers of large models take their step in the backward pass (`stepping`): the
gradient of a whole model is never held.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.trees import Tree
from fedquilt.common.vectors import chunks
from fedquilt.training.draws import ClientDraws, RandomCalls, bits_of, own_draws, seeded_layers
from fedquilt.training.flat import FlatModel
from fedquilt.training.objective import CROSS_ENTROPY, outputs_of
from fedquilt.training.task import (
    ClientUpdate,
    LocalSettings,
    Loss,
    LossOf,
    StepLoss,
    Task,
    client_seed,
    epoch_order,
    public_inputs,
)
from fedquilt.training.trainers import Trainer, failed_update

LARGE = 1 << 22
"""Parameters above which memory counts; below it calls do."""
WIDE = 1 << 20
"""Weights from which a linear layer steps in the backward pass."""
_TRIAL_STEPS = 3
_OTHER_STEPS = (5, 7, 3, 2)
_WIDEST = 64


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


class AutogradTrainer(Trainer):
    """Trains clients one by one; memory is one model beside the updates.

    Given a `FlatModel`, it trains in that one's memory, and nobody may read it without
    writing it first.  `is_tried`: another process has seen that it trains alike from the same
    state (`refuse_hidden_state`).
    """

    name = "autograd"

    def __init__(
        self,
        model: nn.Module | FlatModel,
        task: Task,
        settings: LocalSettings,
        loss_of: LossOf | None = None,
        *,
        is_tried: bool = False,
    ) -> None:
        self.task, self.settings = task, settings
        self._lends_updates = False
        self._loss_of = loss_of or self._default_loss
        mask = None if loss_of is not None else task.class_mask
        self._hidden = None if mask is None else mask.hidden[0].clone()
        """The classes that the running client's loss leaves alone, always in one place."""
        public = task.public()
        if isinstance(model, FlatModel):
            self.flat = model.twin()
        else:
            self.flat = FlatModel(model, public.inputs)
        self.draws = find_draws(self.flat, public)
        find_steps(self.flat, public, settings)
        if not is_tried:
            refuse_hidden_state(self.flat, public, settings, self.draws, self._loss_of)

    def lend_updates(self) -> None:
        """Let an update lie in the working model's memory until the next client trains."""
        self._lends_updates = True

    def train(
        self,
        start: torch.Tensor,
        clients: Sequence[int],
        round_index: int,
        learning_rate: float,
        out: Sequence[torch.Tensor] | None = None,
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client, in their order."""
        for number, client in enumerate(clients):
            into = None if out is None else out[number]
            yield self._train_one(start, client, round_index, learning_rate, into)

    def _train_one(
        self,
        start: torch.Tensor,
        client: int,
        round_index: int,
        learning_rate: float,
        out: torch.Tensor | None,
    ) -> ClientUpdate:
        index = self.task.index(client)
        try:
            seed = client_seed(self.settings, round_index, client)
            client_loss = self._loss_of(client, round_index)
            loss = self._train(start, index, learning_rate, seed, client_loss)
        except Exception as error:
            out = torch.empty_like(start) if out is None else out
            return failed_update(error, self.settings, client, out, len(index))
        trained = self.flat.read()
        delta = torch.sub(trained, start, out=trained if self._lends_updates else out)
        return ClientUpdate(client, delta, len(index), loss)

    def _train(
        self, start: torch.Tensor, index: torch.Tensor, learning_rate: float, seed: int, loss: Loss
    ) -> float:
        """Train the working model on some samples and return the mean loss."""
        inputs, targets = self.task.inputs, self.task.targets
        return train_client(
            *(self.flat, start, inputs, targets, index, learning_rate),
            *(self.settings, seed, loss, self.draws),
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

    def restore(self) -> None:
        """Restore what training has changed outside the weights, such as attributes of a class."""
        self.flat.restore()
        self.task.objective.begin()
        self.settings.optimizer.restore()


class _SteppedLinear(torch.autograd.Function):
    """A linear layer whose backward pass moves its weight instead of returning a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        learning_rate: float,
        done: Callable[[], None],
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.learning_rate, ctx.done = learning_rate, done
        return functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        (gradient,) = gradients
        rows = gradient.reshape(-1, gradient.shape[-1])
        needs_inputs, _, needs_bias = ctx.needs_input_grad[:3]
        passed = gradient @ weight if needs_inputs else None
        bias = rows.sum(0) if needs_bias else None
        # It shares the weight's version: whoever has saved the weight too is told that it moved.
        moving = weight.detach()
        moving.addmm_(rows.mT, inputs.reshape(-1, inputs.shape[-1]), alpha=-ctx.learning_rate)
        ctx.done()
        return passed, None, bias, None, None


def find_stepped(
    module: nn.Module, parameters: Sequence[torch.Tensor], forward: Callable[[], torch.Tensor]
) -> list[nn.Linear]:
    """Return the wide linear layers that a forward pass calls once, and whose weight is theirs.

    A second use needs the weight as it was, and a gradient (`stepping`).  None at all where the
    backward pass says so, of a weight that is used outside its layer.
    """
    trained = {id(parameter) for parameter in parameters}
    owners = Counter(id(p) for part in module.modules() for p in part._parameters.values())
    wide = [
        part
        for part in module.modules()
        if type(part) is nn.Linear
        and "forward" not in vars(part)
        and id(part._parameters.get("weight")) in trained
        and owners[id(part.weight)] == 1
        and part.weight.numel() >= WIDE
    ]
    calls: Counter[int] = Counter()
    hooks = [part.register_forward_pre_hook(partial(_count, calls)) for part in wide]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    once = [part for part in wide if calls[id(part)] == 1]
    try:
        with stepping(once, 0.0):
            forward().backward(inputs=list(parameters))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return []
    finally:
        for parameter in parameters:
            parameter.grad = None
    return once


def _in_backward() -> bool:
    """Whether a backward pass runs a part of the model again (`torch.utils.checkpoint`)."""
    return torch._C._current_graph_task_id() != -1


def _count(calls: Counter[int], part: nn.Module, inputs: Any) -> None:
    calls[id(part)] += 1


@contextmanager
def stepping(layers: Sequence[nn.Linear], learning_rate: float) -> Iterator[None]:
    """Let these layers take their steps in the backward pass, within.

    A batch may call a layer more often than the trial did (a model that works in chunks).  Only
    the first call since its last step moves the weight: its way back is the last, when the others
    have read the weight as it was, and autograd adds up their gradients and applies them after.
    """
    waiting: set[int] = set()

    def forward(layer: nn.Linear, inputs: torch.Tensor) -> Any:
        weight, bias = layer.weight, layer.bias
        again = id(layer) in waiting and not _in_backward()
        if again or not torch.is_grad_enabled():
            return functional.linear(inputs, weight, bias)
        waiting.add(id(layer))
        done = partial(waiting.discard, id(layer))
        return _SteppedLinear.apply(inputs, weight, bias, learning_rate, done)  # type: ignore[no-untyped-call]

    for layer in layers:
        vars(layer)["forward"] = partial(forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
