"""What clients and server of the FedNum document are told alike: the images and the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedquilt import validate
from fedquilt.errors import InvalidValueError


@dataclass(frozen=True)
class ImageInfo:
    """What is taken from the document's `dataset_info`.

    Read are "channel", "img_size" (a side, or height and width) and "num_classes", the
    number of the model's outputs; labels lie below it.  "name" is optional.  All other
    keys ("mean", "std", ...) are left alone: images come normalised.
    """

    shape: tuple[int, int, int]
    num_classes: int
    name: str

    @classmethod
    def read(cls, dataset_info: object) -> ImageInfo:
        """Check the dictionary and take from it what is needed."""
        if not isinstance(dataset_info, Mapping):
            raise InvalidValueError(
                f"dataset_info of type {type(dataset_info).__name__} must be a dictionary with "
                "'channel', 'img_size' and 'num_classes'"
            )
        for key in ("channel", "img_size", "num_classes"):
            if key not in dataset_info:
                raise InvalidValueError(
                    f"dataset_info must have the key {key!r}; it has "
                    f"{sorted(map(str, dataset_info))}"
                )
        height, width = _height_and_width(dataset_info["img_size"])
        channel, classes = (
            validate.integer(f"dataset_info[{key!r}]", dataset_info[key], at_least=1)
            for key in ("channel", "num_classes")
        )
        return cls((channel, height, width), classes, str(dataset_info.get("name", "custom")))


def _height_and_width(size: object) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2:
        raise InvalidValueError(
            f"dataset_info['img_size']={size!r} must be a side or (height, width)"
        )
    height, width = (
        validate.integer("dataset_info['img_size']", side, at_least=1) for side in sides
    )
    return height, width


def checked_device(device: torch.device | str) -> torch.device:
    """Return a device that is there, or raise."""
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidValueError(
            f"device={device!r} must be a device that torch finds here: {reason}"
        ) from error
    if chosen.type == "meta":
        raise InvalidValueError(f"device={device!r} must be a device that holds numbers")
    return chosen
