"""A slice of a model: its tensors, and where they lie in the flat vector.

A client's update is one flat vector: the trainable parameters in
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

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.common.errors import InvalidValueError
from fedquilt.slices.layer_rules import STATISTICS
from fedquilt.slices.layers import SubsetLayer
from fedquilt.slices.selection import Axis
from fedquilt.slices.tensor_map import TensorMap

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
    held = [name for name in mine if name in whole or not _is_statistic(name)]
    for name in held:
        if name not in maps:
            maps[name] = TensorMap.full(mine[name].shape)
        _check_shapes(name, maps[name], whole.get(name), mine[name])
    return ModelSlice(tuple((name, maps[name]) for name in held))


def _is_statistic(name: str) -> bool:
    """Tell whether a tensor may be on one side only: running statistics that one side tracks."""
    return name.rpartition(".")[2] in STATISTICS


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
def assign_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write values into a model's tensors, in the model's own types and device.

    Running statistics that are not among them stay as they are.
    """
    for name, tensor in tensors_of(model).items():
        if name in values or not _is_statistic(name):
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
    missing, foreign = ({n for n in some if not _is_statistic(n)} for some in (missing, foreign))
    if missing or foreign:
        problems = [f"only server_net has {', '.join(sorted(missing))}"] if missing else []
        problems += [f"only client_net has {', '.join(sorted(foreign))}"] if foreign else []
        raise InvalidValueError(
            f"client_net and server_net must have the same tensors: {'; '.join(problems)}"
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


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor in a flat vector: row k begins at start + k length."""

    start: int
    length: int


@dataclass(frozen=True)
class WithoutRows:
    """A place in the whole vector, less some rows of some tensors: they are not held."""

    place: SliceMap
    rows: tuple[Rows, ...]
    left_out: tuple[int, ...]

    def scatter_add_(self, total: Tensor, part: Tensor, alpha: float = 1.0) -> None:
        """Add alpha times what is held of a sub-model's vector to the whole one."""
        self.place.scatter_add_(total, self._held(part.clone()), alpha)

    def cover_(self, coverage: Tensor, weight: float = 1.0) -> None:
        """Add a weight to every element of the whole vector that is held."""
        self.place.scatter_add_(coverage, self._held(coverage.new_ones(self.place.size)), weight)

    def _held(self, part: Tensor) -> Tensor:
        for rows in self.rows:
            for row in self.left_out:
                start = rows.start + row * rows.length
                part[start : start + rows.length] = 0
        return part


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
