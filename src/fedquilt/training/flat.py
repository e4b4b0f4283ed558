"""A model whose travelling tensors are views of one flat vector.

Loading the global model is then one copy and a client's update one
subtraction, whatever the number of layers.

What travels: every trainable parameter, and every buffer that a training step
changes (the running statistics of BatchNorm).  Frozen parameters and constant
buffers are the same on both sides and stay where they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.trees import Tree
from fedquilt.training.state import ModuleState

_PASSES = 3


@dataclass(frozen=True)
class Segment:
    """Where one named tensor lies in the flat vector."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    is_buffer: bool


class FlatModel:
    """A private copy of a model, its travelling tensors laid out in one vector.

    Parameters
    ----------
    model : nn.Module
        Any model; it is copied, never changed.
    sample : tensor or tree of tensors, optional
        A small batch of public inputs, on the device where the copy shall live.
        Forward passes in training mode tell which buffers move; without a
        sample every buffer counts as constant.
    adopt : bool
        Take the model itself instead of a copy: nobody else may have it then.
    """

    def __init__(
        self, model: nn.Module, sample: Tree | None = None, *, adopt: bool = False
    ) -> None:
        module = model if adopt else copy.deepcopy(model)
        moving: list[str] = []
        if sample is not None:
            module.to(trees.device_of(sample))
            moving = moving_buffers(module, sample)
        tensors = _travelling(module, moving)
        if not any(not is_buffer for _, _, is_buffer in tensors):
            raise InvalidValueError("model has no trainable parameter: nothing could be learned")
        _refuse_complex(tensors)
        wide = any(tensor.dtype == torch.float64 for _, tensor, _ in tensors)
        segments = _lay_out(tensors)
        vector = torch.empty(
            segments[-1].stop,
            dtype=torch.float64 if wide else torch.float32,
            device=tensors[0][1].device,
        )
        with torch.no_grad():
            for segment, (_, tensor, _) in zip(segments, tensors, strict=True):
                # One after the other, so that no second model is held.
                view = vector[segment.start : segment.stop].view(segment.shape)
                view.copy_(tensor)
                if not segment.is_buffer and tensor.dtype == vector.dtype:
                    tensor.data = view
        self._lay(module, segments, vector)

    def twin(self) -> FlatModel:
        """Return the same model with a state of its own and its parameters in this vector.

        Whoever writes one has written the other: two users in turn, each of whom writes
        before it reads, share the memory of one model.
        """
        homes = zip(self.parameters, self._homes, strict=True)
        memo = {
            id(parameter): nn.Parameter(home, parameter.requires_grad)
            for parameter, home in homes
            if type(parameter) is nn.Parameter and home.dtype == self.vector.dtype
        }
        other = FlatModel.__new__(FlatModel)
        other._lay(copy.deepcopy(self.module, memo), self.segments, self.vector)
        return other

    def _lay(self, module: nn.Module, segments: list[Segment], vector: torch.Tensor) -> None:
        """Make each parameter of the module a view of the vector, where its type allows it.

        Buffers are looked up by name whenever they are needed: a forward pass
        may put a new tensor in a buffer's place.
        """
        self.module, self.segments, self.vector = module, segments, vector
        named = dict(module.named_parameters())
        self._outside: list[tuple[Segment, torch.Tensor]] = []
        for segment in segments:
            if segment.is_buffer:
                continue
            if named[segment.name].dtype == vector.dtype:
                named[segment.name].data = self._view(segment)
            else:
                self._outside.append((segment, named[segment.name]))
        self.parameters: list[torch.Tensor] = [
            parameter for parameter in self.module.parameters() if parameter.requires_grad
        ]
        # Their own memory: a forward pass may point a parameter at another one.
        self._homes = [parameter.data for parameter in self.parameters]
        self.remember()
        self.stepped: tuple[nn.Linear, ...] = ()
        """The layers that step while the gradient passes (`training/stepped.py`)."""

    def remember(self) -> None:
        """Save the module's whole state, for `restore`; done when the model is laid out."""
        buffers = [self.module.get_buffer(s.name) for s in self.segments if s.is_buffer]
        self.state = ModuleState(self.module, [*self.parameters, *buffers])

    def restore(self) -> None:
        """Restore everything that `write` does not write, as `remember` saw it.

        Copies of a module share its class, closures, defaults and hooks: what a client leaves
        there while one of them trains is there for all of them.
        """
        self.state.restore()
        for tensor in self.module.parameters():
            tensor.grad = None
        for parameter, home in zip(self.parameters, self._homes, strict=True):
            parameter.data = home

    def _view(self, segment: Segment) -> torch.Tensor:
        return self.vector[segment.start : segment.stop].view(segment.shape)

    def copied(self) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Yield the tensors that are not views of the vector."""
        yield from self._outside
        for segment in self.segments:
            if segment.is_buffer:
                yield segment, self.module.get_buffer(segment.name)

    def read(self) -> torch.Tensor:
        """Return the vector with the current values; a view, not a copy."""
        with torch.no_grad():
            for segment, tensor in self.copied():
                self._view(segment).copy_(tensor)
        return self.vector

    def write(self, vector: torch.Tensor) -> None:
        """Load the values of a vector into the model, and restore everything else.

        What is evaluated, kept or handed out is so a function of the vector alone.
        """
        self.restore()
        with torch.no_grad():
            self.vector.copy_(vector)
            for segment, tensor in self.copied():
                values = self._view(segment)
                integral = not tensor.dtype.is_floating_point
                tensor.copy_(values.round() if integral else values)

    @property
    def needs_pairs(self) -> bool:
        """Whether a layer normalises over the batch, which a single sample has none of."""
        batch_norm = nn.modules.batchnorm._BatchNorm
        return any(isinstance(module, batch_norm) for module in self.module.modules())

    @property
    def frozen_names(self) -> list[str]:
        """The names of the parameters that never change and never travel."""
        return [n for n, p in self.module.named_parameters() if not p.requires_grad]

    @property
    def is_lossy(self) -> bool:
        """Whether some tensor has a type that cannot hold the vector's values exactly."""
        return any(tensor.dtype != self.vector.dtype for _, tensor in self.copied())

    @property
    def names(self) -> list[str]:
        """The names of the travelling tensors, in the order of the vector."""
        return [segment.name for segment in self.segments]

    @property
    def buffer_names(self) -> list[str]:
        """The names of the travelling buffers."""
        return [segment.name for segment in self.segments if segment.is_buffer]

    def matching(self, patterns: tuple[str, ...]) -> list[Segment]:
        """Return the parameters whose name, or a module of it, matches a pattern.

        The pattern `fc*` matches `fc1.weight` and `head.fc2.bias`; `all` matches
        everything.  A pattern that matches nothing is an error.
        """
        chosen: dict[str, Segment] = {}
        for pattern in patterns:
            found = [s for s in self.segments if pattern == "all" or matches(s.name, pattern)]
            if not found:
                raise InvalidValueError(
                    f"noise_layers={pattern!r} must match a parameter; "
                    f"the model has {', '.join(self.names)}"
                )
            chosen.update((segment.name, segment) for segment in found)
        return [segment for segment in self.segments if segment.name in chosen]


def matches(name: str, pattern: str) -> bool:
    """Tell whether a tensor's name, or the path of one of its modules, fits a pattern.

    >>> matches("fc1.weight", "fc*"), matches("head.fc.bias", "fc*"), matches("conv.fc", "conv")
    (True, True, True)
    """
    parts = name.split(".")
    spans = (
        ".".join(parts[start:stop])
        for start in range(len(parts))
        for stop in range(start + 1, len(parts) + 1)
    )
    return any(fnmatchcase(span, pattern) for span in spans)


def freeze_others(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze every parameter that matches none of the patterns; `all` freezes nothing."""
    if "all" in patterns:
        return
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise InvalidValueError(
                f"trainable={pattern!r} must match a parameter; the model has {', '.join(names)}"
            )
    for name, parameter in model.named_parameters():
        if not any(matches(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def moving_buffers(model: nn.Module, sample: Tree) -> list[str]:
    """Return the names of the buffers that forward passes in training mode change.

    Several passes, with gradients: some statistics move late, or only in training.
    """
    if next(model.buffers(), None) is None:
        return []
    probe = copy.deepcopy(model).train()
    before = {name: buffer.clone() for name, buffer in probe.named_buffers()}
    state = ModuleState(probe)  # what hooks hold on to is not copied with the module
    with torch.enable_grad(), torch.random.fork_rng(devices=_cuda_devices(sample)):
        for _ in range(_PASSES):
            trees.call_with(probe, sample)
    moving = [
        name
        for name, buffer in probe.named_buffers()
        if name not in before or not torch.equal(before[name], buffer)
    ]
    state.restore()
    return moving


def _cuda_devices(sample: Tree) -> list[torch.device]:
    device = trees.device_of(sample)
    return [device] if device.type == "cuda" else []


def _travelling(model: nn.Module, moving: list[str]) -> list[tuple[str, torch.Tensor, bool]]:
    def pairs() -> Iterator[tuple[str, torch.Tensor, bool]]:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter, False
        for name, buffer in model.named_buffers():
            if name in moving:
                yield name, buffer, True

    return list(pairs())


def _refuse_complex(tensors: list[tuple[str, torch.Tensor, bool]]) -> None:
    """Raise for complex numbers, whose imaginary part a real vector would lose."""
    for name, tensor, _ in tensors:
        if tensor.is_complex():
            raise InvalidValueError(
                f"{name} of type {tensor.dtype} must be real: store the two parts as real tensors"
            )


def _lay_out(tensors: list[tuple[str, torch.Tensor, bool]]) -> list[Segment]:
    segments, start = [], 0
    for name, tensor, is_buffer in tensors:
        stop = start + tensor.numel()
        segments.append(Segment(name, start, stop, tuple(tensor.shape), is_buffer))
        start = stop
    return segments
