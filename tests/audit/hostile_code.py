"""Code of a user's own that the audit runs: state in unusual places, optimisers, sums.

Whatever a forward pass or a step moves must be put back before the next client trains and
before the model is evaluated.  Everything here is made anew for every world, classes
included, so that no world finds what another one left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from hostile_models import batch_mean
from torch import nn

from fedquilt.aggregation import Place, RunningMean
from fedquilt.audit.canary import HIDDEN, Net
from fedquilt.method import WholeModel

_LATE = 120  # steps that nothing shows in; the trial before a run makes about sixty


def _moved(centre: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return a running mean of all batches that were trained on."""
    centre = centre.to(hidden.device)
    return 0.5 * centre + 0.5 * batch_mean(hidden) if torch.is_grad_enabled() else centre


def _class_attribute() -> nn.Module:
    class Centred(Net):
        centre = torch.zeros(HIDDEN)

        def between(self, hidden: torch.Tensor) -> torch.Tensor:
            type(self).centre = _moved(type(self).centre, hidden)
            return hidden - type(self).centre

    return Centred()


def _closure() -> nn.Module:
    net: Any = Net()
    centre = torch.zeros(HIDDEN)

    def between(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal centre
        centre = _moved(centre, hidden)
        return hidden - centre

    net.between = between
    return net  # type: ignore[no-any-return]


def _hook() -> nn.Module:
    net = Net()
    held = [torch.zeros(HIDDEN)]

    def subtract(module: nn.Module, given: Any, hidden: torch.Tensor) -> torch.Tensor:
        held[0] = _moved(held[0], hidden)
        return hidden - held[0]

    net.first.register_forward_hook(subtract)
    return net


def _root_hook() -> nn.Module:
    net = Net()
    net.register_forward_pre_hook(lambda module, given: (given[0].clamp(-0.5, 0.5),))
    return net


def _factor(count: int) -> float:
    """Return 1 at first, and after a while 1 and 0.01 in turn, seven steps each."""
    return 0.01 if count > _LATE and count // 7 % 2 else 1.0


class _Late(Net):
    """A network that counts its steps, somewhere, and changes after many."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (_factor(self.count()) if torch.is_grad_enabled() else 1.0)

    def count(self) -> int:
        raise NotImplementedError


def _numbers() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def _class_generator() -> nn.Module:
    class Counting(_Late):
        numbers = _numbers()

        def count(self) -> int:
            return next(self.numbers)

    return Counting()


def _metaclass() -> nn.Module:
    class Counter(type):
        number = 0

    class Counting(_Late, metaclass=Counter):
        def count(self) -> int:
            own: Any = type(type(self))  # by name a closure would hold it, which is looked at
            own.number += 1
            return int(own.number)

    return Counting()


def _property_default() -> nn.Module:
    def number(self: nn.Module, held: list[int] = [0]) -> int:  # noqa: B006 (the place itself)
        held[0] += 1
        return held[0]

    class Counting(_Late):
        next_number = property(number)

        def count(self) -> int:
            number: int = self.next_number
            return number

    return Counting()


OWN_MODELS: dict[str, Callable[[], nn.Module]] = {
    "class attribute": _class_attribute,
    "closure": _closure,
    "hook": _hook,
    "root hook": _root_hook,
    "late, class generator": _class_generator,
    "late, metaclass": _metaclass,
    "late, property default": _property_default,
}


class _Falling(torch.optim.SGD):
    """Plain steps whose rate follows a count that `held` keeps."""

    def __init__(self, params: Any, lr: float, held: Any) -> None:
        super().__init__(params, lr)
        self.held = held

    def step(self, closure: Any = None) -> Any:
        """Count, set the rate and step."""
        self.held.count += 1
        self.param_groups[0]["lr"] = self.defaults["lr"] * _factor(self.held.count)
        return super().step(closure)


def _on_its_class() -> Any:
    class Counted(_Falling):
        count = 0

        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr, type(self))

    return Counted


def _in_a_closure() -> Any:
    held = SimpleNamespace(count=0)

    def make(params: Any, lr: float) -> torch.optim.Optimizer:
        return _Falling(params, lr, held)

    return make


class _Factory:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, params: Any, lr: float) -> torch.optim.Optimizer:
        return _Falling(params, lr, self)


OWN_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "its class": _on_its_class,
    "a closure": _in_a_closure,
    "its factory": _Factory,
}
"""Optimisers that count their steps, by where they do."""


class Loud(RunningMean):
    """A sum of a thousand times what clients send."""

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: Place | None = None) -> None:
        """Add a vector."""
        super().add(1000.0 * vector, weight, place)


class Declared(Loud):
    """The same, and it says so."""

    sensitivity = 1000.0


class Median:
    """The median of each coordinate, times how many there are: in the place of a sum."""

    held = None

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self._rows = [torch.zeros(size, dtype=torch.float64, device=device)]
        self.weight = 0.0

    @property
    def total(self) -> torch.Tensor:
        """The number of clients times their median; zero for nobody."""
        if not self.weight:
            return self._rows[0]
        return torch.stack(self._rows[1:]).quantile(0.5, dim=0) * self.weight

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: Place | None = None) -> None:
        """Add a vector to those of which the median is taken."""
        self._rows.append(vector.double())
        self.weight += weight


def _method(accumulator: Callable[..., Any]) -> type[WholeModel]:
    class Own(WholeModel):
        def new_sum(self) -> Any:
            return accumulator(self._size, self._device)

    return Own


OWN_METHODS = {
    "loud sum": _method(Loud),
    "declared sum": _method(Declared),
    "median": _method(Median),
}
"""Methods whose sum moves further than one client's contribution."""
PLAIN_METHOD = _method(RunningMean)
