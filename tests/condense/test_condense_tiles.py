"""Images that hold smaller ones, and statistics of two moments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from condense_samples import condense, images_of
from torch import nn

from fedquilt.condense.embeds import TwoMoments
from fedquilt.condense.matching import (
    SyntheticSet,
    expand_tiles,
    matching_loss,
    mean_and_spread,
    shrink_to_tiles,
)
from fedquilt.condense.training import TrainingSettings, cut_and_mix
from fedquilt.data import load_condensed
from fedquilt.errors import InvalidValueError


def test_tiles_are_the_quarters_in_reading_order() -> None:
    image = torch.arange(4.0).repeat_interleave(4).view(2, 2, 2, 2).permute(0, 2, 1, 3)
    whole = image.reshape(1, 1, 4, 4)
    parts = expand_tiles(whole, 2)
    assert parts.shape == (4, 1, 4, 4)
    for number, part in enumerate(parts):
        assert torch.equal(part, torch.full((1, 4, 4), float(number)))
    assert expand_tiles(whole, 1) is whole


def test_shrinking_undoes_the_expansion_of_flat_tiles() -> None:
    flat = torch.randn(8, 3, 1, 1).expand(8, 3, 9, 7).contiguous()
    packed = shrink_to_tiles(flat, 2)
    assert packed.shape == (2, 3, 9, 7)
    assert torch.allclose(expand_tiles(packed, 2), flat)


def test_expanded_sets_keep_the_order_of_classes() -> None:
    source = np.random.default_rng(0)
    grown = SyntheticSet.random((1, 4), 3, (1, 8, 8), source, tiles=2).expanded()
    assert grown.ipc == 12
    assert grown.labels.tolist() == [1] * 12 + [4] * 12
    with pytest.raises(InvalidValueError, match="tiles=9 must be"):
        SyntheticSet.random((1,), 1, (1, 8, 8), source, tiles=9)


def test_two_moments_are_mean_and_spread_of_every_feature() -> None:
    class Twice(nn.Module):
        def embed(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x.flatten(1)

    x = torch.randn(50, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    sent = TwoMoments(Twice()).embed(x).mean(dim=0)
    mean, spread = mean_and_spread(sent).chunk(2)
    seen = 2 * x.flatten(1).numpy()
    np.testing.assert_allclose(mean, seen.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(spread, np.sqrt(seen.var(axis=0) + 1e-4), rtol=1e-4)


def test_groups_of_two_moments_merge_into_the_variance_of_all() -> None:
    values = torch.randn(30, 2, generator=torch.Generator().manual_seed(1))
    both = torch.cat([values, values.square()], dim=1)
    groups = torch.stack([both[:10].mean(dim=0), both[10:].mean(dim=0)])[None]
    weights = torch.tensor([[10 / 30, 20 / 30]])
    f = both.mean(dim=0)[None]
    nothing = torch.zeros(1, 2, 0)
    loss = matching_loss(f, nothing[:, 0], groups, nothing, weights, moments=2)
    assert float(loss) < 1e-10
    other = torch.cat([values.mean(dim=0), 2 * values.square().mean(dim=0)])[None]
    assert float(matching_loss(other, nothing[:, 0], groups, nothing, weights, moments=2)) > 0.01


def test_two_moments_double_the_bytes_of_features() -> None:
    sizes = {}
    for moments in (1, 2):
        done = condense(moments=moments, num_rounds=1)
        sizes[moments] = done.result["condensation"]["bytes_up"]
        assert torch.isfinite(images_of(done)).all()
    rows = done.result["history"]["groups"][0]
    assert sizes[2] - sizes[1] == 4 * rows * 6  # Linear embeds into six features


@pytest.mark.parametrize("tiles", [2, 3])
def test_a_run_with_tiles_gives_the_smaller_images(tiles: int, tmp_path: Path) -> None:
    done = condense(tiles=tiles, num_rounds=1, ipc=2, output_dir=str(tmp_path))
    stored = load_condensed(tmp_path / done.folder.name / "condensed.safetensors", whole=True)
    assert done.result["condensation"]["images"] == len(stored) == 20
    assert torch.equal(images_of(done), expand_tiles(stored.images, tiles))
    again = load_condensed(done.folder / "condensed.safetensors")
    assert torch.equal(again.images, images_of(done))
    assert again.targets.tolist() == stored.targets.repeat_interleave(tiles**2).tolist()


def test_cut_and_mix_takes_one_rectangle_from_another() -> None:
    images = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 1, 8, 8)
    mixed, other, share = cut_and_mix(images, np.random.default_rng(3))
    for place in range(6):
        foreign = mixed[place] == float(other[place])
        own = mixed[place] == float(place)
        assert bool((foreign | own).all())
        if other[place] != place:
            assert float(foreign.float().mean()) == pytest.approx(share)


def test_the_rate_falls_as_it_is_said() -> None:
    step = TrainingSettings(10, learning_rate=1.0)
    assert [step.rate_at(e) for e in (0, 4, 5, 9)] == [1.0, 1.0, 0.1, 0.1]
    cosine = TrainingSettings(10, learning_rate=1.0, schedule="cosine")
    assert cosine.rate_at(0) == 1.0
    assert cosine.rate_at(5) == pytest.approx(0.5)
    assert TrainingSettings(10, learning_rate=1.0, schedule="constant").rate_at(9) == 1.0
    with pytest.raises(InvalidValueError, match="model_schedule='steep'"):
        TrainingSettings(schedule="steep")
