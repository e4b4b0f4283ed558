"""What is known of a value while a model's graph is walked: which dimension is cut, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fedquilt.errors import InvalidValueError
from fedquilt.subnet.graph.axis_table import Part


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
                "give slice_model a sample of the model's input"
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


def operation(node: fx.Node) -> str:
    """Return the bare name of the function or method that a node calls."""
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", node.target))
