"""Where the elements of a slice lie in a tensor, and their mean over holders.

A slice of a tensor is the outer product of one `Axis` per dimension.  That is
all a client's slice ever is, so no index of single elements is needed: a
dimension held in one run is a strided view, a few runs are a few views (a
rolling window that wraps around has 2 x 2 blocks), and only scattered choices
(Federated Dropout) fall back to index tensors, one per dimension.  An element
index of ResNet-18 would take 89 MB for every distinct slice; these maps take a
few kilobytes, and copying a strided view runs at the speed of memory.

The mean of an element is weighted over the clients that hold it.  For an element i held by
the clients H(i), with weights w_k:

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

import torch
from torch import Tensor

from fedquilt.common.errors import InvalidValueError
from fedquilt.slices.selection import Axis

MAX_BLOCKS = 16
"""Above this number of blocks one indexed copy is faster than a view for each."""

Block = tuple[slice, ...]


@dataclass(frozen=True)
class TensorMap:
    """Where the elements of a packed tensor lie in the whole one.

    Parameters
    ----------
    axes : tuple of Axis
        One for each dimension of the whole tensor; none for a scalar.
    """

    axes: tuple[Axis, ...]

    @classmethod
    def full(cls, shape: torch.Size | tuple[int, ...]) -> TensorMap:
        """Return the map of a tensor that is held whole."""
        return cls(tuple(Axis.full(size) for size in shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape of the slice."""
        return tuple(len(axis) for axis in self.axes)

    @cached_property
    def numel(self) -> int:
        """The number of elements of the slice."""
        return prod(self.packed_shape)

    @cached_property
    def is_full(self) -> bool:
        """Whether the slice is the whole tensor."""
        return all(axis.is_full for axis in self.axes)

    @cached_property
    def _hash(self) -> int:
        return hash(self.axes)

    def __hash__(self) -> int:
        return self._hash

    def contains(self, other: TensorMap) -> bool:
        """Tell whether this slice holds all that another slice of the same tensor holds."""
        return all(mine.contains(its) for mine, its in zip(self.axes, other.axes, strict=True))

    def gather(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the slice of a whole tensor; differentiable, and perhaps a view of it."""
        self._check("whole tensor", whole, self.shape)
        near = self._narrowed(whole)
        for dim in self._scattered:
            near = near.index_select(dim, self.axes[dim].index.to(whole.device))
        return near

    def scatter_(self, whole: torch.Tensor, packed: torch.Tensor) -> None:
        """Write a packed tensor into its place in the whole one."""
        self.update_(whole, lambda block, values: block.copy_(values), packed)

    def scatter_add_(
        self, whole: torch.Tensor, packed: torch.Tensor | float, alpha: float = 1.0
    ) -> None:
        """Add alpha times a packed tensor, or a number, to its place in the whole one."""
        if isinstance(packed, torch.Tensor):
            self.update_(whole, lambda block, values: block.add_(values, alpha=alpha), packed)
        else:
            self.update_(whole, lambda block: block.add_(packed * alpha))

    def update_(
        self, whole: torch.Tensor, change: Callable[..., object], *packed: torch.Tensor
    ) -> None:
        """Call `change(block of whole, block of each packed tensor)`, block by block.

        `change` alters its first argument.
        """
        self._check("whole tensor", whole, self.shape)
        for tensor in packed:
            self._check("packed tensor", tensor, self.packed_shape)
        near = self._narrowed(whole)
        if not self._scattered:
            change(near, *packed)
        elif self._number_of_blocks <= MAX_BLOCKS:
            for there, here in self._blocks:
                change(near[there], *(tensor[here] for tensor in packed))
        else:
            block = self.gather(whole)
            change(block, *packed)
            self._put(whole, block)

    def flat_index(self) -> torch.Tensor:
        """Return the int64 position, in the flattened whole tensor, of every packed element."""
        return _flat_index(self.axes)

    @cached_property
    def _scattered(self) -> tuple[int, ...]:
        return tuple(dim for dim, axis in enumerate(self.axes) if len(axis.runs) > 1)

    @cached_property
    def _number_of_blocks(self) -> int:
        return prod(len(axis.runs) for axis in self.axes)

    def _narrowed(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of the whole tensor cut on every dimension held in one run."""
        return whole if self.is_full else whole[self._cuts]

    @cached_property
    def _cuts(self) -> Block:
        return tuple(
            slice(*axis.runs[0]) if len(axis.runs) == 1 else slice(None) for axis in self.axes
        )

    @cached_property
    def _blocks(self) -> tuple[tuple[Block, Block], ...]:
        """Where each block lies in the narrowed tensor and in the packed one."""
        sides = [_sides(axis) if len(axis.runs) > 1 else [_EVERYTHING] for axis in self.axes]
        return tuple(
            (tuple(there for there, _ in pairs), tuple(here for _, here in pairs))
            for pairs in product(*sides)
        )

    def _put(self, whole: torch.Tensor, block: torch.Tensor) -> None:
        """Write a block back by an index of its rows: what follows the last cut dimension."""
        last = max(dim for dim, axis in enumerate(self.axes) if not axis.is_full)
        cut = self.axes[: last + 1]
        if whole.is_contiguous():
            place = _flat_index(cut).to(whole.device)
            rows = whole.view(-1, prod(self.shape[last + 1 :]))
            rows.index_copy_(0, place, block.reshape(len(place), -1))
            return
        index = [axis.index.to(whole.device) for axis in cut]
        whole[torch.meshgrid(*index, indexing="ij")] = block

    @staticmethod
    def _check(what: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise InvalidValueError(
                f"{what} of shape {tuple(tensor.shape)} must have shape {shape}"
            )


_EVERYTHING = (slice(None), slice(None))


def _flat_index(axes: Sequence[Axis]) -> torch.Tensor:
    """Return the position of each combination of held positions in the flattened product."""
    index = torch.zeros((), dtype=torch.int64)
    for axis in axes:
        index = index[..., None] * axis.size + axis.index
    return index.reshape(-1)


def _sides(axis: Axis) -> list[tuple[slice, slice]]:
    """Return, for each run, where it lies in the whole axis and in the packed one."""
    pairs, offset = [], 0
    for start, stop in axis.runs:
        pairs.append((slice(start, stop), slice(offset, offset + stop - start)))
        offset += stop - start
    return pairs


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
