"""First drawings, batches under several families, and the quicker forms of two layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from condense_samples import condense, small
from torch import nn
from torch.nn import functional

from fedquilt.condense.augment import Augmentation
from fedquilt.condense.embeds import HalfPrecision, Halving, frozen_copy
from fedquilt.condense.matching import SyntheticSet, expand_tiles
from fedquilt.condense.training import TrainingSettings, augmented
from fedquilt.errors import InvalidValueError
from fedquilt.models.networks import ConvNet

IMAGES = torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def test_first_drawings_follow_from_the_seed_and_stand_apart() -> None:
    shape = (3, 16, 16)
    empty = SyntheticSet.random((0, 2), 2, shape, np.random.default_rng(0), tiles=2)
    one, again, other = (empty.drawn(seed) for seed in (4, 4, 5))
    assert one.images.shape == (4, *shape)
    assert torch.equal(one.images, again.images)
    assert not torch.equal(one.images, other.images)
    seen = one.expanded().images
    assert len(torch.unique(seen.flatten(1), dim=0)) == 16
    assert abs(float(seen.mean())) < 0.1
    assert 0.2 < float(seen.std()) < 0.6


def test_a_run_records_what_it_began_with_and_no_image_leaves() -> None:
    done = condense(init_method="leaves", model_families=2)
    used = done.result["metadata"]["hyperparameters"]
    assert (used["init_method"], used["model_families"]) == ("leaves", 2)
    assert "leave them" not in done.statement.as_text()
    assert done.result["condensation"]["bytes_up"] == condense().result["condensation"]["bytes_up"]


def test_families_of_a_batch_are_all_different() -> None:
    families = Augmentation("color_flip")
    one, both, more = (
        augmented(IMAGES, families, count, np.random.default_rng(4)) for count in (1, 2, 6)
    )
    alone = families.draw(np.random.default_rng(4), len(IMAGES)).apply(IMAGES)
    assert torch.equal(one, alone)
    assert not torch.equal(one, both)
    assert torch.equal(both, more)


@pytest.mark.parametrize("count", [0, 7])
def test_how_many_families(count: int) -> None:
    with pytest.raises(InvalidValueError, match=f"model_families={count} must be"):
        small(model_families=count)
    if count == 0:
        with pytest.raises(InvalidValueError, match="model_families=0 must be"):
            TrainingSettings(families=count)


def test_feature_models_of_a_round_cost_about_the_same_bytes() -> None:
    counts = {
        (moments, bits): small(model_n=None, moments=moments, row_bits=bits).feature_models
        for moments in (1, 2)
        for bits in (32, 12, 8)
    }
    assert counts == {(1, 32): 8, (1, 12): 16, (1, 8): 24, (2, 32): 4, (2, 12): 8, (2, 8): 12}
    assert small(model_n=5, row_bits=8).feature_models == 5
    assert small(model_n=None, row_bits=8, feature_model="global").feature_models == 1


@pytest.mark.parametrize("sides", [(8, 8), (7, 9), (5, 4)])
@pytest.mark.parametrize("tiles", [2, 3])
def test_tiles_are_enlarged_bilinearly(sides: tuple[int, int], tiles: int) -> None:
    images = torch.randn(2, 3, *sides, generator=torch.Generator().manual_seed(1))
    height, width = (side // tiles for side in sides)
    seen = expand_tiles(images.requires_grad_(True), tiles)
    for number in range(tiles**2):
        row, column = divmod(number, tiles)
        small_one = images[
            :, :, row * height : (row + 1) * height, column * width : (column + 1) * width
        ]
        large = functional.interpolate(small_one, size=sides, mode="bilinear", align_corners=False)
        assert torch.allclose(seen[number :: tiles**2], large, atol=1e-6)


@pytest.mark.parametrize("sides", [(8, 8), (7, 9)])
def test_halving_is_pooling_and_so_is_its_gradient(sides: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *sides, generator=torch.Generator().manual_seed(2), requires_grad=True)
    ours, theirs = Halving()(x), functional.avg_pool2d(x, 2)
    assert torch.allclose(ours, theirs, atol=1e-6)
    weights = torch.arange(ours.numel(), dtype=torch.float32).view_as(ours)
    slopes = [torch.autograd.grad((weights * y).sum(), x)[0] for y in (ours, theirs)]
    assert torch.allclose(*slopes, atol=1e-5)


def test_half_precision_sees_what_the_model_sees() -> None:
    model = ConvNet((3, 16, 16), 4, width=8)
    quick = HalfPrecision(frozen_copy(model))
    assert sum(isinstance(layer, Halving) for layer in quick.modules()) == 3
    assert not any(isinstance(layer, Halving) for layer in model.modules())
    x = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.allclose(quick.embed(x), model.embed(x), atol=0.05)


@pytest.mark.parametrize(
    "other", [{"padding": 1}, {"stride": 1}, {"ceil_mode": True}, {"divisor_override": 3}]
)
def test_other_pools_stay_as_they_are(other: dict[str, Any]) -> None:
    model = nn.Sequential(nn.AvgPool2d(2, **other), nn.AvgPool2d(3))
    kept = HalfPrecision(model).modules()
    assert not any(isinstance(layer, Halving) for layer in kept)


def test_a_pool_of_ones_own_stays() -> None:
    class Doubled(nn.AvgPool2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    x = torch.ones(1, 1, 4, 4)
    assert torch.equal(HalfPrecision(nn.Sequential(Doubled(2)))(x), torch.full((1, 1, 2, 2), 2.0))
