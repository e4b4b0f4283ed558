"""Drawn images that stand in for data where a public average is needed.

They come from a seed alone.  No data set has any part in them, so whatever is computed
from them is public and costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fedquilt.common import checks
from fedquilt.models.features.frozen import image_shape

KINDS = ("strokes", "leaves")

_STROKES = 3
_POINTS = 40
_STROKE_BATCH = 256
_FILLED = 0.6  # of the image's side
_LEAVES = 40


def draw(kind: str, input_shape: Sequence[int], count: int, seed: int = 0) -> torch.Tensor:
    """Return `count` images, [count, channels, height, width], values in [0, 1].

    Parameters
    ----------
    kind
        "strokes": bright pen strokes on a dark ground, as in handwriting.
        "leaves": ellipses of random size and colour that cover one another, as objects do
        in photographs (the dead leaves model, Lee, Mumford and Huang 2001).
    input_shape
        (channels, height, width).  Strokes are the same in every channel.
    count
        Number of images.
    seed
        Draws the same images every time.
    """
    shape = image_shape(input_shape)
    checks.choice("kind", kind, KINDS)
    checks.integer("count", count, at_least=1)
    generator = torch.Generator().manual_seed(checks.integer("seed", seed, at_least=0))
    return (_strokes if kind == "strokes" else _leaves)(shape, count, generator)


def _strokes(shape: tuple[int, int, int], count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw one to three Bezier curves an image with a round pen."""
    channels, height, width = shape
    side = min(height, width)
    points = _centred(_pen_points(count, generator), _FILLED * side)
    points += torch.tensor([(height - 1) / 2, (width - 1) / 2])
    pen = side * (0.03 + 0.04 * torch.rand(count, 1, generator=generator))
    pixels = torch.cartesian_prod(torch.arange(height).float(), torch.arange(width).float())
    images = torch.empty(count, 1, height, width)
    for part in torch.split(torch.arange(count), _STROKE_BATCH):
        nearest = _distance_to_nearest(pixels, points[part])
        images[part] = (pen[part] + 0.5 - nearest).clamp(0, 1).view(-1, 1, height, width)
    return images.expand(-1, channels, -1, -1).clone()


def _distance_to_nearest(pixels: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return the distance of each pixel to the nearest point of its image, [N, pixels].

    |a - b|^2 = |a|^2 + (|b|^2 - 2 a.b), the root taken of the least one only.
    """
    lengths = points.square().sum(2).unsqueeze(1)
    least = torch.baddbmm(lengths, pixels.expand(len(points), -1, -1), points.mT, alpha=-2).amin(2)
    return (least + pixels.square().sum(1)).clamp(min=0).sqrt()


def _pen_points(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return points along the curves, [count, P, 2].

    Each curve has four control points in the unit square; half of the second and third
    curves start where the one before ended.
    """
    control = torch.rand(count, _STROKES, 4, 2, generator=generator)
    joined = torch.rand(count, _STROKES, 1, generator=generator) < 0.5
    for stroke in range(1, _STROKES):
        control[:, stroke, 0] = torch.where(
            joined[:, stroke], control[:, stroke - 1, 3], control[:, stroke, 0]
        )
    t = torch.linspace(0, 1, _POINTS)
    bernstein = torch.stack([math.comb(3, k) * t**k * (1 - t) ** (3 - k) for k in range(4)], 1)
    points = torch.einsum("pk,nskd->nspd", bernstein, control).flatten(1, 2)
    strokes = torch.randint(1, _STROKES + 1, (count, 1), generator=generator)
    used = torch.arange(_STROKES).repeat_interleave(_POINTS) < strokes
    # Curves that an image does not use lie on its first point and add nothing.
    return torch.where(used.unsqueeze(2), points, points[:, :1])


def _centred(points: torch.Tensor, extent: float) -> torch.Tensor:
    """Scale a drawing's longer side to `extent` and move its middle to the origin."""
    low, high = points.amin(1, keepdim=True), points.amax(1, keepdim=True)
    longer = (high - low).amax(2, keepdim=True).clamp(min=0.2)
    return (points - (low + high) / 2) * (extent / longer)


def _leaves(shape: tuple[int, int, int], count: int, generator: torch.Generator) -> torch.Tensor:
    """Paint ellipses over one another; their radii r have density ~ r^-3."""
    channels, height, width = shape
    side = max(height, width)
    down = torch.arange(height).view(1, -1, 1)
    right = torch.arange(width).view(1, 1, -1)

    def uniform(*sizes: int) -> torch.Tensor:
        return torch.rand(count, *sizes, generator=generator)

    def colour() -> torch.Tensor:
        return (0.7 * uniform(1, 1, 1) + 0.3 * uniform(channels, 1, 1)).clamp(0, 1)

    images = colour().expand(-1, -1, height, width).clone()
    for _ in range(_LEAVES):
        # 1 / r^2 is uniform between its values at the largest and the smallest radius.
        radius = side / (4 + (144 - 4) * uniform(1, 1)).sqrt()
        angle, flat = math.pi * uniform(1, 1), 0.4 + 0.6 * uniform(1, 1)
        y, x = down - height * uniform(1, 1), right - width * uniform(1, 1)
        along, across = y * angle.cos() + x * angle.sin(), x * angle.cos() - y * angle.sin()
        inside = along**2 + (across / flat) ** 2 < radius**2
        images = torch.where(inside.unsqueeze(1), colour(), images)
    return images
