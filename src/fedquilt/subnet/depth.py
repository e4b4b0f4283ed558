"""Slices by depth: a client holds some of a model's blocks, at full width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fedquilt.errors import InvalidValueError
from fedquilt.subnet.model_slice import ModelSlice, tensors_of
from fedquilt.subnet.tensor_map import TensorMap


@dataclass(frozen=True)
class Blocks:
    """Which of a model's blocks, numbered from 0, a client holds."""

    held: tuple[int, ...]
    total: int

    def __post_init__(self) -> None:
        if not self.held or any(not 0 <= block < self.total for block in self.held):
            raise InvalidValueError(f"held={self.held} must be blocks of 0..{self.total - 1}")


def depth_slice(model: nn.Module, blocks: Sequence[Sequence[str]], held: Blocks) -> ModelSlice:
    """Return the slice of a client that holds only some blocks.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    blocks : sequence of sequences of str
        For each depth, the names of the modules that belong to it: the block
        and, as in DepthFL, its own classifier.  What is named in none is held
        by everyone.
    held : Blocks
        The depths that the client holds.
    """
    if len(blocks) != held.total:
        raise InvalidValueError(f"blocks={len(blocks)} of them must be the {held.total} of held")
    modules = {name for name, _ in model.named_modules()}
    for name in (name for names in blocks for name in names):
        if name not in modules:
            raise InvalidValueError(f"blocks: {name!r} must be a module of the model")
    absent = tuple(
        f"{name}."
        for number, names in enumerate(blocks)
        for name in names
        if number not in held.held
    )
    return ModelSlice(
        tuple(
            (name, TensorMap.full(tensor.shape))
            for name, tensor in tensors_of(model).items()
            if not absent or not name.startswith(absent)
        )
    )
