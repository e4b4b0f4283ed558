"""From the dictionary that a client's `train` returns to a table of statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedquilt.condense.table import StatisticsTable
from fedquilt.errors import InvalidValueError


def table_of(
    message: object,
    cid: int | str,
    number: int,
    classes: Sequence[int],
    num_features: int,
    num_logits: int,
) -> StatisticsTable:
    """Check what a client's `train` returned and lay its classes out in one table.

    `number` is that of the feature model.  Without "counts" every group counts alike, as
    in the reference; logits are left behind where `num_logits` is 0.
    """
    who = f"train() of client {cid!r}"
    if not isinstance(message, Mapping) or not {"classes", "avg_features"} <= message.keys():
        raise InvalidValueError(f"{who} must return a dictionary with 'classes' and 'avg_features'")
    none = torch.zeros(0)
    parts = [(none, none, none.view(0, num_features), none.view(0, num_logits))]
    for label in message["classes"]:
        if label not in classes:
            raise InvalidValueError(f"{who}: class {label!r} must be one of {tuple(classes)}")
        parts.append(_groups_of(message, label, who, num_features, num_logits))
    labels, counts, features, logits = (torch.cat(part) for part in zip(*parts, strict=True))
    labels = labels.to(torch.int64)
    models = torch.full_like(labels, number)
    return StatisticsTable(models, labels, counts.to(torch.int64), features, logits)


def _groups_of(
    message: Mapping[str, Any], label: int, who: str, num_features: int, num_logits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return label, count, features and logits of each group of a class."""
    features = _part(message, "avg_features", label, who, (-1, num_features))
    groups = len(features)
    logits, counts = torch.zeros(groups, 0), torch.ones(groups)
    if num_logits:
        logits = _part(message, "avg_logits", label, who, (groups, num_logits))
    if "counts" in message:
        counts = _part(message, "counts", label, who, (groups,))
    if not bool((counts >= 1).all()):
        raise InvalidValueError(f"{who}: 'counts'[{label}]={counts.tolist()} must be >= 1")
    return torch.full((groups,), float(label)), counts, features, logits


def _part(
    message: Mapping[str, Any], key: str, label: int, who: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return one tensor of a message in float32 on the CPU; -1 in `shape` is any length."""
    try:
        part = torch.as_tensor(message[key][label]).detach().to("cpu", torch.float32)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidValueError(
            f"{who} must return a tensor as {key!r}[{label!r}]: {error!r}"
        ) from error
    if part.ndim != len(shape) or any(
        wanted not in (-1, size) for size, wanted in zip(part.shape, shape, strict=True)
    ):
        raise InvalidValueError(
            f"{who}: {key!r}[{label}] of shape {tuple(part.shape)} must have shape {shape}"
        )
    return part
