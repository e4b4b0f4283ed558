"""Subset layers over channels: convolution and normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedquilt.common.errors import InvalidValueError
from fedquilt.slices.layer_rules import kept_groups, norm_groups
from fedquilt.slices.layers import SubsetLayer
from fedquilt.slices.ranges import Axis, Layer_Range, Ranges, parse_ranges


class _SSConv(SubsetLayer):
    """Channels held of a convolution of any dimension and direction."""

    range_names = ("in_channels_ranges", "out_channels_ranges")
    in_channels_ranges: Ranges
    out_channels_ranges: Ranges

    def subset_axes(self, father: nn.Module, where: str) -> tuple[Axis | None, Axis]:
        """Return what is held of the father's input and output channels."""
        assert isinstance(father, _ConvNd)
        inputs = self._axis(father.in_channels, "in_channels_ranges", where)
        outputs = self._axis(father.out_channels, "out_channels_ranges", where)
        groups = kept_groups(father.groups, inputs, outputs, where)[0]
        if groups != self.groups:
            raise InvalidValueError(
                f"{where}: groups={self.groups} must be {groups} to fit the father's ranges"
            )
        return inputs, outputs

    def _held(
        self, channels: tuple[int, int], ranges: tuple[object, object], groups: int
    ) -> tuple[int, int, int, tuple[Ranges, Ranges]]:
        """Return the input channels, output channels, groups and ranges of the small layer."""
        where = type(self).__name__
        names = [f"{where}.{name}" for name in self.range_names]
        sources, targets = (parse_ranges(r, n) for r, n in zip(ranges, names, strict=True))
        inputs = Axis.from_ranges(channels[0], sources, names[0])
        outputs = Axis.from_ranges(channels[1], targets, names[1])
        if groups < 1 or channels[0] % groups or channels[1] % groups:
            raise InvalidValueError(f"{where}: groups={groups} must divide both of {channels}")
        kept = kept_groups(groups, inputs, outputs, where)[0]
        return len(inputs), len(outputs), kept, (sources, targets)

    def _remember(self, ranges: tuple[Ranges, Ranges]) -> None:
        self.in_channels_ranges, self.out_channels_ranges = ranges


class SSConv2d(_SSConv, nn.Conv2d):
    """A Conv2d that holds a part of its father's channels.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias
        Those of the whole layer, as for `torch.nn.Conv2d`; `padding_mode`,
        `device` and `dtype` can follow by name.
    in_channels_ranges, out_channels_ranges : range
        What is held: one interval such as ('0', '1/4') or a list of disjoint ones.
    """

    father_kind = nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        in_channels_ranges: Layer_Range = ("0", "1"),
        out_channels_ranges: Layer_Range = ("0", "1"),
        **options: Any,
    ) -> None:
        inputs, outputs, kept, ranges = self._held(
            (in_channels, out_channels), (in_channels_ranges, out_channels_ranges), groups
        )
        super().__init__(
            inputs, outputs, kernel_size, stride, padding, dilation, kept, bias, **options
        )
        self._remember(ranges)


class SSConv1d(_SSConv, nn.Conv1d):
    """A Conv1d that holds a part of its father's channels; arguments as for `SSConv2d`."""

    father_kind = nn.Conv1d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: str | int | tuple[int] = 0,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = True,
        in_channels_ranges: Layer_Range = ("0", "1"),
        out_channels_ranges: Layer_Range = ("0", "1"),
        **options: Any,
    ) -> None:
        inputs, outputs, kept, ranges = self._held(
            (in_channels, out_channels), (in_channels_ranges, out_channels_ranges), groups
        )
        super().__init__(
            inputs, outputs, kernel_size, stride, padding, dilation, kept, bias, **options
        )
        self._remember(ranges)


class SSConvTranspose2d(_SSConv, nn.ConvTranspose2d):
    """A ConvTranspose2d that holds a part of its father's channels.

    Arguments in the order of `torch.nn.ConvTranspose2d`, then the two ranges.
    """

    father_kind = nn.ConvTranspose2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        output_padding: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, int] = 1,
        in_channels_ranges: Layer_Range = ("0", "1"),
        out_channels_ranges: Layer_Range = ("0", "1"),
        **options: Any,
    ) -> None:
        inputs, outputs, kept, ranges = self._held(
            (in_channels, out_channels), (in_channels_ranges, out_channels_ranges), groups
        )
        super().__init__(
            inputs,
            outputs,
            kernel_size,
            stride,
            padding,
            output_padding,
            kept,
            bias,
            dilation,
            **options,
        )
        self._remember(ranges)


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
