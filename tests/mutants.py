"""A module of the package with one check taken out, to see that an attack needs it."""

from __future__ import annotations

import ast
import inspect
from types import FunctionType, ModuleType
from typing import Any

import pytest


class _Cut(ast.NodeTransformer):
    """Takes out the statements that raise, or require, in certain words."""

    def __init__(self, words: str) -> None:
        self.words, self.count = words, 0

    def _cut(self, node: Any) -> Any:
        if self.words not in ast.unparse(node):
            return node
        self.count += 1
        return ast.copy_location(ast.Pass(), node)

    visit_Raise = visit_Expr = _cut  # noqa: N815


def take_out(monkeypatch: pytest.MonkeyPatch, module: ModuleType, words: str) -> None:
    """Let a module go on where it raises or requires in these words."""
    cut = _Cut(words)
    tree = ast.fix_missing_locations(cut.visit(ast.parse(inspect.getsource(module))))
    assert cut.count == 1, f"{cut.count} statements of {module.__name__} have {words!r}"
    made = dict(vars(module))
    exec(compile(tree, str(module.__file__), "exec"), made)
    for name, value in made.items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            monkeypatch.setattr(module, name, value)
        elif isinstance(value, type):
            for method, changed in vars(value).items():
                if isinstance(changed, (FunctionType, staticmethod)) and not method.startswith(
                    "__"
                ):
                    monkeypatch.setattr(getattr(module, name), method, changed)
