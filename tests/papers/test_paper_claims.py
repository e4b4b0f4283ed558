"""Claims of the QuAP-FL paper that can be computed: what `docs/papers.md` says of them."""

from __future__ import annotations

import itertools
import math

import pytest
from test_framework import server

from fedquilt.framework import AdaptivePrivacyAllocator
from fedquilt.models import CIFAR10Model, MNISTModel, ResNet18


def share(model: MNISTModel | CIFAR10Model, layers: str) -> float:
    """Return the share of the parameters whose names begin with one of some letters."""
    sizes = {name: value.numel() for name, value in model.named_parameters()}
    chosen = sum(size for name, size in sizes.items() if name.startswith(tuple(layers.split(","))))
    return chosen / sum(sizes.values())


def test_what_share_of_the_parameters_the_classifier_is() -> None:
    assert share(MNISTModel(), "fc") == pytest.approx(0.984, abs=5e-4)
    assert share(CIFAR10Model(), "fc") == pytest.approx(0.745, abs=5e-4)
    assert share(MNISTModel(), "fc2") == pytest.approx(0.001, abs=1e-4)
    layers = ("conv1", "conv2", "conv3", "fc1", "fc2", "fc3")
    shares = [
        share(CIFAR10Model(), ",".join(chosen))
        for count in range(1, 7)
        for chosen in itertools.combinations(layers, count)
    ]
    assert not any(0.0345 <= one < 0.0355 for one in shares)


def test_the_nominal_bound_and_its_delta() -> None:
    allocator = AdaptivePrivacyAllocator(epsilon_base=6.0 / 200, alpha=0.5)
    found = allocator.get_privacy_analysis([0.0], [200])
    assert found["theoretical_upper_bound"] == pytest.approx(9.0)
    assert found["max_cumulative_loss"] <= 9.0 * (1 + 1e-12)
    assert 200 * allocator.delta == pytest.approx(2e-3)


def test_more_participation_is_more_noise() -> None:
    allocator = AdaptivePrivacyAllocator()
    noise = [
        allocator.compute_noise_multiplier(allocator.compute_privacy_budget(rate), 1.0)
        for rate in (0.0, 0.3, 0.6, 1.0)
    ]
    assert noise == sorted(noise)
    assert noise[-1] > noise[0]


def test_the_bytes_of_resnet18() -> None:
    """Four bytes for each of its parameters, whatever the mode: what a client of one sends."""
    assert ResNet18().get_num_parameters() * 4 == 44_695_848
    for mode in ("fedavg", "fixed_dp", "quap_fl"):
        made = server(mode=mode)
        numbers = sum(parameter.numel() for parameter in made.model.parameters())
        assert made.local_training(0, 0).nbytes == 4 * numbers


@pytest.mark.parametrize("budget", [0.0, 0.5])
@pytest.mark.parametrize("clipping", ["fixed", "quantile"])
@pytest.mark.parametrize("noise", ["full", "layer_wise"])
def test_the_eight_rows_of_the_ablation_run(budget: float, clipping: str, noise: str) -> None:
    made = server(alpha=budget, clipping_strategy=clipping, noise_strategy=noise)
    history = made.train()
    base = 1000.0
    assert all(value >= base for value in history["privacy_budgets"])
    assert (set(history["privacy_budgets"]) == {base}) == (budget == 0.0)
    assert (set(history["clip_values"]) == {1.0}) == (clipping == "fixed")
    assert len(made.statement.uncovered) == (2 if noise == "layer_wise" else 0)
    assert math.isfinite(history["test_loss"][-1])
