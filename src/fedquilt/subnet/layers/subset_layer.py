"""What all subset layers share.

A subset layer is an ordinary small layer that remembers which part of a larger
one, its father, it stands for.  The ranges are fractions, so they are relative
to whatever father is given, and fathers can be chained.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedquilt.errors import InvalidValueError
from fedquilt.subnet.axis import Axis
from fedquilt.subnet.ranges import Ranges, show
from fedquilt.subnet.rules import own_tensors, tensor_maps
from fedquilt.subnet.tensor_map import TensorMap


class SubsetLayer(nn.Module):
    """A layer that holds a part of another layer's features."""

    father_kind: ClassVar[type[nn.Module]]
    """The torch layer, plain or subset, that can be the father."""
    range_names: ClassVar[tuple[str, ...]]
    """The attributes that hold the ranges."""

    def subset_axes(self, father: nn.Module, where: str) -> tuple[Axis | None, Axis]:
        """Return what is held of the father's input and output features."""
        raise NotImplementedError

    @property
    def range_key(self) -> Hashable:
        """The kind of layer and its ranges in whole numbers, which hash faster than fractions."""
        return type(self), tuple(
            (start.numerator, start.denominator, end.numerator, end.denominator)
            for name in self.range_names
            for start, end in getattr(self, name)
        )

    def tensor_maps(self, father: nn.Module, name: str = "") -> dict[str, TensorMap]:
        """Return where each tensor of this layer lies in the father's, or raise on a misfit.

        Parameters
        ----------
        father : nn.Module
            The larger layer, of the same kind.
        name : str
            The layer's name in its network, for the errors.
        """
        where = f"{name} ({type(self).__name__})" if name else type(self).__name__
        if not isinstance(father, self.father_kind):
            raise InvalidValueError(
                f"{where}: father={type(father).__name__} must be a {self.father_kind.__name__}"
            )
        inputs, outputs = self.subset_axes(father, where)
        maps = tensor_maps(father, inputs, outputs, where)
        self._check_fit(maps, where)
        return maps

    @torch.no_grad()
    def reset_parameters_from_father_layer(self, father_layer: nn.Module) -> None:
        """Copy this layer's part of the father's parameters and running statistics."""
        maps = self.tensor_maps(father_layer)
        source, target = own_tensors(father_layer), own_tensors(self)
        for name, tensor_map in maps.items():
            target[name].copy_(tensor_map.gather(source[name]))

    def reset_parameters_from_father(self, father: nn.Module) -> None:
        """Do what `reset_parameters_from_father_layer` does, under its shorter name."""
        self.reset_parameters_from_father_layer(father)

    def extra_repr(self) -> str:
        """Return the layer's sizes and its ranges."""
        held = [f"{name}={show(getattr(self, name))}" for name in self.range_names]
        return ", ".join([part for part in [super().extra_repr()] if part] + held)

    def _axis(self, size: int, name: str, where: str) -> Axis:
        ranges: Ranges = getattr(self, name)
        return Axis.from_ranges(size, ranges, f"{where}.{name}")

    def _check_fit(self, maps: dict[str, TensorMap], where: str) -> None:
        mine: dict[str, Tensor] = own_tensors(self)
        ranges = ", ".join(f"{name}={show(getattr(self, name))}" for name in self.range_names)
        if mine.keys() != maps.keys():
            differing = ", ".join(sorted(mine.keys() ^ maps.keys()))
            raise InvalidValueError(
                f"{where} with {ranges}: the layer and its father must hold the same tensors; "
                f"only one has {differing}"
            )
        for name, tensor_map in maps.items():
            if tensor_map.packed_shape != tuple(mine[name].shape):
                raise InvalidValueError(
                    f"{where} with {ranges}: {name} of shape {tuple(mine[name].shape)} must have "
                    f"shape {tensor_map.packed_shape} to be a part of {tensor_map.shape}"
                )
