"""Histograms of oriented gradients against scikit-image and against plain loops."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fedquilt.errors import InvalidValueError
from fedquilt.models.features import OrientedGradients

GOLDEN = Path(__file__).parents[1] / "golden" / "features" / "hog.npz"
PLAIN = {"signed": False, "smooth": False, "interpolate": False, "floor": 0.0}


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


@pytest.mark.parametrize(
    ("case", "images", "orientations", "cell", "block", "norm"),
    [
        ("cells", "grey", 8, 4, 1, "L2"),
        ("blocks", "grey", 9, 4, 2, "L2"),
        ("hysteresis", "grey", 9, 5, 3, "L2-Hys"),
        ("absolute", "grey", 6, 6, 2, "L1"),
        ("colour", "colour", 8, 8, 2, "L2-Hys"),
        ("small", "small", 4, 2, 1, "L2"),
    ],
)
def test_agrees_with_scikit_image(golden, case, images, orientations, cell, block, norm):
    inputs = torch.from_numpy(golden[f"images_{images}"])
    front = OrientedGradients(
        inputs.shape[1:], cell, orientations, block=block, block_norm=norm, **PLAIN
    )
    outputs = front(inputs)
    assert outputs.dtype == torch.float32
    assert outputs.shape == golden[case].shape == (len(inputs), front.num_features)
    np.testing.assert_allclose(outputs.numpy(), golden[case], atol=1e-5, rtol=0)


def interpolated_histogram(image, cell, orientations, floor):
    """The default definition for one channel, pixel by pixel in float64."""
    size = image.shape[0]
    padded = np.pad(image, 1, mode="edge")
    for _ in range(2):
        padded = ((np.roll(padded, 1, 0) + 2 * padded + np.roll(padded, -1, 0)) / 4).T
    smooth = padded[1:-1, 1:-1]
    count = size // cell
    centres = [(size - 1) / 2 + (i - (count - 1) / 2) * cell for i in range(count)]
    triangles = np.array([[max(0, 1 - abs(p - c) / cell) for p in range(size)] for c in centres])
    triangles /= triangles.sum(1, keepdims=True)
    cells = np.zeros((count, count, orientations))
    for y in range(size):
        for x in range(size):
            down = smooth[y + 1, x] - smooth[y - 1, x] if 0 < y < size - 1 else 0.0
            right = smooth[y, x + 1] - smooth[y, x - 1] if 0 < x < size - 1 else 0.0
            place = math.atan2(down, right) % (2 * math.pi) / (2 * math.pi) * orientations
            low = int(place)
            weight = np.outer(triangles[:, y], triangles[:, x]) * math.hypot(down, right)
            cells[:, :, low % orientations] += weight * (1 - (place - low))
            cells[:, :, (low + 1) % orientations] += weight * (place - low)
    energy = (cells**2).sum(2, keepdims=True)
    return (cells / np.sqrt(energy + floor * energy.mean() + 1e-10)).ravel()


@pytest.mark.parametrize(
    ("size", "cell", "orientations", "floor"), [(14, 6, 8, 0.1), (9, 2, 5, 0.5)]
)
def test_interpolated_definition(size, cell, orientations, floor):
    images = torch.rand(3, 1, size, size, generator=torch.Generator().manual_seed(1))
    front = OrientedGradients((1, size, size), cell, orientations, floor=floor)
    expected = [
        interpolated_histogram(image[0].double().numpy(), cell, orientations, floor)
        for image in images
    ]
    np.testing.assert_allclose(front(images).numpy(), expected, atol=2e-6)


def test_without_norm_a_histogram_adds_up_to_the_mean_gradient():
    images = torch.rand(4, 1, 12, 12, generator=torch.Generator().manual_seed(2))
    values = images.numpy()[:, 0]
    down, right = np.zeros_like(values), np.zeros_like(values)
    down[:, 1:-1] = values[:, 2:] - values[:, :-2]
    right[:, :, 1:-1] = values[:, :, 2:] - values[:, :, :-2]
    magnitude = np.hypot(down, right).reshape(4, 3, 4, 3, 4).mean((2, 4))
    front = OrientedGradients((1, 12, 12), 4, 6, block_norm="none", **PLAIN)
    np.testing.assert_allclose(front(images).view(4, 3, 3, 6).sum(3), magnitude, atol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_a_ramp_falls_into_the_bin_of_its_direction(signed):
    ramp = torch.arange(12.0).expand(12, 12)
    images = torch.stack([ramp, -ramp]).unsqueeze(1)  # brighter to the right, to the left
    front = OrientedGradients((1, 12, 12), 4, 8, signed=signed)
    bins = front(images).view(2, 9, 8).sum(1).argmax(1).tolist()
    assert bins == ([0, 4] if signed else [0, 0])


def test_brightness_and_contrast_do_not_matter():
    images = torch.rand(5, 3, 20, 20, generator=torch.Generator().manual_seed(3))
    front = OrientedGradients((3, 20, 20))
    torch.testing.assert_close(front(images), front(images * 7 - 3), atol=1e-4, rtol=0)


def test_an_image_without_gradient_is_finite():
    front = OrientedGradients((1, 12, 12), 4)
    assert torch.equal(front(torch.ones(1, 1, 12, 12)), torch.zeros(1, 72))


def test_trains_nothing_and_saves_nothing():
    front = OrientedGradients((1, 28, 28))
    assert list(front.parameters()) == []
    assert front.state_dict() == {}
    images = torch.rand(2, 1, 28, 28, requires_grad=True)
    assert front(images.detach()).grad_fn is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cell": 0}, "cell=0 must be >= 1"),
        ({"cell": 29}, "cell=29 must be"),
        ({"block": 5}, "block=5 must be"),
        ({"orientations": 1}, "orientations=1 must be >= 2"),
        ({"block_norm": "L2Hys"}, "did you mean 'L2-Hys'"),
        ({"floor": -1}, "floor=-1 must be >= 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InvalidValueError, match=message):
        OrientedGradients((1, 28, 28), **options)


@pytest.mark.parametrize("shape", [(28, 28), (0, 28, 28), (1, 2, 28)])
def test_bad_shapes(shape):
    with pytest.raises(InvalidValueError, match="input_shape"):
        OrientedGradients(shape)


def test_images_of_another_shape():
    with pytest.raises(InvalidValueError, match=r"\(2, 1, 8, 9\) must have shape \(N, 1, 8, 8\)"):
        OrientedGradients((1, 8, 8), 2)(torch.zeros(2, 1, 8, 9))
