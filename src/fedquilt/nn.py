"""Subset layers: the names of HeFlwr's module `nn`, and more kinds.

layer = SSLinear(784, 128, out_features_ranges=('0', '1/4'))   # 784 -> 32
layer.reset_parameters_from_father_layer(whole_layer)
"""

from typing import TypeAlias

from fedquilt.slices.layers import (
    SSBatchNorm1d,
    SSBatchNorm2d,
    SSConv1d,
    SSConv2d,
    SSConvTranspose2d,
    SSEmbedding,
    SSGroupNorm,
    SSLayerNorm,
    SSLinear,
    SSMultiheadAttention,
)
from fedquilt.slices.selection import Interval, Intervals, Layer_Range
from fedquilt.slices.slicer import Scaler

__all__ = [
    "SUPPORT_LAYER",
    "Interval",
    "Intervals",
    "Layer_Range",
    "SSBatchNorm1d",
    "SSBatchNorm2d",
    "SSConv1d",
    "SSConv2d",
    "SSConvTranspose2d",
    "SSEmbedding",
    "SSGroupNorm",
    "SSLayerNorm",
    "SSLinear",
    "SSMultiheadAttention",
    "Scaler",
]

SUPPORT_LAYER: TypeAlias = (
    SSLinear
    | SSConv1d
    | SSConv2d
    | SSConvTranspose2d
    | SSBatchNorm1d
    | SSBatchNorm2d
    | SSGroupNorm
    | SSLayerNorm
    | SSEmbedding
    | SSMultiheadAttention
)
"""Every subset layer; `isinstance(layer, SUPPORT_LAYER)` works."""
