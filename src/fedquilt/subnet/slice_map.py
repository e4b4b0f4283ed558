"""Slices of flat vectors.

A round keeps a client's update in one flat vector: the trainable parameters in
the order of `named_parameters`, then the travelling buffers in the order of
`named_buffers`.  A `SliceMap` tells where the elements of a sub-model's vector
lie in the whole model's.

The map is kept by blocks, not by elements (see `tensor_map`): the int64 index
of every element of ResNet-18 takes 89 MB for each distinct slice, twice the
model, and an indexed copy reads it once for every client.  By blocks a slice
takes a few kilobytes, gather and scatter are strided copies, and a client
of full width is one copy.  `index` still gives the element index, for those who
want `total.index_add_(0, map.index(), update)`; the result is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.subnet.axis import Axis
from fedquilt.subnet.model_slice import ModelSlice, slice_between
from fedquilt.subnet.tensor_map import TensorMap


@dataclass(frozen=True)
class FlatSegment:
    """One tensor: its place in the whole vector and in the sub-model's."""

    whole_start: int
    start: int
    tensor_map: TensorMap

    def of_whole(self, vector: Tensor) -> Tensor:
        """Return the view of the whole vector that is this tensor."""
        shape = self.tensor_map.shape
        return vector[self.whole_start : self.whole_start + prod(shape)].view(shape)

    def of_part(self, vector: Tensor) -> Tensor:
        """Return the view of the sub-model's vector that is this tensor."""
        return vector[self.start : self.start + self.tensor_map.numel].view(
            self.tensor_map.packed_shape
        )


@dataclass(frozen=True)
class SliceMap:
    """Where the elements of a sub-model's flat vector lie in the whole model's.

    Attributes
    ----------
    whole_size, size : int
        The lengths of the two vectors.
    segments : tuple of FlatSegment
        The tensors; neighbours that are held whole are one segment.
    """

    whole_size: int
    size: int
    segments: tuple[FlatSegment, ...]

    @classmethod
    def between(
        cls,
        global_model: nn.Module,
        sub_model: nn.Module,
        buffers: Sequence[str] = (),
        model_slice: ModelSlice | None = None,
    ) -> SliceMap:
        """Return the map between the flat vectors of a model and a sub-model.

        Parameters
        ----------
        buffers : sequence of str
            The names of the buffers that travel.
        model_slice : ModelSlice, optional
            What the sub-model holds, where it cannot tell itself.
        """
        held = model_slice or slice_between(global_model, sub_model)
        whole = dict(_travelling(global_model, buffers))
        unknown = set(buffers) - {name for name, _ in global_model.named_buffers()}
        if unknown:
            raise InvalidValueError(f"buffers={sorted(unknown)} must be buffers of the model")
        starts, start = {}, 0
        for name, tensor in whole.items():
            starts[name] = start
            start += tensor.numel()
        segments, offset = [], 0
        for name, _ in _travelling(sub_model, buffers):
            if name not in whole or name not in held.maps:
                raise InvalidValueError(f"tensor {name!r} of the sub-model must travel in both")
            segments.append(FlatSegment(starts[name], offset, held.maps[name]))
            offset += held.maps[name].numel
        return cls(start, offset, _coalesced(segments))

    @cached_property
    def _hash(self) -> int:
        return hash((self.whole_size, self.size, self.segments))

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_full(self) -> bool:
        """Whether the sub-model is the whole model."""
        return self.size == self.whole_size and all(s.tensor_map.is_full for s in self.segments)

    def gather(self, whole: Tensor) -> Tensor:
        """Return the sub-model's vector, a copy of its elements of the whole one."""
        self._check("whole", whole, self.whole_size)
        part = whole.new_empty(self.size)
        for segment in self.segments:
            segment.of_part(part).copy_(segment.tensor_map.gather(segment.of_whole(whole)))
        return part

    def scatter_(self, whole: Tensor, part: Tensor) -> None:
        """Write a sub-model's vector into its places in the whole one."""
        self._check("whole", whole, self.whole_size)
        self._check("part", part, self.size)
        for segment in self.segments:
            segment.tensor_map.scatter_(segment.of_whole(whole), segment.of_part(part))

    def scatter_add_(self, total: Tensor, part: Tensor, alpha: float = 1.0) -> None:
        """Add alpha times a sub-model's vector to its places in the whole one."""
        self._check("total", total, self.whole_size)
        self._check("part", part, self.size)
        for segment in self.segments:
            segment.tensor_map.scatter_add_(segment.of_whole(total), segment.of_part(part), alpha)

    def cover_(self, coverage: Tensor, weight: float = 1.0) -> None:
        """Add a weight to every element of the whole vector that the slice holds."""
        self._check("coverage", coverage, self.whole_size)
        for segment in self.segments:
            segment.tensor_map.scatter_add_(segment.of_whole(coverage), weight)

    def index(self) -> Tensor:
        """Return the int64 position in the whole vector of every element; 8 bytes each."""
        return torch.cat([s.whole_start + s.tensor_map.flat_index() for s in self.segments])

    @staticmethod
    def _check(name: str, vector: Tensor, size: int) -> None:
        if tuple(vector.shape) != (size,):
            raise InvalidValueError(
                f"{name} of shape {tuple(vector.shape)} must be a vector of {size} elements"
            )


class HolderMean:
    """The weighted mean over holders of flat vectors that arrive one at a time.

    Holds one total of the whole size; the weights are kept for each distinct
    slice, and become a second vector only when the mean is taken.
    """

    def __init__(
        self, size: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> None:
        self.total = torch.zeros(size, dtype=dtype, device=device)
        self.weights: dict[SliceMap, float] = {}

    def add(self, slice_map: SliceMap, vector: Tensor, weight: float = 1.0) -> None:
        """Add a client's vector with its weight."""
        weight = validate.number("weight", weight, at_least=0)
        if weight:
            slice_map.scatter_add_(self.total, vector.to(self.total.dtype), weight)
        self.weights[slice_map] = self.weights.get(slice_map, 0.0) + weight

    def coverage(self) -> Tensor:
        """Return, for each element, the sum of the weights of its holders."""
        coverage = torch.zeros_like(self.total)
        for slice_map, weight in self.weights.items():
            slice_map.cover_(coverage, weight)
        return coverage

    def mean(self, previous: Tensor | None = None) -> Tensor:
        """Return the mean; an element that nobody holds is that of `previous`, or zero."""
        coverage = self.coverage()
        held = coverage > 0
        mean = self.total / coverage.masked_fill_(~held, 1.0)
        if previous is None:
            return mean.masked_fill_(~held, 0.0)
        return torch.where(held, mean.to(previous.dtype), previous)


def _travelling(model: nn.Module, buffers: Sequence[str]) -> Iterable[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter
    for name, buffer in model.named_buffers():
        if name in buffers:
            yield name, buffer


def _coalesced(segments: Iterable[FlatSegment]) -> tuple[FlatSegment, ...]:
    """Join neighbouring tensors that are held whole and follow one another in both vectors."""
    joined: list[FlatSegment] = []
    for segment in segments:
        if not segment.tensor_map.is_full:
            joined.append(segment)
            continue
        size, last = segment.tensor_map.numel, joined[-1] if joined else None
        if last is not None and _continues(last, segment):
            joined[-1] = _run(last.whole_start, last.start, last.tensor_map.numel + size)
        else:
            joined.append(_run(segment.whole_start, segment.start, size))
    return tuple(joined)


def _continues(last: FlatSegment, segment: FlatSegment) -> bool:
    size = last.tensor_map.numel
    return (
        last.tensor_map.is_full
        and last.whole_start + size == segment.whole_start
        and last.start + size == segment.start
    )


def _run(whole_start: int, start: int, size: int) -> FlatSegment:
    return FlatSegment(whole_start, start, TensorMap((Axis.full(size),)))
