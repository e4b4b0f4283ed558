"""From the clients' updates to the next global model: sums, and the server's step.

Weighted means of update vectors are computed in float64, one vector at a time; the server
optimiser moves the model by the mean update d, the (negative) gradient of the server
(Reddi et al. 2021, "Adaptive Federated Optimization"):

| name | step |
|---|---|
| sgd | w + lr * d |
| momentum | m = momentum * m + d; w + lr * m |
| adam | m = b1 m + (1 - b1) d; v = b2 v + (1 - b2) d^2; w + lr * m / (sqrt(v) + tau) |
| yogi | as adam with v = v - (1 - b2) d^2 sign(v - d^2) |

with b1 = 0.9, b2 = 0.99, tau = 1e-3, m = 0 and v = tau^2 at the start and no bias
correction, as in that paper (its Algorithm 2 asks for v >= tau^2).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.vectors import chunks_of
from fedquilt.config.choices import SERVER_LEARNING_RATES, SERVER_OPTIMIZERS

__all__ = [
    "Accumulator",
    "Concatenation",
    "LateAverage",
    "Place",
    "RunningMean",
    "ServerOptimizer",
    "ServerStep",
    "add",
    "keeps_vectors",
    "make_server_optimizer",
    "sensitivity_of",
    "try_sensitivity",
]

BETA_1, BETA_2, TAU = 0.9, 0.99, 1e-3


class Place(Protocol):
    """Where the elements of a shorter vector lie in the whole one; equal places hash alike."""

    def scatter_add_(self, total: torch.Tensor, part: torch.Tensor, alpha: float = 1.0) -> None:
        """Add alpha times the shorter vector to its elements of the whole one."""

    def cover_(self, coverage: torch.Tensor, weight: float = 1.0) -> None:
        """Add a number to every element of the whole vector that has its place here."""

    def __hash__(self) -> int: ...


class Accumulator(Protocol):
    """The sum of a cohort's vectors, before anything is released.

    `total` is released, noised or not; `weight` divides it; `held` is the weight on each
    element where clients send parts.

    One of somebody's own keeps a claim in mode `certified` if it has a number `sensitivity`:
    with zeros in the place of any one vector x, whatever the others are, `total` moves by at
    most sensitivity * |x|.  See `sensitivity_of`.

    `keeps_vectors` says whether it still looks at a vector after `add` has returned, as a median
    does; one that does not may be lent vectors that lie in memory which is written again.  One of
    somebody's own need not say: it is taken to keep them.
    """

    @property
    def keeps_vectors(self) -> bool: ...

    @property
    def total(self) -> torch.Tensor: ...

    @property
    def weight(self) -> float: ...

    @property
    def held(self) -> torch.Tensor | None: ...

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: Place | None = None) -> None:
        """Add one client's vector."""


class Concatenation:
    """Vectors laid end to end, for tables whose rows are not summed; they get no noise."""

    keeps_vectors = True
    weight = 1.0
    held = None

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._parts = [torch.zeros(0, device=device)]

    @property
    def total(self) -> torch.Tensor:
        """All vectors so far as one."""
        return torch.cat(self._parts)

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: Place | None = None) -> None:
        """Add one client's vector; it has no weight but its length."""
        self._parts.append(vector)


class RunningMean:
    """Sum of w_k x_k and of w_k; the mean is their quotient.

    Only the sum is held, so a cohort of any size costs one vector.  A client that
    holds a part of the model adds a shorter vector at its place; `held` then says,
    for each element, the sum of w_k over those who hold it.

    What it declares of itself holds for no subclass, which has to declare it anew.
    """

    sensitivity: float | None = 1.0  # under equal weights
    keeps_vectors = False
    adds_scaled = True

    def __init_subclass__(cls) -> None:
        """Let a subclass inherit nothing that its own `add` may make untrue."""
        own = vars(cls)
        cls.sensitivity = own.get("sensitivity")
        cls.keeps_vectors = own.get("keeps_vectors", True)
        cls.adds_scaled = own.get("adds_scaled", False)

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.weight = 0.0
        self._whole = 0.0
        self._places: dict[Place, float] = {}

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: Place | None = None) -> None:
        """Add one client's vector with its weight."""
        if not weight > 0:
            raise InvalidValueError(f"weight={weight!r} must be > 0")
        if place is not None:
            place.scatter_add_(self.total, vector.to(self.total.dtype), weight)
            self._places[place] = self._places.get(place, 0.0) + weight
            self.weight += weight
            return
        if vector.shape != self.total.shape:
            raise InvalidValueError(
                f"vector of shape {tuple(vector.shape)} must have the shape "
                f"{tuple(self.total.shape)}"
            )
        for chunk in chunks_of(vector):  # torch would make a float64 copy of all of it
            self.total[chunk].add_(vector[chunk], alpha=weight)
        self.weight += weight
        self._whole += weight

    def add_scaled(self, vector: torch.Tensor, scale: float, weight: float = 1.0) -> None:
        """Add one client's whole vector times a number; the product is in float64."""
        if self.total.is_cuda:  # one kernel, and no copy; on a CPU torch would make one
            self.total.add_(vector, alpha=scale * weight)
            self.weight += weight
            self._whole += weight
            return
        for chunk in chunks_of(vector):
            self.total[chunk].add_(vector[chunk].to(self.total.dtype) * scale, alpha=weight)
        self.weight += weight
        self._whole += weight

    @property
    def held(self) -> torch.Tensor | None:
        """The weight on each element; None when every vector was a whole one."""
        if not self._places:
            return None
        held = torch.full_like(self.total, self._whole)
        for place, weight in self._places.items():
            place.cover_(held, weight)
        return held

    def mean(self) -> torch.Tensor:
        """Return the weighted mean over holders; zero where nothing was added."""
        held = self.held
        if held is not None:
            return torch.where(held > 0, self.total / held.masked_fill(held <= 0, 1.0), 0.0)
        return self.total / self.weight if self.weight else self.total.clone()


def sensitivity_of(total: Accumulator) -> float | None:
    """Return how far one vector may move a sum, by unit of its length; None: nobody knows.

    Of `RunningMean` under equal weights it is 1.  Whatever else adds up, a subclass of it
    included, has to declare it: what a `__getattr__` fetches is said of another sum.
    """
    stated = inspect.getattr_static(total, "sensitivity", None)
    declared = None if stated is None else getattr(total, "sensitivity", None)
    if declared is None:
        return None
    return checks.number(f"sensitivity of {type(total).__name__}", declared, above=0)


def keeps_vectors(total: Accumulator) -> bool:
    """Tell whether a sum may look at a vector after `add` has returned; unless it says no."""
    stated = inspect.getattr_static(total, "keeps_vectors", None)
    return stated is None or bool(total.keeps_vectors)


def add(
    total: Accumulator,
    vector: torch.Tensor,
    scale: float | None,
    weight: float,
    place: Place | None,
) -> None:
    """Add a vector times `scale`, in float64, to a sum; one that `adds_scaled` needs no copy."""
    if scale is None:
        total.add(vector, weight, place)
    elif place is None and getattr(type(total), "adds_scaled", False):
        cast(RunningMean, total).add_scaled(vector, scale, weight)
    else:
        total.add(vector.to(torch.float64) * scale, weight, place)


def try_sensitivity(
    new_sum: Callable[[], Accumulator],
    declared: float,
    places: Sequence[Place | None],
    sizes: Sequence[int],
    longest: float,
) -> int:
    """Try a declared sensitivity on made-up vectors; raise where a sum is seen to exceed it.

    Cohorts of one client to all of `places`; the vectors are random, all alike, or half of them
    zero, which is where a median is moved most; the first and the last one are exchanged for
    zeros.  Returns how many such exchanges were tried.  That none exceeds it proves nothing.

    Parameters
    ----------
    places, sizes
        Where the vector of each client of the cohort belongs, and how long it is.
    longest : float
        The norm of the longest vector that a clip lets pass.
    """
    tried = 0
    for vectors in _trial_cohorts(sizes, longest):
        with_all = _summed(new_sum, vectors, places)
        for victim in {0, len(vectors) - 1}:
            others = [x if k != victim else torch.zeros_like(x) for k, x in enumerate(vectors)]
            moved = float((_summed(new_sum, others, places) - with_all).norm())
            allowed = declared * float(vectors[victim].norm())
            tried += 1
            if not moved <= allowed * (1 + 1e-9) + 1e-12 * longest:
                raise InvalidValueError(
                    f"sensitivity={declared:g} of {type(new_sum()).__name__} must be at least "
                    f"{moved / allowed * declared:g}: so far does the sum of {len(vectors)} "
                    "vectors move, by unit of its length, when zeros take the place of one"
                )
        if not torch.equal(_summed(new_sum, vectors, places), with_all):
            raise InvalidValueError(
                f"{type(new_sum()).__name__} must give the same sum of the same vectors: its "
                "sensitivity is of one sum, and something is kept from one to the next"
            )
    return tried


def _trial_cohorts(sizes: Sequence[int], longest: float) -> Iterator[list[torch.Tensor]]:
    source = torch.Generator().manual_seed(0)
    for count in sorted({1, 2, 3, len(sizes)} & set(range(1, len(sizes) + 1))):
        drawn = [torch.randn(n, generator=source, dtype=torch.float64) for n in sizes[:count]]
        lengths = [longest * 10 ** -(k % 3) for k in range(count)]
        yield [x * (length / x.norm()) for x, length in zip(drawn, lengths, strict=True)]
        same = [torch.full((n,), longest / n**0.5, dtype=torch.float64) for n in sizes[:count]]
        yield same
        # The first and the last one are where it tips; the others lie on both sides of them.
        yield [x if k in (0, count - 1) or k % 2 else 0 * x for k, x in enumerate(same)]
        yield [x if k in (0, count - 1) else x * (-1) ** k for k, x in enumerate(same)]


def _summed(
    new_sum: Callable[[], Accumulator],
    vectors: Sequence[torch.Tensor],
    places: Sequence[Place | None],
) -> torch.Tensor:
    total = new_sum()
    for vector, place in zip(vectors, places, strict=False):
        total.add(vector.to(total.total.device), 1.0, place)
    return total.total.detach().to("cpu", torch.float64, copy=True)


class ServerStep(Protocol):
    """What a server makes of a release."""

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Return the weights after the release `update`, in the type of the old ones.

        It may have moved the old ones themselves.
        """

    def report(self) -> dict[str, float]:
        """Return what there is to say of the newest step, computed from releases alone."""

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the next step needs, as arrays."""

    def load_state(self, state: dict[str, NDArray[Any]], device: torch.device) -> None:
        """Restore what `state` returned."""


class ServerOptimizer:
    """Apply mean updates to the flat global vector; state is kept in float64."""

    def __init__(self, name: str, lr: float, momentum: float = 0.9) -> None:
        self.name = checks.choice("server_optimizer", name, SERVER_OPTIMIZERS)
        self.lr = checks.number("server_lr", lr, above=0)
        self.momentum = checks.number("server_momentum", momentum, at_least=0, below=1)
        self._first: torch.Tensor | None = None
        self._second: torch.Tensor | None = None

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Move the weights, in place: a second model would be a large one's peak of memory."""
        if self.name != "sgd" and self._first is None:
            self._first = torch.zeros_like(update, dtype=torch.float64)
        if self.name in ("adam", "yogi") and self._second is None:
            self._second = torch.full_like(update, TAU**2, dtype=torch.float64)
        for chunk in chunks_of(weights):
            direction = self._direction(update[chunk].to(torch.float64), chunk)
            weights[chunk] = weights[chunk].to(torch.float64) + self.lr * direction
        return weights

    def _direction(self, update: torch.Tensor, chunk: slice) -> torch.Tensor:
        """Move the moments of a chunk, in place, and return where its weights go."""
        if self._first is None:
            return update
        first = self._first[chunk]
        if self._second is None:
            first.copy_(self.momentum * first + update)
            return first
        square, second = update * update, self._second[chunk]
        first.copy_(BETA_1 * first + (1 - BETA_1) * update)
        if self.name == "adam":
            second.copy_(BETA_2 * second + (1 - BETA_2) * square)
        else:
            second.copy_(second - (1 - BETA_2) * square * torch.sign(second - square))
        return first / (second.sqrt() + TAU)

    def report(self) -> dict[str, float]:
        """Return no measurements."""
        return {}

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the moments as arrays, for a checkpoint; the next step moves them."""
        moments = {"first": self._first, "second": self._second}
        return {key: m.cpu().numpy() for key, m in moments.items() if m is not None}

    def load_state(self, state: dict[str, NDArray[Any]], device: torch.device) -> None:
        """Restore what `state` returned."""
        moments = {
            key: torch.from_numpy(np.array(value, dtype=np.float64)).to(device)
            for key, value in state.items()
        }
        self._first, self._second = moments.get("first"), moments.get("second")


class LateAverage:
    """The mean of the models after the last k of n rounds, in the place of the last model.

    Those are functions of releases, and so is their mean: it costs no privacy, and of models with
    independent noise it keeps what they agree on (Polyak and Juditsky 1992).  Earlier models are
    as without it; a round without release counts the model that it leaves as it is.  A run that
    is stopped before round n keeps its last model.

    Parameters
    ----------
    late : tuple of int
        (k, n).
    """

    def __init__(self, late: tuple[int, int]) -> None:
        self._count, self._rounds = late
        self._sum: torch.Tensor | None = None

    def end_round(self, weights: torch.Tensor, round_index: int) -> None:
        """Add the model after a round to the sum; after the last one move it to the mean."""
        if not self._rounds - self._count <= round_index < self._rounds:
            return
        if self._sum is None:
            self._sum = torch.zeros_like(weights, dtype=torch.float64)
        for chunk in chunks_of(weights):
            self._sum[chunk] += weights[chunk]
            if round_index == self._rounds - 1:
                weights[chunk] = self._sum[chunk] / self._count

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the sum as an array, for a checkpoint; the next round moves it."""
        return {} if self._sum is None else {"sum": self._sum.cpu().numpy()}

    def load_state(self, state: dict[str, NDArray[Any]], device: torch.device) -> None:
        """Restore what `state` returned."""
        found = state.get("sum")
        self._sum = None if found is None else torch.from_numpy(np.array(found)).to(device)


def make_server_optimizer(name: str, lr: float | None, momentum: float) -> ServerOptimizer:
    """Return the optimiser of a name, with its usual learning rate when none is given."""
    checks.choice("server_optimizer", name, SERVER_OPTIMIZERS)
    return ServerOptimizer(name, SERVER_LEARNING_RATES[name] if lr is None else lr, momentum)
