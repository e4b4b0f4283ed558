"""Large linear layers step while the gradient passes, and train what they would without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fedquilt.training import FlatModel, LocalSettings, Task, make_engine
from fedquilt.training.trainers import autograd


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "LARGE", 10)
    monkeypatch.setattr(autograd, "WIDE", 20)


class Net(nn.Module):
    """Wide layers used once, twice, tied, outside themselves, without a bias, on sequences, in
    chunks of a batch, and again in the backward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(6, 8, bias=kind != "no bias")
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        if kind == "tied":
            self.third.weight = self.second.weight
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "chunks":  # the two samples of the trial are one
            return torch.cat([self.passed(part) for part in x.split(3)])
        return self.passed(x)

    def passed(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "sequence":
            x = x[:, None].expand(-1, 4, -1)
        x = self.first(x).relu()
        if self.kind == "outside before":
            x = functional.linear(x, self.second.weight).relu()
        if self.kind == "recomputed":
            x = checkpoint(self.second, x, use_reentrant=False).relu()
        else:
            x = self.second(x).relu()
        if self.kind == "twice":
            x = self.second(x).relu()
        if self.kind == "outside after":
            x = functional.linear(x, self.second.weight).relu()
        x = self.last(self.third(x).relu())
        return x.mean(1) if self.kind == "sequence" else x


def make(kind: str) -> tuple[nn.Module, Task]:
    torch.manual_seed(0)
    inputs, targets = torch.randn(20, 6), torch.randint(0, 3, (20,))
    return Net(kind), Task(inputs, targets, np.split(np.arange(20), [7, 15]))


HOW = LocalSettings(epochs=2, batch_size=4, fedprox_mu=0.0, seed=1)
KINDS = {
    "once": ["first", "second", "third", "last"],
    "no bias": ["first", "second", "third", "last"],
    "sequence": ["first", "second", "third", "last"],
    "chunks": ["first", "second", "third", "last"],
    "recomputed": ["first", "second", "third", "last"],
    "twice": ["first", "third", "last"],
    "tied": ["first", "last"],
    "outside after": ["first", "second", "third", "last"],
    "outside before": [],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_update_is_that_of_steps_after_the_backward_pass(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = make(kind)
    start = FlatModel(model).read().clone()
    engine = make_engine("sequential", model, task, HOW)
    names = {layer: name for name, layer in engine.trainer.flat.module.named_modules()}
    assert [names[layer] for layer in engine.trainer.flat.stepped] == KINDS[kind]
    found = list(engine.train(start, range(3), 0, 0.1))
    monkeypatch.setattr(autograd, "LARGE", 10**6)
    wanted = list(make_engine("sequential", model, task, HOW).train(start, range(3), 0, 0.1))
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.delta - theirs.delta).norm() <= 1e-5 * theirs.delta.norm()
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert not [layer for layer in engine.trainer.flat.stepped if "forward" in vars(layer)]


def test_no_gradient_of_a_wide_layer_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where gradients arrive."""
    model, task = make("once")
    engine = make_engine("sequential", model, task, HOW)
    arrived: list[int] = []
    plain = autograd.step_in_backward

    def watched(loss: torch.Tensor, parameters: list[torch.Tensor], rate: float) -> None:
        hooks: list[Any] = [
            parameter.register_hook(
                lambda gradient: None if gradient is None else arrived.append(gradient.dim())
            )
            for parameter in parameters
        ]
        plain(loss, parameters, rate)
        for hook in hooks:
            hook.remove()

    monkeypatch.setattr(autograd, "step_in_backward", watched)
    list(engine.train(FlatModel(model).read().clone(), [0], 0, 0.1))
    assert arrived
    assert set(arrived) == {1}  # biases


@pytest.mark.parametrize("how", [{"fedprox_mu": 0.1}, {"batch_size": 4}])
def test_other_steps_than_plain_ones_wait_for_the_gradient(how: dict[str, Any]) -> None:
    model, task = make("once")
    settings = LocalSettings(**{"epochs": 1, "batch_size": 8, "fedprox_mu": 0.0, "seed": 1, **how})
    stepped_layers = make_engine("sequential", model, task, settings).trainer.flat.stepped
    assert bool(stepped_layers) == (settings.fedprox_mu == 0)
