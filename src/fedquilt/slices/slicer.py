"""The sub-network of any model, and HeteroFL's Scaler.

    small = slice_model(model, "1/4")            # the first quarter of every hidden axis
    small = slice_model(model, Window("1/4", 3)) # a rolling window

A `Slicer` is made once for a model; each slice is then only arithmetic on runs of
positions, and is cached for as long as it is likely to come again.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.trees import Tree
from fedquilt.slices.graph import trace, walk, widthless_class
from fedquilt.slices.graph.cuts import LayerCut, Part, Parts
from fedquilt.slices.layer_rules import resize, tensor_maps
from fedquilt.slices.model_slice import ModelSlice, attach, tensors_of
from fedquilt.slices.ranges import Axis, Bound, end_to_end
from fedquilt.slices.selection import Selection, as_selection
from fedquilt.slices.tensor_map import TensorMap
from fedquilt.training.state import ModuleState


class Scaler(nn.Module):
    """x / keep_rate in training mode, x in evaluation.

    A layer that keeps the share r of its inputs gives outputs that are r times
    as large on average; dividing by r while the slice trains lets the whole
    model be used without a change, as inverted dropout does.

    Parameters
    ----------
    keep_rate : float
        The share that is kept, in (0, 1].
    training : bool
        False builds a Scaler that never scales.
    """

    def __init__(self, keep_rate: float, training: bool = True) -> None:
        super().__init__()
        rate = checks.number("keep_rate", keep_rate, above=0, at_most=1)
        self.keep_rate = rate if training else 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Scale in training mode."""
        return x / self.keep_rate if self.training and self.keep_rate != 1 else x

    def extra_repr(self) -> str:
        """Return the rate."""
        return f"keep_rate={self.keep_rate}"


@dataclass(frozen=True)
class _ScaleOutput:
    """A forward hook that does what a Scaler behind the layer would."""

    keep_rate: float
    always: bool = False

    def __call__(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output / self.keep_rate if self.always or layer.training else output


def scale_outputs(layer: nn.Module, keep_rate: float) -> None:
    """Let a layer act as if a Scaler followed it; names in the state dict do not change."""
    rate = checks.number("keep_rate", keep_rate, above=0, at_most=1)
    if rate < 1:
        layer.register_forward_hook(_ScaleOutput(rate))


REMEMBERED = 256
_MAKERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def keep_scaling(model: nn.Module) -> None:
    """Let the layers of a slice scale in evaluation too: the small model as it was trained.

    The Scaler is left out of evaluation for the sake of the whole model; a narrow model that is
    used by itself needs it.
    """
    for layer in model.modules():
        for key, hook in layer._forward_hooks.items():
            if isinstance(hook, _ScaleOutput):
                layer._forward_hooks[key] = replace(hook, always=True)


@dataclass(frozen=True)
class PlanAxis:
    """One dimension along which a model can be cut.

    Attributes
    ----------
    origin : str
        The layer that makes its features.
    units : int
        How many units can be kept or dropped.
    pinned : bool
        Whether it must stay whole, as the axis of the model's output.
    """

    origin: str
    units: int
    pinned: bool


class Slicer:
    """How a model can be cut, found out once from its graph.

    Parameters
    ----------
    model : nn.Module
        An ordinary model.  It is kept, not copied: `build` cuts its current values.
    sample : tensor, optional
        A batch of inputs; only its number of dimensions is used, and only
        models that count dimensions from the front before any convolution need it.
    whole : sequence of str
        Names or patterns of modules that stay at full width.
    """

    def __init__(
        self, model: nn.Module, sample: Tree | None = None, whole: Sequence[str] = ()
    ) -> None:
        state = ModuleState(model, model.parameters())
        graph = trace(model, whole)
        records = walk(model, graph, sample, whole)
        state.restore()  # following the forward pass may have left something behind
        self.model = model
        self.axes: tuple[PlanAxis, ...] = ()
        self._number: dict[int, int] = {}
        self._table = records.table
        self._layers = {name: self._rooted(cut) for name, cut in records.layers.items()}
        raw = {name: (dim, self._roots(parts)) for name, (dim, parts) in records.raw.items()}
        saved = tensors_of(model)
        self._raw = {name: cut for name, cut in raw.items() if name in saved}
        self._unsaved = {name: cut for name, cut in raw.items() if name not in saved}
        _refuse_computed(self._unsaved)
        self.output_layer = self._output_layer(records.outputs)
        """The one linear layer that makes the model's output, None where there is no such."""
        self._list_axes()
        self._kind = type(model)
        if records.written_sizes:
            self._kind = widthless_class(model, records.written_sizes, whole)
        self._slices: OrderedDict[Selection, ModelSlice] = OrderedDict()

    @property
    def cuts_unsaved(self) -> bool:
        """Whether tensors are cut that no state dict has, such as non-persistent buffers."""
        return bool(self._unsaved)

    def slice(self, width: Bound | Selection) -> ModelSlice:
        """Return what a sub-network of a width, or of any selection, holds."""
        selection = as_selection(width)
        if selection not in self._slices:
            self._slices[selection] = self._cut(selection)
            if len(self._slices) > REMEMBERED:
                self._slices.popitem(last=False)
        self._slices.move_to_end(selection)
        return self._slices[selection]

    def importance(self, values: Mapping[str, Tensor]) -> list[NDArray[np.float64]]:
        """Return of each free axis how large the weights are that make its units, |w| summed.

        Of linear layers and convolutions; an axis that other layers make has zeros.
        """
        free = {number: axis for axis, number in self._number.items()}
        scores = [np.zeros(self._table.units(free[number])) for number in range(len(free))]
        for name, cut in self._layers.items():
            layer, parts = self.model.get_submodule(name), cut.outputs or ()
            if not isinstance(layer, _MAKERS) or f"{name}.weight" not in values:
                continue
            rows = values[f"{name}.weight"].detach().double().abs().flatten(1).sum(dim=1).cpu()
            start = 0
            for part in parts:
                units = self._table.units(part.axis)
                own = rows[start : start + units * part.factor].view(units, part.factor).sum(dim=1)
                start += units * part.factor
                if part.axis in self._number:
                    scores[self._number[part.axis]] += own.numpy()
        return scores

    def build(self, width: Bound | Selection, *, scaled: bool = False) -> nn.Module:
        """Return the sub-network, with its part of the model's current values.

        It is an ordinary small model of the same class with the same names, and
        it remembers its slice.

        Parameters
        ----------
        scaled : bool
            Divide, in training mode, the output of each layer that lost
            outputs by the share it kept (HeteroFL's Scaler).
        """
        selection = as_selection(width)
        held = self.slice(selection)
        small = copy.deepcopy(self.model, self._cut_tensors(held))
        if self._kind is not type(self.model):
            small.__class__ = self._kind
        for name, cut in self._layers.items():
            layer = small.get_submodule(name)
            inputs, outputs = self._axes_of(cut, name, selection)
            resize(layer, inputs, outputs, f"layer {name!r}", cut.dim)
            if scaled and isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
                scale_outputs(layer, len(outputs) / outputs.size)
        for name, (dim, parts) in self._unsaved.items():
            self._cut_unsaved(small, name, dim, self._axis(parts, selection))
        attach(small, held)
        return small

    def _cut_unsaved(self, small: nn.Module, name: str, dim: int, kept: Axis) -> None:
        """Cut a non-persistent buffer, or a tensor in a plain attribute, of the small model."""
        owner, _, attribute = name.rpartition(".")
        home = small.get_submodule(owner)
        tensor: Tensor = getattr(home, attribute)
        setattr(home, attribute, tensor.index_select(dim, kept.index.to(tensor.device)))

    def _cut(self, selection: Selection) -> ModelSlice:
        maps: dict[str, TensorMap] = {}
        tensors = tensors_of(self.model)
        for name, cut in self._layers.items():
            layer = self.model.get_submodule(name)
            inputs, outputs = self._axes_of(cut, name, selection)
            found = tensor_maps(layer, inputs, outputs, f"layer {name!r}", cut.dim)
            maps.update((f"{name}.{key}" if name else key, m) for key, m in found.items())
        for name, (dim, parts) in self._raw.items():
            axes = [Axis.full(size) for size in self._raw_shape(name)]
            axes[dim] = self._axis(parts, selection)
            maps[name] = TensorMap(tuple(axes))
        items = [(name, maps.get(name, TensorMap.full(t.shape))) for name, t in tensors.items()]
        _refuse_torn(items, tensors)
        return ModelSlice(tuple(items))

    def _cut_tensors(self, held: ModelSlice) -> dict[int, Any]:
        """Return the cut tensors as a memo for deepcopy, which then never copies the whole ones."""
        memo: dict[int, Any] = {}
        tensors = tensors_of(self.model)
        for name, tensor_map in held.items:
            tensor = tensors[name]
            if tensor_map.is_full:
                continue
            part = tensor_map.gather(tensor.detach()).clone()
            if isinstance(tensor, nn.Parameter):
                part = nn.Parameter(part, tensor.requires_grad)
            memo[id(tensor)] = part
        return memo

    def _axes_of(self, cut: LayerCut, name: str, selection: Selection) -> tuple[Axis | None, Axis]:
        layer = self.model.get_submodule(name)
        outputs = self._axis(cut.outputs or (), selection)
        if cut.inputs is not None:
            return self._axis(cut.inputs, selection), outputs
        names = ("in_features", "in_channels", "input_size")
        size = next((getattr(layer, name) for name in names if hasattr(layer, name)), None)
        return (None if size is None else Axis.full(size)), outputs

    def _axis(self, parts: Parts, selection: Selection) -> Axis:
        return end_to_end([self._chosen(part, selection) for part in parts])

    def _chosen(self, part: Part, selection: Selection) -> Axis:
        units = self._table.units(part.axis)
        if self._table.is_pinned(part.axis):
            return Axis.full(units * part.factor)
        try:
            kept = selection.choose(units, self._number[part.axis])
        except InvalidValueError as error:
            raise InvalidValueError(f"layer {self._table.origin(part)!r}: {error}") from error
        return kept.spread(part.factor)

    def _output_layer(self, outputs: Parts) -> str | None:
        last = self._roots(outputs)
        makers = [name for name, cut in self._layers.items() if cut.outputs == last]
        if len(makers) != 1 or len(last) != 1:
            return None
        return makers[0] if isinstance(self.model.get_submodule(makers[0]), nn.Linear) else None

    def _raw_shape(self, name: str) -> tuple[int, ...]:
        return tuple(tensors_of(self.model)[name].shape)

    def _roots(self, parts: Parts) -> Parts:
        return tuple(self._table.root(part) for part in parts)

    def _rooted(self, cut: LayerCut) -> LayerCut:
        inputs = None if cut.inputs is None else self._roots(cut.inputs)
        outputs = None if cut.outputs is None else self._roots(cut.outputs)
        return LayerCut(inputs, outputs, cut.dim)

    def _list_axes(self) -> None:
        """Number the axes that can be cut, in the order of the layers that make them."""
        listed: dict[int, PlanAxis] = {}
        for cut in self._layers.values():
            for part in (*(cut.inputs or ()), *(cut.outputs or ())):
                if part.axis not in listed:
                    pinned = self._table.is_pinned(part.axis)
                    units = self._table.units(part.axis)
                    listed[part.axis] = PlanAxis(self._table.origin(part), units, pinned)
        self.axes = tuple(listed.values())
        free = [axis for axis, known in listed.items() if not known.pinned]
        self._number = {axis: number for number, axis in enumerate(free)}
        if not free:
            raise InvalidValueError(
                f"model={type(self.model).__name__} must have an axis that can be cut: "
                "every layer reaches the input and the output at full width"
            )


def slice_model(
    model: nn.Module,
    width: Bound | Selection,
    *,
    sample: Tree | None = None,
    whole: Sequence[str] = (),
    scaled: bool = False,
) -> nn.Module:
    """Return the sub-network of an ordinary model.

    Inputs and outputs stay whole; every hidden axis keeps what `width` says.
    Layers whose outputs are added are cut alike, concatenated features follow
    one another, grouped convolutions lose groups and attention loses heads.

    Parameters
    ----------
    model : nn.Module
        A model that torch.fx can trace and whose layers can be cut, or are kept `whole`; what
        cannot be cut is an error that says so.  It is not changed.
    width : fraction or Selection
        '1/4' and the like keep the first quarter of every hidden axis.
    sample, whole
        As in `Slicer`, which is faster for many slices of one model.
    scaled : bool
        As in `Slicer.build`.
    """
    return Slicer(model, sample, whole).build(width, scaled=scaled)


def _refuse_computed(names: Iterable[str]) -> None:
    """Raise for a constant that forward computes from attributes: nothing says how to cut it."""
    for name in names:
        if name.rpartition(".")[2].startswith("_tensor_constant"):
            raise InvalidValueError(
                "forward must not compute a tensor of the cut width from attributes alone; compute "
                "it once in __init__ and register it as a buffer"
            )


def _refuse_torn(items: list[tuple[str, TensorMap]], tensors: dict[str, Tensor]) -> None:
    """Raise when two names of one tensor are cut in two ways."""
    seen: dict[int, tuple[str, TensorMap]] = {}
    for name, tensor_map in items:
        first, known = seen.setdefault(id(tensors[name]), (name, tensor_map))
        if known != tensor_map:
            raise InvalidValueError(
                f"tensors {first!r} and {name!r} are one and must be cut alike; the model's "
                "graph cuts them in two ways"
            )
