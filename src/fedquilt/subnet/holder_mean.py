"""The weighted mean over the clients that hold an element.

For an element i held by the clients H(i), with weights w_k:

    new(i) = sum over k in H(i) of w_k x_k(i)  /  sum over k in H(i) of w_k

and new(i) = old(i) where the sum of weights is zero.  (HeteroFL, Diao et al.
2021, eq. 1, with weights.)

It is computed as a running mean, m <- m + (x - m) w / W, where W is the weight
so far: equal values then give exactly that value, an element that nobody holds
is never written, and no sum can grow beyond the values themselves.

Clients with the same slice are averaged while packed, at the cost of plain
averaging, and only the mean of each distinct slice is scattered.  Slices that
lie inside one another, as prefixes and the windows of one round do, are taken
from the largest to the smallest; W is then one number for each.  Slices that
cross, as random ones do, need W for each element, stored once for all the
dimensions that everybody holds whole, such as those of a kernel.  One tensor is
worked on at a time, so the temporaries are a packed tensor and its W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fedquilt.subnet.axis import Axis
from fedquilt.subnet.tensor_map import TensorMap

SMALL = 16_384
"""Elements up to which tensors are averaged together rather than one after the other."""

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
    maps = sorted(groups, key=lambda tensor_map: -tensor_map.numel)
    if not all(outer.contains(inner) for outer, inner in pairwise(maps)):
        return _merged_crossing(previous, groups, like)
    if maps and maps[0].is_full:
        members = groups[maps.pop(0)]
        mean, weight = _packed_mean(members, like)
        mean = mean.clone() if mean is members[0][0] else mean
    else:
        mean, weight = previous.to(like.dtype, copy=True), 0.0
    for tensor_map in maps:
        part, extra = _packed_mean(groups[tensor_map], like)
        weight += extra
        _move(tensor_map, mean, part, extra / weight)
    return mean


def _merged_crossing(previous: Tensor, groups: Mapping[TensorMap, Members], like: Tensor) -> Tensor:
    """Return the running mean of slices that cross, each element with its own weight so far."""
    weight_maps = _weight_maps(list(groups))
    mean = _start(previous, groups, like)
    covered = like.new_zeros(weight_maps[0].shape)
    for (tensor_map, members), weight_map in zip(groups.items(), weight_maps, strict=True):
        part, weight = _packed_mean(members, like)
        weight_map.scatter_add_(covered, weight)
        shares = (weight / weight_map.gather(covered)).expand(part.shape)
        tensor_map.update_(mean, lambda block, end, by: block.lerp_(end, by), part, shares)
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


def _move(tensor_map: TensorMap, mean: Tensor, part: Tensor, share: float) -> None:
    """Move the held elements of a mean towards a part by the share of the weight it has."""
    if share == 1:
        tensor_map.scatter_(mean, part)
    else:
        tensor_map.update_(mean, lambda block, end: block.lerp_(end, share), part)


def _packed_mean(members: Members, like: Tensor) -> tuple[Tensor, float]:
    """Return the weighted mean of packed tensors, in the type and place of `like`.

    The mean of a single tensor is that tensor itself, not a copy.
    """
    kind, place = like.dtype, like.device
    tensors = [t if t.dtype == kind and t.device == place else t.to(like) for t, _ in members]
    if len(members) == 1:
        return tensors[0], members[0][1]
    if len(members) > 2 and tensors[0].numel() <= SMALL:
        return _stacked_mean(tensors, [weight for _, weight in members], like)
    mean, weight = tensors[0].detach().clone(), members[0][1]
    for tensor, (_, extra) in zip(tensors[1:], members[1:], strict=True):
        weight += extra
        mean.lerp_(tensor, extra / weight)
    return mean, weight


def _stacked_mean(
    tensors: Sequence[Tensor], weights: Sequence[float], like: Tensor
) -> tuple[Tensor, float]:
    """Return first + sum of share (x - first), in which equal values too give just that value.

    Small tensors cost more in calls than in arithmetic, so all are taken at once.
    """
    total = sum(weights)
    rows = torch.stack(list(tensors)).view(len(tensors), -1)
    shares = like.new_tensor([weight / total for weight in weights])
    mean = torch.addmv(rows[0], (rows - rows[0]).t(), shares)
    return mean.view(tensors[0].shape), total


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
