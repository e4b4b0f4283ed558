"""Sub-models whose code has a width written into it.

`x.view(-1, 400)` is right for one width only.  A sub-model of such a model gets
a forward made from the traced graph, in which these views are flattens.  The
graph is traced once for training and once for evaluation, because a trace
fixes what the code asks of `self.training`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from fedquilt.subnet.graph.walk import trace

Forward = Callable[..., Any]


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

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (training if self.training else evaluating)(self, *args, **kwargs)

    kind = type(model)
    body = {"forward": forward, "__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(f"{kind.__name__}Slice", (kind,), body)


def _forward(graph: fx.Graph, names: Sequence[str]) -> Forward:
    """Return the graph as a function of the model, with flattens for the named views."""
    for node in list(graph.nodes):
        if node.name in names:
            with graph.inserting_after(node):
                flat = graph.call_function(torch.flatten, (node.args[0], 1))
            node.replace_all_uses_with(flat)
            graph.erase_node(node)
    graph.eliminate_dead_code(_may_have_effect)
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, "<sliced forward>", "exec"), namespace)
    forward: Forward = namespace["forward"]
    return forward


def _may_have_effect(node: fx.Node) -> bool:
    """Tell whether a node must stay though nothing uses it: all but sizes and their arithmetic."""
    harmless = (operator.getitem, operator.mul, getattr)
    is_size = node.op == "call_method" and node.target == "size"
    return not (is_size or (node.op == "call_function" and node.target in harmless))
