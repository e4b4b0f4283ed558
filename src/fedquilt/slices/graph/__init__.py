"""The walk over a model's graph: which dimensions are cut together.

The graph comes from torch.fx; no data flows.  Each layer that makes features
(a convolution, a dense layer, an embedding) opens an axis, everything after it
carries that axis on, and the records say how each layer's tensors are cut.

Some models have a width written into their code: `x.view(-1, 400)` is right for one width
only.  A sub-model of such a model (`widthless_class`) gets
a forward made from the traced graph, in which these views are flattens.  The
graph is traced once for training and once for evaluation, because a trace
fixes what the code asks of `self.training`.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedParameter

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.trees import Tree
from fedquilt.slices.graph.cuts import (
    NOT_TENSOR,
    Layout,
    RawTensor,
    Records,
    Several,
    Value,
    argument,
    describe,
    operation,
    or_whole,
)
from fedquilt.slices.graph.operations import (
    COMBINING,
    ELEMENTWISE,
    HANDLERS,
    MEASURING,
    combine_layouts,
    concatenate,
    keep_whole,
    walk_layer,
)
from fedquilt.slices.layer_rules import SLICEABLE


class LayerTracer(fx.Tracer):
    """A tracer that takes sliceable layers, and those kept whole, as single nodes."""

    def __init__(self, whole: Sequence[str]) -> None:
        super().__init__()
        self.whole = tuple(whole)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Tell whether a module is a leaf of the graph: its inside is not traced."""
        if isinstance(m, SLICEABLE) or matches_any(module_qualified_name, self.whole):
            return True
        return super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module, whole: Sequence[str]) -> fx.Graph:
    """Return the graph of a model, or an error that says why there is none."""
    lazy = [n for n, t in model.named_parameters() if isinstance(t, UninitializedParameter)]
    if lazy:
        raise InvalidValueError(
            f"parameter {lazy[0]!r} has no size yet: call the model once on a batch, then cut it"
        )
    try:
        return LayerTracer(whole).trace(model)
    except Exception as error:
        raise InvalidValueError(
            f"model={type(model).__name__} must have a forward that torch.fx can trace "
            f"(no branches on data); keep the part in question `whole` or build the model from "
            f"the layers of fedquilt.nn.  {type(error).__name__}: {error}"
        ) from error


def walk(model: nn.Module, graph: fx.Graph, sample: Tree | None, whole: Sequence[str]) -> Records:
    """Return the axes of a model and how each layer is cut."""
    walker = Walker(model, whole)
    ranks = _ranks(graph, sample)
    for node in graph.nodes:
        walker.visit(node, ranks.get(str(node.target)) if node.op == "placeholder" else None)
    return walker.records


def _ranks(graph: fx.Graph, sample: Tree | None) -> dict[str, int]:
    """Return the number of dimensions of each input of a model, by its name."""
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    if sample is None:
        return {}
    if isinstance(sample, dict):
        return {name: part.dim() for name, part in sample.items() if isinstance(part, Tensor)}
    parts = (sample,) if isinstance(sample, Tensor) else sample
    pairs = zip(names, parts, strict=False)
    return {name: part.dim() for name, part in pairs if isinstance(part, Tensor)}


class Walker:
    """The values of a graph's nodes, and what has been recorded so far."""

    def __init__(self, model: nn.Module, whole: Sequence[str]) -> None:
        self.model = model
        self.whole = tuple(whole)
        self.records = Records()
        self.values: dict[fx.Node, Value] = {}

    def visit(self, node: fx.Node, rank: int | None) -> None:
        """Work out the value of one node."""
        if node.op == "placeholder":
            self.values[node] = Layout(rank)
        elif node.op == "get_attr":
            self.values[node] = self._attribute(str(node.target))
        elif node.op == "call_module":
            self.values[node] = self._module(node)
        elif node.op == "output":
            self._pin_all(self.value_of(node.args[0]))
        else:
            self.values[node] = self._call(node)

    def value_of(self, item: Any) -> Value:
        """Return the value of an argument."""
        if isinstance(item, fx.Node):
            return self.values[item]
        if isinstance(item, tuple | list):
            return tuple(self.value_of(one) for one in item)
        if isinstance(item, dict):
            return tuple(self.value_of(one) for one in item.values())
        return NOT_TENSOR

    def _attribute(self, name: str) -> Value:
        found: Any = self.model
        for part in name.split("."):
            found = getattr(found, part)
        return RawTensor(name, tuple(found.shape)) if isinstance(found, Tensor) else NOT_TENSOR

    def _module(self, node: fx.Node) -> Value:
        name = str(node.target)
        given = (*node.args, *node.kwargs.values())
        values = [self.value_of(item) for item in given]
        if matches_any(name, self.whole):
            return keep_whole(self.records, values)
        layer = self.model.get_submodule(name)
        if isinstance(layer, nn.RNNBase) and all(item is None for item in given[1:]):
            values = values[:1]
        return walk_layer(self.records, name, layer, values)

    def _call(self, node: fx.Node) -> Value:
        called = operation(node)
        arguments = (*node.args, *node.kwargs.values())
        values = [self.value_of(item) for item in arguments]
        if called in MEASURING or (called == "getattr" and str(node.args[1]) in MEASURING):
            return NOT_TENSOR
        if called == "getitem" and not isinstance(values[0], Layout):
            return self._item(node, values[0])
        if called == "getattr" and isinstance(values[0], tuple):
            return cast(Value, values[0][0])  # values or places of a maximum: cut alike
        if called in ("max", "min") and len(values) > 1 and _is_tensor(values[1:2]):
            return self._combined(values[0], values[1], node)
        if called in ("cat", "concat", "concatenate"):
            dim = argument(node, 1, "dim", 0)
            joined = values[0] if isinstance(values[0], tuple) else (values[0],)
            return concatenate(self.records, joined, dim, describe(node))
        if called in COMBINING and len(values) >= 2:
            return self._combined(values[0], values[1], node)
        return self._through(node, called, values)

    def _through(self, node: fx.Node, called: str, values: Sequence[Value]) -> Value:
        first = values[0] if values else NOT_TENSOR
        if called == "expand" and isinstance(first, RawTensor):
            return first
        if isinstance(first, Layout) and not _is_cut(values[1:]):
            if called in ELEMENTWISE:
                return first
            if called in HANDLERS:
                return HANDLERS[called](self.records, node, first)
        if not _is_cut(values):
            return Layout() if _is_tensor(values) else NOT_TENSOR
        raise InvalidValueError(
            f"{describe(node)}: it is not known how this acts on a tensor that is cut; build the "
            f"model from the layers of fedquilt.nn, {or_whole(node)}"
        )

    def _combined(self, one: Value, other: Value, node: fx.Node) -> Value:
        if not _is_tensor((one, other)):
            return NOT_TENSOR
        return combine_layouts(self.records, one, other, describe(node))

    def _item(self, node: fx.Node, value: Value) -> Value:
        if isinstance(value, Several):
            return value.layout
        if isinstance(value, tuple) and isinstance(node.args[1], int):
            item: Value = value[node.args[1]]
            return item
        return Layout() if isinstance(value, RawTensor) else NOT_TENSOR

    def _pin_all(self, value: Value) -> None:
        if isinstance(value, tuple):
            for one in value:
                self._pin_all(one)
        elif isinstance(value, Several):
            self._pin_all(value.layout)
        elif isinstance(value, Layout):
            self.records.pin(value.parts)
            self.records.outputs += value.parts


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a module's name, or that of a module around it, fits a pattern."""
    parts = name.split(".")
    around = [".".join(parts[: stop + 1]) for stop in range(len(parts))]
    return any(fnmatchcase(one, pattern) for one in around for pattern in patterns)


def _is_cut(values: Sequence[Value]) -> bool:
    for value in values:
        if isinstance(value, Layout) and value.axis is not None:
            return True
        if isinstance(value, Several) and _is_cut([value.layout]):
            return True
        if isinstance(value, tuple) and _is_cut(value):
            return True
    return False


def _is_tensor(values: Sequence[Value]) -> bool:
    return any(
        isinstance(value, Layout | RawTensor | Several)
        or (isinstance(value, tuple) and _is_tensor(value))
        for value in values
    )


class _Forward:
    """A forward pass made from a traced graph; it is pickled as its source."""

    def __init__(self, source: str, names: dict[str, Any]) -> None:
        self._source, self._names = source, names
        namespace = dict(names)
        exec(compile(source, "<sliced forward>", "exec"), namespace)
        self._function: Callable[..., Any] = namespace["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        modules = {k: v.__name__ for k, v in self._names.items() if isinstance(v, ModuleType)}
        others = {k: v for k, v in self._names.items() if k not in modules}
        return _forward_again, (self._source, modules, others)


def _forward_again(source: str, modules: dict[str, str], others: dict[str, Any]) -> _Forward:
    found = {name: importlib.import_module(module) for name, module in modules.items()}
    return _Forward(source, {**others, **found})


def widthless_class(
    model: nn.Module, names: Sequence[str], whole: Sequence[str]
) -> type[nn.Module]:
    """Return a subclass of the model's class whose forward flattens at the named nodes."""
    was_training = model.training
    modes = {module: module.training for module in model.modules()}
    try:
        training = _forward(trace(model.train(), whole), names)
        evaluating = _forward(trace(model.eval(), whole), names)
    finally:
        model.train(was_training)
        for module, mode in modes.items():
            module.training = mode
    return _class_with(type(model), training, evaluating)


def _class_with(kind: type[nn.Module], training: _Forward, evaluating: _Forward) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (training if self.training else evaluating)(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _instance, (kind, training, evaluating), dict(self.__dict__)

    body = {"forward": forward, "__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(f"{kind.__name__}Slice", (kind,), {**body, "__reduce_ex__": reduce})


def _instance(kind: type[nn.Module], training: _Forward, evaluating: _Forward) -> nn.Module:
    """Return an empty model of such a class; whoever copies or unpickles it fills it."""
    made = _class_with(kind, training, evaluating)
    return made.__new__(made)


def _forward(graph: fx.Graph, names: Sequence[str]) -> _Forward:
    """Return the graph as a function of the model, with flattens for the named views."""
    for node in list(graph.nodes):
        if node.name in names:
            with graph.inserting_after(node):
                flat = graph.call_function(torch.flatten, (node.args[0], 1))
            node.replace_all_uses_with(flat)
            graph.erase_node(node)
    graph.eliminate_dead_code(_may_have_effect)
    code = graph.python_code("self")
    return _Forward(code.src, dict(code.globals))


def _may_have_effect(node: fx.Node) -> bool:
    """Tell whether a node must stay though nothing uses it: all but sizes and their arithmetic."""
    harmless = (operator.getitem, operator.mul, getattr)
    is_size = node.op == "call_method" and node.target == "size"
    return not (is_size or (node.op == "call_function" and node.target in harmless))
