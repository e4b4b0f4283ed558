"""Scattering against kymatio and against convolutions computed pixel by pixel."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fedquilt.errors import InvalidValueError
from fedquilt.models.features import Scattering
from fedquilt.models.features.scattering import gaussian_spectrum, wavelet_spectra

GOLDEN = Path(__file__).parents[1] / "golden" / "features" / "scattering.npz"
CASES = {
    "one_scale": (1, 4, 2),
    "usual": (2, 8, 2),
    "odd_angles": (2, 5, 2),
    "three_scales": (3, 3, 2),
    "first_order": (2, 6, 1),
}
ROUGH_PI = 3.1415  # kymatio 0.3.0's, in the normalisation of each of its filters


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_kymatio(golden, case):
    J, L, max_order = CASES[case]
    images = torch.from_numpy(golden[f"images_{case}"]).unsqueeze(1)
    front = Scattering(images.shape[1:], J, L, max_order)
    outputs = front(images)
    expected = golden[case]
    assert outputs.shape == expected.shape
    assert outputs.shape[1] == front.num_paths
    assert outputs[0].numel() == front.num_features
    second = front.num_paths - 1 - J * L
    convolutions = np.repeat([1, 2, 3], [1, J * L, second])
    exact = expected * (ROUGH_PI / math.pi) ** convolutions.reshape(-1, 1, 1)
    scale = np.abs(exact).max(axis=(0, 2, 3), keepdims=True)
    assert np.abs((outputs.numpy() - exact) / scale).max() < 1e-5


def circular(signal, spatial):
    """Circular convolution as the double sum of its definition."""
    height, width = signal.shape
    out = np.zeros_like(signal, dtype=complex)
    for y in range(height):
        for x in range(width):
            out += signal[y, x] * np.roll(spatial, (y, x), (0, 1))
    return out


def gabor(size, scale, angle, frequency, slant):
    """The Gabor function written out, summed over shifts by the period."""
    out = np.zeros((size, size), dtype=complex)
    for y in range(-3 * size, 3 * size):
        for x in range(-3 * size, 3 * size):
            p = y * math.cos(angle) + x * math.sin(angle)
            q = -y * math.sin(angle) + x * math.cos(angle)
            envelope = math.exp(-(p**2 + slant**2 * q**2) / (2 * scale**2))
            out[y % size, x % size] += envelope * np.exp(1j * frequency * p)
    return out * slant / (2 * math.pi * scale**2)


def test_one_scale_is_its_definition_in_space():
    """J = 1 samples nothing before the modulus, so the definition holds without aliasing."""
    image = np.random.default_rng(4).random((6, 6))
    padded = np.pad(image, 2, mode="reflect")
    phi = gabor(10, 0.8, 0, 0, 1).real
    expected = [circular(padded, phi).real]
    for angle in (1 * math.pi / 4, 0, -1 * math.pi / 4, -2 * math.pi / 4):
        wave = gabor(10, 0.8, angle, 3 * math.pi / 4, 1.0)
        envelope = gabor(10, 0.8, angle, 0, 1.0)
        morlet = wave - envelope * wave.sum() / envelope.sum()
        expected.append(circular(np.abs(circular(padded, morlet)), phi).real)
    outputs = Scattering((1, 6, 6), J=1, L=4)(torch.from_numpy(image).float().view(1, 1, 6, 6))
    np.testing.assert_allclose(outputs[0], np.stack(expected)[:, 2:-2:2, 2:-2:2], atol=1e-6)


def test_filters():
    spectra = wavelet_spectra(40, 40, 1, 8)
    assert torch.allclose(spectra[:, 0, 0], torch.zeros(8), atol=1e-6)  # wavelets have no mean
    assert gaussian_spectrum(40, 40, 3)[0, 0, 0] == pytest.approx(1, abs=1e-4)
    peak = spectra[3].argmax().item()  # angle 0: along the height, frequency 3 pi / 8
    assert peak % 40 == 0
    assert peak // 40 * 2 * math.pi / 40 == pytest.approx(3 * math.pi / 8, abs=math.pi / 40)


def test_channels_and_images_are_described_one_by_one():
    images = torch.rand(150, 2, 12, 16, generator=torch.Generator().manual_seed(5))
    front = Scattering((2, 12, 16), J=2, L=3)
    outputs = front(images)
    assert outputs.shape == (150, 2 * front.num_paths, 3, 4)
    alone = Scattering((1, 12, 16), J=2, L=3)
    for channel in range(2):
        part = outputs[:, channel * front.num_paths : (channel + 1) * front.num_paths]
        for index in (0, 70, 149):
            one = images[index : index + 1, channel : channel + 1]
            torch.testing.assert_close(part[index], alone(one)[0], atol=1e-6, rtol=1e-4)


def test_brightness_moves_the_mean_only():
    images = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(6))
    front = Scattering((1, 16, 16), J=2, L=4)
    before, after = front(images), front(images + 3)
    torch.testing.assert_close(after[:, 0], before[:, 0] + 3, atol=1e-3, rtol=0)
    torch.testing.assert_close(after[:, 1:], before[:, 1:], atol=1e-5, rtol=0)


def test_a_small_shift_changes_little():
    """Averaging over 2^J pixels makes a shift by one far smaller than in the image."""
    generator = torch.Generator().manual_seed(7)
    image = torch.zeros(1, 1, 32, 32)
    image[..., 10:22, 10:22] = torch.rand(12, 12, generator=generator)
    shifted = image.roll(1, 3)
    front = Scattering((1, 32, 32), J=3, L=4)
    moved = (front(shifted) - front(image)).norm() / front(image).norm()
    assert moved < 0.25 * (shifted - image).norm() / image.norm()


def test_trains_nothing_and_saves_nothing():
    front = Scattering((1, 8, 8), J=1)
    assert list(front.parameters()) == []
    assert front.state_dict() == {}
    assert front(torch.rand(1, 1, 8, 8)).grad_fn is None


@pytest.mark.parametrize(
    ("shape", "J", "options", "message"),
    [
        ((1, 8, 8), 3, {}, "J=3 must leave images of 8 pixels"),
        ((1, 8, 8), 0, {}, "J=0 must be >= 1"),
        ((1, 8, 8), 1, {"L": 0}, "L=0 must be >= 1"),
        ((1, 8, 8), 1, {"max_order": 3}, "max_order=3 must be"),
        ((8, 8), 1, {}, "input_shape"),
    ],
)
def test_bad_options(shape, J, options, message):
    with pytest.raises(InvalidValueError, match=message):
        Scattering(shape, J, **options)
