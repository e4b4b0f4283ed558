"""The scattering transform, its Morlet wavelets and its Gaussian, in the Fourier domain.

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
from collections.abc import Sequence

import torch
from torch import nn

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.models.features.frozen import as_images, image_shape

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


_PLANES = 128  # worked on at a time; each becomes L^2 planes of a quarter of its size


class Scattering(nn.Module):
    """Scattering coefficients up to the second order (Bruna and Mallat 2013), batched.

    With wavelets psi of J octaves and L angles and a Gaussian phi of width about 2^J,

        S0 = x * phi
        S1[j, t] = |x * psi[j, t]| * phi
        S2[j, t, k, u] = ||x * psi[j, t]| * psi[k, u]| * phi      for k > j

    sampled at every 2^J-th pixel.  The image is mirrored outwards first, to the next
    multiple of 2^J beyond one more step, and the samples inside the image are kept.
    |x * psi[j, t]| varies slowly, so it is kept at every 2^j-th pixel only, the usual fast
    algorithm.

    A channel has 1 + J L + L^2 J (J - 1) / 2 paths, in the order above; the paths of S2
    run through (j, t) first, then through (k, u).

    Derivatives by the images are those of the formulas; a modulus has derivative 0 at 0.

    Parameters
    ----------
    input_shape
        (channels, height, width).
    J
        Log2 of the averaging scale.
    L
        Number of angles.
    max_order
        1 leaves S2 out.
    """

    def __init__(
        self, input_shape: Sequence[int], J: int = 2, L: int = 8, max_order: int = 2
    ) -> None:
        super().__init__()
        self.input_shape = image_shape(input_shape)
        self.J = checks.integer("J", J, at_least=1)
        self.L = checks.integer("L", L, at_least=1)
        self.max_order = checks.integer("max_order", max_order, at_least=1, at_most=2)
        self.padded = tuple(_padded(size, self.J) for size in self.input_shape[1:])
        height, width = self.padded
        phi = gaussian_spectrum(height, width, self.J)
        psi = [wavelet_spectra(height, width, j, self.L) for j in range(self.J)]
        steps = range(self.J)
        self.averages = nn.ModuleList(
            SampledFilters(phi, level, 2 ** (self.J - level)) for level in steps
        )
        self.inner = nn.ModuleList(SampledFilters(psi[j], 0, 2**j) for j in steps)
        self.outer = nn.ModuleList(
            nn.ModuleList(SampledFilters(psi[k], j, 2 ** (k - j)) for k in steps[j + 1 :])
            for j in (steps if self.max_order == 2 else ())
        )

    @property
    def num_paths(self) -> int:
        """The number of coefficients for each place and channel."""
        second = self.L**2 * self.J * (self.J - 1) // 2 if self.max_order == 2 else 0
        return 1 + self.J * self.L + second

    @property
    def num_features(self) -> int:
        """The number of values that describe an image."""
        channels, height, width = self.input_shape
        return channels * self.num_paths * (height >> self.J) * (width >> self.J)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return [N, channels * paths, height / 2^J, width / 2^J]."""
        planes = as_images(images, self.input_shape)
        parts = torch.split(planes, max(1, _PLANES // self.input_shape[0]))
        return torch.cat([self._paths(self._mirror(part)).flatten(1, 2) for part in parts])

    def _paths(self, images: torch.Tensor) -> torch.Tensor:
        """Return [N, channels, paths, h, w]."""
        spectrum = torch.fft.fft2(images).unsqueeze(2)
        first, second = [self._average(spectrum, 0)], []
        for j, wavelets in enumerate(self.inner):
            moduli = _modulus(wavelets(spectrum))
            first.append(self._average(moduli, j))
            for_each = moduli.unsqueeze(3)
            behind = [
                self._average(_modulus(filters(for_each)), k)
                for k, filters in enumerate(self._outer(j), start=j + 1)
            ]
            if behind:
                second.append(torch.cat(behind, dim=3).flatten(2, 3))
        return torch.cat(first + second, dim=2)

    def _outer(self, j: int) -> Sequence[nn.Module]:
        """The wavelets that follow a wavelet of scale 2^j."""
        return list(self.outer[j].children()) if self.max_order == 2 else []

    def _average(self, spectrum: torch.Tensor, level: int) -> torch.Tensor:
        """Return y * phi at every 2^J-th pixel inside the image, y at every 2^level-th."""
        return torch.real(torch.fft.ifft2(self.averages[level](spectrum)))[..., 1:-1, 1:-1]

    def _mirror(self, images: torch.Tensor) -> torch.Tensor:
        """Continue the image by its mirror image, without repeating the border."""
        sides: list[int] = []
        for size, padded in zip(self.input_shape[:0:-1], self.padded[::-1], strict=True):
            before = (padded - size) // 2
            sides += [before, padded - size - before]
        return nn.functional.pad(images, sides, mode="reflect")


def _modulus(spectrum: torch.Tensor) -> torch.Tensor:
    """Return the spectrum of |y| for the spectrum of y."""
    result: torch.Tensor = torch.fft.fft2(torch.fft.ifft2(spectrum).abs())
    return result


def _padded(size: int, J: int) -> int:
    """Return the size after mirroring, or raise when the image is too small for it."""
    step: int = 2**J
    padded = ((size + step) // step + 1) * step
    after = padded - size - (padded - size) // 2
    if size < step or after >= size:
        raise InvalidValueError(
            f"J={J} must leave images of {size} pixels larger than their mirrored margin "
            f"of {after} pixels; use a smaller J"
        )
    return padded
