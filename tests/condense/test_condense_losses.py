"""Losses against figures, SciPy, a linear program and sums by hand."""

from __future__ import annotations

import condense_oracle as oracle
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.special import softmax
from scipy.stats import entropy, wasserstein_distance

from fedquilt.condense.matching import logit_distance, matching_loss
from fedquilt.config.choices import LOGIT_LOSSES, LOSS_COMPUTATIONS
from fedquilt.errors import InvalidValueError

Array = NDArray[np.float64]
SOURCE = np.random.default_rng(7)
PAIRS = [(SOURCE.normal(0, 2, k), SOURCE.normal(0, 2, k)) for k in (2, 3, 5, 8)]


def distance(kind: str, z: Array, target: Array) -> float:
    return logit_distance(kind, torch.from_numpy(z), torch.from_numpy(target)).item()


def transport(p: Array, q: Array) -> float:
    """Cost of the cheapest plan from p to q where moving to another class costs 1."""
    size = len(p)
    cost = 1 - np.eye(size)
    leave = np.kron(np.eye(size), np.ones(size))
    arrive = np.kron(np.ones(size), np.eye(size))
    plan = linprog(cost.ravel(), A_eq=np.vstack([leave, arrive]), b_eq=np.concatenate([p, q]))
    assert plan.status == 0
    return float(plan.fun)


def test_certain_of_one_class_against_certain_of_another() -> None:
    """Logits of 8 at class 0 against 8 at class 5: the published sorted form sees nothing."""
    z, target = 8 * np.eye(10)[0], 8 * np.eye(10)[5]
    assert distance("wasserstein_sorted", z, target) == pytest.approx(0.0, abs=1e-12)
    assert distance("kl", z, target) == pytest.approx(7.97, abs=5e-3)
    assert distance("l2", z, target) == 128
    certain, other = np.exp(8) / (np.exp(8) + 9), 1 / (np.exp(8) + 9)
    assert distance("wasserstein", z, target) == pytest.approx(certain - other)
    assert distance("wasserstein", 100 * z, 100 * target) == pytest.approx(1.0)


@pytest.mark.parametrize(("z", "target"), PAIRS)
def test_wasserstein_is_the_cheapest_transport(z: Array, target: Array) -> None:
    assert distance("wasserstein", z, target) == pytest.approx(
        transport(softmax(z), softmax(target)), abs=1e-9
    )


def test_wasserstein_of_two_classes_is_that_of_the_line() -> None:
    """With two classes the 0/1 metric is the distance on the line {0, 1}."""
    z, target = PAIRS[0]
    line = wasserstein_distance([0, 1], [0, 1], softmax(z), softmax(target))
    assert distance("wasserstein", z, target) == pytest.approx(line)


@pytest.mark.parametrize(("z", "target"), PAIRS)
def test_sorted_form_is_the_line_distance_of_sorted_probabilities(z: Array, target: Array) -> None:
    line = np.arange(len(z))
    p, q = np.sort(softmax(z)), np.sort(softmax(target))
    expected = wasserstein_distance(line, line, p, q)
    assert distance("wasserstein_sorted", z, target) == pytest.approx(expected)


@pytest.mark.parametrize(("z", "target"), PAIRS)
def test_kl_is_the_entropy_of_the_target_relative_to_the_images(z: Array, target: Array) -> None:
    assert distance("kl", z, target) == pytest.approx(entropy(softmax(target), softmax(z)))


@pytest.mark.parametrize("kind", LOGIT_LOSSES)
def test_distance_and_slope_are_those_of_the_oracle(kind: str) -> None:
    for z, target in PAIRS:
        at = torch.from_numpy(z).requires_grad_(True)
        value = logit_distance(kind, at, torch.from_numpy(target))
        (slope,) = torch.autograd.grad(value, at)
        expected, expected_slope = oracle.distance(kind, z, target)
        assert value.item() == pytest.approx(expected, abs=1e-12)
        np.testing.assert_allclose(slope.numpy(), expected_slope, atol=1e-12)


@pytest.mark.parametrize("kind", LOGIT_LOSSES)
def test_equal_logits_are_at_no_distance(kind: str) -> None:
    z = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    assert logit_distance(kind, z, z).abs().max().item() < 1e-6


@pytest.mark.parametrize("kind", ["kl", "wasserstein", "wasserstein_sorted"])
def test_extreme_logits_stay_finite(kind: str) -> None:
    z = torch.tensor([1e4, -1e4, 0.0], requires_grad=True)
    value = logit_distance(kind, z, torch.tensor([-1e4, 1e4, 0.0]))
    (slope,) = torch.autograd.grad(value, z)
    assert torch.isfinite(value)
    assert torch.isfinite(slope).all()


def ragged(seed: int) -> tuple[Array, Array, list[list[oracle.Group]]]:
    """Return means of three classes, and 1, 4 and 2 groups for them."""
    source = np.random.default_rng(seed)
    groups = [
        [
            oracle.Group(int(source.integers(1, 40)), source.normal(size=6), source.normal(size=4))
            for _ in range(number)
        ]
        for number in (1, 4, 2)
    ]
    return source.normal(size=(3, 6)), source.normal(size=(3, 4)), groups


def padded(groups: list[list[oracle.Group]], junk: float) -> tuple[torch.Tensor, ...]:
    """Lay the groups side by side; places without one hold `junk` and weight 0."""
    most = max(len(part) for part in groups) + 1
    features = torch.full((len(groups), most, 6), junk, dtype=torch.float64)
    logits = torch.full((len(groups), most, 4), junk, dtype=torch.float64)
    weights = torch.zeros(len(groups), most, dtype=torch.float64)
    for row, part in enumerate(groups):
        total = sum(group.count for group in part)
        for place, group in enumerate(part):
            features[row, place] = torch.from_numpy(group.features)
            logits[row, place] = torch.from_numpy(group.logits)
            weights[row, place] = group.count / total
    return features, logits, weights


@pytest.mark.parametrize("computation", LOSS_COMPUTATIONS)
@pytest.mark.parametrize("kind", LOGIT_LOSSES)
def test_matching_loss_is_that_of_each_class_alone(kind: str, computation: str) -> None:
    """Whatever stands in a place of weight 0, the losses are those of the ragged groups."""
    f, z, groups = ragged(3)
    expected = [
        oracle.class_loss(*means, part, kind, computation)[0]
        for *means, part in zip(f, z, groups, strict=True)
    ]
    for junk in (0.0, 7.0, -1e3):
        features, logits, weights = padded(groups, junk)
        actual = matching_loss(
            torch.from_numpy(f),
            torch.from_numpy(z),
            features,
            logits,
            weights,
            logit_loss_type=kind,
            loss_computation=computation,
        )
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-12)


def test_counts_are_weights() -> None:
    """One class, one feature: 30 samples at 0 and 10 at 4 mean 1."""
    f, z = torch.tensor([[3.0]]), torch.zeros(1, 0)
    features, logits = torch.tensor([[[0.0], [4.0]]]), torch.zeros(1, 2, 0)
    weights = torch.tensor([[0.75, 0.25]])
    averaged = matching_loss(f, z, features, logits, weights)
    each = matching_loss(f, z, features, logits, weights, loss_computation="loss-avg")
    assert averaged.tolist() == [4.0]  # (3 - 1)^2
    assert each.tolist() == [7.0]  # 3/4 * 9 + 1/4 * 1


def test_unknown_names_are_refused() -> None:
    z = torch.zeros(1, 2)
    with pytest.raises(InvalidValueError, match=r"logit_loss_type='wasserstien'.*did you mean"):
        logit_distance("wasserstien", z, z)
    with pytest.raises(InvalidValueError, match="loss_computation='mean'"):
        matching_loss(z, z, z[:, None], z[:, None], torch.ones(1, 1), loss_computation="mean")
