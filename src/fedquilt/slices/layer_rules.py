"""What a slice of a layer means for each of its tensors.

A layer has an input axis and an output axis; layers that work on single
features (normalisation, embedding, attention) have only the latter.  These
rules serve the subset layers of `fedquilt.nn` and `slice_model` alike.

| layer | tensors |
|---|---|
| Linear | weight[out, in], bias[out] |
| Conv | weight[out, in of one group, kernel], bias[out] |
| ConvTranspose | weight[in, out of one group, kernel], bias[out] |
| BatchNorm, InstanceNorm, GroupNorm, PReLU | every vector[out]; the counter of batches whole |
| LayerNorm, RMSNorm | every tensor, cut on one of the normalised dimensions |
| LSTM, GRU, RNN | weight_ih[gates x out, in], weight_hh[gates x out, out], biases[gates x out] |
| Embedding | weight[vocabulary, out]; the vocabulary is whole |
| MultiheadAttention | the packed projections[3 x out, out], out_proj[out, out] |

A grouped convolution loses whole groups, or the same channels of every group
that stays; a depthwise one loses the channel in its input and its output.
Attention loses whole heads.  All layers and directions of a recurrent network keep the same
hidden units.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fedquilt.common.errors import InvalidValueError
from fedquilt.slices.selection import Axis
from fedquilt.slices.tensor_map import TensorMap

SLICEABLE = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.Embedding,
    nn.MultiheadAttention,
    nn.PReLU,
    nn.RMSNorm,
    nn.LSTM,
    nn.GRU,
    nn.RNN,
)

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""What a layer may have or not have beside its parameters."""
_KNOWN = ("weight", "bias", *STATISTICS)


def tensor_maps(
    layer: nn.Module, inputs: Axis | None, outputs: Axis, where: str, dim: int = -1
) -> dict[str, TensorMap]:
    """Return the map of every tensor of a whole layer, by its name in the layer.

    Parameters
    ----------
    inputs, outputs : Axis
        What is held of the layer's input and output features.
    where : str
        How errors call the layer.
    dim : int
        The normalised dimension that is cut, counted from the end; LayerNorm only.
    """
    if isinstance(layer, nn.MultiheadAttention):
        return _attention(layer, outputs, where)
    if isinstance(layer, nn.RNNBase):
        return _recurrent(layer, cast(Axis, inputs), outputs, where)
    maps = {}
    for name, tensor in own_tensors(layer).items():
        if name not in _KNOWN:
            raise InvalidValueError(f"{where}: tensor {name!r} must be one of {', '.join(_KNOWN)}")
        axes = [Axis.full(size) for size in tensor.shape]
        if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            axes[dim] = outputs
        elif isinstance(layer, nn.Embedding):
            axes[1] = outputs
        elif name == "weight" and isinstance(layer, nn.Linear | _ConvNd):
            axes[:2] = _matrix(layer, cast(Axis, inputs), outputs, where)
        elif axes and not (isinstance(layer, nn.PReLU) and tensor.numel() == 1):
            axes[0] = outputs
        maps[name] = TensorMap(tuple(axes))
        _check_sizes(maps[name], tensor, f"{where}.{name}")
    return maps


def own_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer of a layer, by name."""
    return dict(layer.state_dict(keep_vars=True))


def kept_groups(groups: int, inputs: Axis, outputs: Axis, where: str) -> tuple[int, Axis, Axis]:
    """Return how many groups stay and what each keeps of its inputs and outputs."""
    source, target = inputs.per_group(groups), outputs.per_group(groups)
    if source is None or target is None or source[0] != target[0]:
        raise InvalidValueError(
            f"{where}: groups={groups} must stay whole, or all keep the same channels; "
            f"input channels {_listed(inputs)} and output channels {_listed(outputs)} do not fit"
        )
    return len(source[0]), source[1], target[1]


def norm_groups(channels: int, groups: int, kept: int) -> int:
    """Return the number of groups of a GroupNorm that keeps `kept` of its channels.

    A group keeps its size where that divides what is kept, so the held groups of
    an aligned slice have the statistics they have in the whole layer; otherwise
    the largest smaller size that divides it.

    >>> norm_groups(64, 8, 32), norm_groups(64, 4, 8), norm_groups(48, 3, 24)
    (4, 1, 2)
    """
    size = channels // groups
    while kept % size:
        size -= 1
    return kept // size


def resize(layer: nn.Module, inputs: Axis | None, outputs: Axis, where: str, dim: int = -1) -> None:
    """Set the size attributes of a layer whose tensors have been cut."""
    if isinstance(layer, nn.Linear):
        layer.in_features, layer.out_features = len(cast(Axis, inputs)), len(outputs)
    elif isinstance(layer, _ConvNd):
        source = cast(Axis, inputs)
        layer.groups = kept_groups(layer.groups, source, outputs, where)[0]
        layer.in_channels, layer.out_channels = len(source), len(outputs)
    elif isinstance(layer, _NormBase):
        layer.num_features = len(outputs)
    elif isinstance(layer, nn.GroupNorm):
        layer.num_groups = norm_groups(layer.num_channels, layer.num_groups, len(outputs))
        layer.num_channels = len(outputs)
    elif isinstance(layer, nn.RNNBase):
        layer.input_size, layer.hidden_size = len(cast(Axis, inputs)), len(outputs)
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        shape = list(layer.normalized_shape)
        shape[dim] = len(outputs)
        layer.normalized_shape = tuple(shape)
    elif isinstance(layer, nn.Embedding):
        layer.embedding_dim = len(outputs)
    elif isinstance(layer, nn.PReLU) and layer.num_parameters > 1:
        layer.num_parameters = len(outputs)
    elif isinstance(layer, nn.MultiheadAttention):
        _resize_attention(layer, outputs)


def held_heads(heads: int, axis: Axis, where: str) -> Axis:
    """Return which heads an axis of embedding features holds; a cut head is an error."""
    split = axis.per_group(heads)
    if split is None or not split[1].is_full:
        raise InvalidValueError(
            f"{where}: num_heads={heads} of {axis.size // heads} features must be kept whole; "
            f"features {_listed(axis)} cut a head"
        )
    return Axis.from_index(heads, split[0])


def _matrix(layer: nn.Linear | _ConvNd, inputs: Axis, outputs: Axis, where: str) -> list[Axis]:
    if isinstance(layer, nn.Linear):
        return [outputs, inputs]
    _, source, target = kept_groups(layer.groups, inputs, outputs, where)
    return [inputs, target] if isinstance(layer, _ConvTransposeNd) else [outputs, source]


def _attention(layer: nn.MultiheadAttention, axis: Axis, where: str) -> dict[str, TensorMap]:
    held_heads(layer.num_heads, axis, where)
    maps = {}
    for name, tensor in own_tensors(layer).items():
        axes = [Axis.full(size) for size in tensor.shape]
        if name in ("in_proj_weight", "in_proj_bias"):
            axes[0] = axis.stacked(3)
        elif name not in ("bias_k", "bias_v"):
            axes[0] = axis
        if name in ("in_proj_weight", "q_proj_weight", "out_proj.weight", "bias_k", "bias_v"):
            axes[-1] = axis
        maps[name] = TensorMap(tuple(axes))
        _check_sizes(maps[name], tensor, f"{where}.{name}")
    return maps


def _recurrent(layer: nn.RNNBase, inputs: Axis, outputs: Axis, where: str) -> dict[str, TensorMap]:
    """Return the maps of all layers and directions; `weight_ih_l1` reads both directions."""
    if layer.proj_size:
        raise InvalidValueError(
            f"{where}: proj_size={layer.proj_size} must be 0 to be cut; name the layer in `whole` "
            "to keep it and its input at full width"
        )
    gates = len(cast(Tensor, layer.weight_hh_l0)) // layer.hidden_size
    below = outputs.stacked(2 if layer.bidirectional else 1)
    maps = {}
    for name, tensor in own_tensors(layer).items():
        axes = [outputs.stacked(gates)]
        if name.startswith("weight_hh"):
            axes.append(outputs)
        elif name.startswith("weight_ih"):
            axes.append(inputs if name.startswith("weight_ih_l0") else below)
        maps[name] = TensorMap(tuple(axes))
        _check_sizes(maps[name], tensor, f"{where}.{name}")
    return maps


def _resize_attention(layer: nn.MultiheadAttention, axis: Axis) -> None:
    if layer._qkv_same_embed_dim:
        layer.kdim = layer.vdim = len(axis)
    layer.embed_dim = len(axis)
    layer.num_heads = len(axis) // layer.head_dim
    layer.out_proj.in_features = layer.out_proj.out_features = len(axis)


def _check_sizes(tensor_map: TensorMap, tensor: Tensor, where: str) -> None:
    if tensor_map.shape != tuple(tensor.shape):
        raise InvalidValueError(
            f"{where} of shape {tuple(tensor.shape)} must fit a slice of shape {tensor_map.shape}"
        )


def _listed(axis: Axis) -> str:
    runs = [f"{start}..{stop - 1}" for start, stop in axis.runs[:4]]
    more = ", ..." if len(axis.runs) > 4 else ""
    return f"{', '.join(runs)}{more} of {axis.size}"
