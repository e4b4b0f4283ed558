"""One client's local training: the steps that every engine repeats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from fedquilt.learning.engine import LocalSettings, Loss
from fedquilt.learning.flat import FlatModel
from fedquilt.randomness import torch_seed


def client_seed(settings: LocalSettings, round_index: int, client: int) -> int:
    """Return the seed of everything random that a client does in a round."""
    return torch_seed(settings.seed, "local", round_index, client)


def epoch_batches(
    index: torch.Tensor, batch_size: int, shuffle: torch.Generator, smallest: int
) -> tuple[torch.Tensor, ...]:
    """Return one epoch of a client's samples as shuffled batches, the last one kept.

    A last batch below `smallest` is left out: BatchNorm cannot train on one sample.
    """
    order = torch.randperm(len(index), generator=shuffle)
    batches = torch.split(index[order.to(index.device)], batch_size)
    return batches if len(batches[-1]) >= smallest else batches[:-1]


def cross_entropy(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of a model's outputs."""
    return functional.cross_entropy(module(inputs), targets)


def train_client(
    flat: FlatModel,
    start: torch.Tensor,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    index: torch.Tensor,
    learning_rate: float,
    settings: LocalSettings,
    seed: int,
    loss_of_batch: Loss = cross_entropy,
) -> float:
    """Train from `start` on the samples in `index`; return the mean loss.

    Plain SGD on a loss, w <- w - lr * (grad + mu * (w - w_start)).
    Cross-entropy of log-probabilities equals their negative log-likelihood, so
    models may end in logits or in log-probabilities.
    """
    flat.write(start)
    flat.module.train()
    parameters = flat.parameters
    anchors = _views(flat, start) if settings.fedprox_mu else None
    shuffle = torch.Generator().manual_seed(seed)
    smallest = 2 if flat.needs_pairs else 1
    loss_sum = torch.zeros((), device=inputs.device)
    seen = 0
    with seeded_layers(inputs.device, seed):
        for _ in range(settings.epochs):
            for batch in epoch_batches(index, settings.batch_size, shuffle, smallest):
                loss = loss_of_batch(flat.module, inputs[batch], targets[batch])
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                _step(parameters, gradients, anchors, learning_rate, settings.fedprox_mu)
                loss_sum += loss.detach() * len(batch)
                seen += len(batch)
    return float(loss_sum) / max(seen, 1)


@torch.no_grad()
def _step(
    parameters: list[torch.Tensor],
    gradients: tuple[torch.Tensor | None, ...],
    anchors: list[torch.Tensor] | None,
    learning_rate: float,
    mu: float,
) -> None:
    if anchors is not None:
        for parameter, anchor in zip(parameters, anchors, strict=True):
            parameter.lerp_(anchor.to(parameter.dtype), learning_rate * mu)
    used = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    torch._foreach_add_([p for p, _ in used], [g for _, g in used], alpha=-learning_rate)


def _views(flat: FlatModel, vector: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters' places in a vector of the same layout."""
    return [vector[s.start : s.stop].view(s.shape) for s in flat.segments if not s.is_buffer]


@contextmanager
def seeded_layers(device: torch.device, seed: int) -> Iterator[None]:
    """Let dropout and the like draw from `seed`, and put torch's own state back after."""
    on_gpu = device.type == "cuda"
    cpu_state = torch.get_rng_state()
    gpu_state = torch.cuda.get_rng_state(device) if on_gpu else None
    try:
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state, device)
