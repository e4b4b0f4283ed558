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
such as those of a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedquilt.subnet.axis import Axis
from fedquilt.subnet.tensor_map import TensorMap

Members = Sequence[tuple[Tensor, float]]
"""Packed tensors with the weights of their clients, all > 0."""


def mean_over_holders_(whole: Tensor, groups: Mapping[TensorMap, Members]) -> None:
    """Replace each held element of `whole` by the weighted mean over its holders.

    Half precision is averaged in float32; whole numbers in float64, then
    rounded to the nearest.

    Parameters
    ----------
    whole : tensor
        The previous values; changed in place.
    groups : mapping of TensorMap to members
        The clients' packed tensors and weights, by what they hold.
    """
    if not groups:
        return
    with torch.no_grad():
        work = whole.to(working_type(whole.dtype))
        _merge_groups(work, groups)
        if work is not whole:
            whole.copy_(work if whole.dtype.is_floating_point else work.round())


def working_type(kind: torch.dtype) -> torch.dtype:
    """Return the type in which values of a type are averaged."""
    if not (kind.is_floating_point or kind.is_complex):
        return torch.float64
    return torch.float32 if kind in (torch.float16, torch.bfloat16) else kind


def _merge_groups(work: Tensor, groups: Mapping[TensorMap, Members]) -> None:
    if len(groups) == 1:
        (tensor_map, members), *_ = groups.items()
        tensor_map.scatter_(work, _packed_mean(members, work)[0])
        return
    if not torch.isfinite(work.sum()):
        # A running mean starts from the old value with factor 0, which does not
        # remove an infinity or a NaN; any held value is as good a start.
        for tensor_map, members in groups.items():
            tensor_map.scatter_(work, members[0][0].to(work))
    weight_maps = _weight_maps(list(groups))
    covered = torch.zeros(weight_maps[0].shape, dtype=work.dtype, device=work.device)
    for (tensor_map, members), weight_map in zip(groups.items(), weight_maps, strict=True):
        mean, weight = _packed_mean(members, work)
        weight_map.scatter_add_(covered, weight)
        share = weight / weight_map.gather(covered)
        _move(tensor_map, work, mean, share)


def _move(tensor_map: TensorMap, work: Tensor, mean: Tensor, share: Tensor) -> None:
    """Move the held elements towards a mean by the share of the weight it has."""
    shares = share.expand(mean.shape)
    tensor_map.update_(work, lambda block, end, by: block.lerp_(end, by), mean, shares)


def _packed_mean(members: Members, like: Tensor) -> tuple[Tensor, float]:
    """Return the weighted mean of packed tensors, in the type and place of `like`."""
    first, weight = members[0]
    mean = first.to(like)
    if len(members) > 1 and mean is first:
        mean = first.clone()
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
