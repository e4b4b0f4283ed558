"""Which part of a whole model each tensor of a sub-model is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.errors import InvalidValueError
from fedquilt.subnet.layers.subset_layer import SubsetLayer
from fedquilt.subnet.tensor_map import TensorMap

_ATTACHED = "_fedquilt_slice"


@dataclass(frozen=True)
class ModelSlice:
    """The map of every tensor that a client holds, by its name in the state dict.

    A tensor of the whole model that is not named is not held at all, as in
    slices by depth.
    """

    items: tuple[tuple[str, TensorMap], ...]

    @cached_property
    def maps(self) -> Mapping[str, TensorMap]:
        """The maps by name."""
        return MappingProxyType(dict(self.items))

    @cached_property
    def _hash(self) -> int:
        return hash(self.items)

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSlice:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelSlice, (self.items,)

    @cached_property
    def is_full(self) -> bool:
        """Whether every named tensor is held whole."""
        return all(tensor_map.is_full for _, tensor_map in self.items)

    def gather(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the held part of a whole model's tensors.

        Differentiable, and views where possible: with
        `torch.func.functional_call(small, slice.gather(dict(big.named_parameters())), x)`
        the gradient of a narrow pass arrives in the wide model, which is how
        ordered dropout trains.  Tensors that `state` does not name are left out.
        """
        return {name: m.gather(state[name]) for name, m in self.items if name in state}


def attach(model: nn.Module, model_slice: ModelSlice) -> None:
    """Let a sub-model remember what it is a slice of; copies of it remember too."""
    setattr(model, _ATTACHED, model_slice)


def slice_between(server_net: nn.Module, client_net: nn.Module) -> ModelSlice:
    """Return what a client's network holds of the server's.

    A network from `slice_model` knows its slice.  In any other, subset layers
    stand for their ranges of the layer of the same name, and every other
    tensor must have the same shape on both sides.
    """
    attached: ModelSlice | None = getattr(client_net, _ATTACHED, None)
    maps = dict(attached.items) if attached else _maps_of_layers(server_net, client_net)
    whole, mine = tensors_of(server_net), tensors_of(client_net)
    if attached is None:
        _same_names(whole, mine)
    for name, tensor in mine.items():
        if name not in maps:
            maps[name] = TensorMap.full(tensor.shape)
        _check_shapes(name, maps[name], whole.get(name), tensor)
    return ModelSlice(tuple((name, maps[name]) for name in mine))


def structure_of(net: nn.Module, tensors: Mapping[str, Tensor]) -> Hashable:
    """Return a key that is equal for networks that hold the same slice of any other."""
    held = getattr(net, _ATTACHED, None) or tuple(
        (name, layer.range_key)
        for name, layer in net.named_modules()
        if isinstance(layer, SubsetLayer)
    )
    return held, tuple((name, tensor.shape) for name, tensor in tensors.items())


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model without copying; what is no tensor is an error."""
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InvalidValueError(
                f"{name} of type {type(value).__name__} must be a tensor to travel"
            )
    return dict(state)


@torch.no_grad()
def load_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write values into a model's tensors, in the model's own types and device."""
    for name, tensor in tensors_of(model).items():
        tensor.copy_(values[name])


def plain_tensors(client_net: nn.Module, model_slice: ModelSlice) -> list[str]:
    """Return the tensors that belong to no subset layer of a network built from them."""
    if getattr(client_net, _ATTACHED, None) is not None:
        return []
    owned = tuple(
        f"{name}." if name else ""
        for name, layer in client_net.named_modules()
        if isinstance(layer, SubsetLayer)
    )
    return [name for name, _ in model_slice.items if not owned or not name.startswith(owned)]


def _maps_of_layers(server_net: nn.Module, client_net: nn.Module) -> dict[str, TensorMap]:
    fathers = dict(server_net.named_modules())
    maps: dict[str, TensorMap] = {}
    for name, layer in client_net.named_modules():
        if not isinstance(layer, SubsetLayer):
            continue
        if name not in fathers:
            raise InvalidValueError(f"layer {name!r} of client_net must also be in server_net")
        prefix = f"{name}." if name else ""
        for key, tensor_map in layer.tensor_maps(fathers[name], name).items():
            maps[prefix + key] = tensor_map
    return maps


def _same_names(whole: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
    missing, foreign = whole.keys() - mine.keys(), mine.keys() - whole.keys()
    if missing or foreign:
        told = [f"only server_net has {', '.join(sorted(missing))}"] if missing else []
        told += [f"only client_net has {', '.join(sorted(foreign))}"] if foreign else []
        raise InvalidValueError(
            f"client_net and server_net must have the same tensors: {'; '.join(told)}"
        )


def _check_shapes(name: str, tensor_map: TensorMap, whole: Tensor | None, mine: Tensor) -> None:
    if whole is None:
        raise InvalidValueError(f"tensor {name!r} of client_net must also be in server_net")
    if tuple(whole.shape) != tensor_map.shape:
        raise InvalidValueError(
            f"tensor {name!r} of shape {tuple(whole.shape)} in server_net must have shape "
            f"{tensor_map.shape}, as client_net was cut from it"
        )
    if tuple(mine.shape) != tensor_map.packed_shape:
        raise InvalidValueError(
            f"tensor {name!r} of shape {tuple(mine.shape)} in client_net must have shape "
            f"{tensor_map.packed_shape}"
        )
