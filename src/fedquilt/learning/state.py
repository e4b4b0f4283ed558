"""The whole state of a module, and how it is put back before every client.

One working model trains all clients of an engine.  Its trainable parameters are written
anew for each of them; everything else that a forward pass can move must be put back as
well, bit by bit, or one client's data would reach the next client's update: frozen
parameters (a momentum teacher), buffers, tensors and numbers in plain attributes, lists
of them, generators.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

# Values that cannot change; whoever holds them is put back, and that is enough.
_FIXED = (
    *(int, float, complex, str, bytes, type(None), type, range, slice),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout, np.generic, np.dtype),
    *(FunctionType, BuiltinFunctionType, ModuleType),
)


class _Part(NamedTuple):
    """One thing that can move: how it is put back, and the names of what in it has moved."""

    restore: Callable[[], None]
    moved: Callable[[], list[str]]


class ModuleState:
    """A picture of everything that a module holds, taken when it is made.

    Parameters
    ----------
    module : nn.Module
        The module.
    written : iterable of tensors
        Tensors whose values are written before every client anyway; their values are
        not part of the picture.
    """

    def __init__(self, module: nn.Module, written: Iterable[torch.Tensor] = ()) -> None:
        self.opaque: list[str] = []
        """The names of things whose state cannot be seen, so not put back either."""
        self._written = {id(tensor) for tensor in written}
        self._known: dict[int, Any] = {}
        self._parts: list[_Part] = []
        self._take(module, "")

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back as it was."""
        for part in self._parts:
            part.restore()

    @torch.no_grad()
    def moved(self) -> list[str]:
        """Return the names of what is not as it was."""
        return sorted({name for part in self._parts for name in part.moved()})

    def _take(self, value: Any, name: str) -> None:
        """Take a value into the picture, and everything that hangs on it."""
        if isinstance(value, _FIXED) or id(value) in self._known:
            return
        self._known[id(value)] = value  # kept alive, so that its id stays its own
        if isinstance(value, torch.Tensor):
            if id(value) not in self._written:
                self._parts.append(_tensor(name, value))
        elif isinstance(value, np.ndarray):
            self._parts.append(_array(name, value))
        elif isinstance(value, dict):
            self._parts.append(_mapping(name, value))
            for key, item in list(value.items()):
                self._take(item, _below(name, key))
        elif isinstance(value, list | deque):
            self._parts.append(_sequence(name, value))
            for place, item in enumerate(list(value)):
                self._take(item, _below(name, place))
        elif isinstance(value, set):
            self._parts.append(_set(name, value))
        elif isinstance(value, tuple | frozenset):
            for place, item in enumerate(value):
                self._take(item, _below(name, place))
        elif isinstance(value, MethodType):
            self._take(value.__self__, name)
        else:
            self._take_object(value, name)

    def _take_object(self, value: Any, name: str) -> None:
        generator = _generator(name, value)
        if generator is not None:
            self._parts.append(generator)
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._take(attributes, name)
        else:
            self.opaque.append(name)


def _below(name: str, key: object) -> str:
    """Return the name of what stands under a key, as `state_dict` would write it."""
    text = "" if key in ("_parameters", "_buffers", "_modules") else str(key)
    return ".".join(part for part in (name, text) if part)


def _tensor(name: str, tensor: torch.Tensor) -> _Part:
    saved, wants_gradient = tensor.detach().clone(), tensor.requires_grad

    def moved() -> list[str]:
        same = tensor.shape == saved.shape and tensor.dtype == saved.dtype
        return [] if same and _same_bits(tensor.detach(), saved) else [name]

    def restore() -> None:
        if tensor.shape != saved.shape or tensor.dtype != saved.dtype:
            tensor.data = saved.clone()
        else:
            tensor.detach().copy_(saved)
        if tensor.is_leaf and tensor.requires_grad != wants_gradient:
            tensor.requires_grad_(wants_gradient)

    return _Part(restore, moved)


def _same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Tell whether two tensors hold the same values, NaN being the same as NaN."""
    if torch.equal(ours, theirs):
        return True
    if not (ours.is_floating_point() or ours.is_complex()):
        return False
    return bool(torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True))


def _array(name: str, array: NDArray[Any]) -> _Part:
    saved = array.copy()

    def restore() -> None:
        array[...] = saved

    return _Part(restore, lambda: [] if np.array_equal(array, saved) else [name])


def _mapping(name: str, mapping: dict[Any, Any]) -> _Part:
    saved = dict(mapping)

    def moved() -> list[str]:
        keys = [*saved, *(key for key in mapping if key not in saved)]
        return [
            _below(name, key)
            for key in keys
            if key not in _SET_BY_TRAIN and mapping.get(key, _ABSENT) is not saved.get(key, _ABSENT)
        ]

    def restore() -> None:
        if len(mapping) != len(saved) or any(
            mapping.get(key, _ABSENT) is not value for key, value in saved.items()
        ):
            mapping.clear()
            mapping.update(saved)

    return _Part(restore, moved)


def _sequence(name: str, items: Any) -> _Part:
    saved = list(items)

    def differs() -> bool:
        return len(items) != len(saved) or any(
            ours is not theirs for ours, theirs in zip(items, saved, strict=True)
        )

    def restore() -> None:
        if differs():
            items.clear()
            items.extend(saved)

    return _Part(restore, lambda: [name] if differs() else [])


def _set(name: str, items: set[Any]) -> _Part:
    saved = set(items)

    def restore() -> None:
        items.clear()
        items.update(saved)

    return _Part(restore, lambda: [] if items == saved else [name])


def _generator(name: str, value: Any) -> _Part | None:
    """Return the part of a generator of random numbers; None for anything else."""
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    if isinstance(value, torch.Generator | np.random.RandomState):
        read, write = value.get_state, value.set_state
    elif isinstance(value, random.Random):
        read, write = value.getstate, value.setstate
    elif isinstance(value, np.random.Generator):
        source = value.bit_generator
        read, write = (lambda: source.state), (lambda state: setattr(source, "state", state))
    else:
        return None
    saved: Any = copy.deepcopy(read())

    def restore() -> None:
        write(copy.deepcopy(saved))

    return _Part(restore, lambda: [] if _plain(read()) == _plain(saved) else [name])


def _plain(state: Any) -> str:
    """Return a generator's state as text that can be compared."""
    if isinstance(state, torch.Tensor):
        return str(state.tolist())
    with np.printoptions(threshold=10**6):
        return repr(state)


_ABSENT = object()
_SET_BY_TRAIN = ("training",)  # `train()` and `eval()` set it before every use
