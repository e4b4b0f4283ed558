"""One model with many sets of weights: what it can run, and what that takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional

from fedquilt.learning.engine import Task
from fedquilt.learning.flat import FlatModel
from fedquilt.learning.local import seeded_layers

_IGNORED_LABEL = -100
_GPU_SHARE = 0.4
_CPU_BYTES = 2**28


class ModelStack:
    """A model that runs with K sets of weights at once."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self.task = task
        self.flat = FlatModel(model, task.inputs[:2])
        self.flat.module.train()
        self._forward: Callable[..., torch.Tensor] = vmap(self._one, randomness="different")

    def _one(self, weights: list[torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self.flat.names, weights, strict=True))
        outputs: torch.Tensor = functional_call(self.flat.module, named, (inputs,))
        return outputs

    def losses(
        self,
        weights: list[torch.Tensor],
        samples: torch.Tensor,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss of each sample, [K, B], under its client's weights.

        `hidden` are the rows of the task's class mask, [K, classes].
        """
        outputs = self._forward(weights, self.task.inputs[samples])
        if hidden is not None and self.task.class_mask is not None:
            outputs = self.task.class_mask.apply(outputs, hidden[:, None, :])
        targets = self.task.targets[samples]
        losses = functional.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(0, 1), reduction="none"
        )
        return (
            losses.view(*samples.shape, -1).mean(2) if losses.dim() > 1 else losses.view_as(samples)
        )

    def spread(self, vector: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return the vector's tensors, each repeated for `count` clients."""
        return [
            vector[s.start : s.stop]
            .view(1, *s.shape)
            .expand(count, *s.shape)
            .to(parameter.dtype)
            .clone(memory_format=torch.contiguous_format)
            for s, parameter in zip(self.flat.segments, self.flat.parameters, strict=True)
        ]

    def gather(self, weights: list[torch.Tensor], start: torch.Tensor) -> torch.Tensor:
        """Return weights minus `start`, one row a client."""
        count = len(weights[0])
        rows = start.new_empty(count, len(start))
        for segment, tensor in zip(self.flat.segments, weights, strict=True):
            part = slice(segment.start, segment.stop)
            torch.sub(tensor.view(count, -1), start[part], out=rows[:, part])
        return rows


def obstacle(model: nn.Module, task: Task) -> str | None:
    """Return why the model cannot run as a stack, or None when it can.

    What cannot be read off the model is tried: one step on two clients of two
    samples.  An error of the model itself, stacked or not, is raised as it is.
    """
    stack = ModelStack(model, task)
    if stack.flat.buffer_names:
        moving = ", ".join(stack.flat.buffer_names)
        return f"a training step changes its buffers ({moving}), as BatchNorm does"
    if not task.targets.is_floating_point() and bool((task.targets == _IGNORED_LABEL).any()):
        return f"the targets hold {_IGNORED_LABEL}, the label that the loss leaves out"
    with seeded_layers(task.inputs.device, 0):
        if _mixes_samples(stack.flat.module, task.inputs):
            return "its output for a sample depends on the other samples of the batch"
        plain = _plain_gradients(stack)
        try:
            stacked, _ = _trial_step(stack)
        except Exception as error:
            return f"torch.func.vmap cannot run it ({_first_line(error)})"
    for name, one, many in zip(stack.flat.names, plain, stacked, strict=True):
        if one is not None and many is None:
            return f"torch.func.functional_call does not reach its parameter {name}"
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"


@torch.no_grad()
def _mixes_samples(module: nn.Module, inputs: torch.Tensor) -> bool:
    """Tell whether another second sample changes the first one's output."""
    first, second = inputs[:1], inputs[-1:]
    other = 1 - 2 * second if inputs.is_floating_point() else first
    outputs = []
    for neighbour in (second, other):
        with seeded_layers(inputs.device, 0):
            outputs.append(module(torch.cat([first, neighbour]))[0])
    return not torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-6, equal_nan=True)


def _plain_gradients(stack: ModelStack) -> tuple[torch.Tensor | None, ...]:
    inputs, targets = stack.task.inputs[:2], stack.task.targets[:2]
    loss = functional.cross_entropy(stack.flat.module(inputs), targets)
    return torch.autograd.grad(loss, stack.flat.parameters, allow_unused=True)


def _trial_step(stack: ModelStack) -> tuple[tuple[torch.Tensor | None, ...], int]:
    """Return the gradients of one step on 2 x 2 samples, and the bytes it kept a sample."""
    weights = [tensor.requires_grad_() for tensor in stack.spread(stack.flat.vector, 2)]
    known = {tensor.untyped_storage().data_ptr() for tensor in weights}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    samples = torch.zeros(2, 2, dtype=torch.int64, device=stack.task.inputs.device)
    samples[:, 1] = len(stack.task.inputs) - 1
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = stack.losses(weights, samples).sum()
    return torch.autograd.grad(loss, weights, allow_unused=True), sum(kept.values()) // 4


def group_size(stack: ModelStack, batch_size: int) -> int:
    """Return how many clients fit into the memory that a group may take.

    A client holds its weights, their gradient, its update and one tensor of
    scratch, and for each sample of a batch what the forward pass keeps and the
    gradients with respect to it.
    """
    with seeded_layers(stack.task.inputs.device, 0):
        _, sample_bytes = _trial_step(stack)
    vector = stack.flat.vector
    widest = min(batch_size, max((len(c) for c in stack.task.clients), default=1))
    client_bytes = 4 * vector.numel() * vector.element_size() + 2 * sample_bytes * widest
    return max(1, _memory(vector.device) // client_bytes)


def _memory(device: torch.device) -> int:
    """Return the bytes a group may take: a share of a GPU, a fixed amount on a CPU."""
    if device.type != "cuda":
        return _CPU_BYTES
    return int(_GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
