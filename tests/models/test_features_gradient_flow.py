"""Frozen fronts pass gradients to images: exact where there are any, finite everywhere."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.func import grad, vmap

from fedquilt.data import load_dataset
from fedquilt.models import make_model
from fedquilt.models.features import (
    FrozenExtractor,
    OrientedGradients,
    SampleStandard,
    Scattering,
    draw,
    frozen,
    gradients,
    make_feature_model,
    precompute,
    scattering,
)

SHAPE = (1, 12, 12)

# First five features of the last image, and the sum of all absolute values, as the fronts
# gave them before gradients could pass through them.
GOLDEN = {
    ("hog", "strokes"): ([0.1524263, 0.23314191, 0.69035947, 0.21764554, 0.0], 16.407228),
    ("hog", "pattern"): ([0.51498985, 0.58832121, 0.17914735, 0.05073103, 0.24678038], 15.494637),
    ("hog", "flat"): ([0.0, 0.0, 0.0, 0.0, 0.0], 0.0),
    ("whitened", "strokes"): (
        [-0.73088074, -1.1045278, 1.3885381, 1.8292245, -0.56466579],
        57.128113,
    ),
    ("whitened", "pattern"): ([0.59936637, 0.73642433, 0.88222551, 0.6017648, 2.0282686], 53.68686),
    ("whitened", "flat"): (
        [-1.337478, -1.4768596, -1.2125665, -0.46514443, -0.29315966],
        61.168781,
    ),
    ("standard", "strokes"): (
        [0.97357899, 0.74846691, -0.42685002, 0.63439202, 1.5847824],
        15.829049,
    ),
    ("standard", "pattern"): (
        [0.32597435, 0.65105671, 1.3737497, -0.34180066, -0.46222314],
        15.675109,
    ),
    ("standard", "flat"): ([0.89204812, 0.40320906, -0.5376789, 0.40977168, 0.39252159], 17.120951),
    ("scattering", "strokes"): (
        [-0.74688363, 0.65034491, 1.3571488, -0.34684956, 0.91770965],
        18.118332,
    ),
    ("scattering", "pattern"): (
        [-0.73354274, -1.2395352, -0.15793194, 0.3588616, -0.38906515],
        15.785685,
    ),
    ("scattering", "flat"): (
        [0.16627252, 0.09697457, 0.18135382, 0.94292647, 0.11881214],
        14.591978,
    ),
}


def noise(*sizes, seed=0, dtype=torch.float32):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(scope="module")
def fronts():
    public = draw("strokes", SHAPE, 60)
    plain = OrientedGradients(SHAPE, 4)
    wavelets = Scattering(SHAPE, J=1, L=4)
    return {
        "hog": plain,
        "whitened": FrozenExtractor(plain, public),
        "standard": FrozenExtractor(SampleStandard(plain), public, projection=20),
        "scattering": FrozenExtractor(SampleStandard(wavelets), public, projection=20),
    }


@pytest.fixture(scope="module")
def pictures():
    i = torch.arange(144.0).view(1, *SHAPE)
    return {
        "strokes": draw("strokes", SHAPE, 2, seed=9),
        "pattern": (i * i * 7 + i * 3) % 23 / 23,
        "flat": torch.full((1, *SHAPE), 0.5),
    }


@pytest.mark.parametrize(("front", "picture"), GOLDEN)
def test_values_are_what_they_were(fronts, pictures, front, picture):
    features = fronts[front](pictures[picture])[-1]
    first, total = GOLDEN[front, picture]
    torch.testing.assert_close(features[:5], torch.tensor(first), atol=2e-5, rtol=0)
    assert float(features.abs().sum()) == pytest.approx(total, abs=1e-3)


def test_a_gradient_asked_for_changes_no_bit(fronts, pictures):
    for front in fronts.values():
        for images in [*pictures.values(), torch.zeros(1, *SHAPE), noise(9, *SHAPE)]:
            assert torch.equal(front(images), front(images.clone().requires_grad_()))


def test_real_digits_keep_every_bit():
    """The formulas as they stand in the docstrings, from the front's own numbers."""
    images = load_dataset("digits")[0].images[:200]
    front = make_feature_model("hog-linear", (1, 8, 8), 10).front
    described = front.front(images).flatten(1)
    rows = described.sign() * described.abs() ** 0.5
    rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=1e-12)
    rows = (rows - front.mean) @ front.whitening
    rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=1e-12)
    expected = rows * front.num_features**0.5
    assert torch.equal(front(images.clone().requires_grad_()), expected)


@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e-13, 1e-9, 1e-3, 1.0])
def test_the_divisions_keep_every_bit_at_every_scale(scale):
    images = scale * noise(5, *SHAPE)
    rows = images.flatten(1)
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    assert torch.equal(frozen._unit(rows), rows / lengths.clamp(min=1e-12))
    centred = images - images.mean((1, 2, 3), keepdim=True)
    spread = centred.square().mean((1, 2, 3), keepdim=True).sqrt()
    assert torch.equal(frozen._standardised(images), centred / spread.clamp(min=1e-12))


@pytest.fixture
def in_double(monkeypatch):
    """Lets a front compute in the precision of its images, as finite differences need."""
    for module in (gradients, scattering):
        monkeypatch.setattr(module, "as_images", lambda images, shape: images)


@pytest.mark.parametrize("norm", ["none", "L1", "L2", "L2-Hys"])
@pytest.mark.parametrize("interpolate", [True, False])
@pytest.mark.parametrize("signed", [True, False])
def test_oriented_gradients_against_finite_differences(in_double, norm, interpolate, signed):
    front = OrientedGradients(
        (2, 8, 8), 3, 5, block=2, block_norm=norm, interpolate=interpolate, signed=signed
    )
    images = noise(2, 2, 8, 8, seed=1, dtype=torch.float64).requires_grad_()
    assert gradcheck(front.double(), images)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_frozen_front_against_finite_differences(in_double, power):
    public = draw("strokes", (1, 8, 8), 30)
    front = FrozenExtractor(OrientedGradients((1, 8, 8), 4, 4), public, projection=6, power=power)
    images = noise(2, 1, 8, 8, seed=2, dtype=torch.float64).requires_grad_()
    assert gradcheck(front.double(), images)


def test_scattering_against_finite_differences(in_double):
    front = FrozenExtractor(Scattering((1, 8, 8), J=1, L=2), projection=10).double()
    images = noise(1, 1, 8, 8, seed=3, dtype=torch.float64).requires_grad_()
    assert gradcheck(front, images)


def test_standardising_against_finite_differences():
    images = noise(2, 1, 4, 5, seed=4, dtype=torch.float64).requires_grad_()
    assert gradcheck(frozen._standardised, images)


def test_single_precision_agrees_with_double(in_double):
    front = OrientedGradients(SHAPE, 4)
    images = draw("strokes", SHAPE, 3, seed=2) + 0.1 * noise(3, *SHAPE)
    weights = noise(3, front.num_features, seed=5)
    single = images.clone().requires_grad_()
    double = images.double().requires_grad_()
    (front(single) * weights).sum().backward()
    (front.double()(double) * weights).sum().backward()
    torch.testing.assert_close(single.grad, double.grad.float(), atol=1e-4, rtol=1e-3)


def test_a_ramp_by_hand():
    """The features add up to the mean magnitude, which along a ramp is x[i+1] - x[i-1]."""
    front = OrientedGradients((1, 4, 6), 4, interpolate=False, smooth=False, block_norm="none")
    images = torch.arange(6.0).expand(1, 1, 4, 6).clone().requires_grad_()
    front(images).sum().backward()
    # The only cell covers columns 0 to 3; column 0 is border, and m of columns 1, 2 and 3 is
    # x2 - x0, x3 - x1 and x4 - x2.
    row = torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0, 0.0])
    torch.testing.assert_close(images.grad, (row / 16).expand(1, 1, 4, 6))


def gradient(front, images, seed=6):
    """Gradient of a random combination of the features."""
    images = images.clone().requires_grad_()
    features = front(images).flatten(1)
    (features * noise(*features.shape, seed=seed)).sum().backward()
    return images.grad


@pytest.mark.parametrize("value", [0.0, 0.37, -2.0])
def test_an_image_of_one_value_has_no_gradient(fronts, value):
    images = torch.full((2, *SHAPE), value)
    for name, front in fronts.items():
        assert torch.equal(gradient(front, images), torch.zeros_like(images)), name
    assert torch.equal(gradient(SampleStandard(fronts["hog"]), images), torch.zeros_like(images))


@pytest.mark.parametrize("contrast", [1e-40, 1e-20, 1e-12, 1e-8, 1e-6, 1e-4, 1.0])
def test_gradients_are_finite_and_bounded_at_every_contrast(fronts, contrast):
    """The features hide contrast, so derivatives grow as its inverse, but not without end."""
    images = contrast * noise(5, *SHAPE, seed=7)
    for name, front in fronts.items():
        found = gradient(front, images)
        assert torch.isfinite(found).all(), name
        assert found.abs().max() < 100 / max(contrast, 1e-6), name


def test_gradients_beside_flat_regions_are_finite(fronts):
    """Strokes on an even ground, and a single dot: most pixels have no slope."""
    dot = torch.zeros(1, *SHAPE)
    dot[..., 6, 6] = 1
    for images in (draw("strokes", SHAPE, 20, seed=4), dot):
        for name, front in fronts.items():
            found = gradient(front, images)
            assert torch.isfinite(found).all(), name
            assert 0 < found.abs().max() < 1e4, name


@pytest.mark.parametrize("norm", ["none", "L1", "L2", "L2-Hys"])
@pytest.mark.parametrize("interpolate", [True, False])
def test_flat_pixels_under_every_option(norm, interpolate):
    front = OrientedGradients((3, 12, 12), 4, interpolate=interpolate, block=2, block_norm=norm)
    found = gradient(front, draw("leaves", (3, 12, 12), 10))
    assert torch.isfinite(found).all()
    assert found.abs().max() > 0


def test_the_power_has_a_bounded_slope():
    values = torch.tensor([-4.0, -1e-9, 0.0, 1e-9, 0.25], requires_grad=True)
    out = frozen._signed_power(values, 0.5)
    out.sum().backward()
    torch.testing.assert_close(out, torch.tensor([-2.0, -(1e-9**0.5), 0.0, 1e-9**0.5, 0.5]))
    torch.testing.assert_close(values.grad, torch.tensor([0.25, 500.0, 500.0, 500.0, 1.0]))


def test_nobody_asks_and_no_graph_is_built(fronts):
    images = noise(3, *SHAPE)
    for front in [*fronts.values(), SampleStandard(fronts["hog"])]:
        assert front(images).grad_fn is None
        assert precompute(front, images.clone().requires_grad_()).grad_fn is None


def test_sample_standard_trains_nothing():
    class Layer(torch.nn.Conv2d):
        num_features = 100

    front = SampleStandard(Layer(1, 1, 3))
    images = noise(2, *SHAPE).requires_grad_()
    front(images).sum().backward()
    assert images.grad is not None
    assert all(not p.requires_grad and p.grad is None for p in front.parameters())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, for unfold
@pytest.mark.parametrize("name", ["hog", "whitened", "standard", "scattering"])
def test_gradients_through_vmap(fronts, name):
    """Both ways round, with flat pixels: as a stack of clients computes them."""
    front = fronts[name]
    images = draw("strokes", SHAPE, 6, seed=8).view(3, 2, *SHAPE)
    weights = noise(3, 2, front(images[0]).flatten(1).shape[1], seed=9)

    def score(batch, weight):
        return (front(batch).flatten(1) * weight).sum()

    expected = torch.stack([grad(score)(images[i], weights[i]) for i in range(3)])
    inside = vmap(grad(score))(images, weights)
    outside = grad(lambda batch: vmap(score)(batch, weights).sum())(images)
    plain = images.clone().requires_grad_()
    sum(score(plain[i], weights[i]) for i in range(3)).backward()
    assert torch.isfinite(plain.grad).all()
    for found in (inside, outside, plain.grad):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_images_can_be_made_to_raise_a_logit():
    model = make_model("hog-linear", (1, 28, 28), 10, 0)
    with torch.no_grad():
        model.head.weight.copy_(0.1 * noise(*model.head.weight.shape, seed=10))
    model.requires_grad_(False)
    images = noise(10, 1, 28, 28, seed=11).requires_grad_()
    classes = torch.arange(10)
    optimizer = torch.optim.Adam([images], lr=0.05)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    assert torch.equal(model(images).argmax(1), classes)
