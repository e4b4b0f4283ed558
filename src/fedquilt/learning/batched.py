"""Many clients as one tensor program: the fast engine for small models and for GPUs.

The weights of K clients are stacked, one leading axis for the clients, and the
model runs on the stack through `torch.func.vmap`.  Client k's loss depends on
client k's weights alone, so the gradient of the *sum* of the K losses with
respect to the stack is every client's own gradient, in one backward pass.

Clients hold different numbers of samples.  A batch that is shorter than the
widest one of its step is padded with samples of weight zero, and a client with
no step left drops out of the program: rows are sorted by number of steps, so
the clients still training are always the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.learning.engine import ClientUpdate, LocalSettings, Task
from fedquilt.learning.flat import FlatModel
from fedquilt.learning.local import client_seed, epoch_batches, seeded_layers
from fedquilt.randomness import torch_seed

_IGNORED_LABEL = -100
_GPU_SHARE = 0.4
_CPU_BYTES = 2**28


class BatchedEngine:
    """Train many clients at once; memory is one model and one batch a client.

    The batches are those of the sequential engine, so updates agree with it up
    to floating-point rounding.  The exception is a model that draws random
    numbers while it trains (dropout): its masks are drawn for the whole group,
    so the two engines agree in distribution only.  The draw is seeded by
    (seed, round, group); the same run on this engine repeats exactly, as long
    as the clients fall into the same groups.

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
        obstacle = _obstacle(model, task)
        if obstacle:
            raise InvalidValueError(
                f"engine='batched' cannot train this model: {obstacle}; "
                "use engine='sequential' or engine='processes'"
            )
        self.task = task
        self.settings = settings
        self._stack = _Stack(model, task)
        if max_clients_per_group is None:
            max_clients_per_group = _group_size(self._stack, settings.batch_size)
        self.max_clients_per_group = validate.integer(
            "max_clients_per_group", max_clients_per_group, at_least=1
        )

    @staticmethod
    def supports(model: nn.Module, task: Task) -> bool:
        """Tell whether the model can run as a stack of clients."""
        return _obstacle(model, task) is None

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the cohort, in its order."""
        clients = [int(client) for client in cohort]
        for group, first in enumerate(range(0, len(clients), self.max_clients_per_group)):
            members = clients[first : first + self.max_clients_per_group]
            plan = _plan(self.task, members, self.settings, round_index)
            with seeded_layers(
                self.task.inputs.device, torch_seed(self.settings.seed, "group", round_index, group)
            ):
                deltas, losses = self._train_group(start, plan, learning_rate)
            for client, row in zip(members, plan.row_of, strict=True):
                size = len(self.task.clients[client])
                yield ClientUpdate(client, deltas[row], size, losses[row])

    def _train_group(
        self, start: torch.Tensor, plan: _Plan, learning_rate: float
    ) -> tuple[torch.Tensor, list[float]]:
        """Run all steps of a group; nothing waits for the device until the end."""
        stack, count = self._stack, len(plan.row_of)
        weights = stack.spread(start, count)
        pull = learning_rate * self.settings.fedprox_mu
        anchors = stack.spread(start, 1) if pull else []
        loss_sum = torch.zeros(count, device=start.device)
        leaves: list[torch.Tensor] = []
        for step, (active, width) in enumerate(zip(plan.active, plan.widths, strict=True)):
            if not leaves or len(leaves[0]) != active:
                leaves = [tensor[:active].detach().requires_grad_() for tensor in weights]
            samples = plan.samples[step, :active, :width]
            losses = (stack.losses(leaves, samples) * plan.shares[step, :active, :width]).sum(1)
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
            with torch.no_grad():
                for leaf, anchor in zip(leaves, anchors, strict=bool(anchors)):
                    leaf.lerp_(anchor, pull)
                used = [(w, g) for w, g in zip(leaves, gradients, strict=True) if g is not None]
                torch._foreach_add_([w for w, _ in used], [g for _, g in used], alpha=-learning_rate)
                loss_sum[:active].addcmul_(losses.detach(), plan.sizes[step, :active])
        return stack.gather(weights, start), (loss_sum / plan.seen).tolist()

    def close(self) -> None:
        """Hold nothing beyond the working model, give nothing back."""


class _Stack:
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

    def losses(self, weights: list[torch.Tensor], samples: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample, [K, B], under its client's weights."""
        outputs = self._forward(weights, self.task.inputs[samples])
        targets = self.task.targets[samples]
        losses = functional.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(0, 1), reduction="none"
        )
        return losses.view(*samples.shape, -1).mean(2) if losses.dim() > 1 else losses.view_as(samples)

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


@dataclass(frozen=True, eq=False)
class _Plan:
    """All local steps of a group, laid out before the first one runs.

    At step t the first `active[t]` rows train, each on the samples
    `samples[t, row, :widths[t]]`; `shares` is 1/(batch size) for a sample of the
    batch and 0 for padding.  Padding repeats the last sample of the batch, so it
    cannot bring in a value that the client does not have.
    """

    row_of: list[int]
    active: list[int]
    widths: list[int]
    samples: torch.Tensor
    shares: torch.Tensor
    sizes: torch.Tensor
    seen: torch.Tensor


def _plan(task: Task, clients: list[int], settings: LocalSettings, round_index: int) -> _Plan:
    """Lay out a group's steps on the host and move them to the device at once."""
    batches = [
        _batches(task.clients[client], settings, client_seed(settings, round_index, client))
        for client in clients
    ]
    order = sorted(range(len(clients)), key=lambda place: -len(batches[place]))
    steps = np.array([len(batches[place]) for place in order])
    flat = [batch for place in order for batch in batches[place]]
    lengths = np.array([len(batch) for batch in flat], dtype=np.int64)
    row = np.repeat(np.arange(len(order)), steps)
    step = np.arange(len(flat)) - np.repeat(np.cumsum(steps) - steps, steps)
    sizes = np.zeros((int(steps.max(initial=0)), len(order)), dtype=np.int64)
    sizes[step, row] = lengths
    column = np.arange(lengths.max(initial=0))
    samples = np.zeros((*sizes.shape, len(column)), dtype=np.int64)
    if flat:
        first = np.cumsum(lengths) - lengths
        place = first[:, None] + np.minimum(column, lengths[:, None] - 1)
        samples[step, row] = torch.cat(flat).numpy()[place]
    device = task.inputs.device
    sizes_there = torch.from_numpy(sizes).to(device)
    inside = torch.arange(len(column), device=device) < sizes_there[..., None]
    return _Plan(
        row_of=np.argsort(order).tolist(),
        active=(sizes > 0).sum(1).tolist(),
        widths=sizes.max(1, initial=0).tolist(),
        samples=torch.from_numpy(samples).to(device),
        shares=inside / sizes_there[..., None].clamp(min=1),
        sizes=sizes_there.float(),
        seen=sizes_there.sum(0).clamp(min=1),
    )


def _batches(
    samples: NDArray[np.int64], settings: LocalSettings, seed: int
) -> list[torch.Tensor]:
    """Return a client's batches of all epochs, as the sequential engine draws them."""
    shuffle = torch.Generator().manual_seed(seed)
    index = torch.as_tensor(samples, dtype=torch.int64)
    return [
        batch
        for _ in range(settings.epochs)
        for batch in epoch_batches(index, settings.batch_size, shuffle, 1)
    ]


def _obstacle(model: nn.Module, task: Task) -> str | None:
    """Return why the model cannot run as a stack, or None when it can.

    What cannot be read off the model is tried: one step on two clients of two
    samples.  An error of the model itself, stacked or not, is raised as it is.
    """
    stack = _Stack(model, task)
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


def _plain_gradients(stack: _Stack) -> tuple[torch.Tensor | None, ...]:
    inputs, targets = stack.task.inputs[:2], stack.task.targets[:2]
    loss = functional.cross_entropy(stack.flat.module(inputs), targets)
    return torch.autograd.grad(loss, stack.flat.parameters, allow_unused=True)


def _trial_step(stack: _Stack) -> tuple[tuple[torch.Tensor | None, ...], int]:
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


def _group_size(stack: _Stack, batch_size: int) -> int:
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
