"""Subset forms of the normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedquilt.errors import InvalidValueError
from fedquilt.subnet.axis import Axis
from fedquilt.subnet.layers.subset_layer import SubsetLayer
from fedquilt.subnet.ranges import Layer_Range, Ranges, parse_ranges
from fedquilt.subnet.rules import norm_groups


class _SSBatchNorm(SubsetLayer, _BatchNorm):
    """Batch normalisation of a part of its father's features."""

    range_names = ("features_ranges",)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        features_ranges: Layer_Range = ("0", "1"),
    ) -> None:
        held, ranges = _held(self, num_features, features_ranges)
        super().__init__(held, eps, momentum, affine, track_running_stats, device, dtype)
        self.features_ranges = ranges

    def subset_axes(self, father: nn.Module, where: str) -> tuple[Axis | None, Axis]:
        """Return what is held of the father's features."""
        assert isinstance(father, _BatchNorm)
        return None, self._axis(father.num_features, "features_ranges", where)


class SSBatchNorm1d(_SSBatchNorm, nn.BatchNorm1d):
    """A BatchNorm1d that holds a part of its father's features; see `SSBatchNorm2d`."""

    father_kind = nn.BatchNorm1d


class SSBatchNorm2d(_SSBatchNorm, nn.BatchNorm2d):
    """A BatchNorm2d that holds a part of its father's features.

    Parameters
    ----------
    num_features, eps, momentum, affine, device, dtype
        Those of the whole layer, as in torch.
    track_running_stats : bool
        Off by default: batch statistics of slices of different width do not
        mix well, and what is not kept cannot leak.  When on, the running
        statistics travel and are averaged like parameters.
    features_ranges : range
        What is held: one interval such as ('0', '1/4') or a list of disjoint ones.
    """

    father_kind = nn.BatchNorm2d


class SSGroupNorm(SubsetLayer, nn.GroupNorm):
    """A GroupNorm that holds a part of its father's channels.

    A group keeps its size where it can (see `norm_groups`), so with ranges that
    hold whole groups the statistics are those of the father.
    """

    father_kind = nn.GroupNorm
    range_names = ("features_ranges",)

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        features_ranges: Layer_Range = ("0", "1"),
    ) -> None:
        held, ranges = _held(self, num_channels, features_ranges)
        if num_groups < 1 or num_channels % num_groups:
            raise InvalidValueError(
                f"{type(self).__name__}: num_groups={num_groups} must divide {num_channels}"
            )
        groups = norm_groups(num_channels, num_groups, held)
        super().__init__(groups, held, eps, affine, device, dtype)
        self.features_ranges = ranges

    def subset_axes(self, father: nn.Module, where: str) -> tuple[Axis | None, Axis]:
        """Return what is held of the father's channels."""
        assert isinstance(father, nn.GroupNorm)
        return None, self._axis(father.num_channels, "features_ranges", where)


class SSLayerNorm(SubsetLayer, nn.LayerNorm):
    """A LayerNorm that holds a part of its father's last dimension."""

    father_kind = nn.LayerNorm
    range_names = ("features_ranges",)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        features_ranges: Layer_Range = ("0", "1"),
    ) -> None:
        one = isinstance(normalized_shape, int)
        shape = [normalized_shape] if isinstance(normalized_shape, int) else [*normalized_shape]
        shape[-1], ranges = _held(self, shape[-1], features_ranges)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(shape[-1] if one else shape, eps, elementwise_affine, bias, **options)
        self.features_ranges = ranges

    def subset_axes(self, father: nn.Module, where: str) -> tuple[Axis | None, Axis]:
        """Return what is held of the father's last dimension."""
        assert isinstance(father, nn.LayerNorm)
        return None, self._axis(father.normalized_shape[-1], "features_ranges", where)


def _held(layer: nn.Module, size: int, ranges: object) -> tuple[int, Ranges]:
    where = f"{type(layer).__name__}.features_ranges"
    parsed = parse_ranges(ranges, where)
    return len(Axis.from_ranges(size, parsed, where)), parsed
