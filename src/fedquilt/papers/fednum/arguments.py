"""Checks of the arguments of `FedNumClient` and `FedNumServer`, and of a resumed folder.

A folder is resumed only with the settings, clients and first weights it was made with.
`fedquilt.record.folder` reads the folder's files; it stands above this package, so the
server passes on what it has read.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.common.storage import write_file
from fedquilt.condense.augment import Augmentation
from fedquilt.config import CondenseConfig, RunConfig, write_config_file
from fedquilt.config.choices import LOGIT_LOSSES


@dataclass(frozen=True)
class ImageInfo:
    """The image shape, the classes and the name of FedNum's `dataset_info`.

    Read are "channel", "img_size" (a side, or height and width; the published code calls it
    "im_size") and "num_classes", the number of the model's outputs; labels lie below it.
    "name" is optional.  Images come normalised; "mean" and "std", one number a channel,
    say with what, and pictures of the synthetic images need them.
    """

    shape: tuple[int, int, int]
    num_classes: int
    name: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @classmethod
    def read(cls, dataset_info: object) -> ImageInfo:
        """Check the dictionary and take from it what is needed."""
        if not isinstance(dataset_info, Mapping):
            raise InvalidValueError(
                f"dataset_info of type {type(dataset_info).__name__} must be a dictionary with "
                "'channel', 'img_size' and 'num_classes'"
            )
        size_key = "im_size" if "im_size" in dataset_info else "img_size"
        for key in ("channel", size_key, "num_classes"):
            if key not in dataset_info:
                raise InvalidValueError(
                    f"dataset_info must have the key {key!r}; it has "
                    f"{sorted(map(str, dataset_info))}"
                )
        height, width = _height_and_width(size_key, dataset_info[size_key])
        channel, classes = (
            checks.integer(f"dataset_info[{key!r}]", dataset_info[key], at_least=1)
            for key in ("channel", "num_classes")
        )
        name = str(dataset_info.get("name", "custom"))
        return cls((channel, height, width), classes, name, *_pixels(dataset_info, channel))


def _height_and_width(key: str, size: object) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2:
        raise InvalidValueError(f"dataset_info[{key!r}]={size!r} must be a side or (height, width)")
    height, width = (checks.integer(f"dataset_info[{key!r}]", side, at_least=1) for side in sides)
    return height, width


def _pixels(info: Mapping[str, Any], channels: int) -> tuple[tuple[float, ...] | None, ...]:
    """Return "mean" and "std" where both are there, one number a channel."""
    if info.get("mean") is None or info.get("std") is None:
        return None, None
    read = []
    for key in ("mean", "std"):
        given = info[key]
        values = list(given) if isinstance(given, Iterable) else [given]
        if len(values) != channels:
            raise InvalidValueError(
                f"dataset_info[{key!r}]={given!r} must have {channels} numbers, one a channel"
            )
        above = 0 if key == "std" else None
        read.append(tuple(checks.number(f"dataset_info[{key!r}]", v, above=above) for v in values))
    return read[0], read[1]


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


class Client(Protocol):
    """What the server asks of a client; `FedNumClient` is one, and so may yours be."""

    cid: int | str
    classes: list[int]

    def receive_model(self, model: nn.Module) -> None:
        """Take the model of the round."""

    def train(self) -> dict[str, Any]:
        """Return "classes", "avg_features", "avg_logits" and, if groups differ, "counts"."""


def checked_clients(clients: Sequence[Client]) -> list[Client]:
    """Return the clients, at least one, each with what is asked of it and its own cid."""
    found = list(clients)
    if not found:
        raise InvalidValueError("clients=[] must hold at least one client")
    for client in found:
        for name in ("cid", "classes", "receive_model", "train"):
            if not hasattr(client, name):
                raise InvalidValueError(
                    f"clients: {type(client).__name__} must have cid, classes, receive_model() "
                    f"and train(); it has no {name}"
                )
    taken: set[int | str] = set()
    for client in found:
        if client.cid in taken:
            raise InvalidValueError(f"clients: cid={client.cid!r} must name one client only")
        taken.add(client.cid)
    return found


def all_classes(clients: Sequence[Client], num_classes: int) -> tuple[int, ...]:
    """Return the classes that some client lists, ascending."""
    labels = {
        checks.integer(f"class of client {client.cid!r}", c, at_least=0, at_most=num_classes - 1)
        for client in clients
        for c in client.classes
    }
    if not labels:
        raise InvalidValueError("clients must list at least one class; their classes are empty")
    return tuple(sorted(labels))


def checked_loader(loader: Iterable[Any] | None, info: ImageInfo) -> Iterable[Any] | None:
    """Look at the first batch, so that a misfit is an error here and not after a round."""
    if loader is None:
        return None
    if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
        raise InvalidValueError(
            f"test_loader of type {type(loader).__name__} must be iterable again and again"
        )
    batch = next(iter(loader), None)
    parts = list(batch) if isinstance(batch, tuple | list) else []
    if len(parts) != 2 or not all(isinstance(p, torch.Tensor) and len(p) for p in parts):
        raise InvalidValueError(
            "test_loader must give batches (images, labels) of tensors, at least one"
        )
    images, labels = parts
    if images.shape[1:] != info.shape or int(labels.max()) >= info.num_classes:
        raise InvalidValueError(
            f"test_loader with images of shape {tuple(images.shape[1:])} and labels up to "
            f"{int(labels.max())} must have shape {info.shape} and labels below {info.num_classes}"
        )
    return loader


@torch.no_grad()
def check_outputs(model: nn.Module, sample: torch.Tensor, info: ImageInfo) -> None:
    """Refuse a model that does not take the images, or has another number of outputs."""
    model.eval()
    try:
        outputs = model(sample)
    except (RuntimeError, ValueError, IndexError) as error:
        raise InvalidValueError(
            f"global_model must take images of shape {info.shape}; it does not: {error}"
        ) from error
    if outputs.shape != (len(sample), info.num_classes):
        raise InvalidValueError(
            f"global_model must return {info.num_classes} scores an image, the num_classes of "
            f"dataset_info; it returns a tensor of shape {tuple(outputs.shape)}"
        )


def make_config(
    clients: Sequence[Client],
    info: ImageInfo,
    *,
    communication_rounds: int,
    join_ratio: float,
    eval_gap: int,
    logit_loss_type: str,
    augmentation: str,
    **named_alike: Any,
) -> CondenseConfig:
    """Return the configuration for the arguments of `FedNumServer`.

    An error names an argument as `FedNumServer` does; `named_alike` have the same name in
    the configuration, which checks them itself.
    """
    return CondenseConfig(
        dataset=info.name,
        model="custom",
        num_clients=len(clients),
        num_rounds=checks.integer("communication_rounds", communication_rounds, at_least=1),
        clients_per_round=checks.number("join_ratio", join_ratio, above=0, at_most=1),
        eval_every=checks.integer("eval_gap", eval_gap, at_least=1),
        min_group=min(getattr(client, "min_group", 1) for client in clients),
        max_samples=0,
        logit_loss_type=checks.choice("logit_loss_type", logit_loss_type, LOGIT_LOSSES),
        augmentation=Augmentation(augmentation).strategy,
        pixel_mean=_joined(info.mean),
        pixel_std=_joined(info.std),
        **named_alike,
    )


def _joined(numbers: tuple[float, ...] | None) -> str | None:
    return None if numbers is None else ",".join(map(repr, numbers))


def write_settings(path: Path, config: CondenseConfig) -> None:
    """Make the folder of a run that begins, with its configuration in it."""
    text = io.StringIO()
    write_config_file(config, text)
    write_file(path / "config.toml", text.getvalue().encode(), parents=True)


def check_settings(path: Path, there: RunConfig, here: CondenseConfig) -> None:
    """Refuse a folder whose run has other settings."""
    found = there.as_dict()
    for key, value in here.as_dict().items():
        if found.get(key) != value:
            raise RunFolderError(
                f"output_dir={str(path)!r} must be another folder: the run in it has "
                f"{key}={found.get(key)!r}, not {value!r}"
            )


def fingerprint(clients: Sequence[Client], weights: torch.Tensor) -> NDArray[np.uint8]:
    """Return what tells a run from another with the same settings, as it begins."""
    held = [
        (client.cid, list(client.classes), len(client) if isinstance(client, Sized) else None)
        for client in clients
    ]
    digest = hashlib.sha256(repr(held).encode())
    digest.update(weights.cpu().numpy().tobytes())
    return np.frombuffer(digest.digest(), dtype=np.uint8)


def check_fingerprint(
    path: Path, state: Mapping[str, NDArray[Any]], expected: NDArray[np.uint8]
) -> None:
    """Refuse a checkpoint of a run that began otherwise."""
    if not np.array_equal(state.get("fingerprint", []), expected):
        raise RunFolderError(
            f"output_dir={str(path)!r} must be another folder: the run in it began "
            "with other weights of the global model, or with other clients"
        )
