"""The documents' models, layer by layer, and the registry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedquilt.errors import InvalidValueError
from fedquilt.models import MLP, CIFAR10Model, DigitsModel, Linear, MNISTModel, make_model

SIZES = {
    MNISTModel: {"conv1": 320, "conv2": 18_496, "fc1": 1_179_776, "fc2": 1_290},
    CIFAR10Model: {
        "conv1": 1_792,
        "conv2": 73_856,
        "conv3": 295_168,
        "fc1": 1_048_832,
        "fc2": 32_896,
        "fc3": 1_290,
    },
}
SHAPES = {MNISTModel: (1, 28, 28), CIFAR10Model: (3, 32, 32), DigitsModel: (1, 8, 8)}


@pytest.mark.parametrize("kind", [MNISTModel, CIFAR10Model])
def test_the_documents_models_have_their_sizes(kind: type[nn.Module]) -> None:
    model = kind()
    sizes = {
        name: sum(p.numel() for p in layer.parameters())
        for name, layer in model.named_children()
        if list(layer.parameters())
    }
    assert sizes == SIZES[kind]
    assert model.get_num_parameters() == sum(sizes.values())
    assert model.get_num_parameters() == {MNISTModel: 1_199_882, CIFAR10Model: 1_453_834}[kind]


def test_the_mnist_network_is_the_documents_chain() -> None:
    model = MNISTModel().eval()
    x = torch.randn(3, 1, 28, 28)
    hidden = functional.conv2d(x, model.conv1.weight, model.conv1.bias).clamp(min=0)
    hidden = functional.conv2d(hidden, model.conv2.weight, model.conv2.bias).clamp(min=0)
    hidden = hidden.unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2)).reshape(3, 9216)
    hidden = (hidden @ model.fc1.weight.T + model.fc1.bias).clamp(min=0)
    logits = hidden @ model.fc2.weight.T + model.fc2.bias
    expected = logits - logits.exp().sum(1, keepdim=True).log()
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_the_cifar_network_is_the_documents_chain() -> None:
    model = CIFAR10Model().eval()
    hidden = x = torch.randn(2, 3, 32, 32)
    for layer in (model.conv1, model.conv2, model.conv3):
        padded = functional.pad(hidden, (1, 1, 1, 1))
        hidden = functional.conv2d(padded, layer.weight, layer.bias).clamp(min=0)
        hidden = hidden.unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2))
    hidden = hidden.reshape(2, 4096)
    for layer in (model.fc1, model.fc2):
        hidden = (hidden @ layer.weight.T + layer.bias).clamp(min=0)
    logits = hidden @ model.fc3.weight.T + model.fc3.bias
    expected = logits - logits.exp().sum(1, keepdim=True).log()
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_dropout_is_the_documents() -> None:
    model = MNISTModel()
    assert isinstance(model.dropout1, nn.Dropout2d)
    assert (model.dropout1.p, model.dropout2.p, CIFAR10Model().dropout.p) == (0.25, 0.5, 0.5)
    x = torch.randn(4, 1, 28, 28)
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@pytest.mark.parametrize("kind", [MNISTModel, CIFAR10Model, DigitsModel])
def test_log_probabilities_make_cross_entropy_and_likelihood_agree(kind: type[nn.Module]) -> None:
    model = kind().eval()
    outputs, labels = model(torch.randn(5, *SHAPES[kind])), torch.arange(5)
    assert torch.allclose(outputs.exp().sum(1), torch.ones(5), atol=1e-5)
    entropy = functional.cross_entropy(outputs, labels).item()
    assert entropy == pytest.approx(functional.nll_loss(outputs, labels).item(), rel=1e-5)


def test_digits_mlp_and_linear() -> None:
    assert DigitsModel().get_num_parameters() == 160 + 256 * 32 + 32 + 330 == 8_714
    mlp, linear = MLP((2, 3), 4, hidden=5), Linear((2, 3), 4)
    assert mlp.get_num_parameters() == 6 * 5 + 5 + 5 * 4 + 4
    assert linear.get_num_parameters() == 6 * 4 + 4
    x = torch.randn(7, 2, 3)
    hidden = (x.reshape(7, 6) @ mlp.fc1.weight.T + mlp.fc1.bias).clamp(min=0)
    assert torch.allclose(mlp(x), hidden @ mlp.fc2.weight.T + mlp.fc2.bias, atol=1e-6)
    assert torch.allclose(linear(x), x.reshape(7, 6) @ linear.fc.weight.T + linear.fc.bias)


@pytest.mark.parametrize("kind", [MNISTModel, CIFAR10Model])
def test_gradients_travel_through_one_vector(kind: type[nn.Module]) -> None:
    model = kind()
    assert model.get_gradients_as_vector() is None
    outputs = model(torch.randn(2, *SHAPES[kind]))
    functional.nll_loss(outputs, torch.tensor([1, 2])).backward()
    vector = model.get_gradients_as_vector()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).numpy()
    assert np.array_equal(vector, expected)
    other = kind()
    other.set_gradients_from_vector(2 * vector)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(2 * one.grad, two.grad)
    assert np.array_equal(other.get_gradients_as_vector(), 2 * vector)
    model.conv1.weight.grad = None
    vector = model.get_gradients_as_vector()
    assert vector.shape == expected.shape
    assert not vector[: model.conv1.weight.numel()].any()


def test_a_gradient_vector_of_another_size_is_refused() -> None:
    model = MNISTModel()
    for size in (1, 1_199_881, 1_199_883):
        with pytest.raises(InvalidValueError, match="grad_vector"):
            model.set_gradients_from_vector(np.zeros(size))
    assert model.conv1.weight.grad is None


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("auto", (1, 8, 8), "DigitsModel"),
        ("auto", (1, 28, 28), "MNISTModel"),
        ("auto", (3, 32, 32), "CIFAR10Model"),
        ("auto", (17,), "MLP"),
        ("linear", (1, 8, 8), "Linear"),
        ("mlp", [2, 2], "MLP"),
    ],
)
def test_models_by_name(name: str, shape: list[int], kind: str) -> None:
    model = make_model(name, shape, 7, seed=0)
    assert type(model).__name__ == kind
    assert model.training
    assert model(torch.zeros(2, *shape)).shape == (2, 7)


def test_weights_follow_the_seed_and_no_global_state() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, again = (make_model("mlp", (5,), 3, seed=4).state_dict() for _ in range(2))
    other = make_model("mlp", (5,), 3, seed=5).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["fc1.weight"], other["fc1.weight"])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mnist", (1, 8, 8), r"model='mnist' must take inputs of shape \(1, 8, 8\)"),
        ("cifar10", (1, 28, 28), r"model='cifar10' must take inputs"),
        ("mlp", (), r"model='mlp' must take inputs of shape \(\)"),
        ("mlpp", (4,), r"model='mlpp' must be one of .*did you mean 'mlp'"),
    ],
)
def test_a_model_that_does_not_fit_is_named(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make_model(name, shape, 10, seed=0)
