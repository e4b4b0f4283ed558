"""Large linear layers that take their step while the gradient passes: none is ever held.

A step of plain SGD on y = x W^T + b with the gradient g of y is

    W <- W - lr * g^T x,

one product that is added to W where it lies.  Autograd would first make g^T x, a tensor of the
size of W, which for a network of a few wide layers is a good part of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

WIDE = 1 << 20
"""The number of weights from which a layer is worth it."""


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
