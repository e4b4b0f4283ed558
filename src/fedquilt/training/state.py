"""The whole state of a module, and how it is restored before every client.

One working model trains all clients of an engine.  Its trainable parameters are written
anew for each of them; everything else that a forward pass can move must be put back as
well, bit by bit, or one client's data would reach the next client's update: frozen
parameters (a momentum teacher), buffers, tensors and numbers in plain attributes, lists
of them, iterators, generators, what hooks hold on to, attributes of the module's class.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import decimal
import functools
import io
import operator
import random
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    CoroutineType,
    EllipsisType,
    FunctionType,
    GenericAlias,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NotImplementedType,
    UnionType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

# Values that cannot change; whoever holds them is put back, and that is enough.
_FIXED = (
    *(int, float, complex, str, bytes, type(None), range, slice, ModuleType),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout, np.generic, np.dtype),
    *(EllipsisType, NotImplementedType, GenericAlias, UnionType, re.Pattern, decimal.Decimal),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
)
_CONTAINERS = (dict, list, deque, set, tuple, frozenset, MappingProxyType)
_METHODS = (MethodType, BuiltinFunctionType, MethodWrapperType)
_MANAGER = contextlib._GeneratorContextManagerBase
_CACHE = functools._lru_cache_wrapper
_ACCESSORS = (property, classmethod, staticmethod)
# Seen through by `_take`; anything else without attributes keeps its state to itself.
_SEEN = (
    *(torch.Tensor, np.ndarray, FunctionType, functools.partial, type, weakref.ref),
    *(_MANAGER, *_METHODS, *_ACCESSORS),
)
# What Python itself writes into a class.
_MACHINERY = ("__dict__", "__weakref__", "__annotations__", "__abstractmethods__")


class _Part(NamedTuple):
    """One thing that can move: how it is put back, and the names of what in it has moved."""

    restore: Callable[[], None]
    moved: Callable[[], list[str]]


class ModuleState:
    """A picture of everything that a module holds, taken when it is made.

    Parameters
    ----------
    module : nn.Module, or any object
        The module, or what else is used for one client after the other.
    written : iterable of tensors
        Tensors whose values are written before every client anyway; their values are
        not part of the picture.
    """

    def __init__(self, module: object, written: Iterable[torch.Tensor] = ()) -> None:
        self.opaque: list[str] = []
        """The names of things whose state can neither be seen nor put back."""
        self._written = {id(tensor) for tensor in written}
        self._known: dict[int, Any] = {id(each): each for each in _SEEDED}
        self._parts: list[_Part] = []
        self._take(module, "")

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything as it was saved."""
        for part in self._parts:
            part.restore()

    @torch.no_grad()
    def moved(self) -> list[str]:
        """Return the names of what is not as it was."""
        return sorted({name for part in self._parts for name in part.moved()})

    def _take(self, value: Any, name: str) -> None:
        """Save a value, and everything that is reachable from it."""
        if type(value) in _FIXED or type(value) is object or id(value) in self._known:
            return
        self._known[id(value)] = value  # kept alive, so that its id stays its own
        if not isinstance(value, type):  # a subclass of anything may hold more
            self._take_slots(value, name)
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict) and not isinstance(value, _MANAGER):
                self._take(attributes, name)
            self._take(type(value), name)
        if isinstance(value, torch.Tensor):
            self._parts.append(_hooks(name, value))
            if id(value) not in self._written:
                self._parts.append(_tensor(name, value))
        elif isinstance(value, np.ndarray):
            self._parts.append(_array(name, value))
            if value.dtype == object:
                self._take(tuple(value.flat), name)
        elif isinstance(value, _CONTAINERS):
            self._take_container(value, name)
        elif isinstance(value, _CACHE):
            self._parts.append(_Part(value.cache_clear, list))
        elif isinstance(value, _METHODS):
            if _is_hidden(value.__self__):  # what a method is bound to cannot be exchanged
                self.opaque.append(name)
            self._take(value.__self__, name)
            self._take(getattr(value, "__func__", None), name)
        elif isinstance(value, property):
            self._take((value.fget, value.fset, value.fdel), name)
        elif isinstance(value, classmethod | staticmethod):
            self._take(value.__func__, name)
        elif isinstance(value, weakref.ref):
            self._take(value(), name)
        elif isinstance(value, _MANAGER):  # each use makes a generator anew
            self._take((value.func, value.args, value.kwds), name)
        elif isinstance(value, functools.partial):
            self._take((value.func, value.args, value.keywords), name)
        elif isinstance(value, FunctionType):
            self._take_function(value, name)
        elif isinstance(value, type):
            self._take_class(value, name)
        elif not isinstance(value, _FIXED):
            self._take_object(value, name)

    def _take_container(self, value: Any, name: str) -> None:
        keyed = isinstance(value, dict | MappingProxyType)
        items = list(value.items()) if keyed else list(enumerate(value))
        if isinstance(value, dict):
            self._parts.append(_mapping(name, value))
        elif isinstance(value, list | deque):
            self._parts.append(_sequence(name, value))
        elif isinstance(value, set):
            self._parts.append(_set(name, value))
            self.opaque += [_below(name, key) for key, item in items if _is_opaque(item)]
        else:  # what stands in a tuple cannot be exchanged
            self.opaque += [_below(name, key) for key, item in items if _is_opaque(item)]
        for key, item in items:
            self._take(key, name)
            self._take(item, _below(name, key))

    def _take_slots(self, value: Any, name: str) -> None:
        """Take what an object keeps in slots."""
        for key in _slots(type(value)):
            if hasattr(value, key):
                self._parts.append(_attribute(name, value, key))
                self._take(getattr(value, key), _below(name, key))

    def _take_function(self, function: FunctionType, name: str) -> None:
        """Save what a function refers to: its closure and its defaults."""
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that nothing was put into yet
                self._parts.append(_cell(name, cell))
                self._take(cell.cell_contents, name)
        for key in ("__defaults__", "__kwdefaults__"):
            self._parts.append(_attribute(name, function, key))
            self._take(getattr(function, key), name)

    def _take_class(self, kind: type, name: str) -> None:
        """Save the attributes of a user's own class, of its bases and of its metaclass."""
        for other in (*kind.__bases__, type(kind)):
            self._take(other, name)
        if not _is_own(kind):
            return
        own = {k: v for k, v in vars(kind).items() if k not in _MACHINERY}
        self._parts.append(_class(name, kind, own))
        for key, item in own.items():
            self._take(item, _below(name, key))

    def _take_object(self, value: Any, name: str) -> None:
        generator = _generator(name, value)
        if generator is not None:
            self._parts.append(generator)
            return
        is_iterator = hasattr(value, "__next__") and not isinstance(value, io.IOBase)
        is_frame = is_iterator or isinstance(value, CoroutineType | AsyncGeneratorType)
        if is_frame and _is_opaque(value) and not _is_hidden(value):
            self.opaque.append(name)  # a generator: no copy of it can be kept


def _is_opaque(value: Any) -> bool:
    """Tell whether a value may have a state that cannot be seen: an iterator, for example."""
    if type(value) is object or isinstance(value, _CACHE) or _draws(value):
        return False
    if isinstance(value, (*_FIXED, *_CONTAINERS, *_SEEN)):
        return False
    # A type that is not made in Python may keep a state behind its attributes.
    kinds = type(value).__mro__[:-1]
    in_slots = all("__slots__" in vars(kind) for kind in kinds)
    return not all(map(_is_python, kinds)) or not (in_slots or hasattr(value, "__dict__"))


def _is_python(kind: type) -> bool:
    """Tell whether a class is made in Python: such keep all they have in attributes."""
    return bool(kind.__flags__ & _HEAP_TYPE) and not kind.__flags__ & _IMMUTABLE_TYPE


def _slots(kind: type) -> list[str]:
    """Return the slots of a class and of its bases, by the names that `getattr` knows."""
    found = []
    for base in filter(_is_python, kind.__mro__):
        declared = vars(base).get("__slots__", ())
        for key in (declared,) if isinstance(declared, str) else tuple(declared):
            private = key.startswith("__") and not key.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{key}" if private else key)
    return [key for key in found if key not in ("__dict__", "__weakref__")]


def _is_hidden(value: Any) -> bool:
    """Tell whether a value may have a state that only a copy of it keeps."""
    if not _is_opaque(value):
        return False
    try:
        copy.deepcopy(value)
    except Exception:  # a lock, a file, a handle of another library: nothing to copy
        return False
    return True


def _is_own(kind: type) -> bool:
    """Tell whether a class is neither Python's, nor torch's or NumPy's."""
    home = str(kind.__module__).split(".")[0]  # types of C extensions may have none
    return home not in ("torch", "numpy") and home not in sys.stdlib_module_names - {"__main__"}


def _below(name: str, key: object) -> str:
    """Return the name of what stands under a key, as `state_dict` would write it."""
    text = "" if key in ("_parameters", "_buffers", "_modules") else str(key)
    return ".".join(part for part in (name, text) if part)


def _tensor(name: str, tensor: torch.Tensor) -> _Part:
    # `home` is the same memory: a forward pass may point the tensor at another one.
    home, saved, wants_gradient = tensor.data, tensor.detach().clone(), tensor.requires_grad

    def moved() -> list[str]:
        same = tensor.shape == saved.shape and tensor.dtype == saved.dtype
        return [] if same and _same_bits(tensor.detach(), saved) else [name]

    def restore() -> None:
        if tensor.data_ptr() != home.data_ptr() or tensor.stride() != home.stride():
            tensor.data = home
        if tensor.shape != saved.shape or tensor.dtype != saved.dtype:
            tensor.data = saved.clone()
        else:
            tensor.detach().copy_(saved)
        if tensor.is_leaf and tensor.requires_grad != wants_gradient:
            tensor.requires_grad_(wants_gradient)

    return _Part(restore, moved)


def _hooks(name: str, tensor: torch.Tensor) -> _Part:
    """Return the part of a tensor's hooks and of its gradient, which no dictionary shows."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    saved = {kind: dict(getattr(tensor, kind, None) or {}) for kind in kinds}
    wanted = tensor.grad

    def restore() -> None:
        if tensor.is_leaf and tensor.grad is not wanted:
            tensor.grad = wanted
        for kind, hooks in saved.items():
            now = getattr(tensor, kind, None)
            if now is not None and dict(now) != hooks:
                now.clear()
                now.update(hooks)

    return _Part(restore, list)


def _attribute(name: str, value: Any, key: str) -> _Part:
    saved = getattr(value, key)
    hidden = copy.deepcopy(saved) if _is_hidden(saved) else None

    def restore() -> None:
        wanted = saved if hidden is None else copy.deepcopy(hidden)
        if getattr(value, key, _ABSENT) is not wanted:
            with contextlib.suppress(AttributeError):  # frozen ones cannot have moved
                setattr(value, key, wanted)

    moved = [_below(name, key)]
    return _Part(restore, lambda: [] if getattr(value, key, _ABSENT) is saved else moved)


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
    hidden = {key: copy.deepcopy(item) for key, item in mapping.items() if _is_hidden(item)}

    def moved() -> list[str]:
        keys = [*saved, *(key for key in mapping if key not in saved)]
        return [
            _below(name, key)
            for key in keys
            if key not in _SET_BY_TRAIN and mapping.get(key, _ABSENT) is not saved.get(key, _ABSENT)
        ]

    names = list(saved)

    def restore() -> None:
        if not names and not mapping:  # most are empty, and this runs for every client
            return
        same = (
            len(mapping) == len(names)
            and all(map(operator.is_, mapping.values(), saved.values()))
            and list(mapping) == names
        )
        if not same:
            mapping.clear()
            mapping.update(saved)
        for key, item in hidden.items():
            mapping[key] = saved[key] = copy.deepcopy(item)

    return _Part(restore, moved)


def _sequence(name: str, items: Any) -> _Part:
    saved = list(items)
    hidden = {place: copy.deepcopy(x) for place, x in enumerate(saved) if _is_hidden(x)}

    def differs() -> bool:
        return len(items) != len(saved) or any(
            ours is not theirs for ours, theirs in zip(items, saved, strict=True)
        )

    def restore() -> None:
        for place, item in hidden.items():
            saved[place] = copy.deepcopy(item)
        if differs():
            items.clear()
            items.extend(saved)

    return _Part(restore, lambda: [name] if differs() else [])


def _cell(name: str, cell: CellType) -> _Part:
    saved = cell.cell_contents
    hidden = copy.deepcopy(saved) if _is_hidden(saved) else None

    def restore() -> None:
        cell.cell_contents = saved if hidden is None else copy.deepcopy(hidden)

    return _Part(restore, lambda: [] if cell.cell_contents is saved else [name])


def _class(name: str, kind: type, own: dict[str, Any]) -> _Part:
    def moved() -> list[str]:
        return [_below(name, k) for k, v in own.items() if vars(kind).get(k, _ABSENT) is not v]

    is_descriptor = {k: hasattr(type(v), "__get__") for k, v in own.items()}  # shared by copies
    hidden = {k: copy.deepcopy(v) for k, v in own.items() if not is_descriptor[k] and _is_hidden(v)}

    def restore() -> None:
        for key in [k for k in vars(kind) if k not in own and k not in _MACHINERY]:
            delattr(kind, key)
        for key, value in own.items():
            if key in hidden:
                own[key] = value = copy.deepcopy(hidden[key])
            if vars(kind).get(key, _ABSENT) is not value:
                setattr(kind, key, value)

    return _Part(restore, moved)


def _set(name: str, items: set[Any]) -> _Part:
    saved = set(items)

    def restore() -> None:
        items.clear()
        items.update(saved)

    return _Part(restore, lambda: [] if items == saved else [name])


def _draws(value: Any) -> bool:
    kinds = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
    return isinstance(value, kinds)


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
# The generators of whole libraries: each client begins with a seed of its own (`seeded_layers`).
_SEEDED = tuple(getattr(draw, "__self__", None) for draw in (random.random, np.random.rand))
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE
_SET_BY_TRAIN = ("training",)  # `train()` and `eval()` set it before every use
