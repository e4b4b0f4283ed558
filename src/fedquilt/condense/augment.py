"""Differentiable siamese augmentation of images.

B. Zhao and H. Bilen, "Dataset condensation with differentiable siamese
augmentation", ICML 2021: when gradients of real and of synthetic images are
matched, both sides see the *same* randomly drawn transform, and the gradient
flows through it back into the synthetic pixels.

    augmentation = Augmentation("color_crop_flip")
    transform = augmentation.draw(generator, rows=classes)
    real = transform.apply(real_images, real_labels)
    synthetic = transform.apply(synthetic_images, synthetic_labels)

A `Transform` holds plain numbers in [0, 1), drawn on the CPU, and every image
size gives them its own meaning (pixels to shift by, for instance).  Equal
generators therefore give equal transforms at a client and at the server, on
every device and at every resolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError

FAMILIES = ("color", "crop", "cutout", "flip", "scale", "rotate")

# The strengths of the experiments of Zhao and Bilen 2021.
_BRIGHTNESS = 1.0
_SATURATION = 2.0
_CONTRAST = 0.5
_CROP = 0.125  # largest shift, as a share of the side
_CUTOUT = 0.5  # side of the hole, as a share of the image's
_FLIP = 0.5  # probability
_SCALE = 1.2
_ROTATE = 15.0  # degrees


@dataclass(frozen=True)
class Augmentation:
    """A choice of families; every draw takes one of them, each equally likely.

    Parameters
    ----------
    strategy
        Names of `FAMILIES` joined by "_", or "none".
    """

    strategy: str = "_".join(FAMILIES)

    def __post_init__(self) -> None:
        families = self.families
        for family in families:
            checks.choice("augmentation family", family, (*FAMILIES, "none"))
        if len(set(families)) < len(families):
            raise InvalidValueError(f"strategy={self.strategy!r} must name each family once")
        if "none" in families and len(families) > 1:
            raise InvalidValueError(f"strategy={self.strategy!r} must not join 'none' to others")

    @property
    def families(self) -> tuple[str, ...]:
        """The families a draw chooses among."""
        if not isinstance(self.strategy, str):
            raise InvalidValueError(f"strategy={self.strategy!r} must be a text")
        return tuple(self.strategy.split("_"))

    def draw(self, generator: np.random.Generator, rows: int) -> Transform:
        """Pick one family and draw `rows` independent sets of its parameters.

        The family and row r depend on the generator alone, not on how many
        rows follow r.
        """
        rows = checks.integer("rows", rows, at_least=1)
        family = self.families[int(generator.integers(len(self.families)))]
        # Row-major filling: a longer table begins with the shorter one.
        table = generator.random((rows, _COLUMNS[family]), dtype=np.float32)
        return Transform(family, torch.from_numpy(table))


@dataclass(frozen=True, eq=False)
class Transform:
    """One family with its parameters: [rows, columns] float32 on the CPU, each in [0, 1)."""

    family: str
    parameters: Tensor

    def __post_init__(self) -> None:
        checks.choice("family", self.family, _COLUMNS)
        table = self.parameters
        columns = _COLUMNS[self.family]
        if table.ndim != 2 or len(table) == 0 or table.shape[1] != columns:
            raise InvalidValueError(
                f"parameters of shape {tuple(table.shape)} must have at least one row"
                f" and {columns} columns for family={self.family!r}"
            )
        if table.dtype != torch.float32 or table.device.type != "cpu":
            raise InvalidValueError(
                f"parameters ({table.dtype} on {table.device}) must be torch.float32 on cpu"
            )
        outside = table[~((table >= 0) & (table < 1))]
        if len(outside):
            raise InvalidValueError(f"parameter {outside[0].item()} must be >= 0 and < 1")

    @property
    def rows(self) -> int:
        """How many sets of parameters there are."""
        return len(self.parameters)

    def apply(self, images: Tensor, owner: Tensor | None = None) -> Tensor:
        """Return `images` [N, C, H, W] transformed, image n by parameter row `owner[n]`.

        Without `owner` a single row serves every image; otherwise image n
        takes row n.  The result is differentiable in the images.  An owner
        that lies on a GPU is not read back: there the device itself rejects a
        row that does not exist.
        """
        _check_images(images)
        if owner is None and self.rows not in (1, len(images)):
            raise InvalidValueError(
                f"images={len(images)} must be {self.rows}, one for each parameter row,"
                " where no owner is given"
            )
        if owner is not None:
            _check_owner(owner, len(images), self.rows)
            owner = owner.to(images.device)
        if self.family == "none" or len(images) == 0:
            return images
        # Double precision on the CPU: what a parameter means never depends on the device.
        return _APPLY[self.family](images, self.parameters.double(), owner)


def _check_images(images: Tensor) -> None:
    if images.ndim != 4 or 0 in images.shape[1:]:
        raise InvalidValueError(
            f"images of shape {tuple(images.shape)} must be [images, channels, height, width]"
        )
    if not images.is_floating_point():
        raise InvalidValueError(f"images of type {images.dtype} must be floating point")


def _check_owner(owner: Tensor, images: int, rows: int) -> None:
    if owner.shape != (images,) or owner.dtype != torch.int64:
        raise InvalidValueError(
            f"owner of shape {tuple(owner.shape)} and type {owner.dtype} must be [{images}]"
            " torch.int64, one row for each image"
        )
    if owner.device.type != "cpu" or images == 0:
        return
    for worst in (int(owner.min()), int(owner.max())):
        checks.integer("owner", worst, at_least=0, at_most=rows - 1)


def _per_image(images: Tensor, owner: Tensor | None, *columns: Tensor) -> tuple[Tensor, ...]:
    """Lay [rows] columns beside the images: each [N or 1, 1, 1, 1] on their device."""
    table = torch.stack(columns, 1)  # one transfer for all of them
    table = table.to(images.device, images.dtype if table.is_floating_point() else table.dtype)
    if owner is not None:
        table = table.index_select(0, owner)
    return tuple(column.view(-1, 1, 1, 1) for column in table.unbind(1))


def _color(images: Tensor, u: Tensor, owner: Tensor | None) -> Tensor:
    """Brightness, then saturation, then contrast.

    x <- x + b,  b = u_0 - 1/2;  x <- g + s (x - g),  s = 2 u_1, g the mean over
    the channels;  x <- m + c (x - m),  c = u_2 + 1/2, m the mean of the image.
    Saturation leaves g and m as they are, so the three together are

        c s x + c (1 - s) g + (1 - c) m + b,   g and m of the image as it came.
    """
    b = (u[:, 0] - 0.5) * _BRIGHTNESS
    s = u[:, 1] * _SATURATION
    c = u[:, 2] + _CONTRAST
    of_x, of_gray, of_mean, offset = _per_image(images, owner, c * s, c * (1 - s), 1 - c, b)
    gray = images.mean(1, keepdim=True)
    mean = gray.mean((2, 3), keepdim=True)
    return torch.addcmul(of_gray * gray + (of_mean * mean + offset), of_x, images)


def _steps(u: Tensor, count: int) -> Tensor:
    """Turn u in [0, 1) into one of 0 .. count - 1, each equally likely."""
    return (u * count).floor().long()


def _portion(size: int, share: float) -> int:
    return math.floor(size * share + 0.5)


def _crop(images: Tensor, u: Tensor, owner: Tensor | None) -> Tensor:
    """Shift by whole pixels, at most an eighth of the side; what comes in is zero.

    Out of the image with `most` zeros around it, a window of the old size is
    cut whose corner is uniform in 0 .. 2 most.
    """
    height, width = images.shape[2:]
    most_y, most_x = _portion(height, _CROP), _portion(width, _CROP)
    top, left = _steps(u[:, 0], 2 * most_y + 1), _steps(u[:, 1], 2 * most_x + 1)
    if len(u) == 1 and owner is None:
        y, x = int(top) - most_y, int(left) - most_x
        return functional.pad(images, (-x, x, -y, y))
    padded = functional.pad(images, (most_x, most_x, most_y, most_y))
    stride = width + 2 * most_x
    # Flat positions of the window; every pixel is read once, so the gradient is exact too.
    window = _places(images, 2).view(-1, 1) * stride + _places(images, 3)
    (corner,) = _per_image(images, owner, top * stride + left)
    source = (window + corner).flatten(2).expand(-1, images.shape[1], -1)
    return padded.flatten(2).gather(2, source).view_as(images)


def _places(images: Tensor, axis: int) -> Tensor:
    return torch.arange(images.shape[axis], device=images.device)


def _cutout(images: Tensor, u: Tensor, owner: Tensor | None) -> Tensor:
    """Zero a rectangle of half the sides around a uniform centre, clipped at the border."""
    holes = [_portion(size, _CUTOUT) for size in images.shape[2:]]
    first = []
    for column, size, hole in zip(u.unbind(1), images.shape[2:], holes, strict=True):
        # A hole of even length has its centre between two pixels: one place more.
        first.append(_steps(column, size + 1 - hole % 2) - hole // 2)
    top, left = _per_image(images, owner, *first)
    y = _places(images, 2).view(-1, 1) - top
    x = _places(images, 3) - left
    return images.masked_fill((y >= 0) & (y < holes[0]) & ((x >= 0) & (x < holes[1])), 0)


def _flip(images: Tensor, u: Tensor, owner: Tensor | None) -> Tensor:
    """Swap left and right with probability one half."""
    swap = u[:, 0] < _FLIP
    if len(u) == 1 and owner is None:
        return images.flip(3) if bool(swap) else images
    (swapped,) = _per_image(images, owner, swap)
    place = _places(images, 3)
    return images.gather(3, torch.where(swapped, place.flip(0), place).expand_as(images))


def _scale(images: Tensor, u: Tensor, owner: Tensor | None) -> Tensor:
    """Stretch both axes independently, the sampling step uniform in [1/1.2, 1.2]."""
    x, y = (1 / _SCALE + u * (_SCALE - 1 / _SCALE)).unbind(1)
    zero = torch.zeros_like(x)
    return _resample(images, owner, x, zero, zero, y)


def _rotate(images: Tensor, u: Tensor, owner: Tensor | None) -> Tensor:
    """Rotate about the centre by an angle uniform in +-15 degrees."""
    angle = (2 * u[:, 0] - 1) * math.radians(_ROTATE)
    cos, sin = angle.cos(), angle.sin()
    height, width = images.shape[2:]
    # The grid counts in half sides; without the ratio a wide image would be sheared.
    return _resample(images, owner, cos, -sin * height / width, sin * width / height, cos)


def _resample(images: Tensor, owner: Tensor | None, *matrix: Tensor) -> Tensor:
    """Sample bilinearly at (a x + b y, c x + d y) for the matrix a, b, c, d; zero outside.

    x and y are the pixel centres, the outer pixel *edges* being -1 and 1.  The
    products are written out because a matrix product may lose digits on a GPU
    that is allowed TF32.
    """
    a, b, c, d = (entry.squeeze(3) for entry in _per_image(images, owner, *matrix))
    y, x = (
        (2 * _places(images, axis).to(images.dtype) + 1) / images.shape[axis] - 1 for axis in (2, 3)
    )
    y = y.view(-1, 1)
    grid = torch.stack((a * x + b * y, c * x + d * y), -1).expand(len(images), -1, -1, -1)
    return functional.grid_sample(images, grid, padding_mode="zeros", align_corners=False)


_Apply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_APPLY: dict[str, _Apply] = {
    "color": _color,
    "crop": _crop,
    "cutout": _cutout,
    "flip": _flip,
    "scale": _scale,
    "rotate": _rotate,
}
_COLUMNS = {"color": 3, "crop": 2, "cutout": 2, "flip": 1, "scale": 2, "rotate": 1, "none": 0}
