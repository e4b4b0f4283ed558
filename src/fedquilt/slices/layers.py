"""Subset layers: linear, embedding, attention, convolution, normalisation, their base.

A subset layer is an ordinary small layer that remembers which part of a larger
one, its father, it stands for.  The ranges are fractions, so they are relative
to whatever father is given, and fathers can be chained.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedquilt.common.errors import InvalidValueError
from fedquilt.slices.layer_rules import (
    STATISTICS,
    held_heads,
    kept_groups,
    norm_groups,
    own_tensors,
    tensor_maps,
)
from fedquilt.slices.selection import Axis, Layer_Range, Ranges, format_ranges, parse_ranges
from fedquilt.slices.tensor_map import TensorMap


class SubsetLayer(nn.Module):
    """A layer that holds a part of another layer's features."""

    father_kind: ClassVar[type[nn.Module]]
    """The torch layer, plain or subset, that can be the father."""
    range_names: ClassVar[tuple[str, ...]]
    """The attributes that hold the ranges."""
    size_names: ClassVar[tuple[str, ...]]
    """The father's attributes that say of how many features each range is."""

    def subset_axes(self, father: nn.Module, where: str) -> tuple[Axis | None, Axis]:
        """Return what is held of the father's input (None: its own) and output features."""
        sizes = [getattr(father, name) for name in self.size_names]
        sizes = [size if isinstance(size, int) else size[-1] for size in sizes]
        *inputs, outputs = [
            self._axis(size, name, where)
            for size, name in zip(sizes, self.range_names, strict=True)
        ]
        return (inputs[0] if inputs else None), outputs

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
        # A layer without running statistics leaves the father's alone, and the reverse.
        mine = own_tensors(self).keys()
        maps = {n: m for n, m in maps.items() if n in mine or n not in STATISTICS}
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
        held = [f"{name}={format_ranges(getattr(self, name))}" for name in self.range_names]
        return ", ".join([part for part in [super().extra_repr()] if part] + held)

    def _axis(self, size: int, name: str, where: str) -> Axis:
        ranges: Ranges = getattr(self, name)
        return Axis.from_ranges(size, ranges, f"{where}.{name}")

    def _check_fit(self, maps: dict[str, TensorMap], where: str) -> None:
        own: dict[str, Tensor] = own_tensors(self)
        mine = {n: t for n, t in own.items() if n in maps or n not in STATISTICS}
        ranges = ", ".join(
            f"{name}={format_ranges(getattr(self, name))}" for name in self.range_names
        )
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


class SSLinear(SubsetLayer, nn.Linear):
    """A Linear layer that holds a part of its father's inputs and outputs.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        Those of the whole layer, as for `torch.nn.Linear`.
    in_features_ranges, out_features_ranges : range
        What is held: one interval such as ('0', '1/4') or a list of disjoint ones.
    """

    father_kind = nn.Linear
    range_names = ("in_features_ranges", "out_features_ranges")
    size_names = ("in_features", "out_features")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_features_ranges: Layer_Range = ("0", "1"),
        out_features_ranges: Layer_Range = ("0", "1"),
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        where = type(self).__name__
        sources = parse_ranges(in_features_ranges, f"{where}.in_features_ranges")
        targets = parse_ranges(out_features_ranges, f"{where}.out_features_ranges")
        super().__init__(
            len(Axis.from_ranges(in_features, sources, f"{where}.in_features_ranges")),
            len(Axis.from_ranges(out_features, targets, f"{where}.out_features_ranges")),
            bias,
            device,
            dtype,
        )
        self.in_features_ranges = sources
        self.out_features_ranges = targets


class SSEmbedding(SubsetLayer, nn.Embedding):
    """An Embedding that holds a part of its father's dimensions, for every word.

    Parameters
    ----------
    num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, ...
        Those of the whole layer, as for `torch.nn.Embedding`.
    embedding_dim_ranges : range
        What is held of each word's vector.
    """

    father_kind = nn.Embedding
    range_names = ("embedding_dim_ranges",)
    size_names = ("embedding_dim",)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        embedding_dim_ranges: Layer_Range = ("0", "1"),
        **options: Any,
    ) -> None:
        where = f"{type(self).__name__}.embedding_dim_ranges"
        ranges = parse_ranges(embedding_dim_ranges, where)
        held = len(Axis.from_ranges(embedding_dim, ranges, where))
        super().__init__(
            num_embeddings,
            held,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            **options,
        )
        self.embedding_dim_ranges = ranges


class SSMultiheadAttention(SubsetLayer, nn.MultiheadAttention):
    """Multi-head attention over a part of its father's heads.

    The embedding and the heads shrink together: head h owns the features
    h d .. (h + 1) d - 1, and the ranges must hold whole heads.  A `kdim` or
    `vdim` of its own stays whole.

    Parameters
    ----------
    embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, ...
        Those of the whole layer, as for `torch.nn.MultiheadAttention`.
    embed_dim_ranges : range
        What is held: one interval such as ('0', '1/4') or a list of disjoint ones.
    """

    father_kind = nn.MultiheadAttention
    range_names = ("embed_dim_ranges",)
    size_names = ("embed_dim",)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        embed_dim_ranges: Layer_Range = ("0", "1"),
        **options: Any,
    ) -> None:
        where = type(self).__name__
        ranges = parse_ranges(embed_dim_ranges, f"{where}.embed_dim_ranges")
        if num_heads < 1 or embed_dim % num_heads:
            raise InvalidValueError(f"{where}: num_heads={num_heads} must divide {embed_dim}")
        axis = Axis.from_ranges(embed_dim, ranges, f"{where}.embed_dim_ranges")
        heads = held_heads(num_heads, axis, where)
        sources = {"kdim": kdim, "vdim": vdim}
        if all(size in (None, embed_dim) for size in sources.values()):
            sources = {"kdim": None, "vdim": None}
        else:
            sources = {name: size or embed_dim for name, size in sources.items()}
        super().__init__(
            len(axis),
            len(heads),
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            batch_first=batch_first,
            **sources,
            **options,
        )
        self.embed_dim_ranges = ranges

    def extra_repr(self) -> str:
        """Return the heads and the ranges."""
        return f"{self.embed_dim}, heads={self.num_heads}, {super().extra_repr()}"


class _SSConv(SubsetLayer):
    """Channels held of a convolution of any dimension and direction."""

    range_names = ("in_channels_ranges", "out_channels_ranges")
    size_names = ("in_channels", "out_channels")
    in_channels_ranges: Ranges
    out_channels_ranges: Ranges

    def subset_axes(self, father: nn.Module, where: str) -> tuple[Axis | None, Axis]:
        """Return what is held of the father's input and output channels."""
        assert isinstance(father, _ConvNd)
        inputs, outputs = super().subset_axes(father, where)
        assert inputs is not None
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


class _SSForward(_SSConv):
    """Channels held of a convolution with the arguments of `torch.nn.Conv2d`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        in_channels_ranges: Layer_Range = ("0", "1"),
        out_channels_ranges: Layer_Range = ("0", "1"),
        **options: Any,
    ) -> None:
        inputs, outputs, kept, ranges = self._held(
            (in_channels, out_channels), (in_channels_ranges, out_channels_ranges), groups
        )
        sizes: tuple[Any, ...] = (kernel_size, stride, padding, dilation)
        super().__init__(inputs, outputs, *sizes, kept, bias, **options)
        self._remember(ranges)


class SSConv2d(_SSForward, nn.Conv2d):
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


class SSConv1d(_SSForward, nn.Conv1d):
    """A Conv1d that holds a part of its father's channels; arguments as for `SSConv2d`."""

    father_kind = nn.Conv1d


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
        sizes = (kernel_size, stride, padding, output_padding)
        super().__init__(inputs, outputs, *sizes, kept, bias, dilation, **options)
        self._remember(ranges)


class _SSBatchNorm(SubsetLayer, _BatchNorm):
    """Batch normalisation of a part of its father's features."""

    range_names = ("features_ranges",)
    size_names = ("num_features",)

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
    size_names = ("num_channels",)

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


class SSLayerNorm(SubsetLayer, nn.LayerNorm):
    """A LayerNorm that holds a part of its father's last dimension."""

    father_kind = nn.LayerNorm
    range_names = ("features_ranges",)
    size_names = ("normalized_shape",)

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


def _held(layer: nn.Module, size: int, ranges: object) -> tuple[int, Ranges]:
    where = f"{type(layer).__name__}.features_ranges"
    parsed = parse_ranges(ranges, where)
    return len(Axis.from_ranges(size, parsed, where)), parsed
