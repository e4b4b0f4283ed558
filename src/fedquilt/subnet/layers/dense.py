"""Subset forms of the dense layers: Linear and Embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedquilt.subnet.axis import Axis
from fedquilt.subnet.layers.subset_layer import SubsetLayer
from fedquilt.subnet.ranges import Layer_Range, parse_ranges


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

    def subset_axes(self, father: nn.Module, where: str) -> tuple[Axis | None, Axis]:
        """Return what is held of the father's input and output features."""
        assert isinstance(father, nn.Linear)
        return (
            self._axis(father.in_features, "in_features_ranges", where),
            self._axis(father.out_features, "out_features_ranges", where),
        )


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

    def subset_axes(self, father: nn.Module, where: str) -> tuple[Axis | None, Axis]:
        """Return what is held of the father's dimensions."""
        assert isinstance(father, nn.Embedding)
        return None, self._axis(father.embedding_dim, "embedding_dim_ranges", where)
