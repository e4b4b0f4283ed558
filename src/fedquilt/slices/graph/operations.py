"""How functions, tensor methods and layers carry the cut dimension on.

What handles a function takes the records, the node and the layout of its first
argument.  What is not listed is refused when it meets a tensor that is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedquilt.common.errors import InvalidValueError
from fedquilt.slices.graph.cuts import (
    NOT_TENSOR,
    Layout,
    Part,
    RawTensor,
    Records,
    Several,
    Value,
    argument,
    describe,
    operation,
    or_whole,
    parameter_count,
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _words("""
    relu relu_ relu6 leaky_relu leaky_relu_ elu elu_ selu celu gelu silu mish hardswish
    hardtanh hardsigmoid sigmoid tanh softplus softsign logsigmoid tanhshrink softshrink
    hardshrink dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout
    softmax log_softmax contiguous clone detach to float half double bfloat16 type type_as cpu
    cuda neg abs exp log sqrt rsqrt square pow clamp clamp_ clip nan_to_num normalize
    requires_grad_ erf sin cos
""")
COMBINING = _words("""
    add sub mul div truediv true_divide iadd isub imul itruediv add_ sub_ mul_ div_ maximum
    minimum subtract multiply divide
""")
SPATIAL = frozenset(
    f"{kind}_pool{dims}d"
    for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "lp")
    for dims in (1, 2, 3)
)
REDUCING = _words("mean sum amax amin")
MEASURING = _words("size dim numel ndimension shape ndim device dtype is_cuda")

Handler = Callable[["Records", fx.Node, Layout], Value]


def flatten(records: Records, node: fx.Node, value: Layout) -> Value:
    """Join the dimensions from start to end; the cut one must be the first of them."""
    return flattened(
        value, argument(node, 1, "start_dim", 0), argument(node, 2, "end_dim", -1), describe(node)
    )


def flattened(value: Layout, start: int, end: int, where: str) -> Layout:
    """Return the layout of a tensor whose dimensions start..end have been joined."""
    if value.rank is None or value.axis is None:
        if value.axis is not None:
            value.position(1, where)
        return Layout(rank=2 if (start, end) == (1, -1) else None)
    rank, first, last = value.rank, start % value.rank, end % value.rank
    cut, new_rank = rank + value.axis, value.rank - (last - first)
    if first < cut <= last:
        raise InvalidValueError(
            f"{where}: the cut dimension must be the first of those that are joined"
        )
    place = cut if cut <= first else cut - (last - first)
    inner = None if cut == first and last > first else value.inner
    return Layout(new_rank, place - new_rank, value.parts, inner)


def reshape(records: Records, node: fx.Node, value: Layout) -> Value:
    """Accept the reshapes that are flattens; one with a written size is noted for rewriting."""
    shape = node.args[1:] if len(node.args) > 2 else argument(node, 1, "shape", ())
    sizes: list[Any] = list(shape) if isinstance(shape, tuple | list) else [shape]
    if value.axis is None:
        return Layout(rank=len(sizes))
    if value.rank is not None and value.rank + value.axis == 1 and len(sizes) == 2:
        if isinstance(sizes[1], int) and sizes[1] != -1:
            records.written_sizes.append(node.name)
        return flattened(value, 1, -1, describe(node))
    follows = not any(isinstance(size, int) and size != -1 for size in sizes[1:2])
    if value.axis == -1 and value.rank == 2 and sizes[2:] in ([1], [1, 1], [1, 1, 1]) and follows:
        return value.moved(1 - len(sizes), len(sizes))  # back to an image of one pixel
    dynamic = all(isinstance(size, fx.Node) for size in sizes[:2])
    if value.axis == -3 and value.rank == 4 and len(sizes) == 3 and sizes[2] == -1 and dynamic:
        return flattened(value, 2, -1, describe(node))
    raise InvalidValueError(
        f"{describe(node)}: a reshape to {tuple(map(str, sizes))} may write the width into the "
        f"model; use flatten or unsqueeze, which follow the width, {or_whole(node)}"
    )


def transpose(records: Records, node: fx.Node, value: Layout) -> Value:
    """Follow the cut dimension through an exchange of two."""
    if value.axis is None:
        return value
    names = (argument(node, 1, "dim0"), argument(node, 2, "dim1"))
    one, other = (value.position(dim, describe(node)) for dim in names)
    swap = {one: other, other: one}
    return value.moved(swap.get(value.axis, value.axis), value.rank)


def permute(records: Records, node: fx.Node, value: Layout) -> Value:
    """Follow the cut dimension through a new order of all."""
    order = node.args[1:] if len(node.args) > 2 else argument(node, 1, "dims")
    dims = list(order[0]) if len(order) == 1 and isinstance(order[0], tuple | list) else list(order)
    if value.axis is None:
        return Layout(rank=len(dims))
    places = [dim if dim < 0 else dim - len(dims) for dim in dims]
    return value.moved(places.index(value.axis) - len(dims), len(dims))


def reduce(records: Records, node: fx.Node, value: Layout) -> Value:
    """Drop the reduced dimensions; without the cut one the result is whole."""
    dims = argument(node, 1, "dim")
    if value.axis is None or dims is None:
        return Layout()
    listed = [dims] if isinstance(dims, int) else list(dims)
    places = {value.position(dim, describe(node)) for dim in listed}
    if argument(node, 2, "keepdim", False):
        return Layout(value.rank, thin=value.axis) if value.axis in places else value
    rank = None if value.rank is None else value.rank - len(places)
    if value.axis in places:
        return Layout(rank)
    return value.moved(value.axis + sum(place > value.axis for place in places), rank)


def extreme(records: Records, node: fx.Node, value: Layout) -> Value:
    """Follow max and min: of a dimension they return values and places, else one number."""
    reduced = reduce(records, node, value)
    has_dimension = argument(node, 1, "dim") is not None
    return (reduced, reduced) if has_dimension else Layout()


def unsqueeze(records: Records, node: fx.Node, value: Layout) -> Value:
    """Follow the cut dimension past a new one of size 1."""
    rank = None if value.rank is None else value.rank + 1
    if value.axis is None:
        return Layout(rank)
    grown = value.moved(value.axis, rank)
    place = grown.position(argument(node, 1, "dim"), describe(node))
    return grown.moved(value.axis if value.axis > place else value.axis - 1, rank)


def squeeze(records: Records, node: fx.Node, value: Layout) -> Value:
    """Follow the cut dimension past one that is dropped."""
    dim = argument(node, 1, "dim")
    if value.axis is None:
        return Layout()
    if not isinstance(dim, int):
        raise InvalidValueError(f"{describe(node)}: squeeze must name one dimension")
    place = value.position(dim, describe(node))
    if place == value.axis:
        raise InvalidValueError(f"{describe(node)}: the cut dimension must not be squeezed")
    rank = None if value.rank is None else value.rank - 1
    return value.moved(value.axis + (place > value.axis), rank)


def select(records: Records, node: fx.Node, value: Layout) -> Value:
    """Follow the cut dimension through indexing of the others."""
    if value.axis is None:
        return Layout()
    index = node.args[1]
    items = list(index) if isinstance(index, tuple | list) else [index]
    cut = value.axis - value.position(0, describe(node))
    untouched = cut >= len(items) or items[cut] == slice(None)
    if not untouched or not all(isinstance(item, int | slice) for item in items):
        raise InvalidValueError(
            f"{describe(node)}: only dimensions other than the cut one may be indexed, "
            "by numbers and slices"
        )
    dropped = [place for place, item in enumerate(items) if isinstance(item, int)]
    rank = None if value.rank is None else value.rank - len(dropped)
    return value.moved(value.axis + sum(place > cut for place in dropped), rank)


def chunk(records: Records, node: fx.Node, value: Layout) -> Value:
    """Allow splitting along any dimension but the cut one."""
    if value.axis is not None:
        dim = value.position(argument(node, 2, "dim", 0), describe(node))
        if dim == value.axis:
            raise InvalidValueError(
                f"{describe(node)}: the cut dimension must not be split; use a layer for each part "
                f"(nn.MultiheadAttention for attention), {or_whole(node)}"
            )
    return Several(value)


def spatial(records: Records, node: fx.Node, value: Layout) -> Value:
    """Pass pooling over the trailing dimensions, none of which may be the cut one."""
    return beyond(value, int(operation(node)[-2]), describe(node))


def pad(records: Records, node: fx.Node, value: Layout) -> Value:
    """Pass padding of the trailing dimensions, none of which may be the cut one."""
    amounts = argument(node, 1, "pad")
    return beyond(value, len(amounts) // 2, describe(node))


def interpolate(records: Records, node: fx.Node, value: Layout) -> Value:
    """Pass resizing of all dimensions after the second."""
    if value.axis is None:
        return value
    return beyond(value, -value.position(2, describe(node)), describe(node))


def expand(records: Records, node: fx.Node, value: Layout) -> Value:
    """Pass the repetition of dimensions of size 1."""
    return value


def beyond(value: Layout, dims: int, where: str) -> Layout:
    """Return the layout unchanged; the last `dims` dimensions must not be the cut one."""
    if value.axis is not None and value.axis >= -dims:
        raise InvalidValueError(f"{where}: acts along the cut dimension and cannot be sliced")
    return value


HANDLERS: dict[str, Handler] = {
    "flatten": flatten,
    "view": reshape,
    "reshape": reshape,
    "transpose": transpose,
    "swapaxes": transpose,
    "permute": permute,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "getitem": select,
    "chunk": chunk,
    "split": chunk,
    "pad": pad,
    "interpolate": interpolate,
    "expand": expand,
    **dict.fromkeys(SPATIAL, spatial),
    **dict.fromkeys(REDUCING, reduce),
    **dict.fromkeys(("max", "min"), extreme),
}


def combine_layouts(records: Records, one: Value, other: Value, where: str) -> Value:
    """Return the result of an element-wise operation on two values.

    Two cut tensors are cut alike from then on.  A parameter of the model's own
    is cut with what it meets, unless it is broadcast there.  A whole tensor
    keeps what it meets whole.
    """
    if isinstance(other, RawTensor) and isinstance(one, Layout):
        return _with_raw(records, one, other, where)
    if isinstance(one, RawTensor) and isinstance(other, Layout):
        return _with_raw(records, other, one, where)
    if not isinstance(one, Layout) or not isinstance(other, Layout):
        return next((value for value in (one, other) if isinstance(value, Layout)), Layout())
    if one.axis is None or other.axis is None:
        cut, whole = (other, one) if one.axis is None else (one, other)
        if cut.axis is None or whole.thin != cut.axis:
            records.pin(cut.parts)
        return replace(cut, rank=_rank(one, other))
    return _tied(records, one, other, where)


def concatenate(records: Records, values: Sequence[Value], dim: int, where: str) -> Value:
    """Return the concatenation of tensors; along the cut dimension the features follow."""
    layouts = [value for value in values if isinstance(value, Layout)]
    cut = next((value for value in layouts if value.axis is not None), None)
    if cut is None:
        return Layout(layouts[0].rank if layouts else None)
    if cut.position(dim, where) != cut.axis:
        result: Value = cut
        for value in values:
            result = combine_layouts(records, result, value, where)
        return result
    if any(
        not isinstance(v, Layout) or v.axis not in (None, cut.axis) or v.inner != 1 for v in values
    ):
        raise InvalidValueError(
            f"{where}: tensors joined along the cut dimension must be cut there or not at all, "
            "before any flatten; join first and flatten then, or keep the layers before it `whole`"
        )
    # An input, or another whole tensor: how long it is, the next layer tells.
    parts = [v.parts if v.axis is not None else (records.table.open_whole(where),) for v in layouts]
    return replace(cut, parts=tuple(part for one in parts for part in one))


def _with_raw(records: Records, value: Layout, raw: RawTensor, where: str) -> Value:
    if value.axis is None:
        return value
    rank = len(raw.shape)
    if rank < -value.axis or raw.shape[value.axis] == 1:
        return value
    features = records.features(value, raw.shape[value.axis], where)
    records.cut_raw(raw, value.axis, features)
    return value


def _tied(records: Records, one: Layout, other: Layout, where: str) -> Layout:
    sizes = [sum(records.table.size(part) for part in v.parts) for v in (one, other)]
    if 1 in sizes and sizes[0] != sizes[1] and one.inner == other.inner == 1:
        narrow, wide = (one, other) if sizes[0] == 1 else (other, one)
        records.pin(narrow.parts)
        return wide
    if one.axis != other.axis or one.inner != other.inner:
        raise InvalidValueError(
            f"{where}: both tensors must be cut on the same dimension to be combined"
        )
    records.tie(one.parts, other.parts, where)
    return replace(one, rank=_rank(one, other))


def _rank(one: Layout, other: Layout) -> int | None:
    ranks = [value.rank for value in (one, other) if value.rank is not None]
    return max(ranks) if ranks else None


_PASSING = {"torch.nn.modules.activation", "torch.nn.modules.dropout", "torch.nn.modules.linear"}
_SPATIAL = {"torch.nn.modules.pooling", "torch.nn.modules.padding", "torch.nn.modules.upsampling"}


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
    records: Records, name: str, layer: nn.MultiheadAttention, values: Sequence[Value], where: str
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
