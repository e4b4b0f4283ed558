"""Extract and merge over state dicts, over networks, and on Flower's types.

`extract_state` and `merge_states` are pure; `distribute` and `aggregate` write
into networks.  All check first and change nothing when they raise.  `extract` and `merge`
do the same on Flower's types; flwr is needed only when they are called.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedquilt.common import checks, optional
from fedquilt.common.errors import InvalidValueError
from fedquilt.slices.layer_rules import SLICEABLE
from fedquilt.slices.layers import SubsetLayer
from fedquilt.slices.model_slice import (
    ModelSlice,
    assign_tensors,
    plain_tensors,
    slice_between,
    structure_of,
    tensors_of,
)
from fedquilt.slices.tensor_map import TensorMap, mean_over_holders

if TYPE_CHECKING:
    from flwr.common import FitRes, Parameters
    from flwr.server.client_proxy import ClientProxy

PLAIN = ("average", "refuse")
STATISTICS = ("travel", "refuse")


@torch.no_grad()
def extract_state(state: Mapping[str, Tensor], model_slice: ModelSlice) -> dict[str, Tensor]:
    """Return a copy of the part of a whole state dict that a slice holds."""
    _check_slice(state, model_slice)
    parts = model_slice.gather(state)
    return {
        name: part.detach().clone(memory_format=torch.contiguous_format)
        for name, part in parts.items()
    }


def merge_states(
    state: Mapping[str, Tensor],
    client_states: Sequence[Mapping[str, Tensor]],
    slices: Sequence[ModelSlice],
    weights: Sequence[float],
) -> dict[str, Tensor]:
    """Return the new global state: each element the weighted mean over its holders.

    Parameters
    ----------
    state : mapping of tensors
        The previous global state, buffers included.  It is not changed, and its
        values stay wherever no client of positive weight holds an element.
    client_states : sequence of mappings
        What each client sends: exactly the tensors its slice names.
    slices : sequence of ModelSlice
        What each client holds.
    weights : sequence of float
        Each client's weight, usually its number of examples.
    """
    checked = check_weights(weights, len(client_states))
    if len(slices) != len(client_states):
        raise InvalidValueError(
            f"slices={len(slices)} of them must be one for each of {len(client_states)} clients"
        )
    for model_slice in set(slices):
        _check_slice(state, model_slice)
    for number, (mine, model_slice) in enumerate(zip(client_states, slices, strict=True)):
        _check_client(f"client {number}", mine, model_slice)
    return dict(_merged(state, client_states, slices, checked))


def distribute(
    client_net: nn.Module,
    server_net: nn.Module,
    *,
    plain: str = "average",
    statistics: str = "travel",
) -> None:
    """Load a client's network with its part of the server's.

    `plain` and `statistics` as in `aggregate`; average means that plain layers travel.
    """
    model_slice = checked_slice(server_net, client_net, plain, statistics)
    assign_tensors(client_net, model_slice.gather(tensors_of(server_net)))


def aggregate(
    server_net: nn.Module,
    client_nets: Sequence[nn.Module],
    weights: Sequence[float],
    *,
    plain: str = "average",
    statistics: str = "travel",
) -> None:
    """Set the server's network to the weighted mean over the clients that hold each element.

    Parameters
    ----------
    server_net : nn.Module
        Must hold the previous global values: what nobody holds keeps them.
    client_nets : sequence of nn.Module
        The trained networks, each from `slice_model` or built from subset layers.
    weights : sequence of float
        Each client's weight, usually its number of examples.
    plain : {"average", "refuse"}
        What to do with layers, in a network of subset layers, that are none:
        average them over all clients, or raise.
    statistics : {"travel", "refuse"}
        What to do with running statistics: average them, or raise.
    """
    checked = check_weights(weights, len(client_nets))
    states = [tensors_of(net) for net in client_nets]
    slices = checked_slices(server_net, client_nets, states, plain, statistics)
    target = tensors_of(server_net)
    with torch.no_grad():
        for name, mean in _merged(target, states, slices, checked):
            target[name].copy_(mean)


def aggregate_layer(
    global_layer: nn.Module, subset_layers: Sequence[nn.Module], weights: Sequence[float]
) -> None:
    """Set a global layer, in place, to the weighted mean of its sub-layers.

    Each element becomes the mean over the sub-layers that hold it; one that
    none holds keeps its value.

    Parameters
    ----------
    global_layer : SUPPORT_LAYER
        The target; a plain torch layer of a supported kind does as well.
    subset_layers : list of SUPPORT_LAYER
        The sub-layers, in any order.
    weights : list of int
        The weight of each sub-layer, usually the client's number of examples.
    """
    if not isinstance(global_layer, (SubsetLayer, *SLICEABLE)):
        raise InvalidValueError(
            f"global_layer={type(global_layer).__name__} must be one of "
            f"{', '.join(kind.__name__ for kind in SLICEABLE)} or their subset forms"
        )
    aggregate(global_layer, subset_layers, weights)


def checked_slice(
    server_net: nn.Module, client_net: nn.Module, plain: str, statistics: str
) -> ModelSlice:
    """Return what a client holds, after the choices about plain layers and statistics."""
    checks.choice("plain", plain, PLAIN)
    checks.choice("statistics", statistics, STATISTICS)
    model_slice = slice_between(server_net, client_net)
    if plain == "refuse" and (names := plain_tensors(client_net, model_slice)):
        raise InvalidValueError(
            f"plain='refuse': every layer must be a subset layer; {', '.join(names)} belong to none"
        )
    if statistics == "refuse" and (layers := _tracking_layers(client_net)):
        raise InvalidValueError(
            "statistics='refuse': no layer may track running statistics; "
            f"{', '.join(layers)} do (track_running_stats=False turns it off)"
        )
    return model_slice


def checked_slices(
    server_net: nn.Module,
    client_nets: Sequence[nn.Module],
    states: Sequence[Mapping[str, Tensor]],
    plain: str,
    statistics: str,
) -> list[ModelSlice]:
    """Return what each client holds; networks of one structure are examined once."""
    known: dict[Hashable, ModelSlice] = {}
    slices = []
    for net, state in zip(client_nets, states, strict=True):
        key = structure_of(net, state)
        if key not in known:
            known[key] = checked_slice(server_net, net, plain, statistics)
        slices.append(known[key])
    return slices


def check_weights(weights: Sequence[float], clients: int) -> list[float]:
    """Return the weights as floats; they must be one for each client, finite and >= 0."""
    if len(weights) != clients:
        raise InvalidValueError(f"weights={len(weights)} of them must be one for each of {clients}")
    return [
        checks.number(f"weights[{number}]", weight, at_least=0)
        for number, weight in enumerate(weights)
    ]


def _merged(
    previous: Mapping[str, Tensor],
    client_states: Sequence[Mapping[str, Tensor]],
    slices: Sequence[ModelSlice],
    weights: Sequence[float],
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor's mean over its holders; clients of weight zero do not count."""
    cohorts: dict[ModelSlice, list[tuple[Mapping[str, Tensor], float]]] = {}
    for mine, model_slice, weight in zip(client_states, slices, weights, strict=True):
        if weight > 0:
            cohorts.setdefault(model_slice, []).append((mine, weight))
    for name, tensor in previous.items():
        groups: dict[TensorMap, list[tuple[Tensor, float]]] = {}
        for model_slice, members in cohorts.items():
            if name in model_slice.maps:
                group = groups.setdefault(model_slice.maps[name], [])
                group.extend([(mine[name], weight) for mine, weight in members])
        yield name, mean_over_holders(tensor, groups)


def _check_slice(state: Mapping[str, Tensor], model_slice: ModelSlice) -> None:
    for name, tensor_map in model_slice.items:
        if name not in state or state[name].shape != tensor_map.shape:
            raise InvalidValueError(
                f"state must hold the tensor {name!r} with shape {tensor_map.shape}"
            )


def _check_client(who: str, mine: Mapping[str, Tensor], model_slice: ModelSlice) -> None:
    if mine.keys() != model_slice.maps.keys():
        differing = ", ".join(sorted(mine.keys() ^ model_slice.maps.keys()))
        raise InvalidValueError(
            f"{who} must send exactly the tensors of its slice; only one has {differing}"
        )
    for name, tensor_map in model_slice.items:
        if mine[name].shape != tensor_map.packed_shape:
            raise InvalidValueError(
                f"{who}: {name!r} of shape {tuple(mine[name].shape)} must have shape "
                f"{tensor_map.packed_shape}"
            )


def _tracking_layers(model: nn.Module) -> list[str]:
    return [
        name or type(layer).__name__
        for name, layer in model.named_modules()
        if getattr(layer, "running_mean", None) is not None
    ]


def extract(
    parameters: Parameters,
    client_net: nn.Module,
    server_net: nn.Module,
    *,
    plain: str = "average",
    statistics: str = "travel",
) -> Parameters:
    """Return the part of the global parameters that a client's network holds.

    Parameters
    ----------
    parameters : flwr.common.Parameters
        The whole model: one array for each entry of `server_net.state_dict()`,
        in that order, buffers included.
    client_net, server_net : nn.Module
        The two structures.  As a side effect `server_net` is set to
        `parameters` and `client_net` to what is returned.
    plain, statistics : str
        As in `fedquilt.fed.aggregate`.
    """
    model_slice = checked_slice(server_net, client_net, plain, statistics)
    state = _named(server_net, _arrays(parameters), "parameters")
    part = extract_state(state, model_slice)
    assign_tensors(server_net, state)
    assign_tensors(client_net, part)
    return _parameters(client_net)


def merge(
    results: list[tuple[ClientProxy, FitRes]],
    client_nets: list[nn.Module],
    server_net: nn.Module,
    *,
    plain: str = "average",
    statistics: str = "travel",
) -> Parameters:
    """Return the weighted mean, element by element, over the clients that hold it.

    Parameters
    ----------
    results : list of (flwr.server.client_proxy.ClientProxy, flwr.common.FitRes)
        The clients' results; `num_examples` is the weight.
    client_nets : list of nn.Module
        The structure of each client, in the order of `results`.
    server_net : nn.Module
        Must hold the previous global values, which elements held by nobody
        keep; `extract` leaves them there.  As a side effect each of
        `client_nets` is set to its client's result, and `server_net` to what
        is returned.
    plain, statistics : str
        As in `fedquilt.fed.aggregate`.
    """
    if len(results) != len(client_nets):
        raise InvalidValueError(
            f"client_nets={len(client_nets)} of them must be one for each of {len(results)} results"
        )
    weights = check_weights([fit.num_examples for _, fit in results], len(results))
    structures = [tensors_of(net) for net in client_nets]
    slices = checked_slices(server_net, client_nets, structures, plain, statistics)
    states = [
        _named(net, _arrays(fit.parameters), f"results[{number}]")
        for number, (net, (_, fit)) in enumerate(zip(client_nets, results, strict=True))
    ]
    held = [{n: s[n] for n in mine.maps} for s, mine in zip(states, slices, strict=True)]
    merged = merge_states(tensors_of(server_net), held, slices, weights)
    for net, state in zip(client_nets, states, strict=True):
        assign_tensors(net, state)
    assign_tensors(server_net, merged)
    return _parameters(server_net)


def _named(net: nn.Module, arrays: Sequence[NDArray[Any]], what: str) -> dict[str, Tensor]:
    """Return arrays as tensors under the names of a network's state dict."""
    tensors = tensors_of(net)
    if len(arrays) != len(tensors):
        raise InvalidValueError(
            f"{what} with {len(arrays)} arrays must have one for each of the {len(tensors)} "
            f"entries of the network's state dict: {', '.join(tensors)}"
        )
    named = {}
    for (name, tensor), array in zip(tensors.items(), arrays, strict=True):
        if tensor.dtype == torch.bfloat16:
            raise InvalidValueError(f"{name!r} of type bfloat16 must have a type that NumPy knows")
        if array.shape != tuple(tensor.shape):
            raise InvalidValueError(
                f"{what}: {name!r} of shape {array.shape} must have shape {tuple(tensor.shape)}"
            )
        writable = array if array.flags.writeable else array.copy()
        named[name] = torch.as_tensor(writable).to(tensor.dtype)
    return named


def _arrays(parameters: Parameters) -> list[NDArray[Any]]:
    arrays: list[NDArray[Any]] = _flower().parameters_to_ndarrays(parameters)
    return arrays


def _parameters(net: nn.Module) -> Parameters:
    arrays = [np.asarray(tensor.detach().cpu().numpy()) for tensor in tensors_of(net).values()]
    parameters: Parameters = _flower().ndarrays_to_parameters(arrays)
    return parameters


def _flower() -> Any:
    return optional.require("flwr.common", "fedquilt.fed.extract (unlike extract_state)")
