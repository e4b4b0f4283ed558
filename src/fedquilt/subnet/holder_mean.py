"""The weighted mean over the clients that hold an element.

For an element i held by the clients H(i), with weights w_k:

    new(i) = sum over k in H(i) of w_k x_k(i)  /  sum over k in H(i) of w_k

and new(i) = old(i) where the sum of weights is zero.  (HeteroFL, Diao et al.
2021, eq. 1, with weights.)

It is computed as a running mean, m <- m + (x - m) w / W, where W is the weight
so far: equal values then give exactly that value, an element that nobody holds
is never written, and no sum can grow beyond the values themselves.  Clients
with the same slice are averaged while packed, at the cost of plain averaging,
and only the mean of each distinct slice is scattered.  One tensor is worked on
at a time, so the temporaries are one packed tensor and, where slices differ, the
weight so far: stored once for all the dimensions that every client holds whole,
such as those of a kernel.  A group that holds everything comes first; its mean is then
the result in the making, and the previous values need not be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedquilt.subnet.axis import Axis
from fedquilt.subnet.tensor_map import TensorMap

Members = Sequence[tuple[Tensor, float]]
"""Packed tensors with the weights of their clients, all > 0."""


@torch.no_grad()
def mean_over_holders(previous: Tensor, groups: Mapping[TensorMap, Members]) -> Tensor:
    """Return a new tensor: each held element the weighted mean over its holders.

    Half precision is averaged in float32; whole numbers in float64, then
    rounded to the nearest.

    Parameters
    ----------
    previous : tensor
        The values that stay where nobody holds an element; its type and device
        are those of the result.
    groups : mapping of TensorMap to members
        The clients' packed tensors and weights, by what they hold.
    """
    like = previous.new_empty(0, dtype=working_type(previous.dtype))
    mean = _merged(previous.detach(), groups, like)
    if mean.dtype == previous.dtype:
        return mean
    return (mean if previous.dtype.is_floating_point else mean.round()).to(previous.dtype)


def working_type(kind: torch.dtype) -> torch.dtype:
    """Return the type in which values of a type are averaged."""
    if not (kind.is_floating_point or kind.is_complex):
        return torch.float64
    return torch.float32 if kind in (torch.float16, torch.bfloat16) else kind


def _merged(previous: Tensor, groups: Mapping[TensorMap, Members], like: Tensor) -> Tensor:
    """Return the running mean of the groups, those that hold everything first."""
    maps = sorted(groups, key=lambda tensor_map: not tensor_map.is_full)
    weight_maps = _weight_maps(maps) if maps else []
    if maps and maps[0].is_full:
        mean, weight = _packed_mean(groups[maps[0]], like)
        covered = like.new_full(weight_maps[0].shape, weight)
        maps, weight_maps = maps[1:], weight_maps[1:]
    else:
        mean = _start(previous, groups, like)
        covered = like.new_zeros(weight_maps[0].shape if maps else ())
    for tensor_map, weight_map in zip(maps, weight_maps, strict=True):
        part, weight = _packed_mean(groups[tensor_map], like)
        weight_map.scatter_add_(covered, weight)
        _move(tensor_map, mean, part, weight / weight_map.gather(covered))
    return mean


def _start(previous: Tensor, groups: Mapping[TensorMap, Members], like: Tensor) -> Tensor:
    """Return a copy of the previous values to start a running mean from.

    The start counts with factor 0 where an element is held, which does not
    remove an infinity or a NaN; any held value is as good a start.
    """
    start = previous.to(like.dtype, copy=True)
    if not torch.isfinite(start.sum()):
        for tensor_map, members in groups.items():
            tensor_map.scatter_(start, members[0][0].to(like))
    return start


def _move(tensor_map: TensorMap, mean: Tensor, part: Tensor, share: Tensor) -> None:
    """Move the held elements of a mean towards a part by the share of the weight it has."""
    shares = share.expand(part.shape)
    tensor_map.update_(mean, lambda block, end, by: block.lerp_(end, by), part, shares)


def _packed_mean(members: Members, like: Tensor) -> tuple[Tensor, float]:
    """Return the weighted mean of packed tensors, in the type and place of `like`."""
    first, weight = members[0]
    mean = first.detach().to(like, copy=True)
    kind, place = like.dtype, like.device
    for tensor, extra in members[1:]:
        weight += extra
        if tensor.dtype != kind or tensor.device != place:
            tensor = tensor.to(like)
        mean.lerp_(tensor, extra / weight)
    return mean, weight


def _weight_maps(maps: Sequence[TensorMap]) -> list[TensorMap]:
    """Return the maps with one position for each dimension that all of them hold whole."""
    one = Axis.full(1)
    common = [
        all(axis.is_full for axis in axes) for axes in zip(*(m.axes for m in maps), strict=True)
    ]
    return [
        TensorMap(tuple(one if whole else axis for whole, axis in zip(common, m.axes, strict=True)))
        for m in maps
    ]
