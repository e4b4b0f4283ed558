"""Histograms of oriented gradients, a description of images that needs no training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedquilt.common import checks
from fedquilt.models.features.frozen import as_images, image_shape

BLOCK_NORMS = ("none", "L1", "L2", "L2-Hys")
_HYSTERESIS = 0.2
_FLAT = 1e-6  # below this a direction is rounding


class OrientedGradients(nn.Module):
    """Histogram of oriented gradients (Dalal and Triggs 2005), batched.

    With central differences (g_y, g_x), zero on the border, magnitude m and angle a of
    each pixel, the histogram of a cell is

        h[cell, k] = sum_pixels weight(pixel, cell) * share(a, k) * m

    where the weights of a cell sum to 1.  Of several channels a pixel takes the gradient
    of the one where it is steepest.  Each block of `block` x `block` cells v is then
    divided by its norm,

        L1: sum|v| + eps    L2: sqrt(sum v^2 + eps^2 + floor * mean over blocks of sum v^2)

    and L2-Hys cuts the L2 result at 0.2 and divides once more.  `floor` keeps blocks with
    hardly any gradient from being blown up, and unlike `eps` it does not depend on the
    contrast of the image.

    `interpolate=False` is the definition of scikit-image's `hog`: a pixel belongs to one
    cell and one bin.  A share that jumps at the edge of a bin makes a gradient that lies
    on an edge depend on rounding, and wastes what a pixel between two cells says of both.
    `interpolate=True` splits a pixel linearly over the two nearest bins, bin k centred at
    angle k * range / orientations, and over the nearest cells, whose grid is centred in
    the image.

    The defaults were chosen on MNIST for the accuracy of a private linear head: few
    features that a linear model can use.  There is nothing to train and nothing random.

    Derivatives by the images are those of the formulas, except that a pixel with m < 1e-6
    passes none: an image of one value gets no gradient at all.

    Parameters
    ----------
    input_shape
        (channels, height, width).
    cell
        Side of a cell in pixels; there are floor(height / cell) x floor(width / cell).
    orientations
        Number of bins.
    signed
        Whether opposite directions differ: angles in [0, 2 pi) instead of [0, pi).
    smooth
        Whether a binomial filter, (1, 2, 1) / 4 along both axes, comes first.
    interpolate
        See above.
    block, block_norm, eps, floor
        See above; `floor` is for the L2 norms.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        cell: int = 6,
        orientations: int = 8,
        *,
        signed: bool = True,
        smooth: bool = True,
        interpolate: bool = True,
        block: int = 1,
        block_norm: str = "L2",
        eps: float = 1e-5,
        floor: float = 0.1,
    ) -> None:
        super().__init__()
        self.input_shape = image_shape(input_shape)
        self.orientations = checks.integer("orientations", orientations, at_least=2)
        self.signed, self.smooth, self.interpolate = signed, smooth, interpolate
        self.block_norm = checks.choice("block_norm", block_norm, BLOCK_NORMS)
        self.eps = checks.number("eps", eps, above=0)
        self.floor = checks.number("floor", floor, at_least=0)
        _, height, width = self.input_shape
        side = checks.integer("cell", cell, at_least=1, at_most=min(height, width))
        self.cells = (height // side, width // side)
        self.block = checks.integer("block", block, at_least=1, at_most=min(self.cells))
        weights = _interpolated if interpolate else _separate
        self.rows: torch.Tensor
        self.columns: torch.Tensor
        self.register_buffer("rows", weights(height, side), persistent=False)
        self.register_buffer("columns", weights(width, side), persistent=False)

    @property
    def num_features(self) -> int:
        """The number of values that describe an image."""
        blocks = math.prod(cells - self.block + 1 for cells in self.cells)
        return blocks * self.block**2 * self.orientations

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return [N, block rows * block columns * block * block * orientations]."""
        values = as_images(images, self.input_shape)
        values = _binomial(values) if self.smooth else values
        slopes = _Slopes.apply(*_central_differences(values))  # type: ignore[no-untyped-call]
        magnitude, angle = _steepest(*slopes)
        pixels = self._shares(angle) * magnitude.unsqueeze(1)
        cells = torch.einsum("rh,nkhw,cw->nrck", self.rows, pixels, self.columns)
        blocks = cells.unfold(1, self.block, 1).unfold(2, self.block, 1).movedim(3, 5)
        return self._normalise(blocks.flatten(3).flatten(1, 2)).flatten(1)

    def _shares(self, angle: torch.Tensor) -> torch.Tensor:
        """Return the share of each pixel in each bin, [N, orientations, H, W]."""
        span = 2 * math.pi if self.signed else math.pi
        place = torch.remainder(angle, span) * (self.orientations / span)
        bins = torch.arange(self.orientations, device=angle.device).view(-1, 1, 1)
        if not self.interpolate:
            # An angle of -0.0 or a rounded remainder may land on the upper end.
            index = place.floor().clamp(max=self.orientations - 1)
            return (index.unsqueeze(1) == bins).to(angle.dtype)
        distance = (place.unsqueeze(1) - bins).abs()
        return (1 - torch.minimum(distance, self.orientations - distance)).clamp(min=0)

    def _normalise(self, blocks: torch.Tensor) -> torch.Tensor:
        """Divide each block, [N, blocks, values], by its norm."""
        if self.block_norm == "none":
            return blocks
        if self.block_norm == "L1":
            return blocks / (blocks.abs().sum(2, keepdim=True) + self.eps)
        normed = self._unit(blocks)
        return self._unit(normed.clamp(max=_HYSTERESIS)) if "Hys" in self.block_norm else normed

    def _unit(self, blocks: torch.Tensor) -> torch.Tensor:
        energy = blocks.square().sum(2, keepdim=True)
        least = self.floor * energy.mean(1, keepdim=True) + self.eps**2
        return blocks / (energy + least).sqrt()


def _separate(size: int, cell: int) -> torch.Tensor:
    """Return [cells, size]: the mean over each of the cells laid side by side from 0."""
    pixel, index = torch.arange(size), torch.arange(size // cell)
    return (pixel // cell == index.unsqueeze(1)).float() / cell


def _interpolated(size: int, cell: int) -> torch.Tensor:
    """Return [cells, size]: triangles two cells wide around the centres of centred cells."""
    count = size // cell
    centres = (size - 1) / 2 + (torch.arange(count) - (count - 1) / 2) * cell
    weights = (1 - (torch.arange(size) - centres.unsqueeze(1)).abs() / cell).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def _binomial(images: torch.Tensor) -> torch.Tensor:
    """Filter with (1, 2, 1) / 4 along both axes; the border is repeated outwards."""
    for axis in (2, 3):
        size = images.shape[axis]
        before = images.index_select(axis, _neighbour(size, -1, images.device))
        after = images.index_select(axis, _neighbour(size, 1, images.device))
        images = (before + after) / 4 + images / 2
    return images


def _neighbour(size: int, step: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(size, device=device) + step).clamp(0, size - 1)


def _central_differences(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x[i + 1] - x[i - 1] along height and width, 0 on the border."""
    down = images[:, :, 2:] - images[:, :, :-2]
    right = images[:, :, :, 2:] - images[:, :, :, :-2]
    return nn.functional.pad(down, (0, 0, 1, 1)), nn.functional.pad(right, (1, 1))


def _steepest(down: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return magnitude and angle, [N, H, W], in the channel with the largest magnitude."""
    magnitude = torch.hypot(down, right)
    top = magnitude.argmax(1, keepdim=True)
    chosen = (values.gather(1, top).squeeze(1) for values in (magnitude, down, right))
    length, height, width = chosen
    return length, torch.atan2(height, width)


class _Slopes(torch.autograd.Function):
    """The differences as they are; no gradient goes back to those of a flat pixel.

    At (0, 0) the derivative of a magnitude is undefined, NaN in torch, and that of an angle
    has no bound nearby.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(down: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return down.view_as(down), right.view_as(right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(
        ctx: Any, down_grad: torch.Tensor, right_grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat = torch.hypot(*ctx.saved_tensors) < _FLAT
        return down_grad.masked_fill(flat, 0.0), right_grad.masked_fill(flat, 0.0)
