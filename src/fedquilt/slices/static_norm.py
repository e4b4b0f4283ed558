"""Batch normalisation among clients of different width: no running statistics while they train.

The running statistics of a narrow client are those of narrow activations; averaged into the
whole model they describe neither.  Static batch normalisation (Diao et al. 2021, section 3)
normalises by the batch while clients train and tracks nothing; before a model is
evaluated its statistics are computed once, in a pass over inputs:

    mean = sum x / n,    var = (sum x^2 - n mean^2) / (n - 1)

over all values x of a channel, in float64.  Every layer sees inputs that the layers before it
normalised by their batch, as in training.

Whose inputs these are decides what is released.  `clients`: sums over everybody's inputs
leave the clients for every evaluation, neither clipped nor noised; no bound can be claimed then.
`server`: the server's own samples, which no client holds; the clients give away nothing by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedquilt.common import trees
from fedquilt.common.trees import Tree

_BATCH = 256
_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked")

Batches = Callable[[], Iterator[Tree]]
"""Returns the batches of inputs, from the first on."""


def make_static(model: nn.Module) -> None:
    """Let batch normalisation track nothing in training; its statistics stay where they are.

    Without `track_running_stats` torch normalises by the batch in training mode and by the
    statistics, where there are any, in evaluation.
    """
    for _, layer in _tracking(model):
        layer.track_running_stats = False


def make_tracking(model: nn.Module) -> None:
    """Undo `make_static`: the statistics follow the batches again."""
    for _, layer in _tracking(model):
        layer.track_running_stats = True


def statistics_of(model: nn.Module) -> list[str]:
    """Return the names of the running statistics of static layers."""
    return [
        f"{name}.{suffix}" if name else suffix
        for name, layer in _static(model)
        for suffix in _SUFFIXES
        if getattr(layer, suffix) is not None
    ]


def batches_of_clients(inputs: Tree, clients: Sequence[NDArray[np.int64]]) -> Batches:
    """Return the inputs client by client: no batch has those of two."""

    def batches() -> Iterator[Tree]:
        device = trees.device_of(inputs)
        for client in clients:
            for part in torch.split(torch.as_tensor(client, device=device), _BATCH):
                yield trees.take(inputs, part)

    return batches


def batches_of(inputs: Tree) -> Batches:
    """Return inputs of one holder in batches."""
    return lambda: trees.split(inputs, _BATCH)


@torch.no_grad()
def recompute(model: nn.Module, batches: Iterable[Tree]) -> None:
    """Set the running statistics of static layers to those of the batches.

    Everything else is in evaluation mode, so nothing random is drawn.  A batch of one sample
    has no spread and is left out; without batches the statistics stay as they are.
    """
    sums = {layer: _Moments() for _, layer in _static(model)}
    hooks = [layer.register_forward_pre_hook(sums[layer].add) for layer in sums]
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for layer in sums:
        layer.training = True
    try:
        for batch in batches:
            if trees.length(batch) > 1:
                trees.call_with(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    for layer, moments in sums.items():
        moments.write(layer)


class _Moments:
    """The sums of a layer's inputs and of their squares, by channel."""

    def __init__(self) -> None:
        self.count = self.batches = 0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Take a batch on its way into the layer."""
        values = args[0].transpose(0, 1).flatten(1).to(torch.float64)
        self.count += values.shape[1]
        self.batches += 1
        self.total = self.total + values.sum(1)
        self.squares = self.squares + values.square().sum(1)

    def write(self, layer: _BatchNorm) -> None:
        """Set the layer's statistics."""
        if self.count < 2 or layer.running_mean is None or layer.running_var is None:
            return
        mean = torch.as_tensor(self.total) / self.count
        spread = torch.as_tensor(self.squares) - self.count * mean.square()
        layer.running_mean.copy_(mean)
        layer.running_var.copy_((spread / (self.count - 1)).clamp_min(0.0))
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(self.batches)


def _tracking(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yield the batch normalisations that have running statistics."""
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            yield name, layer


def _static(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    return ((name, layer) for name, layer in _tracking(model) if not layer.track_running_stats)
