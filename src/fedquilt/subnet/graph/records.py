"""What a walk over a model's graph finds out."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from torch import nn

from fedquilt.errors import InvalidValueError
from fedquilt.subnet.graph.axis_table import AxisTable, Part
from fedquilt.subnet.graph.layout import Layout, RawTensor

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
        size = sum(self.table.size(part) for part in value.parts)
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
