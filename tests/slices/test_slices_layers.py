"""The subset layers: sizes, what they take from a father, what does not fit."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from holders_oracle import fill, held_index
from torch import nn

from fedquilt.errors import InvalidValueError
from fedquilt.nn import (
    SUPPORT_LAYER,
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

WRAPPED = [("3/4", "1"), ("0", "1/4")]
QUARTERS = [("1/2", "3/4"), ("0", "1/4")]


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (SSLinear, "in_features out_features bias in_features_ranges out_features_ranges"),
        (
            SSConv2d,
            "in_channels out_channels kernel_size stride padding dilation groups bias "
            "in_channels_ranges out_channels_ranges",
        ),
        (
            SSBatchNorm2d,
            "num_features eps momentum affine track_running_stats device dtype features_ranges",
        ),
        (
            SSBatchNorm1d,
            "num_features eps momentum affine track_running_stats device dtype features_ranges",
        ),
        (
            SSEmbedding,
            "num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq "
            "sparse embedding_dim_ranges",
        ),
    ],
)
def test_documented_arguments_in_their_order(kind: Any, arguments: str) -> None:
    positional = [
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == arguments.split()


def test_linear_takes_rows_and_columns_in_packed_order() -> None:
    father = nn.Linear(8, 12)
    layer = SSLinear(8, 12, True, QUARTERS, WRAPPED)
    assert (layer.in_features, layer.out_features) == (4, 6)
    layer.reset_parameters_from_father_layer(father)
    rows, columns = held_index(WRAPPED, 12), held_index(QUARTERS, 8)
    assert np.array_equal(array(layer.weight), array(father.weight)[np.ix_(rows, columns)])
    assert np.array_equal(array(layer.bias), array(father.bias)[rows])
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert "out_features_ranges=[('3/4', '1'), ('0', '1/4')]" in repr(layer)
    assert layer(torch.zeros(2, 4)).shape == (2, 6)


def test_both_spellings_copy_and_do_not_share() -> None:
    father, layer = nn.Linear(4, 4), SSLinear(4, 4, out_features_ranges=("0", "1/2"))
    layer.reset_parameters_from_father(father)
    before = array(layer.weight).copy()
    fill(father, 1)
    assert np.array_equal(array(layer.weight), before)


def test_fathers_can_be_chained() -> None:
    grandfather = nn.Linear(3, 16)
    father = SSLinear(3, 16, out_features_ranges=("1/2", "1"))
    child = SSLinear(3, 8, out_features_ranges=("1/4", "1/2"))
    father.reset_parameters_from_father_layer(grandfather)
    child.reset_parameters_from_father_layer(father)
    assert np.array_equal(array(child.weight), array(grandfather.weight)[10:12])


def test_convolution_takes_filters_and_channels() -> None:
    father = nn.Conv2d(8, 12, 3)
    layer = SSConv2d(8, 12, 3, stride=2, in_channels_ranges=QUARTERS, out_channels_ranges=WRAPPED)
    layer.reset_parameters_from_father_layer(father)
    rows, columns = held_index(WRAPPED, 12), held_index(QUARTERS, 8)
    assert np.array_equal(array(layer.weight), array(father.weight)[np.ix_(rows, columns)])
    assert layer.stride == (2, 2)


def test_depthwise_convolution_loses_channels_on_both_sides() -> None:
    father = nn.Conv2d(8, 16, 3, groups=8)
    layer = SSConv2d(8, 16, 3, groups=8, in_channels_ranges=WRAPPED, out_channels_ranges=WRAPPED)
    assert (layer.in_channels, layer.out_channels, layer.groups) == (4, 8, 4)
    layer.reset_parameters_from_father_layer(father)
    assert np.array_equal(array(layer.weight), array(father.weight)[held_index(WRAPPED, 16)])
    # each kept channel is filtered as in the father
    x = torch.randn(1, 8, 5, 5, generator=torch.Generator().manual_seed(0))
    whole = father(x)[:, held_index(WRAPPED, 16)]
    torch.testing.assert_close(layer(x[:, held_index(WRAPPED, 8)]), whole)


@pytest.mark.parametrize("ranges", [("0", "1/2"), [("2/4", "1"), ("0", "1/4")]])
def test_grouped_convolution_loses_whole_groups(ranges: Any) -> None:
    father = nn.Conv1d(8, 16, 3, groups=4)
    layer = SSConv1d(8, 16, 3, groups=4, in_channels_ranges=ranges, out_channels_ranges=ranges)
    assert layer.groups == len(held_index(ranges if isinstance(ranges, list) else [ranges], 4))
    layer.reset_parameters_from_father_layer(father)
    pairs = ranges if isinstance(ranges, list) else [ranges]
    x = torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(0))
    whole = father(x)[:, held_index(pairs, 16)]
    torch.testing.assert_close(layer(x[:, held_index(pairs, 8)]), whole)


def test_groups_can_all_keep_the_same_channels() -> None:
    half_of_each = [(g / 2 + a, g / 2 + a + 0.125) for g in (0, 1) for a in (0.0, 0.25)]
    layer = SSConv2d(8, 16, 1, groups=2, out_channels_ranges=half_of_each)
    assert (layer.groups, layer.weight.shape) == (2, (8, 4, 1, 1))


def test_transposed_convolution_has_inputs_first() -> None:
    father = nn.ConvTranspose2d(8, 12, 2)
    layer = SSConvTranspose2d(8, 12, 2, in_channels_ranges=QUARTERS, out_channels_ranges=WRAPPED)
    layer.reset_parameters_from_father_layer(father)
    rows, columns = held_index(QUARTERS, 8), held_index(WRAPPED, 12)
    assert np.array_equal(array(layer.weight), array(father.weight)[np.ix_(rows, columns)])
    grouped = SSConvTranspose2d(
        8, 4, 2, groups=2, in_channels_ranges=("0", "1/2"), out_channels_ranges=("0", "1/2")
    )
    assert (grouped.groups, grouped.weight.shape) == (1, (4, 2, 2, 2))


@pytest.mark.parametrize(
    ("kind", "plain"), [(SSBatchNorm1d, nn.BatchNorm1d), (SSBatchNorm2d, nn.BatchNorm2d)]
)
def test_batch_norm_tracks_nothing_unless_asked(kind: Any, plain: Any) -> None:
    assert kind(8, features_ranges=("0", "1/2")).running_mean is None
    father = plain(8)
    fill(father, 7)
    layer = kind(8, track_running_stats=True, features_ranges=WRAPPED)
    layer.reset_parameters_from_father_layer(father)
    held = held_index(WRAPPED, 8)
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert np.array_equal(array(getattr(layer, name)), array(getattr(father, name))[held])
    assert layer.num_batches_tracked == 7


def test_group_norm_of_whole_groups_is_that_of_the_father() -> None:
    father = nn.GroupNorm(4, 16)
    fill(father, 3)
    layer = SSGroupNorm(4, 16, features_ranges=WRAPPED)
    layer.reset_parameters_from_father_layer(father)
    assert (layer.num_groups, layer.num_channels) == (2, 8)
    x = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
    held = held_index(WRAPPED, 16)
    torch.testing.assert_close(layer(x[:, held]), father(x)[:, held])
    assert SSGroupNorm(2, 16, features_ranges=("0", "3/16")).num_groups == 1


def test_layer_norm_and_embedding_keep_the_other_dimensions() -> None:
    norm = SSLayerNorm((3, 8), features_ranges=WRAPPED)
    norm.reset_parameters_from_father_layer(nn.LayerNorm((3, 8)))
    assert norm.normalized_shape == (3, 4)
    assert SSLayerNorm(8, features_ranges=("0", "1/4")).normalized_shape == (2,)
    father = nn.Embedding(5, 8, padding_idx=0)
    embedding = SSEmbedding(5, 8, 0, embedding_dim_ranges=WRAPPED)
    embedding.reset_parameters_from_father_layer(father)
    assert np.array_equal(array(embedding.weight), array(father.weight)[:, held_index(WRAPPED, 8)])


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 7}, {"kdim": 16}])
def test_attention_keeps_heads_as_they_are(options: dict[str, Any]) -> None:
    father = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    layer = SSMultiheadAttention(16, 4, batch_first=True, embed_dim_ranges=WRAPPED, **options)
    layer.reset_parameters_from_father_layer(father)
    assert (layer.embed_dim, layer.num_heads, layer.head_dim) == (8, 2, 4)
    held = held_index(WRAPPED, 16)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 16, generator=generator)
    apart = "vdim" in options
    key = torch.randn(2, 3, 5, generator=generator) if apart else query
    value = torch.randn(2, 3, 7, generator=generator) if apart else query
    small = [query[..., held], *((key, value) if apart else (query[..., held],) * 2)]
    # the father, with everything outside the held features and heads at zero
    masked = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    with torch.no_grad():
        state = masked.state_dict()
        for name, tensor_map in layer.tensor_maps(father).items():
            state[name].zero_()
            tensor_map.scatter_(state[name], layer.state_dict()[name])
    whole = masked(query, key, value, need_weights=False)[0]
    torch.testing.assert_close(layer(*small, need_weights=False)[0], whole[..., held])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: SSMultiheadAttention(16, 4, embed_dim_ranges=("0", "3/8")), "cut a head"),
        (lambda: SSMultiheadAttention(16, 3), "must divide"),
        (lambda: SSGroupNorm(3, 16), "must divide"),
        (lambda: SSConv2d(6, 6, 1, groups=4), "must divide"),
        (lambda: SSConv2d(6, 6, 1, groups=3, out_channels_ranges=("0", "1/2")), "groups=3"),
        (lambda: SSConv2d(4, 4, 1, groups=4, in_channels_ranges=("0", "1/2")), "groups=4"),
    ],
)
def test_cuts_through_heads_and_groups_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        make()


@pytest.mark.parametrize(
    ("layer", "father", "reason"),
    [
        (SSLinear(4, 4), nn.Linear(4, 4, bias=False), "only one has bias"),
        (SSLinear(4, 4, bias=False), nn.Linear(4, 4), "only one has bias"),
        (SSLinear(8, 4, in_features_ranges=("0", "1/2")), nn.Linear(4, 4), "must have shape"),
        (SSLinear(4, 4), nn.Conv2d(4, 4, 1), "must be a Linear"),
        (SSConv2d(4, 4, 3), nn.Conv2d(4, 4, 1), "weight of shape"),
        (SSConv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1), "groups=2 must be 1"),
        (SSBatchNorm1d(4), nn.BatchNorm2d(4), "must be a BatchNorm1d"),
        (SSBatchNorm2d(4, affine=False), SSBatchNorm2d(4), "only one has bias, weight"),
    ],
)
def test_a_misfit_names_the_layer_and_changes_nothing(
    layer: Any, father: nn.Module, reason: str
) -> None:
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(InvalidValueError, match=reason) as caught:
        layer.reset_parameters_from_father_layer(father)
    assert type(layer).__name__ in str(caught.value)
    assert all(torch.equal(before[name], layer.state_dict()[name]) for name in before)


def test_type_and_place_are_those_asked_for() -> None:
    layer = SSConv2d(4, 8, 3, out_channels_ranges=("0", "1/2"), dtype=torch.float64)
    layer.reset_parameters_from_father_layer(nn.Conv2d(4, 8, 3))
    assert layer.weight.dtype == torch.float64
    assert SSLinear(4, 4, device="meta").weight.is_meta


def test_support_layer_knows_them_all() -> None:
    layers = [SSLinear(2, 2), SSEmbedding(2, 2), SSLayerNorm(2), SSMultiheadAttention(2, 1)]
    assert all(isinstance(layer, SUPPORT_LAYER) for layer in layers)
    assert not isinstance(nn.Linear(2, 2), SUPPORT_LAYER)
