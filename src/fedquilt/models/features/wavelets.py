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
from torch import nn

_SCALE = 0.8
_FREQUENCY = 3 * math.pi / 4
_SLANT = 4.0
_PERIODS = 2  # copies of the grid on each side; the widest envelope has died out by then
_NOTHING = 1e-7


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
    return torch.real(torch.fft.fft2(torch.stack(filters))).to(torch.float32)


def gaussian_spectrum(height: int, width: int, J: int) -> torch.Tensor:
    """Return the Fourier transform of the Gaussian that averages over 2^J, [1, H, W]."""
    values = _gabor(height, width, _SCALE * 2 ** (J - 1), 0.0, 0.0, 1.0)
    return torch.real(torch.fft.fft2(values)).to(torch.float32).unsqueeze(0)


class SampledFilters(nn.Module):
    """Filters whose output is wanted at every `factor`-th pixel only.

    Parameters
    ----------
    spectra
        The filters on the finest grid, [F, H, W].
    level
        Inputs have been sampled at every 2^level-th pixel already; of the filters stay the
        frequencies that this grid can carry.
    factor
        See above; it divides the size at that level.
    """

    def __init__(self, spectra: torch.Tensor, level: int, factor: int) -> None:
        super().__init__()
        coarse = _coarser(spectra, 2**level)
        self.factor = factor
        self.spectra: torch.Tensor
        self.register_buffer("spectra", coarse, persistent=False)
        height, width = coarse.shape[1] // factor, coarse.shape[2] // factor
        tiles = [
            (slice(top, top + height), slice(left, left + width))
            for top in range(0, coarse.shape[1], height)
            for left in range(0, coarse.shape[2], width)
        ]
        least = _NOTHING * float(coarse.abs().max())
        self.tiles = [(r, c) for r, c in tiles if float(coarse[:, r, c].abs().max()) > least]

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        """Return the spectra of the filtered and sampled signals, [..., F, h, w].

        `signal` is a spectrum, [..., 1, H, W] or [..., F, H, W].  Sampling folds the
        frequencies: the result is the mean over factor x factor tiles of signal times
        filter.  Tiles are added up one by one, so that the product never exists at full
        size, and those that no filter lets pass were dropped.
        """
        total = torch.zeros((), dtype=signal.dtype, device=signal.device)
        for rows, columns in self.tiles:
            total = total + signal[..., rows, columns] * self.spectra[:, rows, columns]
        return total / self.factor**2


def _coarser(spectra: torch.Tensor, factor: int) -> torch.Tensor:
    """Return filters on the grid of every `factor`-th pixel: its frequencies alone stay."""
    for axis in (1, 2):
        size = spectra.shape[axis]
        kept = size // factor
        below = torch.arange(kept // 2)
        above = torch.arange(size - (kept - kept // 2), size)
        spectra = spectra.index_select(axis, torch.cat([below, above]))
    return spectra


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
