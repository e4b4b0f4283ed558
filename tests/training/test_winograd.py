"""Convolutions by Winograd's formula: what a direct one gives, and its gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedquilt.training import ClientUpdate, Engine, FlatModel, LocalSettings, Task, make_engine
from fedquilt.training.trainers.manual import ManualTrainer
from fedquilt.training.trainers.plan import Conv, is_interpreted
from fedquilt.training.trainers.winograd import (
    Update,
    WinogradMemory,
    WinogradStep,
    suits,
    tile_transforms,
)


def conv(high: int, wide: int, c: int, k: int, pad: int, relu: bool, pool: bool) -> Conv:
    return Conv("w", "b", high, wide, c, k, (3, 3), pad, relu, pool)


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


class Layer:
    """A layer with weights of its own; gradients go beside them."""

    def __init__(self, layer: Conv, width: int, first: bool = False) -> None:
        self.layer, self.first, self.memory = layer, first, WinogradMemory(layer, width, first)
        shape = (3, 3, layer.inputs, layer.outputs)
        self.weight, self.into = torch.randn(shape) / 10, torch.zeros(shape)
        self.bias, self.bias_into = torch.randn(layer.outputs), torch.zeros(layer.outputs)

    def step(self, size: int) -> WinogradStep:
        weight, into = (tensor.permute(3, 2, 0, 1) for tensor in (self.weight, self.into))
        places = (weight, self.bias, into, self.bias_into)
        return WinogradStep(self.layer, self.memory, *places, self.first, size)

    def expected(self, x: torch.Tensor, d: torch.Tensor) -> list[torch.Tensor]:
        """Return y and the gradients of weight, bias and x, in float64."""
        weight = self.weight.permute(3, 2, 0, 1).double().requires_grad_()
        bias, x = self.bias.double().requires_grad_(), x.double().requires_grad_()
        y = torch.conv2d(x, weight, bias, padding=self.layer.padding)
        y = y.relu() if self.layer.relu else y
        y = torch.max_pool2d(y, 2) if self.layer.pool else y
        return [y.detach(), *torch.autograd.grad(y, [weight, bias, x], d.double())]


LAYERS = {
    "whole tiles": conv(10, 14, 8, 12, 0, True, True),
    "padded": conv(8, 8, 6, 8, 1, True, True),
    "tiles beyond the image": conv(7, 9, 8, 6, 1, True, True),
    "no pool": conv(9, 6, 8, 6, 0, False, False),
    "no pool, padded": conv(8, 8, 6, 8, 1, True, False),
}


@pytest.mark.parametrize("size", [7, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_its_gradients_are_those_of_a_direct_convolution(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = LAYERS[name]
    tiles = -(-what.out_size[0] // 4) * -(-what.out_size[1] // 4)
    most = 3 * 4 * 36 * tiles * max(what.inputs, what.outputs)
    monkeypatch.setattr("fedquilt.training.trainers.winograd._CHUNK_BYTES", most)
    torch.manual_seed(0)
    layer = Layer(what, width=7)
    assert layer.memory.chunk == 3  # so the last part of a full batch is a shorter one
    step = layer.step(size)
    for _ in range(2):  # nothing of the first time may be left
        x = torch.randn(size, what.height, what.width, what.inputs).permute(0, 3, 1, 2)
        d = torch.randn(size, *what.shape).permute(0, 3, 1, 2)
        wanted = layer.expected(x, d)
        y = step.forward(x).clone()
        back = step.backward(d.clone(), Update(0.0, 1.0))
    assert back is not None
    got = [y, layer.into.permute(3, 2, 0, 1), layer.bias_into, back]
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape
        assert relative(one, other) < 3e-6


def test_the_first_layer_has_no_gradient_of_its_input() -> None:
    layer = Layer(LAYERS["padded"], width=2, first=True)
    step = layer.step(2)
    y = step.forward(torch.randn(2, 6, 8, 8).to(memory_format=torch.channels_last))
    assert step.backward(y.clone(), Update(0.0, 1.0)) is None
    assert layer.into.norm() > 0


def test_plain_sgd_adds_to_the_weights() -> None:
    torch.manual_seed(1)
    layer = Layer(LAYERS["no pool"], width=2)
    layer.into, layer.bias_into = layer.weight, layer.bias
    x, d = torch.randn(2, 8, 9, 6), torch.randn(2, 6, 7, 4)
    x, d = (tensor.to(memory_format=torch.channels_last) for tensor in (x, d))
    weight, bias = layer.weight.clone(), layer.bias.clone()
    _, of_weight, of_bias, _ = layer.expected(x, d)
    step = layer.step(2)
    step.forward(x)
    step.backward(d.clone(), Update(1.0, -0.5))
    assert relative(layer.weight, weight - 0.5 * of_weight.permute(2, 3, 1, 0)) < 1e-6
    assert relative(layer.bias, bias - 0.5 * of_bias) < 1e-6


def test_nan_leaves_nothing_behind() -> None:
    layer = Layer(LAYERS["tiles beyond the image"], width=3)
    step = layer.step(3)
    x = torch.randn(3, 7, 9, 8).permute(0, 3, 1, 2)
    d = torch.randn(3, 3, 4, 6).permute(0, 3, 1, 2)

    def run(values: torch.Tensor) -> list[torch.Tensor]:
        y = step.forward(values).clone()
        back = step.backward(d.clone(), Update(0.0, 1.0))
        assert back is not None
        return [y, back.clone(), layer.into.clone(), layer.bias_into.clone()]

    before = run(x)
    assert run(torch.full_like(x, torch.nan))[2].isnan().any()
    for one, other in zip(run(x), before, strict=True):
        assert torch.equal(one, other)


def test_a_tie_goes_to_the_first_of_a_window() -> None:
    """As in torch: a constant image has nothing but ties."""
    layer = Layer(conv(6, 6, 1, 1, 0, False, True), width=1)
    layer.weight.zero_()
    step = layer.step(1)
    step.forward(torch.randn(1, 1, 6, 6))
    step.backward(torch.ones(1, 1, 2, 2), Update(0.0, 1.0))
    chunk = step._chunks[0]
    routed = chunk._out.view(4, 4)
    assert routed.tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]


def test_the_matrices_convolve() -> None:
    a, g, b = tile_transforms()
    x, w = torch.randn(6).double(), torch.randn(3).double()
    wanted = torch.stack([(x[i : i + 3] * w).sum() for i in range(4)])
    assert torch.allclose(a @ ((g @ w) * (b @ x)), wanted, rtol=1e-12)


def test_it_is_taken_where_it_saves_more_than_it_costs() -> None:
    assert suits(conv(26, 26, 32, 64, 0, True, True))  # the MNIST network's second
    assert suits(conv(8, 8, 128, 256, 1, True, True))  # the CIFAR-10 network's third
    assert not suits(conv(28, 28, 1, 32, 0, True, False))
    assert not suits(conv(16, 16, 16, 16, 1, True, True))
    assert not suits(conv(5, 5, 64, 64, 0, True, False))  # 9 of 16 outputs of a tile are used
    assert not suits(Conv("w", "b", 16, 16, 64, 64, (5, 5), 2))


@pytest.mark.skipif(is_interpreted(), reason="kernels stand in for this there")
@pytest.mark.parametrize("rule", ["plain", "fedprox"])
def test_a_network_trains_as_the_sequential_engine_trains_it(rule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout2d(0.25), nn.Flatten(), nn.Linear(256, 5)),
    )
    inputs, targets = torch.randn(14, 1, 8, 8), torch.arange(14) % 5
    task = Task(inputs, targets, [np.arange(9), np.arange(9, 13), np.arange(13, 14)])
    settings = LocalSettings(2, 4, 0.5 if rule == "fedprox" else 0.0, seed=1)
    start = FlatModel(model).read().clone()

    def trained(engine: Engine) -> dict[int, ClientUpdate]:
        return {update.client: update for update in engine.train(start, [1, 0, 2], 3, 0.1)}

    wanted = trained(make_engine("sequential", model, task, settings))
    engine = make_engine("batched", model, task, settings)
    assert isinstance(engine.trainer, ManualTrainer)
    assert any(made.tiles is not None for made in engine.trainer._program._layers)
    got = trained(engine)
    again = trained(make_engine("batched", model, task, settings))
    for client, update in wanted.items():
        assert (got[client].delta - update.delta).norm() <= 1e-5 * update.delta.norm()
        assert torch.equal(again[client].delta, got[client].delta)
