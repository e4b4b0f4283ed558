"""Extract and merge over layers, networks and state dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from holders_oracle import Pairs, fill, held_index, mean_over_holders, snapshot, unions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from examples import examples
from fedquilt.errors import InvalidValueError
from fedquilt.fed import aggregate, aggregate_layer, distribute, extract_state, merge_states
from fedquilt.nn import (
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
from fedquilt.slices import slice_between
from run_samples import same_tensors

Make = Callable[..., nn.Module]

# Each makes a layer from (input ranges, output ranges, bias); 12 parts divide every size.
KINDS: dict[str, Make] = {
    "linear": lambda a, b, bias: SSLinear(12, 24, bias, a, b),
    "conv1d": lambda a, b, bias: SSConv1d(
        12, 24, 3, bias=bias, in_channels_ranges=a, out_channels_ranges=b
    ),
    "conv2d": lambda a, b, bias: SSConv2d(
        24, 12, (1, 3), bias=bias, in_channels_ranges=a, out_channels_ranges=b
    ),
    "depthwise": lambda a, b, bias: SSConv2d(
        12, 24, 3, groups=12, bias=bias, in_channels_ranges=b, out_channels_ranges=b
    ),
    "transposed": lambda a, b, bias: SSConvTranspose2d(
        12, 24, 2, bias=bias, in_channels_ranges=a, out_channels_ranges=b
    ),
    "batch norm 1d": lambda a, b, bias: SSBatchNorm1d(12, affine=bias, features_ranges=b),
    "batch norm 2d": lambda a, b, bias: SSBatchNorm2d(
        24, affine=bias, track_running_stats=True, features_ranges=b
    ),
    "group norm": lambda a, b, bias: SSGroupNorm(3, 12, affine=bias, features_ranges=b),
    "layer norm": lambda a, b, bias: SSLayerNorm((2, 12), bias=bias, features_ranges=b),
    "embedding": lambda a, b, bias: SSEmbedding(5, 12, embedding_dim_ranges=b),
    "attention": lambda a, b, bias: SSMultiheadAttention(24, 12, bias=bias, embed_dim_ranges=b),
}
WHOLE = ("0", "1")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(25))
@given(
    st.lists(st.tuples(unions(), unions(), st.integers(0, 9)), min_size=1, max_size=4),
    st.booleans(),
)
def test_extract_then_merge_of_untouched_slices_is_the_identity(
    kind: str, clients: list[tuple[Pairs, Pairs, int]], bias: bool
) -> None:
    whole = KINDS[kind](WHOLE, WHOLE, bias)
    fill(whole, 1)
    before = snapshot(whole)
    parts = [KINDS[kind](inputs, outputs, bias) for inputs, outputs, _ in clients]
    for part in parts:
        part.reset_parameters_from_father_layer(whole)  # type: ignore[operator]
    aggregate_layer(whole, parts, [weight for _, _, weight in clients])
    assert same_tensors(before, snapshot(whole))


@pytest.mark.parametrize("bias", [True, False])
@settings(max_examples=examples(40))
@given(clients=st.lists(st.tuples(unions(), unions(), st.integers(0, 9)), min_size=1, max_size=4))
def test_aggregate_layer_is_the_mean_over_holders(
    bias: bool, clients: list[tuple[Pairs, Pairs, int]]
) -> None:
    whole = SSLinear(12, 24, bias)
    fill(whole, 1)
    before = snapshot(whole)
    parts = [SSLinear(12, 24, bias, inputs, outputs) for inputs, outputs, _ in clients]
    for seed, part in enumerate(parts):
        fill(part, 10 + seed)
    aggregate_layer(whole, parts, [weight for _, _, weight in clients])
    held = [(held_index(outputs, 24), held_index(inputs, 12)) for inputs, outputs, _ in clients]
    weights = [float(weight) for _, _, weight in clients]
    for name, tensor in before.items():
        expected = mean_over_holders(
            tensor.numpy(),
            [
                (index[: tensor.dim()], part.state_dict()[name].numpy(), weight)
                for index, part, weight in zip(held, parts, weights, strict=True)
            ],
        )
        np.testing.assert_allclose(whole.state_dict()[name].numpy(), expected, atol=1e-6)


def test_running_statistics_are_averaged_and_batches_counted() -> None:
    whole = nn.BatchNorm2d(4)
    parts = [
        SSBatchNorm2d(4, track_running_stats=True, features_ranges=("0", w)) for w in ("1/2", "1")
    ]
    for part, value in zip(parts, (2.0, 8.0), strict=True):
        nn.init.constant_(part.running_mean, value)  # type: ignore[arg-type]
        part.num_batches_tracked = torch.tensor(int(value))
    aggregate_layer(whole, parts, [2, 1])
    assert whole.running_mean is not None
    assert whole.running_mean.tolist() == [4, 4, 8, 8]
    assert whole.num_batches_tracked == 4  # (2 * 2 + 1 * 8) / 3
    assert whole.num_batches_tracked.dtype == torch.int64


def net(width: str, extra: nn.Module | None = None) -> nn.Sequential:
    """Return a small network of subset layers, with one plain layer if wanted."""
    return nn.Sequential(
        SSConv2d(3, 8, 3, out_channels_ranges=("0", width)),
        SSBatchNorm2d(8, features_ranges=("0", width)),
        nn.ReLU(),
        nn.Flatten(),
        SSLinear(8 * 4, 5, in_features_ranges=("0", width)),
        *([extra] if extra is not None else []),
    )


def test_distribute_train_aggregate() -> None:
    server, clients = net("1"), [net("1/4"), net("1/2"), net("1/2")]
    for client in clients:
        distribute(client, server)
    assert torch.equal(clients[0][0].weight, server[0].weight[:2])
    before = snapshot(server)
    for client, value in zip(clients, (1.0, 2.0, 5.0), strict=True):
        for parameter in client.parameters():
            nn.init.constant_(parameter, value)
    aggregate(server, clients, [1, 1, 2])
    bias = server[0].bias
    assert bias.tolist()[:4] == [3.25, 3.25, 4.0, 4.0]  # (1 + 2 + 10) / 4, (2 + 10) / 3
    assert torch.equal(bias[4:], before["0.bias"][4:])
    assert server[4].bias.tolist() == [3.25] * 5


def test_zero_weights_keep_everything() -> None:
    server, client = net("1"), net("1/2")
    before = snapshot(server)
    aggregate(server, [client, client], [0, 0])
    assert same_tensors(before, snapshot(server))
    aggregate(server, [], [])
    assert same_tensors(before, snapshot(server))


def test_plain_layers_are_averaged_over_all_or_refused() -> None:
    server, clients = net("1", nn.PReLU()), [net("1/4", nn.PReLU()), net("1/2", nn.PReLU())]
    for client, value in zip(clients, (1.0, 3.0), strict=True):
        nn.init.constant_(client[5].weight, value)
    aggregate(server, clients, [1, 3])
    assert server[5].weight.item() == 2.5
    distribute(clients[0], server)
    assert clients[0][5].weight.item() == 2.5
    before = snapshot(server)
    with pytest.raises(InvalidValueError, match=r"5\.weight belong to none"):
        aggregate(server, clients, [1, 3], plain="refuse")
    with pytest.raises(InvalidValueError, match=r"5\.weight belong to none"):
        distribute(clients[0], server, plain="refuse")
    assert same_tensors(before, snapshot(server))
    aggregate(net("1"), [net("1/4")], [1], plain="refuse")


def test_statistics_travel_or_are_refused() -> None:
    server = nn.Sequential(nn.BatchNorm1d(4))
    client = nn.Sequential(SSBatchNorm1d(4, track_running_stats=True, features_ranges=("0", "1/2")))
    fill(server, 2)
    distribute(client, server)
    assert torch.equal(client[0].running_var, server[0].running_var[:2])
    with pytest.raises(InvalidValueError, match=r"statistics='refuse'.*0 do"):
        aggregate(server, [client], [1], statistics="refuse")
    with pytest.raises(InvalidValueError, match="did you mean 'travel'"):
        aggregate(server, [client], [1], statistics="travels")


class Nested(nn.Module):
    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        (Nested(a=SSLinear(4, 4)), "only server_net has b.bias, b.weight"),
        (Nested(a=SSLinear(4, 4), b=SSLinear(4, 4), c=nn.PReLU()), "only client_net has c.weight"),
        (Nested(a=SSLinear(4, 4), c=SSLinear(4, 4)), "layer 'c' of client_net"),
        (Nested(a=SSLinear(4, 4), b=nn.Linear(4, 3)), r"'b.weight' of shape \(4, 4\) in server"),
        (Nested(a=SSLinear(4, 4), b=SSLinear(2, 4)), r"b \(SSLinear\) with in_features_ranges"),
        (Nested(a=SSLinear(4, 4, bias=False), b=SSLinear(4, 4)), r"a \(SSLinear\).* bias"),
        (Nested(a=SSConv2d(4, 4, 1), b=SSLinear(4, 4)), r"a \(SSConv2d\).*must be a Conv2d"),
    ],
)
def test_mismatched_trees_are_errors_that_change_nothing(client: nn.Module, reason: str) -> None:
    server = Nested(a=SSLinear(4, 4), b=SSLinear(4, 4))
    fine = Nested(a=SSLinear(4, 4), b=SSLinear(4, 4))
    before = snapshot(server)
    with pytest.raises(InvalidValueError, match=reason):
        aggregate(server, [fine, client], [1, 1])
    with pytest.raises(InvalidValueError, match=reason):
        distribute(client, server)
    assert same_tensors(before, snapshot(server))


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([1], "must be one for each of 2"),
        ([1, 2, 3], "must be one for each of 2"),
        ([1, -1], r"weights\[1\]=-1 must be >= 0"),
        ([float("nan"), 1], r"weights\[0\]=nan"),
        ([1, float("inf")], r"weights\[1\]=inf"),
        ([True, 1], r"weights\[0\]=True"),
        (["1", 1], r"weights\[0\]='1'"),
    ],
)
def test_weights_must_fit(weights: Any, reason: str) -> None:
    whole = SSLinear(4, 4)
    with pytest.raises(InvalidValueError, match=reason):
        aggregate_layer(whole, [SSLinear(4, 4), SSLinear(4, 4)], weights)


def test_aggregate_layer_refuses_layers_it_does_not_know() -> None:
    with pytest.raises(InvalidValueError, match="global_layer=Bilinear"):
        aggregate_layer(nn.Bilinear(2, 2, 2), [nn.Bilinear(2, 2, 2)], [1])
    with pytest.raises(InvalidValueError, match="must be a Conv2d"):
        aggregate_layer(SSLinear(4, 4), [SSConv2d(4, 4, 1)], [1])


def test_state_dicts_with_buffers_types_and_device() -> None:
    server = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).double()
    client = nn.Sequential(
        SSLinear(4, 8, out_features_ranges=("1/2", "1")),
        SSBatchNorm1d(8, track_running_stats=True, features_ranges=("1/2", "1")),
    ).double()
    held = slice_between(server, client)
    state = snapshot(server)
    part = extract_state(state, held)
    assert {t.dtype for t in part.values()} == {torch.float64, torch.int64}
    client.load_state_dict(part)
    assert part["0.weight"].data_ptr() != state["0.weight"].data_ptr()
    part["1.running_mean"] += 3
    part["1.num_batches_tracked"] += 4
    merged = merge_states(state, [part], [held], [5])
    assert merged["1.running_mean"].tolist() == [0] * 4 + [3] * 4
    assert merged["1.num_batches_tracked"] == 4
    assert torch.equal(merged["0.weight"], state["0.weight"])
    assert state["1.num_batches_tracked"] == 0
    assert {n: t.dtype for n, t in merged.items()} == {n: t.dtype for n, t in state.items()}


def test_states_must_be_those_of_their_slices() -> None:
    server, client = net("1"), net("1/2")
    held, state = slice_between(server, client), snapshot(server)
    part = extract_state(state, held)
    with pytest.raises(InvalidValueError, match=r"client 1 must send exactly.*0\.bias"):
        merge_states(
            state, [part, {k: v for k, v in part.items() if k != "0.bias"}], [held] * 2, [1, 1]
        )
    with pytest.raises(InvalidValueError, match=r"client 0: '0\.bias' of shape"):
        merge_states(state, [part | {"0.bias": torch.zeros(8)}], [held], [1])
    with pytest.raises(InvalidValueError, match="slices=1 of them"):
        merge_states(state, [part, part], [held], [1, 1])
    with pytest.raises(InvalidValueError, match=r"state must hold the tensor '0\.weight'"):
        extract_state({"0.bias": state["0.bias"]}, held)


def test_the_published_mistake_is_not_made() -> None:
    # two intervals: the second block must go to its own place, not the first block twice
    whole = SSLinear(4, 8)
    before = snapshot(whole)
    part = SSLinear(4, 8, out_features_ranges=[("0", "1/4"), ("3/4", "1")])
    part.reset_parameters_from_father_layer(whole)
    aggregate_layer(whole, [part], [3])
    assert same_tensors(before, snapshot(whole))
