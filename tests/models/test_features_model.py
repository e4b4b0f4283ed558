"""Feature models: what trains, what stays, and that features can be computed once."""

from __future__ import annotations

import copy
import doctest

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional

import fedquilt.models.features
from fedquilt.data import load_dataset
from fedquilt.errors import InvalidValueError
from fedquilt.models.features import (
    FEATURE_MODELS,
    FeatureModel,
    FrozenExtractor,
    OrientedGradients,
    Scattering,
    make_feature_model,
    precompute,
)
from fedquilt.training.flat import FlatModel

SMALL = (1, 8, 8)


def train(model, inputs, targets, steps=5):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def sample(count=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, *SMALL, generator=generator)
    return images, torch.randint(0, 10, (count,), generator=generator)


@pytest.mark.parametrize(
    ("name", "shape", "features"),
    [
        ("hog-linear", (1, 8, 8), 128),
        ("hog-linear", (1, 28, 28), 128),
        ("hog-linear", (3, 32, 32), 128),
        ("scatter-linear", (1, 8, 8), 144),
    ],
)
def test_names_and_sizes(name, shape, features):
    model = make_feature_model(name, shape, 10)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {
        "head.weight": (10, features)
    }
    assert list(model.state_dict()) == ["head.weight"]
    assert model.get_num_parameters() == 10 * features
    assert model(torch.rand(3, *shape)).shape == (3, 10)


def test_equal_arguments_give_equal_and_separate_models():
    first, second = (make_feature_model("hog-linear", SMALL, 10, bias=True) for _ in range(2))
    images, targets = sample()
    assert torch.equal(first.front(images), second.front(images))
    train(first, images, targets)
    assert first.head.weight.abs().sum() > 0
    assert not second.head.weight.any()
    assert not second.head.bias.any()


def test_building_leaves_the_global_random_state_alone():
    state = torch.get_rng_state()
    make_feature_model("hog-linear", (1, 9, 9), 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_training_moves_the_head_alone():
    model = make_feature_model("hog-linear", SMALL, 10)
    images, targets = sample()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    train(model, images, targets)
    assert before.keys() >= {"front.mean", "front.whitening"}
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert FlatModel(model, images[:2]).names == ["head.weight"]


def test_a_front_with_parameters_is_frozen():
    class Layer(nn.Linear):
        num_features = 4

    model = FeatureModel(Layer(6, 4), 3, bias=True)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        "head.weight",
        "head.bias",
    ]
    assert model.get_num_parameters() == 15


@pytest.mark.parametrize("batch_size", [1, 7, 1024])
def test_precomputed_features_are_the_features(batch_size):
    model = make_feature_model("hog-linear", SMALL, 10)
    images, _ = sample()
    features = precompute(model.front, images, batch_size)
    torch.testing.assert_close(features, model.front(images), atol=1e-5, rtol=0)


def test_precompute_flattens_places_and_takes_an_empty_set():
    front = Scattering(SMALL, J=1, L=2)
    images, _ = sample(3)
    assert torch.equal(precompute(front, images), front(images).flatten(1))
    assert precompute(front, images[:0]).shape == (0, front.num_features)
    with pytest.raises(InvalidValueError, match="batch_size=0"):
        precompute(front, images, 0)


def test_how_many_images_there_are_does_not_show_in_what_is_told_of_the_progress():
    model = make_feature_model("hog-linear", SMALL, 10)
    told = [[], [], []]
    for count, said in zip((3, 8, 190), told, strict=True):
        images = torch.rand(count, *SMALL)
        precompute(model.front, images, 4, lambda *given, said=said: said.append(given))
    assert told[0] == told[1] == told[2]
    assert told[0][-1] == ("features", 1.0)


def test_training_a_head_on_features_is_training_the_model():
    model = make_feature_model("hog-linear", SMALL, 10, bias=True)
    images, targets = sample()
    head = copy.deepcopy(model.on_features())
    train(model, images, targets)
    train(head, precompute(model.front, images), targets)
    assert head.head.weight.abs().sum() > 0
    for name, values in model.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], values, atol=1e-5, rtol=0)


def test_a_model_on_features_shares_the_head():
    model = make_feature_model("hog-linear", SMALL, 10)
    images, targets = sample()
    features = precompute(model.front, images)
    train(model.on_features(), features, targets)
    assert model.head.weight.abs().sum() > 0
    torch.testing.assert_close(model(images), model.on_features()(features), atol=1e-5, rtol=0)
    assert FlatModel(model.on_features(), features[:2]).names == ["head.weight"]
    with pytest.raises(InvalidValueError, match=r"\(20, 1, 8, 8\) must have shape \(N, 128\)"):
        model.on_features()(images)


@pytest.mark.parametrize(
    "front",
    [
        OrientedGradients(SMALL, 2),
        OrientedGradients(SMALL, 2, interpolate=False, block=2, block_norm="L2-Hys"),
        FrozenExtractor(Scattering(SMALL, J=1), projection=20),
    ],
)
def test_runs_as_a_stack_of_clients(front):
    """`vmap` over heads and batches, as an engine for many clients does."""
    model = FeatureModel(front, 10)
    heads = torch.randn(3, *model.head.weight.shape, generator=torch.Generator().manual_seed(1))
    batches = sample(12)[0].view(3, 4, *SMALL)
    stacked = vmap(lambda head, x: functional_call(model, {"head.weight": head}, (x,)))(
        heads, batches
    )
    for client in range(3):
        alone = copy.deepcopy(model)
        alone.head.weight.data = heads[client]
        torch.testing.assert_close(stacked[client], alone(batches[client]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FEATURE_MODELS)
def test_learns_real_digits_however_they_are_normalised(name):
    train_part, test_part = load_dataset("digits")
    model = make_feature_model(name, SMALL, 10)
    features = precompute(model.front, train_part.images)
    torch.testing.assert_close(
        precompute(model.front, 0.1 * train_part.images[:50] + 2), features[:50], atol=2e-2, rtol=0
    )
    train(model.head, features, train_part.targets, steps=100)
    right = model(test_part.images).argmax(1) == test_part.targets
    assert right.float().mean() > 0.95


def test_bad_arguments():
    with pytest.raises(InvalidValueError, match="model='hog' must be one of 'hog-linear'"):
        make_feature_model("hog", SMALL, 10)
    with pytest.raises(InvalidValueError, match="input_shape"):
        make_feature_model("hog-linear", (28, 28), 10)
    with pytest.raises(InvalidValueError, match="num_classes=0"):
        make_feature_model("hog-linear", SMALL, 0)


def test_the_example_of_the_package():
    assert doctest.testmod(fedquilt.models.features).failed == 0
