"""Frozen feature extractors: fixed features, standardised for a linear head without any data.

The noise of a private release grows with the number of coordinates it covers, so a
whole-model guarantee among few clients needs a small trainable head.  A feature extractor that is
frozen and known to everybody costs nothing: noise on the head is then noise on everything
that was learned.  That holds only while the feature extractor is a public function, so its centring
and whitening may not come from the clients' data either.  Its settings are another
matter: `model.py` says on what they were chosen.

Where a public average is needed, drawn images stand in for data (`draw`).  They come from a
seed alone: whatever is computed from them is public and costs no privacy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError


def random_projection(size: int, dimension: int, seed: int) -> torch.Tensor:
    """Return a [size, dimension] matrix of N(0, 1 / dimension) entries drawn from a seed.

    It keeps inner products in expectation (Johnson and Lindenstrauss 1984).
    """
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, dimension, generator=generator)
    return matrix.div_(math.sqrt(dimension))


def turned_towards(projection: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns that span C P, C the covariance of `rows`, P a projection.

    One step of the randomised range finder (Halko, Martinsson and Tropp 2011): random
    directions, turned towards those in which the rows vary most.  The columns are
    Q = Y (Y^T Y)^(-1/2) with Y = C P.  Unlike principal components Q does not depend on how
    a solver picks signs and orders equal eigenvalues: machines agree up to rounding.
    """
    centred = (rows - rows.mean(0)).double()
    turned = centred.T @ (centred @ projection.double())
    turned = turned / torch.linalg.matrix_norm(turned).clamp(min=_TINY)
    values, vectors = torch.linalg.eigh(turned.T @ turned)
    # Directions the rows do not span have length zero up to rounding and stay near zero.
    lengths = values.clamp(min=_TINY * max(1.0, float(values.max()))).sqrt()
    columns: torch.Tensor = turned @ (vectors / lengths) @ vectors.T
    return columns.to(projection.dtype)


def mean_and_whitening(rows: torch.Tensor, shrink: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of rows and W = (C / c + shrink)^(-1/2).

    C is the covariance and c its mean eigenvalue.  Of all matrices that whiten, W is the
    symmetric one, which machines agree on up to rounding.
    """
    wide = rows.double()
    mean = wide.mean(0)
    covariance = (wide - mean).T @ (wide - mean) / len(wide)
    level = covariance.diagonal().mean().clamp(min=_TINY)
    values, vectors = torch.linalg.eigh(covariance / level)
    whitening = (vectors * (values.clamp(min=0) + shrink).rsqrt()) @ vectors.T
    return mean.to(rows.dtype), whitening.to(rows.dtype)


_TINY = 1e-12
_SMALLEST = 1e-38  # a positive float32 whose root is below _TINY
_FLAT = 1e-6  # below this length or spread a direction is rounding
_PUBLIC_BATCH = 256


@runtime_checkable
class FeatureExtractor(Protocol):
    """A description of images: [N, channels, height, width] to [N, ...]."""

    @property
    def num_features(self) -> int:
        """The number of values that describe an image."""

    def __call__(self, images: torch.Tensor, /) -> torch.Tensor:
        """Describe images."""


class FrozenExtractor(nn.Module):
    """Features of length sqrt(k), centred and whitened by public images.

    With u(v) = v / ||v||, features f(x), flattened, and r(v) = sign(v) |v|^power,

        phi(x) = sqrt(k) * u( W (P u(r(f(x))) - m) )

    P projects to k dimensions, or is absent; m is the mean over the public images and W the
    shrunken inverse root of their covariance (`mean_and_whitening`).  Without public images
    m = 0 and W = 1.  Everything is a fixed function of one sample.  Build it on the CPU and
    move it afterwards.

    Gradients reach the images, so that images can be made to fit features.  Where the
    derivative has no bound it gets one: that of r stays as it is at |v| = 1e-6 for smaller
    values, and u passes no gradient for vectors shorter than 1e-6.

    Why: around a common mean, the features of all classes point the same way, and updates
    of clients with unequal class mixtures mostly disagree about that one direction.
    Whitening lets few rounds reach directions that vary little.  The length makes the mean
    square of a feature 1, so usual learning rates fit.

    Parameters
    ----------
    front
        `OrientedGradients`, `Scattering` or another module that trains nothing.
    public
        Images that are nobody's data, at least two; see `draw`.
    projection
        k, or None to keep all features.  Random, and turned towards the directions in
        which the public images differ, if there are any.
    seed
        Of the projection.
    power
        1 leaves the features as they are; 1/2 lets large ones dominate less.
    shrink
        How far W stays from full whitening.
    """

    def __init__(
        self,
        front: nn.Module,
        public: torch.Tensor | None = None,
        *,
        projection: int | None = None,
        seed: int = 0,
        power: float = 0.5,
        shrink: float = 1.0,
    ) -> None:
        super().__init__()
        size = count_features(front)
        checks.integer("seed", seed, at_least=0)
        checks.number("shrink", shrink, above=0)
        self.power = checks.number("power", power, above=0)
        self.front = front.requires_grad_(False)
        self.num_features = size
        self.projection: torch.Tensor | None
        self.mean: torch.Tensor
        self.whitening: torch.Tensor
        matrix = None
        if projection is not None:
            self.num_features = checks.integer("projection", projection, at_least=1, at_most=size)
            matrix = random_projection(size, self.num_features, seed)
        self.register_buffer("projection", matrix, persistent=False)
        self.register_buffer("mean", torch.zeros(self.num_features), persistent=False)
        self.register_buffer("whitening", torch.eye(self.num_features), persistent=False)
        if public is not None:
            self._adapt(public, shrink)

    keeps_from = 10_000

    @property
    def num_described(self) -> int:
        """All features are kept."""
        return self.num_features

    @property
    def cache_name(self) -> str:
        """The settings show in what was computed of public images."""
        kept = (self.mean, self.whitening, self.projection)
        parts = [b"" if x is None else x.detach().cpu().numpy().tobytes() for x in kept]
        digest = hashlib.sha256(b"|".join(parts)).hexdigest()[:16]
        return f"frozen-{type(self.front).__name__.lower()}-{digest}"

    def describe(self, images: torch.Tensor) -> torch.Tensor:
        """Return [N, num_features]."""
        return cast(torch.Tensor, self(images))

    def narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        return rows

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return [N, num_features]."""
        whitened = (self._project(self._describe(images)) - self.mean) @ self.whitening
        return _unit(whitened) * math.sqrt(self.num_features)

    @torch.no_grad()
    def _adapt(self, public: torch.Tensor, shrink: float) -> None:
        """Take projection, mean and whitening from public images."""
        if len(public) < 2:
            raise InvalidValueError(f"public holds {len(public)} images, must hold at least 2")
        rows = torch.cat([self._describe(batch) for batch in torch.split(public, _PUBLIC_BATCH)])
        if self.projection is not None:
            self.projection = turned_towards(self.projection, rows)
        self.mean, self.whitening = mean_and_whitening(self._project(rows), shrink)

    def _describe(self, images: torch.Tensor) -> torch.Tensor:
        features = self.front(images).flatten(1)
        return _unit(_signed_power(features, self.power))

    def _project(self, features: torch.Tensor) -> torch.Tensor:
        return features if self.projection is None else features @ self.projection


class SampleStandard(nn.Module):
    """Each image minus its mean, over its standard deviation, then `front`.

    Makes a feature extractor blind to the brightness and contrast of an image, and so to how a data
    set was normalised.  An image whose standard deviation is below 1e-6 is taken to be
    constant: it gets no gradient.
    """

    def __init__(self, front: nn.Module) -> None:
        super().__init__()
        self.num_features = count_features(front)
        self.front = front.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return what the feature extractor makes of the standardised images."""
        features: torch.Tensor = self.front(_standardised(images.to(torch.float32)))
        return features


def count_features(front: nn.Module) -> int:
    """Return the number of features a feature extractor announces, or raise."""
    if isinstance(front, FeatureExtractor) and isinstance(front.num_features, int):
        return front.num_features
    raise InvalidValueError(
        f"front={type(front).__name__} must tell its num_features, a whole number"
    )


def _standardised(images: torch.Tensor) -> torch.Tensor:
    """Return each image minus its mean, over its standard deviation."""
    axes = (1, 2, 3)
    centred = images - images.mean(axes, keepdim=True)
    variance = centred.square().mean(axes, keepdim=True)
    # The root has no derivative at 0, not even one to multiply by zero.
    return _over(centred, variance.clamp(min=_SMALLEST).sqrt())


def _unit(rows: torch.Tensor) -> torch.Tensor:
    """Scale each row to length 1; a row of zeros stays."""
    return _over(rows, torch.linalg.vector_norm(rows, dim=1, keepdim=True))


def _over(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return values / lengths, or over 1e-12; no gradient where a length is below 1e-6.

    The derivative grows as 1 / length, and no direction is meant by so short a vector.
    """
    flat = lengths < _FLAT
    held_values = torch.where(flat, values.detach(), values)
    held_lengths = torch.where(flat, lengths.detach(), lengths)
    return held_values / held_lengths.clamp(min=_TINY)


def _signed_power(values: torch.Tensor, power: float) -> torch.Tensor:
    """Return sign(v) |v|^power, with a bounded derivative."""
    result: torch.Tensor = _SignedPower.apply(values, power)  # type: ignore[no-untyped-call]
    return result


class _SignedPower(torch.autograd.Function):
    """sign(v) |v|^p, whose derivative is taken as p max(|v|, 1e-6)^(p - 1).

    For p < 1 the true one has no bound near 0, and many features of an image are 0.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: torch.Tensor, power: float) -> torch.Tensor:
        return values.sign() * values.abs() ** power

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
        values, ctx.power = inputs
        ctx.save_for_backward(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (values,) = ctx.saved_tensors
        slope = ctx.power * values.abs().clamp(min=_FLAT) ** (ctx.power - 1)
        return grad * slope, None


_SMALLEST_SIDE = 3


def image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (channels, height, width), or raise."""
    if len(shape) != 3:
        raise InvalidValueError(f"input_shape={tuple(shape)!r} must be (channels, height, width)")
    channels = checks.integer("channels of input_shape", shape[0], at_least=1)
    height = checks.integer("height of input_shape", shape[1], at_least=_SMALLEST_SIDE)
    width = checks.integer("width of input_shape", shape[2], at_least=_SMALLEST_SIDE)
    return channels, height, width


def as_images(images: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """Return a batch of images of that shape in float32, or raise."""
    if images.dim() != 4 or tuple(images.shape[1:]) != shape:
        raise InvalidValueError(
            f"images of shape {tuple(images.shape)} must have shape (N, {shape[0]}, "
            f"{shape[1]}, {shape[2]})"
        )
    return images.to(torch.float32)


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
