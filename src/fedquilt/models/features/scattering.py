"""The wavelet scattering transform, a description of images that needs no training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.models.features.shapes import check_images, image_shape
from fedquilt.models.features.wavelets import (
    coarser,
    gaussian_spectrum,
    sample,
    wavelet_spectra,
)


class Scattering(nn.Module):
    """Scattering coefficients up to the second order (Bruna and Mallat 2013), batched.

    With wavelets psi of J octaves and L angles and a Gaussian phi of width about 2^J,

        S0 = x * phi
        S1[j, t] = |x * psi[j, t]| * phi
        S2[j, t, k, u] = ||x * psi[j, t]| * psi[k, u]| * phi      for k > j

    sampled at every 2^J-th pixel.  The image is mirrored outwards first, to the next
    multiple of 2^J beyond one more step, and the samples inside the image are kept.
    |x * psi[j, t]| varies slowly, so it is kept at every 2^j-th pixel only: the usual fast
    algorithm, which computes the spectrum of the samples by folding the spectrum.

    A channel has 1 + J L + L^2 J (J - 1) / 2 paths, in the order above; the paths of S2
    run through (j, t) first, then through (k, u).

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
        low_pass = gaussian_spectrum(height, width, self.J)
        for j in range(self.J):
            self.register_buffer(f"phi{j}", coarser(low_pass, 2**j), persistent=False)
            spectra = wavelet_spectra(height, width, j, self.L)
            for level in range(j + 1):
                self.register_buffer(f"psi{j}_{level}", coarser(spectra, 2**level), persistent=False)

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

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return [N, channels * paths, height / 2^J, width / 2^J]."""
        check_images(images, self.input_shape)
        spectrum = torch.fft.fft2(self._mirror(images)).unsqueeze(2)
        first: list[torch.Tensor] = [self._average(spectrum, 0)]
        second: list[torch.Tensor] = []
        for j in range(self.J):
            inner = self._modulus(spectrum, j, 0)
            first.append(self._average(inner, j))
            if self.max_order == 2 and j + 1 < self.J:
                second.append(torch.cat(list(self._second(inner, j)), dim=3).flatten(2, 3))
        return torch.cat(first + second, dim=2).flatten(1, 2)

    def _second(self, inner: torch.Tensor, level: int) -> Iterator[torch.Tensor]:
        """Yield the coefficients behind the first-order spectra, [N, C, L, L, h, w] a scale."""
        for j in range(level + 1, self.J):
            outer = self._modulus(inner.unsqueeze(3), j, level)
            yield self._average(outer, j)

    def _modulus(self, spectrum: torch.Tensor, j: int, level: int) -> torch.Tensor:
        """Return the spectra of |y * psi[j, t]| at every 2^j-th pixel, y at every 2^level-th."""
        factor = 2 ** (j - level)
        filtered = sample(spectrum * self._buffer(f"psi{j}_{level}"), factor)
        return torch.fft.fft2(torch.fft.ifft2(filtered).abs())

    def _average(self, spectrum: torch.Tensor, level: int) -> torch.Tensor:
        """Return y * phi at every 2^J-th pixel inside the image, y at every 2^level-th."""
        factor = 2 ** (self.J - level)
        smooth = sample(spectrum * self._buffer(f"phi{level}"), factor)
        return torch.fft.ifft2(smooth).real[..., 1:-1, 1:-1]

    def _mirror(self, images: torch.Tensor) -> torch.Tensor:
        """Continue the image by its mirror image, without repeating the border."""
        sides: list[int] = []
        for size, padded in zip(self.input_shape[:0:-1], self.padded[::-1], strict=True):
            before = (padded - size) // 2
            sides += [before, padded - size - before]
        return nn.functional.pad(images, sides, mode="reflect")

    def _buffer(self, name: str) -> torch.Tensor:
        return cast(torch.Tensor, self.get_buffer(name))


def _padded(size: int, J: int) -> int:
    """Return the size after mirroring, or raise when the image is too small for it."""
    step = 2**J
    padded = ((size + step) // step + 1) * step
    after = padded - size - (padded - size) // 2
    if size < step or after >= size:
        raise InvalidValueError(
            f"J={J} must leave images of {size} pixels larger than their mirrored margin "
            f"of {after} pixels; use a smaller J"
        )
    return padded
