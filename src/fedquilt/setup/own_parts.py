"""Digests of the code that a user brought: what tells two experiments apart that are both `custom`.

One is public (`metadata.parts` of a result): source, what it names in its own module, and the
numbers and texts in its closures and defaults.  The other is for the owner alone (`held` in
clients.json): also constants of the module, attributes of objects, and what tensors and lists hold.
Weights of the model are in neither: seeds may begin at other ones.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (str, int, float, bool, type(None), torch.device, torch.dtype)
_LIBRARIES = {"torch", "fedquilt", "numpy", *sys.stdlib_module_names}
_FIRST_HOMES = {
    "ImageDataset": "fedquilt.data.dataset",
    "SyntheticSet": "fedquilt.condense.synthetic",
    "Axis": "fedquilt.slices.ranges",
    "exits_loss": "fedquilt.slices.depth",
    "AmplifiedCertified": "fedquilt.privacy.poisson",
    **dict.fromkeys(("Adjacency", "Release"), "fedquilt.privacy.accounting.release"),
}
"""Where parts of the package lay when they were first in a digest: it stays what it was."""


def parts_digest(model: nn.Module, brought: Sequence[Any]) -> str:
    """Return the public digest of the model's structure and of the parts; samples are not in it."""
    shapes = [(name, list(tensor.shape)) for name, tensor in model.state_dict().items()]
    return _digest([str(model), str(shapes), *(_Text().of(part) for part in brought)])


def code_digest(parts: Sequence[Any]) -> str:
    """Return the public digest of parts alone."""
    return _digest([_Text().of(part) for part in parts])


def held_digest(model: nn.Module, brought: Sequence[Any]) -> str:
    """Return the digest of all that the model's classes and the parts compute with."""
    text = _Text(whole=True)
    modules = [(name, type(part), _settings(part)) for name, part in model.named_modules()]
    return _digest([text.of(modules), *(text.of(part) for part in brought)])


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _is_own(part: Any) -> bool:
    """Tell whether a class or a function is somebody's own, not of an installed package."""
    module = inspect.getmodule(part)
    top = getattr(part, "__module__", None) or "builtins"
    installed = "site-packages" in str(getattr(module, "__file__", None) or "")
    return not installed and top.partition(".")[0] not in _LIBRARIES


def _settings(part: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(part).items()
        if isinstance(value, _PLAIN) and name != "training"
    }


class _Text:
    """Writes parts as text; `whole` also what must not be public."""

    def __init__(self, *, whole: bool = False) -> None:
        self.whole = whole
        self._seen: list[Any] = []  # kept alive, so that no second thing has its address
        self._places: set[int] = set()

    def of(self, part: Any) -> str:
        """Return the source of a function or class, with what it holds; the code without one."""
        if isinstance(part, _PLAIN):
            return repr(part)
        if isinstance(part, tuple):
            return str([self.of(value) for value in part])
        if id(part) in self._places:
            return "seen before"
        self._seen.append(part)
        self._places.add(id(part))
        if isinstance(part, Mapping):
            return str({str(key): self.of(value) for key, value in part.items()})
        if isinstance(part, list):
            return str([self.of(value) for value in part])
        if isinstance(part, functools.partial):
            return self.of([part.func, part.args, part.keywords])
        if isinstance(part, type) or inspect.isroutine(part):
            return self._code(part)
        return f"{type(part).__qualname__} {self.of(type(part))} {self._content(part)}"

    def _content(self, part: Any) -> str:
        """Return what an object holds; it may be samples, so in public only of which type it is."""
        if not self.whole:
            return ""
        if isinstance(part, torch.Tensor | np.ndarray):
            array = part.detach().cpu().numpy() if isinstance(part, torch.Tensor) else part
            return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
        if isinstance(part, bytes | set | frozenset):
            return repr(part if isinstance(part, bytes) else sorted(map(self.of, part)))
        inside = isinstance(part, nn.Module) or _is_own(type(part))
        return self.of(getattr(part, "__dict__", None)) if inside else ""

    def _code(self, part: Any) -> str:
        if not _is_own(part):  # a library may change its classes at their first use
            home, name = str(getattr(part, "__module__", "")), part.__qualname__
            return f"{_FIRST_HOMES.get(name, home) if home[:9] == 'fedquilt.' else home} {name}"
        try:
            source = inspect.getsource(part)
        except (OSError, TypeError):  # typed into an interpreter, or not written in Python
            source = _instructions(getattr(part, "__code__", None))
        # torch wraps the step of an optimiser at its first use: what it wraps stays the same
        owned = vars(part).values() if isinstance(part, type) else [part]
        inside = [inspect.unwrap(one) for one in owned]
        closures = [getattr(one, "__closure__", None) or () for one in inside]
        held = [self.of(_filled(cell)) for cells in closures for cell in cells]
        held += [self.of(used) for one in inside for used in self._named(one)]
        name = getattr(part, "__qualname__", repr(type(part)))
        defaults = getattr(part, "__defaults__", None), getattr(part, "__kwdefaults__", None)
        return f"{name} {source} {held} {self.of(defaults)}"

    def _named(self, given: Any) -> list[Any]:
        """Return what a method or a function names in its own module: functions and classes."""
        function = getattr(given, "fget", None) or getattr(given, "__func__", given)
        names = getattr(getattr(function, "__code__", None), "co_names", ())
        found = [(name, function.__globals__.get(name)) for name in names]
        own: list[Any] = [
            one
            for _, one in found
            if isinstance(one, type | types.FunctionType) and one.__module__ == function.__module__
        ]
        constants = (*_PLAIN, bytes, list, tuple, dict, set, torch.Tensor, np.ndarray)
        if self.whole:
            own += [(name, one) for name, one in found if isinstance(one, constants)]
        return own


def _instructions(code: types.CodeType | None) -> str:
    """Return what compiled code does, as text that is the same in every process."""
    if code is None:
        return ""
    held = [_instructions(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code!r} {code.co_names} {held}"


def _filled(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
