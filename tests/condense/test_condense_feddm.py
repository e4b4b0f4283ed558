"""Matching to real images at hand, step by step against plain autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedquilt.common.randomness import generator
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.matching import (
    MatchingSettings,
    RealImages,
    SyntheticSet,
    match_real,
    real_view,
)
from fedquilt.models import ConvNet

IMAGES = torch.from_numpy(np.random.default_rng(0).standard_normal((40, 1, 8, 8), dtype=np.float32))
CLASSES = {2: np.arange(0, 12), 5: np.arange(12, 17), 9: np.arange(20, 40)}
NONE = Augmentation("none")


def model(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ConvNet((1, 8, 8), 10, width=4, depth=2).eval().requires_grad_(False)


def synthetic() -> SyntheticSet:
    return SyntheticSet.random(tuple(CLASSES), 3, (1, 8, 8), np.random.default_rng(1))


def plain_loss(net: nn.Module, images: torch.Tensor, with_logits: bool) -> torch.Tensor:
    """Return the loss as the papers write it, one class after the other."""
    total = torch.zeros(())
    for place, samples in enumerate(CLASSES.values()):
        made, real = images[3 * place : 3 * place + 3], IMAGES[samples]
        total = total + (net.embed(made).mean(0) - net.embed(real).mean(0)).square().sum()
        if with_logits:
            total = total + (net(made).mean(0) - net(real).mean(0)).square().sum()
    return total


@pytest.mark.parametrize("logit_loss", ["none", "l2"])
def test_steps_are_sgd_with_momentum_on_the_papers_loss(logit_loss: str) -> None:
    nets = [model(seed) for seed in range(3)]
    made = synthetic()
    images, velocity = made.images.clone(), torch.zeros_like(made.images)
    expected = []
    for net in nets:
        images = images.detach().requires_grad_(True)
        loss = plain_loss(net, images, logit_loss == "l2")
        (gradient,) = torch.autograd.grad(loss, images)
        velocity = 0.5 * velocity + gradient
        images = images - 0.7 * velocity
        expected.append(loss.item())
    losses = match_real(
        made,
        RealImages(IMAGES, CLASSES),
        lambda step: nets[step],
        MatchingSettings(3, 0.7, 0.5, logit_loss),
        1000,
        NONE,
        np.random.default_rng(2),
    )
    assert losses == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(made.images, images.detach(), rtol=1e-4, atol=1e-5)


def test_a_batch_is_drawn_from_its_class_without_replacement() -> None:
    real = RealImages(IMAGES, CLASSES)
    source = np.random.default_rng(3)
    draws = [real.batch(7, source) for _ in range(40)]
    for drawn in draws:
        assert [len(samples) for samples in drawn] == [7, 5, 7]
        for samples, of_class in zip(drawn, CLASSES.values(), strict=True):
            assert len(set(samples.tolist())) == len(samples)
            assert set(samples.tolist()) <= set(of_class.tolist())
    seen = {int(sample) for drawn in draws for samples in drawn for sample in samples}
    assert seen == {int(sample) for samples in CLASSES.values() for sample in samples}


def test_real_and_synthetic_images_meet_the_same_augmentation() -> None:
    """A set that is the real images has no loss, whatever the draw; with other rows it has."""
    samples = np.concatenate([samples[:5] for samples in CLASSES.values()])
    made = SyntheticSet(IMAGES[torch.from_numpy(samples)].clone(), tuple(CLASSES), 5)
    real = RealImages(IMAGES, {label: held[:5] for label, held in CLASSES.items()})
    losses = match_real(
        made,
        real,
        model,
        MatchingSettings(12, 1e-9, 0.0),
        5,
        Augmentation("color_crop_cutout_scale_rotate"),
        np.random.default_rng(4),
    )
    assert max(losses) < 1e-6
    families = Augmentation("cutout")
    ours, theirs = (
        real_view(model(0), real, 5, families, np.random.default_rng(seed), False)
        for seed in (5, 6)
    )
    source = generator(0, "unused")
    apart = ours.targets.draw(source).features - theirs.targets.draw(source).features
    assert float(apart.square().sum()) > 1e-3
