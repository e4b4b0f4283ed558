"""Embeddings: a model's own, or the output of one of its layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedquilt.condense.embeds import (
    Embeds,
    LayerEmbedding,
    embed_and_forward,
    embedding_model,
    frozen_copy,
)
from fedquilt.errors import InvalidValueError
from fedquilt.models.networks import CIFAR10Model, ConvNet, DigitsModel, MNISTModel


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def mnist_fc1(net: MNISTModel, x: torch.Tensor) -> torch.Tensor:
    x = functional.relu(net.conv2(functional.relu(net.conv1(x))))
    return net.fc1(functional.max_pool2d(x, 2).flatten(1))


def cifar_fc2(net: CIFAR10Model, x: torch.Tensor) -> torch.Tensor:
    for layer in (net.conv1, net.conv2, net.conv3):
        x = functional.max_pool2d(functional.relu(layer(x)), 2)
    return net.fc2(functional.relu(net.fc1(x.flatten(1))))


def digits_conv1(net: DigitsModel, x: torch.Tensor) -> torch.Tensor:
    return net.conv1(x).flatten(1)


@pytest.mark.parametrize(
    ("net", "layer", "shape", "by_hand"),
    [
        (MNISTModel(), "fc1", (1, 28, 28), mnist_fc1),
        (CIFAR10Model(), "fc2", (3, 32, 32), cifar_fc2),
        (DigitsModel(), "conv1", (1, 8, 8), digits_conv1),
    ],
)
def test_embedding_is_what_the_layer_puts_out(net, layer, shape, by_hand) -> None:
    net.eval()
    seen, x = embedding_model(net, layer), images(2, *shape)
    with torch.no_grad():
        torch.testing.assert_close(seen.embed(x), by_hand(net, x))
        embedded, scores = embed_and_forward(seen, x)
        torch.testing.assert_close(embedded, by_hand(net, x))
        torch.testing.assert_close(scores, net(x))
        torch.testing.assert_close(seen(x), net(x))
    assert embedded.ndim == 2
    assert not net.get_submodule(layer)._forward_hooks


def test_gradient_flows_through_the_layer_to_the_pixels() -> None:
    net = DigitsModel().eval()
    x = images(2, 1, 8, 8).requires_grad_(True)
    (seen,) = torch.autograd.grad(LayerEmbedding(net, "fc1").embed(x).square().sum(), x)
    pooled = functional.max_pool2d(functional.relu(net.conv1(x)), 2).flatten(1)
    (expected,) = torch.autograd.grad(net.fc1(pooled).square().sum(), x)
    torch.testing.assert_close(seen, expected)


def test_one_pass_for_both() -> None:
    calls: list[int] = []
    net = DigitsModel()
    net.conv1.register_forward_hook(lambda *_: calls.append(1))
    embed_and_forward(LayerEmbedding(net, "fc1"), images(2, 1, 8, 8))
    assert len(calls) == 1


def test_in_place_activation_does_not_overwrite_the_embedding() -> None:
    first, last = nn.Linear(3, 4), nn.Linear(4, 2)
    nn.init.constant_(first.bias, -1.0)
    net = nn.Sequential(first, nn.ReLU(inplace=True), last)
    x = images(5, 3)
    embedded, scores = LayerEmbedding(net, "0").embed_and_forward(x)
    assert embedded.min().item() < 0
    torch.testing.assert_close(embedded, first(x))
    torch.testing.assert_close(scores, last(first(x).relu()))


def test_hook_is_removed_where_the_model_fails() -> None:
    net = DigitsModel()
    with pytest.raises(RuntimeError):
        LayerEmbedding(net, "fc1").embed(images(2, 3, 8, 8))
    assert not net.fc1._forward_hooks


def test_unknown_layer_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidValueError, match=r"embed_layer='fc11'.*'fc1'"):
        LayerEmbedding(MNISTModel(), "fc11")


class Twice(nn.Module):
    """Calls a layer twice, one not at all, and one that returns a tuple or single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.never = nn.Linear(3, 3), nn.Linear(3, 3)
        self.pair = nn.LSTM(3, 3, batch_first=True)
        self.flat = nn.Flatten(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(self.both(self.pair(x)[0] + self.flat(x)[0]))


@pytest.mark.parametrize("layer", ["both", "never", "pair", "flat"])
def test_layers_without_one_row_an_image_are_refused(layer: str) -> None:
    with pytest.raises(InvalidValueError, match=f"embed_layer='{layer}' must be called once"):
        LayerEmbedding(Twice(), layer).embed(images(4, 2, 3))


def test_model_with_embed_serves_itself() -> None:
    net = ConvNet((3, 8, 8), 5, width=4, depth=2)
    assert isinstance(net, Embeds)
    assert embedding_model(net) is net
    x = images(2, 3, 8, 8)
    torch.testing.assert_close(LayerEmbedding(net, "features").embed(x), net.embed(x))


def test_model_without_embed_needs_a_layer() -> None:
    with pytest.raises(InvalidValueError, match=r"MNISTModel has no embed.*embed_layer"):
        embedding_model(MNISTModel())


def test_two_passes_where_a_model_has_no_way_to_do_both() -> None:
    class Plain(nn.Module):
        def embed(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(dim=1, keepdim=True)

    embedded, scores = embed_and_forward(embedding_model(Plain()), torch.ones(2, 3))
    assert embedded.tolist() == [[2.0] * 3] * 2
    assert scores.tolist() == [[3.0]] * 2


def test_frozen_copy_shares_nothing() -> None:
    net = MNISTModel().train()
    copy = frozen_copy(net)
    assert not any(p.requires_grad for p in copy.parameters())
    assert not copy.training
    with torch.no_grad():
        net.fc1.weight.zero_()
    assert float(copy.fc1.weight.abs().max()) > 0
    assert net.training
    assert all(p.requires_grad for p in net.parameters())
