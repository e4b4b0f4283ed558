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

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedquilt.subnet.axis import Axis
from fedquilt.subnet.tensor_map import TensorMap

Part = tuple[TensorMap, Tensor, float]
"""A client's packed tensor, where it lies, and the client's weight."""


@torch.no_grad()
def mean_over_holders_(whole: Tensor, parts: Iterable[Part]) -> None:
    """Replace each held element of `whole` by the weighted mean over its holders.

    Half precision is averaged in float32; whole numbers in float64, then
    rounded to the nearest.
    """
    groups: dict[TensorMap, list[tuple[Tensor, float]]] = {}
    for tensor_map, tensor, weight in parts:
        if weight > 0:
            groups.setdefault(tensor_map, []).append((tensor, weight))
    if not groups:
        return
    kind = working_type(whole.dtype)
    work = whole.to(kind)
    _merge_groups(work, groups)
    if work is not whole:
        whole.copy_(work if whole.dtype.is_floating_point else work.round())


def working_type(kind: torch.dtype) -> torch.dtype:
    """Return the type in which values of a type are averaged."""
    if not (kind.is_floating_point or kind.is_complex):
        return torch.float64
    return torch.float32 if kind in (torch.float16, torch.bfloat16) else kind


def _merge_groups(work: Tensor, groups: dict[TensorMap, list[tuple[Tensor, float]]]) -> None:
    maps = list(groups)
    if len(groups) > 1 and not torch.isfinite(work.sum()):
        # A running mean starts from the old value with factor 0, which does not
        # remove an infinity or a NaN; any held value is as good a start.
        for tensor_map, members in groups.items():
            tensor_map.scatter_(work, members[0][0].to(work))
    weight_maps = _weight_maps(maps)
    covered = torch.zeros(weight_maps[0].shape, dtype=work.real.dtype, device=work.device)
    for tensor_map, weight_map in zip(maps, weight_maps, strict=True):
        mean, weight = _packed_mean(groups[tensor_map], work)
        if tensor_map is maps[0]:
            tensor_map.scatter_(work, mean)
        else:
            share = weight_map.gather(covered).add(weight).reciprocal_().mul_(weight)
            _move(tensor_map, work, mean, share)
        if tensor_map is not maps[-1]:
            weight_map.scatter_add_(covered, weight)


def _move(tensor_map: TensorMap, work: Tensor, mean: Tensor, share: Tensor) -> None:
    """Move the held elements towards a mean by the share of the weight it has."""
    share = share.to(work.dtype).expand(mean.shape)
    tensor_map.update_(work, lambda block, end, by: block.lerp_(end, by), mean, share)


def _packed_mean(members: Sequence[tuple[Tensor, float]], like: Tensor) -> tuple[Tensor, float]:
    """Return the weighted mean of packed tensors, in the type and place of `like`."""
    first, weight = members[0]
    mean = first.to(like)
    if len(members) > 1 and mean is first:
        mean = first.clone()
    for tensor, extra in members[1:]:
        weight += extra
        mean.lerp_(tensor.to(like), extra / weight)
    return mean, weight


def _weight_maps(maps: Sequence[TensorMap]) -> list[TensorMap]:
    """Return the maps with one position for each dimension that all of them hold whole."""
    one = Axis.full(1)
    common = [all(axis.is_full for axis in axes) for axes in zip(*(m.axes for m in maps), strict=True)]
    return [
        TensorMap(tuple(one if whole else axis for whole, axis in zip(common, m.axes, strict=True)))
        for m in maps
    ]
