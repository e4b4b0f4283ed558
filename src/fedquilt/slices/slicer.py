"""The sub-network of any model, in width and in depth, and HeteroFL's Scaler.

    small = slice_model(model, "1/4")            # the first quarter of every hidden axis
    small = slice_model(model, Window("1/4", 3)) # a rolling window

A `Slicer` is made once for a model; each slice is then only arithmetic on runs of
positions, and is cached for as long as it is likely to come again.

By depth a slice is the first blocks of a model that can stop after any of them.  DepthFL (Kim et
al. 2023) gives every block a classifier of its own; a client trains the first d blocks with their
classifiers.  A model takes part in it when it has two lists of modules of one length, `blocks` and
`heads`, and a method `exits(x)` that returns the outputs of all heads it has;
`fedquilt.models.ExitNet` is one.

ScaleFL (Ilhan et al. 2023) cuts such a model in both directions: the first blocks, and of each the
first units.  A client of width w keeps the share r = w^(2/3) of either, so that r^3 = w^2 of the
weights are left, about as many as in HeteroFL's slice of width w.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedquilt.common import checks, trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.trees import Tree
from fedquilt.slices.graph import trace, walk, widthless_class
from fedquilt.slices.graph.cuts import LayerCut, Part, Parts
from fedquilt.slices.layer_rules import resize, tensor_maps
from fedquilt.slices.model_slice import ModelSlice, attach, tensors_of
from fedquilt.slices.selection import Axis, Bound, Prefix, Selection, as_selection, end_to_end
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
            axes = [Axis.full(size) for size in tensors[name].shape]
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


class DepthSlicer:
    """How a model with early exits is cut; it answers like a `Slicer`."""

    def __init__(self, model: nn.Module) -> None:
        parts = [getattr(model, name, None) for name in ("blocks", "heads")]
        sizes = {len(part) for part in parts if isinstance(part, nn.ModuleList)}
        listed = all(isinstance(part, nn.ModuleList) for part in parts)
        if not listed or len(sizes) != 1 or not callable(getattr(model, "exits", None)):
            raise InvalidValueError(
                f"method='depthfl' or 'scalefl' must be used with a model that has `blocks`, "
                f"`heads` and `exits`, such as model='exits'; {type(model).__name__} has not"
            )
        self.model = model
        self.depth = sizes.pop()
        self._parts = [(f"blocks.{i}", f"heads.{i}") for i in range(self.depth)]

    def blocks(self, width: Fraction) -> Blocks:
        """Return the first floor(width x depth) blocks; no model has less than one."""
        return Blocks(tuple(range(max(1, math.floor(width * self.depth)))), self.depth)

    def slice(self, held: Blocks) -> ModelSlice:
        """Return what a client with these blocks holds."""
        return depth_slice(self.model, self._parts, held)

    def build(self, held: Blocks, *, scaled: bool = False) -> nn.Module:
        """Return the model that ends after the last held block."""
        small: Any = copy.deepcopy(self.model)
        small.blocks = small.blocks[: len(held.held)]
        small.heads = small.heads[: len(held.held)]
        attach(small, self.slice(held))
        return small  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Scaled:
    """The first blocks, and the first units of their axes."""

    blocks: Blocks
    width: Prefix


class ScaleSlicer:
    """How a model with early exits is cut in both directions; it answers like a `Slicer`."""

    def __init__(self, model: nn.Module, sample: Tree, whole: Sequence[str] = ()) -> None:
        self._depth, self._sample, self._whole = DepthSlicer(model), sample, whole
        self._plans: dict[Blocks, Slicer] = {}

    def blocks(self, width: Fraction) -> Scaled:
        """Return the share w^(2/3) of the blocks, at least one, and of the units of each."""
        share = Fraction(float(width) ** (2 / 3)).limit_denominator(64)
        return Scaled(self._depth.blocks(share), Prefix(min(share, Fraction(1))))

    def slice(self, held: Scaled) -> ModelSlice:
        """Return what a client holds."""
        return self._plan(held).slice(held.width)

    def build(self, held: Scaled, *, scaled: bool = False) -> nn.Module:
        """Return the narrow model that ends after the last held block."""
        return self._plan(held).build(held.width, scaled=scaled)

    def _plan(self, held: Scaled) -> Slicer:
        if held.blocks not in self._plans:
            model = self._depth.build(held.blocks)
            self._plans[held.blocks] = Slicer(model, self._sample, self._whole)
        return self._plans[held.blocks]


def ramp(round_index: int, rampup: int) -> float:
    """Return the weight of the distillation in round t: exp(-5 (1 - t/T)^2), 1 from round T on.

    Early exits have little to teach at first (Kim et al. 2023; the sigmoid ramp-up of Laine and
    Aila 2017, T = 300 in the authors' code).  T = 0 starts at 1.
    """
    if round_index >= rampup:
        return 1.0
    return math.exp(-5.0 * (1.0 - round_index / rampup) ** 2)


def exits_loss(
    module: nn.Module, inputs: Tree, targets: Tensor, distillation: float = 1.0
) -> Tensor:
    """Return DepthFL's loss over the exits z_1 .. z_d of a client's model.

        sum_i CE(z_i, y) + r/(d - 1) sum_i sum_(j != i) KL(p_j || p_i)

    The exits teach one another; no gradient goes through a teacher (Kim et al. 2023, eq. 2).
    r is `distillation`, see `ramp`.
    """
    exits: Any = module.exits
    outputs: Sequence[Tensor] = trees.call_with(exits, inputs)
    logs = [functional.log_softmax(z, dim=-1) for z in outputs]
    loss = sum((functional.nll_loss(log, targets) for log in logs), start=logs[0].new_zeros(()))
    for mine in logs if len(logs) > 1 else ():
        for other in (log for log in logs if log is not mine):
            apart = functional.kl_div(mine, other.detach(), reduction="batchmean", log_target=True)
            loss = loss + distillation * apart / (len(logs) - 1)
    return loss


@dataclass(frozen=True)
class Blocks:
    """Which of a model's blocks, numbered from 0, a client holds."""

    held: tuple[int, ...]
    total: int

    def __post_init__(self) -> None:
        if not self.held or any(not 0 <= block < self.total for block in self.held):
            raise InvalidValueError(f"held={self.held} must be blocks of 0..{self.total - 1}")


def depth_slice(model: nn.Module, blocks: Sequence[Sequence[str]], held: Blocks) -> ModelSlice:
    """Return the slice of a client that holds only some blocks.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    blocks : sequence of sequences of str
        For each depth, the names of the modules that belong to it: the block
        and, as in DepthFL, its own classifier.  What is named in none is held
        by everyone.
    held : Blocks
        The depths that the client holds.
    """
    if len(blocks) != held.total:
        raise InvalidValueError(f"blocks={len(blocks)} of them must be the {held.total} of held")
    modules = {name for name, _ in model.named_modules()}
    for name in (name for names in blocks for name in names):
        if name not in modules:
            raise InvalidValueError(f"blocks: {name!r} must be a module of the model")
    absent = tuple(
        f"{name}."
        for number, names in enumerate(blocks)
        for name in names
        if number not in held.held
    )
    return ModelSlice(
        tuple(
            (name, TensorMap.full(tensor.shape))
            for name, tensor in tensors_of(model).items()
            if not absent or not name.startswith(absent)
        )
    )
