"""One client's vector over all classes, and what the server makes of releases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fedquilt.condense.certified import KAPPA, Released, mean_table, residual_table

CLASSES, WIDTH = 5, 7


def sample(
    seed: int, labels: list[int]
) -> tuple[NDArray[np.float64], NDArray[np.int64], torch.Tensor, torch.Tensor]:
    """Return features of norm sqrt(D) and labels, as arrays and as tensors."""
    raw = np.random.default_rng(seed).normal(size=(len(labels), WIDTH))
    features = raw / np.linalg.norm(raw, axis=1, keepdims=True) * math.sqrt(WIDTH)
    places = np.asarray(labels, dtype=np.int64)
    return features, places, torch.from_numpy(features), torch.from_numpy(places)


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("labels", [[0, 1, 1, 4, 4, 4], [3], [2, 2, 2], []], ids=str)
def test_mean_table_against_numpy(labels: list[int]) -> None:
    features, places, x, y = sample(0, labels)
    wanted = np.zeros((CLASSES, WIDTH + 1))
    for label in set(labels):
        wanted[label, :-1] = features[places == label].mean(axis=0) / math.sqrt(WIDTH)
        wanted[label, -1] = 0.3
    table = mean_table(x, y, CLASSES)
    np.testing.assert_allclose(table.numpy(), wanted, atol=1e-15)
    # Features of norm sqrt(D): no row is longer than sqrt(1 + kappa^2).
    assert np.linalg.norm(table.numpy(), axis=1).max(initial=0) <= math.hypot(1, KAPPA) + 1e-12


def test_a_mean_does_not_grow_with_the_number_of_samples() -> None:
    _, _, x, y = sample(1, [0, 3, 3])
    many = mean_table(x.repeat(50, 1), y.repeat(50), CLASSES)
    torch.testing.assert_close(many, mean_table(x, y, CLASSES))


@pytest.mark.parametrize("labels", [[0, 1, 1, 4, 4, 4], [3], [2, 2, 2], []], ids=str)
def test_residual_table_against_numpy(labels: list[int]) -> None:
    features, places, x, y = sample(2, labels)
    head = np.random.default_rng(3).normal(size=(CLASSES, WIDTH))
    wanted = np.zeros((CLASSES, WIDTH + 1))
    counts = np.bincount(places, minlength=CLASSES)
    chances = softmax(features @ head.T)
    for row, label in enumerate(labels):
        left = np.eye(CLASSES)[label] - chances[row]
        wanted[:, :-1] += np.outer(left, features[row]) / math.sqrt(counts[label])
    table = residual_table(x, y, torch.from_numpy(head))
    np.testing.assert_allclose(table.numpy(), wanted, atol=1e-12)


def test_residuals_are_the_negative_gradient_of_the_weighted_cross_entropy() -> None:
    _, _, x, y = sample(4, [0, 1, 1, 1, 2, 4, 4])
    source = torch.Generator().manual_seed(5)
    head = torch.randn(CLASSES, WIDTH, dtype=torch.float64, generator=source, requires_grad=True)
    weights = torch.bincount(y, minlength=CLASSES)[y].to(x) ** -0.5
    loss = (weights * functional.cross_entropy(x @ head.T, y, reduction="none")).sum()
    (gradient,) = torch.autograd.grad(loss, head)
    table = residual_table(x, y, head.detach())
    torch.testing.assert_close(table[:, :-1], -gradient)
    assert not table[:, -1].any()


def test_residuals_at_zero_are_class_sums_around_the_common_mean() -> None:
    features, places, x, y = sample(6, [0, 0, 1, 2])
    table = residual_table(x, y, torch.zeros(CLASSES, WIDTH, dtype=torch.float64)).numpy()
    weighted = features / np.sqrt(np.array([2, 2, 1, 1]))[:, None]
    for label in range(CLASSES):
        own = weighted[places == label].sum(axis=0)
        np.testing.assert_allclose(table[label, :-1], own - weighted.sum(axis=0) / 5, atol=1e-14)


def test_a_huge_head_gives_finite_residuals() -> None:
    _, _, x, y = sample(7, [0, 1, 2, 2])
    table = residual_table(x, y, torch.full((CLASSES, WIDTH), 1e30, dtype=torch.float64))
    assert torch.isfinite(table).all()


def nothing() -> Released:
    return Released.nothing(CLASSES, WIDTH, torch.device("cpu"))


def test_repeated_means_are_averaged() -> None:
    source = torch.Generator().manual_seed(8)
    tables = [torch.rand(CLASSES, WIDTH + 1, dtype=torch.float64, generator=source) for _ in "abc"]
    several, once = nothing(), nothing()
    for table in tables:
        several.take_means(table)
    once.take_means(torch.stack(tables).mean(dim=0))
    assert several.means_seen == 3
    torch.testing.assert_close(several.means(), once.means())
    torch.testing.assert_close(several.head, once.head)


def test_means_by_hand() -> None:
    """A class that half of the others hold is divided by a count pulled to the average."""
    released = nothing()
    table = torch.zeros(CLASSES, WIDTH + 1, dtype=torch.float64)
    table[:, 0] = 0.1
    table[:, -1] = KAPPA * torch.tensor([1.0, 1.0, 1.0, 1.0, 0.5])
    released.take_means(table)
    average = 4.5 / 5
    wanted = [0.1 / (0.5 * count + 0.5 * average) * math.sqrt(WIDTH) for count in (1.0, 0.5)]
    means = released.means()
    np.testing.assert_allclose(means[:, 0].numpy(), [wanted[0]] * 4 + [wanted[1]], rtol=1e-6)
    assert not means[:, 1:].any()
    np.testing.assert_allclose(
        released.head.numpy(), 0.1 * (means - means.mean(dim=0)).numpy(), rtol=1e-6, atol=1e-9
    )


def test_counts_that_are_noise_divide_nothing_by_zero() -> None:
    released = nothing()
    table = torch.ones(CLASSES, WIDTH + 1, dtype=torch.float64)
    table[:, -1] = torch.tensor([-3.0, 3.0, -1.0, 1.0, 0.0])
    released.take_means(table)
    assert torch.isfinite(released.means()).all()
    assert torch.isfinite(released.head).all()


def test_residuals_move_the_head_and_leave_the_means() -> None:
    released = nothing()
    released.take_means(torch.rand(CLASSES, WIDTH + 1, dtype=torch.float64))
    means, head = released.means(), released.head.clone()
    table = torch.ones(CLASSES, WIDTH + 1, dtype=torch.float64)
    released.take_residuals(table, 0.25)
    torch.testing.assert_close(released.head, head + 0.25)
    assert released.head.dtype == torch.float32
    torch.testing.assert_close(released.means(), means)


def test_the_direction_is_centred_and_of_length_one() -> None:
    released = nothing()
    source = torch.Generator().manual_seed(9)
    released.head = 1e3 * torch.randn(CLASSES, WIDTH, generator=source) + 7
    released.residuals_seen = 1
    direction = released.direction()
    torch.testing.assert_close(direction.sum(dim=0), torch.zeros(WIDTH), atol=1e-5, rtol=0)
    assert torch.linalg.vector_norm(direction, dim=1).mean().item() == pytest.approx(1, rel=1e-5)
    assert not nothing().direction().any()
