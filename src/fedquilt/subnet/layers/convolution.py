"""Subset forms of the convolutions, grouped and depthwise ones included."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from fedquilt.errors import InvalidValueError
from fedquilt.subnet.axis import Axis
from fedquilt.subnet.layers.subset_layer import SubsetLayer
from fedquilt.subnet.ranges import Layer_Range, Ranges, parse_ranges
from fedquilt.subnet.rules import kept_groups


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
