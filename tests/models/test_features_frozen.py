"""The frozen front: a public function of one sample, centred and whitened as documented."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedquilt.errors import InvalidValueError
from fedquilt.models.features import (
    FrozenExtractor,
    OrientedGradients,
    SampleStandard,
    Scattering,
    draw,
)
from fedquilt.models.features.frozen import mean_and_whitening, turned_towards


class Pixels(nn.Module):
    """The image itself, as a front."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_features = size

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images


def pictures(count: int, seed: int, side: int = 3) -> torch.Tensor:
    return torch.randn(count, 1, side, side, generator=torch.Generator().manual_seed(seed)) + 0.5


def documented(images, public, shrink, power=0.5, projection=None):
    """The formula of the docstring, in numpy."""

    def described(values):
        rows = values.double().numpy().reshape(len(values), -1)
        rows = np.sign(rows) * np.abs(rows) ** power
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return rows if projection is None else rows @ projection

    rows = described(public)
    mean, covariance = rows.mean(0), np.cov(rows.T, bias=True)
    size = len(mean)
    ridge = covariance + shrink * np.trace(covariance) / size * np.eye(size)
    values, vectors = np.linalg.eigh(ridge)
    features = (described(images) - mean) @ (vectors @ np.diag(values**-0.5) @ vectors.T)
    return features / np.linalg.norm(features, axis=1, keepdims=True) * np.sqrt(size)


@pytest.mark.parametrize(("shrink", "power"), [(1.0, 0.5), (0.1, 1.0)])
def test_is_the_documented_formula(shrink, power):
    public, images = pictures(200, 1), pictures(7, 2)
    front = FrozenExtractor(Pixels(9), public, power=power, shrink=shrink)
    np.testing.assert_allclose(
        front(images).numpy(), documented(images, public, shrink, power), atol=1e-4
    )


def test_projection_comes_before_centring():
    public, images = pictures(200, 1), pictures(7, 2)
    front = FrozenExtractor(Pixels(9), public, projection=4, seed=3)
    matrix = front.projection.double().numpy()
    assert matrix.shape == (9, 4)
    np.testing.assert_allclose(
        front(images).numpy(), documented(images, public, 1.0, projection=matrix), atol=1e-4
    )


def test_without_public_images_only_the_length_changes():
    images = pictures(5, 3)
    expected = nn.functional.normalize(images.flatten(1), dim=1) * 3
    torch.testing.assert_close(FrozenExtractor(Pixels(9), power=1)(images), expected)


def test_a_random_projection_is_that_of_its_seed():
    images = pictures(4, 4)
    first, again, other = (FrozenExtractor(Pixels(9), projection=5, seed=s) for s in (0, 0, 1))
    assert torch.equal(first(images), again(images))
    assert not torch.allclose(first(images), other(images), atol=0.1)
    assert first(images).square().mean(1) == pytest.approx([1.0] * 4, abs=1e-5)


def test_a_random_projection_keeps_inner_products():
    wide = FrozenExtractor(Pixels(900), projection=600, power=1)
    rows = nn.functional.normalize(pictures(6, 5, side=30).flatten(1), dim=1)
    projected = rows @ wide.projection
    torch.testing.assert_close(projected @ projected.T, rows @ rows.T, atol=0.15, rtol=0)


def test_whitening_leaves_the_public_images_nearly_white():
    rows = pictures(500, 6).flatten(1) @ torch.randn(
        9, 9, generator=torch.Generator().manual_seed(7)
    )
    mean, whitening = mean_and_whitening(rows, shrink=1e-6)
    white = ((rows - mean) @ whitening).double()
    covariance = (white.T @ white / len(white)).numpy()
    np.testing.assert_allclose(covariance / covariance[0, 0], np.eye(9), atol=1e-3)
    torch.testing.assert_close(whitening, whitening.T)


def test_a_turned_projection_finds_where_the_images_vary():
    generator = torch.Generator().manual_seed(8)
    basis = torch.linalg.qr(torch.randn(50, 50, generator=generator)).Q
    rows = torch.randn(400, 50, generator=generator) * torch.tensor([3.0] * 5 + [0.05] * 45)
    columns = turned_towards(torch.randn(50, 5, generator=generator), rows @ basis.T)
    torch.testing.assert_close(columns.T @ columns, torch.eye(5), atol=1e-4, rtol=0)
    caught = (basis[:, :5].T @ columns).square().sum()
    assert float(caught) > 4.99


def test_public_images_that_are_all_alike_give_finite_features():
    public = torch.ones(3, 1, 3, 3)
    for projection in (None, 4):
        front = FrozenExtractor(Pixels(9), public, projection=projection)
        assert torch.isfinite(front(pictures(2, 9))).all()


def test_a_sample_does_not_depend_on_its_neighbours():
    shape = (1, 12, 12)
    front = FrozenExtractor(OrientedGradients(shape, 4), draw("strokes", shape, 50))
    images = draw("strokes", shape, 6, seed=1)
    torch.testing.assert_close(front(images)[2:3], front(images[2:3]), atol=1e-5, rtol=0)


def test_sample_standard_hides_brightness_and_contrast():
    images = pictures(4, 10)
    front = FrozenExtractor(SampleStandard(Pixels(9)), pictures(50, 11))
    torch.testing.assert_close(front(images), front(images * 0.2 + 5), atol=1e-3, rtol=0)
    assert torch.isfinite(front(torch.ones(1, 1, 3, 3))).all()


@pytest.mark.parametrize(
    "front",
    [
        OrientedGradients((3, 12, 12), 4),
        OrientedGradients((3, 12, 12), 4, interpolate=False, block=2, block_norm="L2-Hys"),
        SampleStandard(Scattering((3, 12, 12), J=1, L=4)),
    ],
)
def test_constants_follow_the_module_to_another_device(front):
    """The meta device computes nothing, and refuses a tensor left on the CPU."""
    moved = FrozenExtractor(front, projection=10).to("meta")
    assert moved(torch.empty(4, 3, 12, 12, device="meta")).shape == (4, 10)


def test_double_inputs_give_single_features():
    front = FrozenExtractor(OrientedGradients((1, 12, 12), 4))
    images = pictures(3, 12, side=12)
    assert front(images.double()).dtype == torch.float32
    torch.testing.assert_close(front(images.double()), front(images))


def test_bad_arguments():
    with pytest.raises(InvalidValueError, match="front=Linear must tell its num_features"):
        FrozenExtractor(nn.Linear(2, 2))
    with pytest.raises(InvalidValueError, match="projection=10 must be"):
        FrozenExtractor(Pixels(9), projection=10)
    with pytest.raises(InvalidValueError, match="shrink=0 must be > 0"):
        FrozenExtractor(Pixels(9), shrink=0)
    with pytest.raises(InvalidValueError, match="power=0 must be > 0"):
        FrozenExtractor(Pixels(9), power=0)
    with pytest.raises(InvalidValueError, match="public holds 1 images"):
        FrozenExtractor(Pixels(9), pictures(1, 0))
    with pytest.raises(InvalidValueError, match="seed=-1 must be >= 0"):
        FrozenExtractor(Pixels(9), seed=-1)


@pytest.mark.parametrize("kind", ["strokes", "leaves"])
def test_drawn_images_come_from_the_seed_alone(kind):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    images = draw(kind, (3, 20, 16), 30, seed=5)
    assert images.shape == (30, 3, 20, 16)
    assert images.min() >= 0
    assert images.max() <= 1
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images, draw(kind, (3, 20, 16), 30, seed=5))
    assert not torch.equal(images, draw(kind, (3, 20, 16), 30, seed=6))
    assert len({image.numpy().tobytes() for image in images}) == 30


def test_strokes_are_thin_and_centred():
    images = draw("strokes", (1, 28, 28), 200)
    ink = images.mean((1, 2, 3))
    assert ink.min() > 0.01
    assert ink.max() < 0.5
    inked = images[:, 0].amax(2) > 0.5  # rows with ink
    top, bottom = inked.float().argmax(1), 27 - inked.flip(1).float().argmax(1)
    assert (top + bottom - 27).abs().max() <= 1
    assert images[:, :, (0, -1)].max() == 0


def test_leaves_fill_the_image_with_edges():
    images = draw("leaves", (3, 32, 32), 20)
    flat = (images[..., 1:] == images[..., :-1]).all(1).float().mean()
    assert 0.5 < flat < 0.95  # leaves are even, and many


def test_bad_drawings():
    with pytest.raises(InvalidValueError, match="did you mean 'strokes'"):
        draw("stroke", (1, 8, 8), 2)
    with pytest.raises(InvalidValueError, match="count=0 must be >= 1"):
        draw("leaves", (1, 8, 8), 0)


def test_the_earlier_name_is_still_read() -> None:
    with pytest.warns(DeprecationWarning, match="FrozenExtractor"):
        from fedquilt.models.features import FrozenFront  # type: ignore[attr-defined]
    assert FrozenFront is FrozenExtractor
