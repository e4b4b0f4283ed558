"""What stands in the place of the mean: robust rules, and the server's part of corrections.

Of n vectors x_1 .. x_n, of which up to f = ceil(`byzantine_fraction` * n) may be hostile:

| name | what the model moves by |
|---|---|
| `median` | the median of each coordinate (Yin et al. 2018) |
| `trimmed_mean` | of each coordinate the mean without the f largest and f smallest (ibid.) |
| `krum` | the vector whose n - f - 2 nearest are nearest (Blanchard et al. 2017) |
| `multi_krum` | the mean of the n - f vectors that are best by that score (ibid.) |
| `geometric_median` | argmin_z sum_i |z - x_i|, by Weiszfeld steps (Pillutla et al. 2022) |
| `norm_bound` | the mean of x_i min(1, C / |x_i|), C = `clip_norm` (Sun et al. 2019) |
| `centred_clipping` | v + mean of (x_i - v) min(1, C / |x_i - v|), v the move before it |
| `majority` | of each coordinate the sign that most have (Bernstein et al. 2019) |

Centred clipping is that of Karimireddy et al. 2021, one step of it from the last round's aggregate.

All vectors weigh alike: how many samples a client has is its own word, and a hostile one would say
many.  A rule that is no sum has n times its value as `total` and n as `weight`.  None declares a
sensitivity: one client moves most of them by more than its own length over n.

Of the mean d of corrected updates (`training/corrections.py`) of |S| clients, of N in all:

| name | the server's step |
|---|---|
| `scaffold` | x by d as its optimiser does; c <- c + |S| / N mean(dc)  (Karimireddy et al. 2020) |
| `feddyn` | h <- h - alpha |S| / N d;  x <- x + d - h / alpha  (Acar et al. 2021) |
| `fednova` | x by tau d as its optimiser does, tau the mean of a_i  (Wang et al. 2020) |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.aggregation import Accumulator, Place, RunningMean, ServerOptimizer, ServerStep
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.vectors import chunks_of

Rule = Callable[[torch.Tensor, int], torch.Tensor]
"""What vectors, one a row in float64, are made into when so many of them may be hostile."""

_STEPS, _SMOOTHING, _MOVED = 200, 1e-6, 1e-10


def median(rows: torch.Tensor, hostile: int) -> torch.Tensor:
    """Return the median of each coordinate; of an even number the mean of the middle two."""
    ordered, middle = rows.sort(dim=0).values, (len(rows) - 1) // 2
    return (ordered[middle] + ordered[len(rows) // 2]) / 2


def trimmed_mean(rows: torch.Tensor, hostile: int) -> torch.Tensor:
    """Return the mean of each coordinate without its f smallest and f largest values."""
    cut = min(hostile, (len(rows) - 1) // 2)
    return rows.sort(dim=0).values[cut : len(rows) - cut].mean(dim=0)


def krum_scores(rows: torch.Tensor, hostile: int) -> torch.Tensor:
    """Return the sum of squared distances of each vector to its n - f - 2 nearest others.

    At least one, where a cohort is too small for the rule (it asks for n > 2 f + 2).
    """
    squared = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest = min(max(len(rows) - hostile - 2, 1), len(rows) - 1)
    return squared.sort(dim=1).values[:, 1 : 1 + nearest].sum(dim=1)


def krum(rows: torch.Tensor, hostile: int) -> torch.Tensor:
    """Return the vector of the lowest score."""
    return rows[int(krum_scores(rows, hostile).argmin())].clone()


def multi_krum(rows: torch.Tensor, hostile: int) -> torch.Tensor:
    """Return the mean of the n - f vectors of the lowest scores."""
    kept = max(len(rows) - hostile, 1)
    return rows[krum_scores(rows, hostile).argsort(stable=True)[:kept]].mean(dim=0)


def geometric_median(rows: torch.Tensor, hostile: int) -> torch.Tensor:
    """Return the point with the least sum of distances: z = sum_i b_i x_i / sum_i b_i.

    b_i = 1 / max(nu, |z - x_i|), from the mean, until z moves by less than a 1e-10 of the spread;
    nu is a millionth of it.
    """
    point = rows.mean(dim=0)
    spread = float((rows - point).norm(dim=1).median())
    for _ in range(_STEPS if spread > 0 else 0):
        near = (rows - point).norm(dim=1).clamp(min=_SMOOTHING * spread).reciprocal()
        moved = (near @ rows) / near.sum()
        done = float((moved - point).norm()) <= _MOVED * spread
        point = moved
        if done:
            break
    return point


def majority(rows: torch.Tensor, hostile: int) -> torch.Tensor:
    """Return the sign that most vectors have in each coordinate; 0 where they are even."""
    return rows.sign().sum(dim=0).sign()


_BY_COORDINATE: dict[str, Rule] = {
    "median": median,
    "trimmed_mean": trimmed_mean,
    "majority": majority,
}
_BY_VECTOR: dict[str, Rule] = {
    "krum": krum,
    "multi_krum": multi_krum,
    "geometric_median": geometric_median,
}


class RobustSum:
    """The vectors of a cohort, and n times what a rule makes of them."""

    keeps_vectors = True
    held = None

    def __init__(
        self, rule: str, hostile_fraction: float, size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.rule = rule
        self._fraction, self._size, self._device = hostile_fraction, size, device
        self._vectors: list[torch.Tensor] = []

    @property
    def weight(self) -> float:
        """How many vectors there are."""
        return float(len(self._vectors))

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: Place | None = None) -> None:
        """Keep one client's whole vector; its weight is not believed."""
        refuse_part(self.rule, vector, place, self._size)
        self._vectors.append(vector)

    @property
    def total(self) -> torch.Tensor:
        """The rule's value times the number of vectors; coordinates go a chunk at a time."""
        total = torch.zeros(self._size, dtype=torch.float64, device=self._device)
        if not self._vectors:
            return total
        # A product that is a whole number but for rounding is that number.
        hostile = math.ceil(self._fraction * len(self._vectors) - 1e-9)
        by_coordinate = _BY_COORDINATE.get(self.rule)
        pieces = chunks_of(total) if by_coordinate else [slice(None)]
        rule = by_coordinate or _BY_VECTOR[self.rule]
        for piece in pieces:
            rows = torch.stack([vector[piece].to(torch.float64) for vector in self._vectors])
            total[piece] = rule(rows, hostile)
        return total.mul_(len(self._vectors))


class ClippedSum:
    """n times the mean of vectors that are shortened to a radius around a centre."""

    keeps_vectors = False
    held = None

    def __init__(
        self,
        radius: float,
        size: int,
        device: torch.device | str = "cpu",
        centre: torch.Tensor | None = None,
    ) -> None:
        self._sum, self._radius, self._centre = RunningMean(size, device), radius, centre

    @property
    def weight(self) -> float:
        """How many vectors there are."""
        return self._sum.weight

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: Place | None = None) -> None:
        """Add one client's whole vector, shortened; its weight is not believed."""
        refuse_part("clipping", vector, place, self._sum.total.numel())
        away = vector.to(torch.float64)
        if self._centre is not None:
            away = away - self._centre
        length = float(away.norm())
        self._sum.add_scaled(away, min(1.0, self._radius / length) if length else 1.0)

    @property
    def total(self) -> torch.Tensor:
        """The number of vectors times centre and mean of the shortened."""
        if self._centre is None:
            return self._sum.total
        return self._sum.total + self._sum.weight * self._centre


class KeepingServer:
    """A server's step with one vector of its own, in float64: None before the first round."""

    kept_as: ClassVar[str]
    """What a checkpoint calls the vector."""

    def __init__(self, server: ServerStep) -> None:
        self._server = server
        self.vector: torch.Tensor | None = None

    def report(self) -> dict[str, float]:
        """Return what the step itself reports."""
        return self._server.report()

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the step needs, and the vector."""
        kept = {} if self.vector is None else {self.kept_as: self.vector.cpu().numpy()}
        return {**self._server.state(), **kept}

    def load_state(self, state: dict[str, NDArray[Any]], device: torch.device) -> None:
        """Restore what `state` returned."""
        rest = dict(state)
        vector = rest.pop(self.kept_as, None)
        if vector is not None:
            self.vector = torch.from_numpy(np.array(vector, dtype=np.float64)).to(device)
        self._server.load_state(rest, device)


class RememberingServer(KeepingServer):
    """A server's step that remembers the move before: the centre of the next clipping."""

    kept_as = "move"

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Keep the aggregate and take the step."""
        self.vector = update.to(torch.float64, copy=True)
        return self._server.step(weights, update)


def refuse_part(rule: str, vector: torch.Tensor, place: Place | None, size: int) -> None:
    """Refuse a vector that is not as long as the model."""
    if place is not None or vector.shape != (size,):
        raise InvalidValueError(
            f"vector of shape {tuple(vector.shape)} must be a whole one of {size} numbers: "
            f"{rule} compares vectors of one length"
        )


def make_robust(
    rule: str, byzantine_fraction: float, radius: float, server: ServerStep
) -> tuple[Callable[..., Accumulator], ServerStep]:
    """Return what makes the sums of a rule, given (size, device), and the server's step."""
    if rule == "norm_bound":
        return partial(ClippedSum, radius), server
    if rule == "centred_clipping":
        remembering = RememberingServer(server)

        def around_last(size: int, device: torch.device) -> Accumulator:
            return ClippedSum(radius, size, device, remembering.vector)

        return around_last, remembering
    return partial(RobustSum, rule, byzantine_fraction), server


class CorrectedServer(KeepingServer):
    """A server's step with a control variate, and the sums that it is told of.

    Parameters
    ----------
    name : str
        scaffold, feddyn or fednova.
    server : ServerStep
        What moves the model.
    num_clients : int
        N.
    alpha : float
        Of `feddyn`.
    """

    kept_as = "control"

    def __init__(self, name: str, server: ServerStep, num_clients: int, alpha: float) -> None:
        super().__init__(server)
        self._name, self._num_clients, self._alpha = name, num_clients, alpha
        self._sum: RunningMean | None = None

    def sent_size(self, size: int) -> int:
        """Return how many numbers a client sends for a model of so many."""
        return {"scaffold": 2 * size, "fednova": size + 1}.get(self._name, size)

    def new_sum(self, size: int, device: torch.device | str) -> RunningMean:
        """Return an empty sum of what clients send."""
        self._sum = RunningMean(self.sent_size(size), device)
        return self._sum

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Move the model and the control variate by the mean of what was sent."""
        size, update = weights.numel(), update.to(torch.float64)
        if self._name == "fednova":
            return self._server.step(weights, update[:-1] * update[-1])
        assert self._sum is not None
        share = self._sum.weight / self._num_clients
        self._sum = None
        control = weights.new_zeros(size, dtype=torch.float64)
        control = control if self.vector is None else self.vector
        if self._name == "scaffold":
            self.vector = control + share * update[size:]
            return self._server.step(weights, update[:size])
        self.vector = control - self._alpha * share * update
        return self._server.step(weights, update - self.vector / self._alpha)


class SharedStep(ServerOptimizer):
    """A server's step that leaves alone what stays with clients: noise on it is dropped."""

    def __init__(self, server: ServerOptimizer, own: torch.Tensor) -> None:
        super().__init__(server.name, server.lr, server.momentum)
        self._own = own

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Move what is shared."""
        return super().step(weights, update.masked_fill(self._own, 0.0))
