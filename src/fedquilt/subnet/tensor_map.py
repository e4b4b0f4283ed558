"""Gather and scatter between a tensor and the slice of it that a client holds.

A slice of a tensor is the outer product of one `Axis` per dimension.  That is
all a client's slice ever is, so no index of single elements is needed: a
dimension held in one run is a strided view, a few runs are a few views (a
rolling window that wraps around has 2 x 2 blocks), and only scattered choices
(Federated Dropout) fall back to index tensors, one per dimension.  An element
index of ResNet-18 would take 89 MB for every distinct slice; these maps take a
few kilobytes, and copying a strided view runs at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import torch

from fedquilt.errors import InvalidValueError
from fedquilt.subnet.axis import Axis

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
