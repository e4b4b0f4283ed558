"""The wavelet scattering transform, a description of images that needs no training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.models.features.shapes import as_images, image_shape
from fedquilt.models.features.wavelets import SampledFilters, gaussian_spectrum, wavelet_spectra

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
        self.J = validate.integer("J", J, at_least=1)
        self.L = validate.integer("L", L, at_least=1)
        self.max_order = validate.integer("max_order", max_order, at_least=1, at_most=2)
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
