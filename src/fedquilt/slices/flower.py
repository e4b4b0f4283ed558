"""Extract and merge on Flower's types; flwr is needed only when they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedquilt.common import optional
from fedquilt.common.errors import InvalidValueError
from fedquilt.slices.aggregate import (
    check_weights,
    checked_slice,
    checked_slices,
    extract_state,
    merge_states,
)
from fedquilt.slices.model_slice import load_tensors, tensors_of

if TYPE_CHECKING:
    from flwr.common import FitRes, Parameters
    from flwr.server.client_proxy import ClientProxy


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
    load_tensors(server_net, state)
    load_tensors(client_net, part)
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
        load_tensors(net, state)
    load_tensors(server_net, merged)
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
    return optional.load("flwr.common", "fedquilt.fed.extract (unlike extract_state)")
