"""Which dimensions of a model must be cut alike: axes, layouts and cuts of a walk.

Each layer that makes features opens an axis of units.  An addition ties the
axes of its operands, a grouped convolution or an attention layer makes the
units of an axis coarser, the model's output pins an axis whole.  A union-find
over units keeps track: when an axis of 64 channels is tied to one of 4 heads of
16 features, the 64 become 4 units of 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import fx, nn

from fedquilt.common.errors import InvalidValueError


@dataclass(frozen=True)
class Part:
    """An axis of the table in which every unit stands for `factor` neighbours."""

    axis: int
    factor: int = 1


class AxisTable:
    """The axes of a model under construction."""

    def __init__(self) -> None:
        self._units: list[int] = []
        self._parent: list[Part | None] = []
        self._pinned: list[bool] = []
        self._origin: list[str] = []

    def open(self, units: int, origin: str) -> Part:
        """Open an axis; `origin` is the layer that makes its features."""
        self._units.append(units)
        self._parent.append(None)
        self._pinned.append(False)
        self._origin.append(origin)
        return Part(len(self._units) - 1)

    def open_whole(self, origin: str) -> Part:
        """Open an axis that is always whole, of a size that is not known yet."""
        part = self.open(0, origin)
        self._pinned[part.axis] = True
        return part

    def set_size(self, part: Part, units: int) -> None:
        """Say how long an axis of `open_whole` is."""
        self._units[part.axis] = units

    def root(self, part: Part) -> Part:
        """Return the same features in terms of the axis they have been tied to."""
        parent = self._parent[part.axis]
        while parent is not None:
            part = Part(parent.axis, parent.factor * part.factor)
            parent = self._parent[part.axis]
        return part

    def size(self, part: Part) -> int:
        """Return the number of features."""
        return self._units[part.axis] * part.factor

    def units(self, axis: int) -> int:
        """Return the number of units of an axis."""
        return self._units[axis]

    def origin(self, part: Part) -> str:
        """Return the layer that first made the features."""
        return self._origin[part.axis]

    def is_pinned(self, axis: int) -> bool:
        """Whether an axis, given by its root, must stay whole."""
        return self._pinned[axis]

    def pin(self, part: Part) -> None:
        """Keep an axis whole."""
        self._pinned[self.root(part).axis] = True

    def tie(self, one: Part, other: Part, where: str) -> None:
        """Let two dimensions be cut alike."""
        left, right = self.root(one), self.root(other)
        if left == right:
            return
        if self.size(left) != self.size(right):
            raise InvalidValueError(
                f"{where}: features of {self.origin(one)} ({self.size(one)}) and of "
                f"{self.origin(other)} ({self.size(other)}) must be equally many to be combined"
            )
        common = math.gcd(self._units[left.axis], self._units[right.axis])
        pinned = self._pinned[left.axis] or self._pinned[right.axis]
        first = min(left.axis, right.axis)
        joint = self.open(common, self._origin[first])
        for side in (left, right):
            self._parent[side.axis] = Part(joint.axis, self._units[side.axis] // common)
        self._pinned[joint.axis] = pinned


@dataclass(frozen=True)
class Layout:
    """A tensor of a model's graph.

    Attributes
    ----------
    rank : int or None
        Its number of dimensions, where known.
    axis : int or None
        The dimension that can be cut, counted from the end (-1 is the last);
        None for a tensor that is always whole.
    parts : tuple of Part
        The features on that dimension; several after a concatenation.
    inner : int or None
        How many neighbours each feature has become, after a flatten; None while
        unknown, until a layer with a known number of inputs tells.
    thin : int or None
        In a tensor that is always whole, a dimension known to have size 1; it
        is broadcast over a cut one.
    """

    rank: int | None = None
    axis: int | None = None
    parts: tuple[Part, ...] = ()
    inner: int | None = 1
    thin: int | None = None

    def moved(self, axis: int | None, rank: int | None) -> Layout:
        """Return the layout with its cut dimension elsewhere."""
        return replace(self, axis=axis, rank=rank)

    def position(self, dim: int, where: str) -> int:
        """Return a dimension counted from the end."""
        if dim < 0:
            return dim
        if self.rank is None:
            raise InvalidValueError(
                f"{where}: the number of dimensions is not known there; "
                "give slice_model a sample of the model's input, a tuple where it has several"
            )
        return dim - self.rank


@dataclass(frozen=True)
class RawTensor:
    """A parameter or buffer that the model's own code uses directly."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Several:
    """A sequence of tensors of one layout, as chunk returns them."""

    layout: Layout


class NotTensor:
    """A number, a size, None: anything that has no layout."""


NOT_TENSOR = NotTensor()
Value = Layout | RawTensor | Several | NotTensor | tuple[Any, ...]


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def describe(node: fx.Node) -> str:
    """Return how a user would recognise a call."""
    called = node.target if isinstance(node.target, str) else operation(node)
    return f"call of {called!r} (node {node.name!r})"


def or_whole(node: fx.Node) -> str:
    """Return the advice that always works: to keep the module around a call at full width."""
    around = list(node.meta.get("nn_module_stack", {}))
    name = around[-1] if around and around[-1] else ""
    if not name:
        return "or put this part of the model into a module and name that in `whole`"
    return f"or keep it at full width: whole={name!r} (the command line: --whole {name!r})"


def operation(node: fx.Node) -> str:
    """Return the bare name of the function or method that a node calls."""
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", node.target))


Parts = tuple[Part, ...]


@dataclass
class LayerCut:
    """How one layer is cut: the features of its input and of its output.

    None stands for features that are always whole.  `dim` is the normalised
    dimension of a LayerNorm.
    """

    inputs: Parts | None
    outputs: Parts | None
    dim: int = -1


@dataclass
class Records:
    """The axes of a model, and how each of its layers and raw tensors is cut."""

    table: AxisTable = field(default_factory=AxisTable)
    layers: dict[str, LayerCut] = field(default_factory=dict)
    raw: dict[str, tuple[int, Parts]] = field(default_factory=dict)
    written_sizes: list[str] = field(default_factory=list)
    outputs: Parts = ()

    def cut_layer(
        self, name: str, inputs: Parts | None, outputs: Parts | None, dim: int = -1
    ) -> Parts | None:
        """Record a layer, or tie a second use of it to the first; return its output features."""
        known = self.layers.get(name)
        if known is None:
            self.layers[name] = LayerCut(inputs, outputs, dim)
            return outputs
        self._tie_uses(known.inputs, inputs, name)
        self._tie_uses(known.outputs, outputs, name)
        return known.outputs

    def cut_raw(self, raw: RawTensor, axis: int, parts: Parts) -> None:
        """Record that a parameter used by the model's own code is cut on a dimension."""
        known = self.raw.setdefault(raw.name, (axis, parts))
        if known[0] != axis:
            raise InvalidValueError(f"parameter {raw.name!r} must be cut on one dimension only")
        self.tie(known[1], parts, raw.name)

    def tie(self, one: Parts, other: Parts, where: str) -> None:
        """Let two lists of features be cut alike."""
        sizes = [[self.table.size(part) for part in parts] for parts in (one, other)]
        if sizes[0] != sizes[1]:
            raise InvalidValueError(
                f"{where}: features {sizes[0]} and {sizes[1]} must be put together alike to be "
                "combined"
            )
        for left, right in zip(one, other, strict=True):
            self.table.tie(left, right, where)

    def pin(self, parts: Parts) -> None:
        """Keep features whole."""
        for part in parts:
            self.table.pin(part)

    def features(self, value: Layout, expected: int, where: str) -> Parts:
        """Return the features on the cut dimension, of which a layer expects so many.

        A flatten leaves open how many neighbours each feature has become; the
        layer that follows tells.
        """
        unknown = [part for part in value.parts if self.table.size(part) == 0]
        size = sum(self.table.size(part) for part in value.parts)
        if len(unknown) == 1 and value.inner == 1 and size < expected:
            self.table.set_size(unknown[0], expected - size)
            size = expected
        inner = value.inner if value.inner is not None else expected // max(size, 1)
        if inner * size != expected:
            raise InvalidValueError(
                f"{where}: takes {expected} features but is given {size} x {inner}; "
                "the model's graph is not understood there"
            )
        return tuple(Part(part.axis, part.factor * inner) for part in value.parts)

    def _tie_uses(self, known: Parts | None, again: Parts | None, name: str) -> None:
        if known is not None and again is not None:
            self.tie(known, again, f"layer {name!r}, used twice")
        elif known is not None or again is not None:
            self.pin(known or again or ())


def parameter_count(layer: nn.Module) -> int:
    """Return the number of parameters of a layer and what it holds."""
    return sum(prod(parameter.shape) for parameter in layer.parameters())
