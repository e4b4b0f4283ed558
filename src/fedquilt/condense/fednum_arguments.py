"""Checking what a `FedNumServer` is made with, before anything else happens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from fedquilt import validate
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.fednum_info import ImageInfo
from fedquilt.condense.losses import LOGIT_LOSSES
from fedquilt.config import CondenseConfig
from fedquilt.errors import InvalidValueError


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
        validate.integer(f"class of client {client.cid!r}", c, at_least=0, at_most=num_classes - 1)
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
    """Return the configuration that the document's arguments stand for.

    An error names an argument as the document does; `named_alike` have the same name in
    the configuration, which checks them itself.
    """
    return CondenseConfig(
        dataset=info.name,
        model="custom",
        num_clients=len(clients),
        num_rounds=validate.integer("communication_rounds", communication_rounds, at_least=1),
        clients_per_round=validate.number("join_ratio", join_ratio, above=0, at_most=1),
        eval_every=validate.integer("eval_gap", eval_gap, at_least=1),
        min_group=min(getattr(client, "min_group", 1) for client in clients),
        max_samples=0,
        logit_loss_type=validate.choice("logit_loss_type", logit_loss_type, LOGIT_LOSSES),
        augmentation=Augmentation(augmentation).strategy,
        **named_alike,
    )
