"""Subset form of multi-head attention, cut by whole heads."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedquilt.errors import InvalidValueError
from fedquilt.subnet.axis import Axis
from fedquilt.subnet.layers.subset_layer import SubsetLayer
from fedquilt.subnet.ranges import Layer_Range, parse_ranges
from fedquilt.subnet.rules import held_heads


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

    def subset_axes(self, father: nn.Module, where: str) -> tuple[Axis | None, Axis]:
        """Return what is held of the father's embedding."""
        assert isinstance(father, nn.MultiheadAttention)
        return None, self._axis(father.embed_dim, "embed_dim_ranges", where)

    def extra_repr(self) -> str:
        """Return the heads and the ranges."""
        return f"{self.embed_dim}, heads={self.num_heads}, {super().extra_repr()}"
