"""Data sets of your own, under a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.data.specs import DatasetSpec, add_spec


def register_dataset(
    name: str,
    source: Callable[[], tuple[Any, Any]] | DatasetSpec,
    *,
    num_classes: int | None = None,
    title: str = "",
) -> None:
    """Make a data set known by name in this process, wherever one is named.

    Parameters
    ----------
    name : str
        Letters, digits, '.', '_', '+' and '-'; no other data set may have it.  A ledger knows
        clients by this name and their sample numbers: the same name must always mean the same
        data.
    source : callable or DatasetSpec
        A function that returns (train, test), each an `ImageDataset` or a pair
        `(inputs, labels)`, or the description of files in a form that is known.
    num_classes : int, optional
        Of what a function returns; the largest label and one more by default.
    title : str
        What the list of data sets says of it.

    Examples
    --------
    >>> import torch
    >>> x, y = torch.zeros(8, 3), torch.arange(8) % 2
    >>> register_dataset("eight-zeros", lambda: ((x, y), (x, y)))
    >>> from fedquilt.data import load_dataset
    >>> load_dataset("eight-zeros")[0]
    ImageDataset('eight-zeros', 8 samples 3, 2 classes)
    """
    checks.text("name", name)
    if isinstance(source, DatasetSpec):
        if num_classes is not None:
            raise InvalidValueError("num_classes must be left out beside a DatasetSpec: it has one")
        add_spec(dataclasses.replace(source, name=name, title=title or source.title))
        return
    if not callable(source):
        raise InvalidValueError(
            f"source={source!r:.60} must be a function that returns (train, test), or a DatasetSpec"
        )
    classes = 0 if num_classes is None else checks.integer("num_classes", num_classes, at_least=1)
    add_spec(
        DatasetSpec(
            name=name,
            title=title or "registered at run time",
            kind="own",
            image_shape=(),
            mean=(),
            std=(),
            num_classes=classes,
            load=source,
        )
    )
