"""Growing images: the optimality condition against a solver, picking, refining."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax

from fedquilt.condense.certified import (
    GrowingSettings,
    optimality_gap,
    pick,
    refine,
    roughness,
)

CLASSES, WIDTH, SIDE = 3, 6, 4


def fitted(
    features: NDArray[np.float64], labels: NDArray[np.int64], penalty: float
) -> NDArray[np.float64]:
    """Return the head of softmax regression with penalty w |W|^2, by a solver of its own."""

    def loss(flat: NDArray[np.float64]) -> float:
        head = flat.reshape(CLASSES, WIDTH)
        chances = log_softmax(features @ head.T, axis=1)
        own = chances[np.arange(len(labels)), labels]
        return float(-own.mean() + penalty * np.square(head).sum())

    options = {"gtol": 1e-10, "ftol": 1e-15, "maxiter": 5000, "maxfun": 500000}
    found = minimize(loss, np.zeros(CLASSES * WIDTH), method="L-BFGS-B", options=options)
    return np.asarray(found.x.reshape(CLASSES, WIDTH))


def problem(seed: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), 5)
    return rng.normal(size=(15, WIDTH)) + np.eye(CLASSES, WIDTH)[labels], labels


@pytest.mark.parametrize("penalty", [1e-1, 1e-2])
def test_the_gap_vanishes_at_the_optimum_and_only_there(penalty: float) -> None:
    features, labels = problem(0)
    head = torch.from_numpy(fitted(features, labels, penalty))
    x, y = torch.from_numpy(features), torch.from_numpy(labels)
    assert optimality_gap(x, y, head, penalty).item() < 1e-6
    assert optimality_gap(x, y, 1.1 * head, penalty).item() > 1e-3
    assert optimality_gap(x, y, head, 2 * penalty).item() > 1e-2
    assert optimality_gap(x, y.flip(0), head, penalty).item() > 1e-2


def test_the_gap_against_numpy() -> None:
    features, labels = problem(1)
    head = np.random.default_rng(2).normal(size=(CLASSES, WIDTH))
    chances = np.exp(log_softmax(features @ head.T, axis=1))
    gradient = (np.eye(CLASSES)[labels] - chances).T @ features / len(labels)
    wanted = np.square(gradient - 0.02 * head).sum() / np.square(0.02 * head).sum()
    x, y, w = (torch.from_numpy(array) for array in (features, labels, head))
    got = optimality_gap(x, y, w, 0.01)
    assert got.item() == pytest.approx(wanted)


def test_roughness_by_hand() -> None:
    flat = torch.full((2, 1, SIDE, SIDE), 0.7)
    assert roughness(flat).item() == 0
    steps = torch.arange(3.0).repeat(1, 1, 3, 1)  # 0 1 2 in every row
    assert roughness(steps).item() == 1
    assert roughness(steps.transpose(2, 3)).item() == 1
    board = torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]])
    assert roughness(board).item() == 2


def front() -> torch.Tensor:
    source = torch.Generator().manual_seed(3)
    return 0.5 * torch.randn(SIDE * SIDE, WIDTH, generator=source)


def embed(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.flatten(1) @ front()


def start(ipc: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return drawings, with pixels at both ends of the range, their classes and a head."""
    source = torch.Generator().manual_seed(4)
    drawings = torch.rand(CLASSES * ipc, 1, SIDE, SIDE, generator=source)
    drawings[:, :, 0, 0], drawings[:, :, 0, 1] = 0.0, 1.0
    places = torch.arange(CLASSES).repeat_interleave(ipc)
    head = torch.randn(CLASSES, WIDTH, generator=source)
    head = head - head.mean(dim=0)
    return drawings, places, head / torch.linalg.vector_norm(head, dim=1).mean()


FREE = GrowingSettings(steps=150, penalty=0.03, nearness=0.0, smoothness=0.0)


def test_refining_lowers_the_gap_and_stays_in_range() -> None:
    drawings, places, head = start()
    before = optimality_gap(embed(drawings), places, head, FREE.penalty).item()
    pixels, gap = refine(drawings, places, head, embed, FREE)
    after = optimality_gap(embed(pixels), places, head, FREE.penalty).item()
    assert after < 0.05 * before
    assert gap == pytest.approx(after, rel=0.1, abs=1e-3)
    assert pixels.min().item() > 0
    assert pixels.max().item() < 1
    assert not pixels.requires_grad


def test_who_trains_on_refined_images_finds_the_head_again() -> None:
    drawings, places, head = start(ipc=4)
    settings = dataclasses.replace(FREE, steps=400)
    pixels, gap = refine(drawings, places, head, embed, settings)
    assert gap < 1e-3
    features = embed(pixels).double().numpy()
    found = fitted(features, places.numpy(), settings.penalty)
    wanted = head.double().numpy()
    assert np.linalg.norm(found - wanted) < 0.1 * np.linalg.norm(wanted)


def test_nearness_and_smoothness_do_what_they_say() -> None:
    drawings, places, head = start()
    free, _ = refine(drawings, places, head, embed, FREE)
    tied = dataclasses.replace(FREE, nearness=100.0)
    near, _ = refine(drawings, places, head, embed, tied)
    # Pixels of 0 and 1 begin at 0.02 and 0.98: they cannot be reached.
    assert (near - drawings).abs().mean() < 0.5 * (free - drawings).abs().mean()
    smooth, _ = refine(drawings, places, head, embed, dataclasses.replace(FREE, smoothness=100.0))
    assert roughness(smooth) < 0.5 * roughness(free)


def test_refining_says_how_far_it_is_and_is_repeatable() -> None:
    drawings, places, head = start()
    kept = drawings.clone()
    seen: list[int] = []
    settings = dataclasses.replace(FREE, steps=4)
    first, _ = refine(drawings, places, head, embed, settings, seen.append)
    assert seen == [1, 2, 3, 4]
    assert torch.equal(first, refine(drawings, places, head, embed, settings)[0])
    assert torch.equal(drawings, kept)


def test_the_first_pick_of_a_class_is_the_best_by_the_formula() -> None:
    source = torch.Generator().manual_seed(5)
    pool = torch.randn(50, WIDTH, generator=source)
    head, means = torch.randn(2, CLASSES, WIDTH, generator=source)
    chosen = pick(pool, head, means, 1, GrowingSettings(distance=0.7))
    for label in range(CLASSES):
        near = (pool - means[label]).square().sum(dim=1) / WIDTH
        score = torch.log_softmax(pool @ head.T, dim=1)[:, label] - 0.7 * near
        assert chosen[label] == score.argmax()


def test_variety_takes_distant_drawings_and_none_gives_the_best() -> None:
    # Two drawings that are almost one, and a slightly worse one far away.
    pool = torch.zeros(3, WIDTH)
    pool[1, 0], pool[2, 1] = 1e-3, 1.0
    head, means = torch.zeros(1, WIDTH), torch.zeros(1, WIDTH)
    plain = pick(pool, head, means, 2, GrowingSettings(variety=0.0))
    varied = pick(pool, head, means, 2, GrowingSettings(variety=1.0))
    assert plain.tolist() == [0, 1]
    assert varied.tolist() == [0, 2]


@pytest.mark.parametrize(("size", "ipc"), [(4, 4), (30, 5), (400, 30)])
def test_picks_are_as_many_as_asked_for_and_differ_within_a_class(size: int, ipc: int) -> None:
    source = torch.Generator().manual_seed(6)
    pool = torch.randn(size, WIDTH, generator=source)
    head, means = torch.randn(2, CLASSES, WIDTH, generator=source)
    chosen = pick(pool, head, means, ipc, GrowingSettings(candidates=3))
    assert chosen.shape == (CLASSES * ipc,)
    assert all(len(set(part.tolist())) == ipc for part in chosen.view(CLASSES, ipc))


def test_only_good_candidates_are_looked_at() -> None:
    pool = torch.zeros(10, WIDTH)
    pool[9, 0] = 100.0  # as far away as can be, and bad
    chosen = pick(
        *(pool, torch.zeros(1, WIDTH), torch.zeros(1, WIDTH), 3),
        GrowingSettings(candidates=5, variety=1e6),
    )
    assert 9 not in chosen.tolist()
