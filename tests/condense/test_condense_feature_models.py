"""Feature models: the same for client and server, others every round, nothing else touched."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedquilt.condense.embeds import FeatureModels, perturbed, reinitialised
from fedquilt.config.choices import FEATURE_MODELS
from fedquilt.errors import InvalidValueError
from fedquilt.models.networks import ConvNet, MNISTModel


def make_net() -> ConvNet:
    """Return a network with weights that no initialisation draws."""
    net = ConvNet((3, 8, 8), 5, width=4, depth=2)
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.fill_(100.0 + number)
    return net


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def make(kind: str, seed: int = 0, count: int = 1) -> FeatureModels:
    return FeatureModels(kind, count, seed=seed)


@pytest.mark.parametrize("kind", FEATURE_MODELS)
def test_same_seed_same_weights(kind: str) -> None:
    """Whatever happened to torch's generator in between, client and server agree."""
    client = make(kind).build(make_net(), 3, 0)
    torch.rand(17)
    server = make(kind).build(make_net(), 3, 0)
    assert torch.equal(flat(client), flat(server))


@pytest.mark.parametrize("kind", ["random_pool", "perturbed"])
def test_other_round_number_or_seed_gives_other_weights(kind: str) -> None:
    models = [
        make(kind, seed, count=2).build(make_net(), index, number)
        for seed, index, number in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0))
    ]
    weights = torch.stack([flat(model) for model in models])
    for one in range(4):
        for other in range(one):
            assert not torch.equal(weights[one], weights[other])


def test_global_is_a_copy_of_the_model() -> None:
    net = make_net()
    seen = make("global").build(net, 0, 0)
    assert torch.equal(flat(seen), flat(net))
    assert all(a is not b for a, b in zip(seen.parameters(), net.parameters(), strict=True))


@pytest.mark.parametrize("kind", FEATURE_MODELS)
def test_frozen_and_in_evaluation_mode(kind: str) -> None:
    seen = make(kind).build(MNISTModel().train(), 0, 0)
    assert not any(p.requires_grad for p in seen.parameters())
    assert not any(module.training for module in seen.modules())


@pytest.mark.parametrize("kind", FEATURE_MODELS)
def test_original_and_global_generator_are_untouched(kind: str) -> None:
    net = make_net().train()
    before, state = flat(net).clone(), torch.get_rng_state()
    numbers = np.random.get_state()[1].copy()
    make(kind).build(net, 0, 0)
    assert torch.equal(flat(net), before)
    assert net.training
    assert all(p.requires_grad for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numbers)


def test_random_pool_does_not_depend_on_the_weights() -> None:
    """Only a seed travels, so nothing of the current model may be in them."""
    other = ConvNet((3, 8, 8), 5, width=4, depth=2)
    one, two = (make("random_pool").build(net, 2, 1) for net in (make_net(), other))
    assert torch.equal(flat(one), flat(two))


def test_random_pool_is_drawn_as_a_new_network_is() -> None:
    """The bounds and spread of torch's own initialisation: uniform, 1 / sqrt(fan in)."""
    net = make("random_pool").build(ConvNet((3, 32, 32), 10, width=64), 0, 0)
    second = net.get_submodule("features.4").weight
    bound = 1 / math.sqrt(64 * 9)
    assert float(second.abs().max()) <= bound
    assert float(second.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert torch.equal(net.get_submodule("features.1").weight, torch.ones(64))


@pytest.mark.parametrize("affine", [True, False])
def test_random_pool_forgets_running_statistics(affine: bool) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, affine=affine))
    net(torch.randn(8, 1, 5, 5, generator=torch.Generator().manual_seed(0)) + 4)
    norm = reinitialised(net, 0)[1]
    assert norm.running_mean.tolist() == [0.0, 0.0]
    assert norm.running_var.tolist() == [1.0, 1.0]
    assert net[1].num_batches_tracked.item() == 1
    assert norm.num_batches_tracked.item() == 0


def test_layers_that_cannot_draw_anew_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    net = nn.Sequential(nn.Linear(2, 2), Scaled())
    state = torch.get_rng_state()
    with pytest.raises(InvalidValueError, match="'1' has no reset_parameters"):
        reinitialised(net, 0)
    with pytest.raises(InvalidValueError, match="'Scaled' has no reset_parameters"):
        reinitialised(Scaled(), 0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rho", [0.0, 0.1, 5.0])
def test_perturbed_lies_at_distance_rho(rho: float) -> None:
    net = ConvNet((3, 8, 8), 5, width=8).double()
    for number in range(3):
        moved = FeatureModels("perturbed", 3, rho).build(net, 0, number)
        assert float((flat(moved) - flat(net)).norm()) == pytest.approx(rho, abs=1e-12)
        single = FeatureModels("perturbed", 3, rho).build(net.float(), 0, number)
        assert float((flat(single) - flat(net)).norm()) == pytest.approx(rho, abs=1e-4)
        net.double()


def test_perturbed_leaves_frozen_parameters() -> None:
    net = ConvNet((3, 8, 8), 5, width=4, depth=2).double()
    net.features.requires_grad_(False)
    moved = perturbed(net, 2.0, seed=4)
    for (name, old), new in zip(net.named_parameters(), moved.parameters(), strict=True):
        assert torch.equal(old, new) == name.startswith("features")
    change = flat(moved.classifier) - flat(net.classifier)
    assert float(change.norm()) == pytest.approx(2.0)


def test_directions_of_perturbation_are_spread_evenly() -> None:
    """Independent directions in d dimensions are nearly orthogonal: cosine about 1 / sqrt(d)."""
    net = ConvNet((3, 8, 8), 5, width=8).double()
    moves = torch.stack([flat(perturbed(net, 1.0, seed)) - flat(net) for seed in range(6)])
    cosines = moves @ moves.T - torch.eye(6, dtype=torch.float64)
    assert float(cosines.abs().max()) < 5 / math.sqrt(moves.shape[1])
    assert abs(float(moves.mean())) < 5 / moves.shape[1]


def test_bytes_down() -> None:
    net = ConvNet()
    weights = 4 * 320_010
    assert make("global").bytes_down(net) == weights
    assert make("random_pool", count=10).bytes_down(net) == 8
    assert make("perturbed", count=10).bytes_down(net) == weights + 8


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("pool", 1, 5.0), "feature_model='pool'"),
        (("random_pool", 0, 5.0), "model_n=0"),
        (("perturbed", 1, -1.0), "rho=-1.0"),
        (("global", 2, 5.0), "model_n=2 must be 1"),
    ],
)
def test_wrong_settings_are_refused(arguments: tuple[str, int, float], name: str) -> None:
    with pytest.raises(InvalidValueError, match=name):
        FeatureModels(*arguments)
