"""Morlet wavelets and the Gaussian that scattering averages with, in the Fourier domain.

A Gabor function of scale s, angle t, frequency w and slant a is

    g(u) = exp(-(p^2 + a^2 q^2) / (2 s^2) + i w p) * a / (2 pi s^2)

with p, q the coordinates of u along and across the direction t.  The Morlet wavelet
subtracts as much of its envelope as makes the mean zero (Bruna and Mallat 2013,
"Invariant scattering convolution networks", section 2).  Scales, frequencies and slant are
those of ScatNet, which other implementations share: s = 0.8 * 2^j, w = 3 pi / (4 * 2^j),
a = 4 / L for the wavelets, and s = 0.8 * 2^(J - 1), a = 1 for the Gaussian.
"""

from __future__ import annotations

import math

import torch

_SCALE = 0.8
_FREQUENCY = 3 * math.pi / 4
_SLANT = 4.0
_PERIODS = 2  # copies of the grid on each side; the widest envelope has died out by then


def wavelet_spectra(height: int, width: int, j: int, orientations: int) -> torch.Tensor:
    """Return the Fourier transforms of the wavelets of scale 2^j, [orientations, H, W].

    They are real, because g(-u) is the conjugate of g(u) on the periodic grid.  Angles go
    down from (floor(L / 2) - 1) pi / L in steps of pi / L.
    """
    first = orientations // 2 - 1
    filters = [
        _morlet(
            height,
            width,
            _SCALE * 2**j,
            (first - index) * math.pi / orientations,
            _FREQUENCY / 2**j,
            _SLANT / orientations,
        )
        for index in range(orientations)
    ]
    return torch.fft.fft2(torch.stack(filters)).real.to(torch.float32)


def gaussian_spectrum(height: int, width: int, scale_log2: int) -> torch.Tensor:
    """Return the Fourier transform of the Gaussian that averages over 2^J, [H, W]."""
    values = _gabor(height, width, _SCALE * 2 ** (scale_log2 - 1), 0.0, 0.0, 1.0)
    return torch.fft.fft2(values).real.to(torch.float32)


def coarser(spectrum: torch.Tensor, factor: int) -> torch.Tensor:
    """Return a filter's spectrum on the grid of every `factor`-th pixel.

    Of its last two axes the frequencies stay that the coarser grid can carry.
    """
    for axis in (-2, -1):
        size = spectrum.shape[axis]
        kept = size // factor
        below = torch.arange(kept // 2)
        above = torch.arange(size - (kept - kept // 2), size)
        spectrum = spectrum.index_select(axis, torch.cat([below, above]))
    return spectrum


def sample(spectrum: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the spectrum of every `factor`-th value of a signal.

    Sampling folds the frequencies: the mean of the factor x factor tiles of the spectrum.
    """
    if factor == 1:
        return spectrum
    height, width = spectrum.shape[-2] // factor, spectrum.shape[-1] // factor
    tiles = spectrum.unflatten(-1, (factor, width)).unflatten(-3, (factor, height))
    return tiles.mean(dim=(-4, -2))


def _morlet(
    height: int, width: int, scale: float, angle: float, frequency: float, slant: float
) -> torch.Tensor:
    wave = _gabor(height, width, scale, angle, frequency, slant)
    envelope = _gabor(height, width, scale, angle, 0.0, slant)
    return wave - envelope * (wave.sum() / envelope.sum())


def _gabor(
    height: int, width: int, scale: float, angle: float, frequency: float, slant: float
) -> torch.Tensor:
    """Return the function on a grid of period (height, width), its origin at [0, 0]."""
    down, right = torch.meshgrid(_unrolled(height), _unrolled(width), indexing="ij")
    along = down * math.cos(angle) + right * math.sin(angle)
    across = right * math.cos(angle) - down * math.sin(angle)
    envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * scale**2))
    values = torch.polar(envelope, frequency * along) * (slant / (2 * math.pi * scale**2))
    copies = 2 * _PERIODS + 1
    return values.view(copies, height, copies, width).sum(dim=(0, 2))


def _unrolled(size: int) -> torch.Tensor:
    return torch.arange(-_PERIODS * size, (_PERIODS + 1) * size, dtype=torch.float64)
