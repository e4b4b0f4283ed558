"""Checks of image shapes, for every front."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedquilt import validate
from fedquilt.errors import InvalidValueError

_SMALLEST = 3


def image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (channels, height, width), or raise."""
    if len(shape) != 3:
        raise InvalidValueError(f"input_shape={tuple(shape)!r} must be (channels, height, width)")
    channels = validate.integer("channels of input_shape", shape[0], at_least=1)
    height = validate.integer("height of input_shape", shape[1], at_least=_SMALLEST)
    width = validate.integer("width of input_shape", shape[2], at_least=_SMALLEST)
    return channels, height, width


def check_images(images: torch.Tensor, shape: tuple[int, int, int]) -> None:
    """Raise unless `images` is a batch of that shape."""
    if images.dim() != 4 or tuple(images.shape[1:]) != shape:
        raise InvalidValueError(
            f"images of shape {tuple(images.shape)} must have shape (N, {shape[0]}, "
            f"{shape[1]}, {shape[2]})"
        )
