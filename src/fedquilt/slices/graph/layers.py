"""How each kind of layer carries the cut dimension on, and what is recorded of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedquilt.common.errors import InvalidValueError
from fedquilt.slices.graph.cuts import (
    NOT_TENSOR,
    Layout,
    Part,
    Records,
    Value,
    parameter_count,
)
from fedquilt.slices.graph.operations import beyond, combine_layouts, flattened

_PASSING = {
    "torch.nn.modules.activation",
    "torch.nn.modules.dropout",
    "torch.nn.modules.linear",
}
_SPATIAL = {
    "torch.nn.modules.pooling",
    "torch.nn.modules.padding",
    "torch.nn.modules.upsampling",
}


def walk_layer(records: Records, name: str, layer: nn.Module, values: Sequence[Value]) -> Value:
    """Return the layout of a layer's output and record how the layer is cut."""
    value = values[0] if values and isinstance(values[0], Layout) else Layout()
    where = f"layer {name!r} ({type(layer).__name__})"
    if isinstance(layer, nn.MultiheadAttention):
        return _attention(records, name, layer, values, where)
    if isinstance(layer, nn.TransformerEncoder):
        return _encoder(records, name, layer, value, where)
    if isinstance(layer, nn.TransformerEncoderLayer):
        return _encoder_layer(records, name, layer, value, where)
    if isinstance(layer, nn.Linear):
        return _linear(records, name, layer, value, where)
    if isinstance(layer, _ConvNd):
        return _convolution(records, name, layer, value, where)
    if isinstance(layer, nn.Embedding):
        outputs = records.cut_layer(name, None, (records.table.open(layer.embedding_dim, name),))
        return Layout(None if value.rank is None else value.rank + 1, -1, outputs or ())
    if isinstance(layer, _NormBase | nn.GroupNorm | nn.PReLU):
        return _channelwise(records, name, layer, value, where)
    if isinstance(layer, nn.RNNBase):
        return _recurrent(records, name, layer, values, where)
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return _layer_norm(records, name, layer, value, where)
    return _other(layer, value, where)


def keep_whole(records: Records, values: Sequence[Value]) -> Value:
    """Keep the inputs of something whole, and count its output as whole."""
    for value in values:
        if isinstance(value, Layout):
            records.pin(value.parts)
    first = values[0] if values else None
    return Layout(first.rank if isinstance(first, Layout) else None)


def _linear(records: Records, name: str, layer: nn.Linear, value: Layout, where: str) -> Value:
    if value.axis is not None and value.axis != -1:
        return value  # it works along a dimension that is not cut: it stays whole
    inputs = None
    if value.axis is not None:
        inputs = records.features(value, layer.in_features, where)
    outputs = records.cut_layer(name, inputs, (records.table.open(layer.out_features, name),))
    return Layout(value.rank, -1, outputs or ())


def _convolution(records: Records, name: str, layer: _ConvNd, value: Layout, where: str) -> Value:
    dims = len(layer.kernel_size)
    axis = -1 - dims
    if value.axis not in (None, axis):
        raise InvalidValueError(f"{where}: its channels must be the dimension that is cut")
    if value.axis is None:
        if layer.groups > 1:
            return Layout(dims + 2)
        inputs = None
    else:
        inputs = records.features(value, layer.in_channels, where)
    opened = _outputs(records, name, layer, inputs, where)
    outputs = records.cut_layer(name, inputs, opened)
    return Layout(dims + 2, axis, outputs or ())


def _outputs(
    records: Records, name: str, layer: _ConvNd, inputs: tuple[Part, ...] | None, where: str
) -> tuple[Part, ...]:
    """Return the output channels; those of a grouped convolution follow its groups."""
    if layer.groups == 1 or inputs is None:
        return (records.table.open(layer.out_channels, name),)
    if layer.groups == layer.in_channels:
        each = layer.out_channels // layer.in_channels
        return tuple(Part(part.axis, part.factor * each) for part in inputs)
    if len(inputs) > 1:
        raise InvalidValueError(f"{where}: the input of a grouped layer must not be concatenated")
    groups = records.table.open(layer.groups, name)
    source = Part(groups.axis, layer.in_channels // layer.groups)
    records.table.tie(inputs[0], source, where)
    return (Part(groups.axis, layer.out_channels // layer.groups),)


def _channelwise(
    records: Records,
    name: str,
    layer: _NormBase | nn.GroupNorm | nn.PReLU,
    value: Layout,
    where: str,
) -> Value:
    sizes = {nn.GroupNorm: "num_channels", nn.PReLU: "num_parameters"}
    attribute = next((a for kind, a in sizes.items() if isinstance(layer, kind)), "num_features")
    expected: int = getattr(layer, attribute)
    if value.axis is None or (isinstance(layer, nn.PReLU) and expected == 1):
        return value
    if value.rank is not None and value.axis != 1 - value.rank:
        raise InvalidValueError(f"{where}: its features must be the dimension that is cut")
    features = records.features(value, expected, where)
    records.cut_layer(name, None, features)
    return value


def _layer_norm(
    records: Records, name: str, layer: nn.LayerNorm | nn.RMSNorm, value: Layout, where: str
) -> Value:
    if value.axis is None or value.axis < -len(layer.normalized_shape):
        return value
    features = records.features(value, layer.normalized_shape[value.axis], where)
    records.cut_layer(name, None, features, value.axis)
    return value


def _recurrent(
    records: Records, name: str, layer: nn.RNNBase, values: Sequence[Value], where: str
) -> Value:
    """Follow an LSTM, GRU or RNN: one axis of hidden units for all layers and directions."""
    value = values[0] if isinstance(values[0], Layout) else Layout()
    if len(values) > 1:
        raise InvalidValueError(
            f"{where}: a first state of its own has a width of its own; leave it out, which means "
            "zeros, or name the layer in `whole` to keep it and its input at full width"
        )
    inputs = None
    if value.axis is not None:
        if value.axis != -1:
            raise InvalidValueError(f"{where}: its last dimension must be the one that is cut")
        inputs = records.features(value, layer.input_size, where)
    opened = (records.table.open(layer.hidden_size, name),)
    hidden = records.cut_layer(name, inputs, opened) or ()
    rank = value.rank or 3
    state = Layout(rank, -1, hidden)
    outputs = Layout(rank, -1, hidden * (2 if layer.bidirectional else 1))
    return (outputs, (state, state) if isinstance(layer, nn.LSTM) else state)


def _attention(
    records: Records,
    name: str,
    layer: nn.MultiheadAttention,
    values: Sequence[Value],
    where: str,
) -> Value:
    layouts = [value for value in values if isinstance(value, Layout)]
    query = layouts[0]
    if query.axis is None or not layer._qkv_same_embed_dim:
        return (keep_whole(records, layouts), NOT_TENSOR)
    for other in layouts[1:3]:
        combine_layouts(records, query, other, where)
    if query.axis != -1 or len(query.parts) > 1:
        raise InvalidValueError(f"{where}: its last dimension must be the one that is cut")
    features = records.features(query, layer.embed_dim, where)
    heads = records.table.open(layer.num_heads, name)
    records.table.tie(features[0], Part(heads.axis, layer.head_dim), where)
    records.cut_layer(name, None, features)
    return (query, NOT_TENSOR)


def _encoder_layer(
    records: Records, name: str, layer: nn.TransformerEncoderLayer, value: Layout, where: str
) -> Value:
    """Follow a Transformer block: attention and a feed-forward pair, both residual."""
    attended = _attention(records, f"{name}.self_attn", layer.self_attn, [value], where)
    stream = combine_layouts(
        records, value, attended[0] if isinstance(attended, tuple) else value, where
    )
    inner = walk_layer(records, f"{name}.linear1", layer.linear1, [stream])
    out = walk_layer(records, f"{name}.linear2", layer.linear2, [inner])
    stream = combine_layouts(records, stream, out, where)
    for norm in ("norm1", "norm2"):
        walk_layer(records, f"{name}.{norm}", getattr(layer, norm), [stream])
    return stream


def _encoder(
    records: Records, name: str, layer: nn.TransformerEncoder, value: Layout, where: str
) -> Value:
    stream: Value = value
    for number, block in enumerate(layer.layers):
        stream = walk_layer(records, f"{name}.layers.{number}", block, [stream])
    if layer.norm is not None:
        stream = walk_layer(records, f"{name}.norm", layer.norm, [stream])
    return stream


def _other(layer: nn.Module, value: Layout, where: str) -> Value:
    """Pass layers without parameters that keep the dimension; refuse what is not known."""
    kind, home = type(layer).__name__, type(layer).__module__
    if isinstance(layer, nn.Flatten):
        return flattened(value, layer.start_dim, layer.end_dim, where)
    if parameter_count(layer) == 0 and kind != "GLU":
        if home in _PASSING:
            return value
        if home in _SPATIAL:
            digits = [int(letter) for letter in kind if letter.isdigit()]
            dims = digits[0] if digits else 1
            return beyond(value, dims, where)
    if value.axis is None and parameter_count(layer) == 0:
        return Layout()
    raise InvalidValueError(
        f"{where}: this kind of layer cannot be cut; name it in `whole` (slice_model and "
        "fedquilt.run: whole=, the command line: --whole) to keep it and its input at full width"
    )
