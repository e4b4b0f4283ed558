"""Means over groups: batches, augmentation, with and without scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedquilt.condense.augment import FAMILIES, Augmentation, Transform
from fedquilt.condense.statistics import group_means, make_groups
from fedquilt.models.networks import ConvNet


class Sums(nn.Module):
    """Embeds an image as (its sum, its first pixel); scores are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.scored = 0
        self.batches: list[int] = []

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(x))
        return torch.stack([x.sum(dim=(1, 2, 3)), x[:, 0, 0, 0]], dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scored += 1
        return x.mean(dim=(1, 2, 3))[:, None]


def images(number: int, channels: int = 3, side: int = 8) -> torch.Tensor:
    values = np.random.default_rng(0).normal(size=(number, channels, side, side))
    return torch.from_numpy(values).float()


def test_means_by_hand() -> None:
    """Pixels of image i are all i: sums are 4 i, and groups need not follow the order."""
    x = torch.arange(5.0)[:, None, None, None].expand(5, 1, 2, 2)
    order, counts = torch.tensor([4, 0, 2, 1, 3]), torch.tensor([2, 3])
    features, scores = group_means(Sums(), x, order, counts)
    assert features.tolist() == [[8.0, 2.0], [8.0, 2.0]]
    assert scores.tolist() == [[2.0], [2.0]]
    features, _ = group_means(Sums(), x, order, torch.tensor([1, 4]))
    assert features.tolist() == [[16.0, 4.0], [6.0, 1.5]]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_groups_may_lie_across_batches(batch_size: int) -> None:
    model, x = Sums(), images(20)
    order = torch.from_numpy(np.random.default_rng(1).permutation(20))
    counts = torch.tensor([1, 9, 3, 1, 6])
    features, scores = group_means(model, x, order, counts, batch_size=batch_size)
    for row, part in enumerate(torch.split(order, counts.tolist())):
        torch.testing.assert_close(features[row, 0], x[part].sum(dim=(1, 2, 3)).mean())
        torch.testing.assert_close(features[row, 1], x[part, 0, 0, 0].mean())
        torch.testing.assert_close(scores[row, 0], x[part].mean())
    assert model.batches == [min(batch_size, 20 - at) for at in range(0, 20, batch_size)]


def test_without_logits_nothing_is_scored() -> None:
    model = Sums()
    features, scores = group_means(
        model, images(4), torch.arange(4), torch.tensor([4]), with_logits=False
    )
    assert model.scored == 0
    assert features.shape == (1, 2)
    assert scores.shape == (1, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_sample_gets_the_augmentation_of_its_row(family: str) -> None:
    x = images(9)
    rows = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1])
    transform = Augmentation(family).draw(np.random.default_rng(3), rows=3)
    order = torch.from_numpy(np.random.default_rng(1).permutation(9))
    features, _ = group_means(
        Sums(), x, order, torch.tensor([4, 5]), transform=transform, rows=rows, batch_size=4
    )
    seen = [
        Transform(family, transform.parameters[row : row + 1]).apply(x[sample : sample + 1])
        for sample, row in zip(order.tolist(), rows.tolist(), strict=True)
    ]
    for row, part in enumerate((seen[:4], seen[4:])):
        torch.testing.assert_close(features[row, 0], torch.cat(part).sum(dim=(1, 2, 3)).mean())


def test_one_augmentation_for_all_without_rows() -> None:
    x = images(4)
    transform = Augmentation("color").draw(np.random.default_rng(3), rows=1)
    features, _ = group_means(Sums(), x, torch.arange(4), torch.tensor([4]), transform=transform)
    torch.testing.assert_close(features[0, 0], transform.apply(x).sum(dim=(1, 2, 3)).mean())


def test_nothing_to_look_at() -> None:
    model = Sums()
    features, scores = group_means(
        model, images(3), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    )
    assert (len(features), len(scores), model.batches) == (0, 0, [])


def test_same_bits_in_every_run_and_no_gradient() -> None:
    net = ConvNet((3, 8, 8), 5, width=4, depth=2)
    groups = make_groups(np.arange(60) % 5, 4, 1, np.random.default_rng(0))
    order, counts = torch.from_numpy(groups.order), torch.from_numpy(groups.counts)
    first, second = (group_means(net, images(60), order, counts, batch_size=16) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert not one.requires_grad


def test_group_means_weighted_by_counts_are_the_class_mean() -> None:
    """What the server may compute from the groups is the mean over the class."""
    net, x = ConvNet((3, 8, 8), 5, width=4, depth=2), images(50)
    labels = np.arange(50) % 3
    groups = make_groups(labels, 4, 1, np.random.default_rng(0))
    features, logits = group_means(
        net, x, torch.from_numpy(groups.order), torch.from_numpy(groups.counts)
    )
    with torch.no_grad():
        embedded, scores = net.embed_and_forward(x)
    for label in range(3):
        here = torch.from_numpy(groups.classes == label)
        weights = torch.from_numpy(groups.counts)[here] / (labels == label).sum()
        own = torch.from_numpy(labels == label)
        torch.testing.assert_close(weights.float() @ features[here], embedded[own].mean(dim=0))
        torch.testing.assert_close(weights.float() @ logits[here], scores[own].mean(dim=0))
