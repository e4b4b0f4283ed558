"""Weighted means of update vectors, in float64, one vector at a time."""

from __future__ import annotations

from typing import Protocol

import torch

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.pieces import pieces_of


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
    """

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
    """

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
        for piece in pieces_of(vector):  # torch would make a float64 copy of all of it
            self.total[piece].add_(vector[piece], alpha=weight)
        self.weight += weight
        self._whole += weight

    def add_scaled(self, vector: torch.Tensor, scale: float, weight: float = 1.0) -> None:
        """Add one client's whole vector times a number; the product is in float64."""
        if self.total.is_cuda:  # one kernel, and no copy; on a CPU torch would make one
            self.total.add_(vector, alpha=scale * weight)
            self.weight += weight
            self._whole += weight
            return
        for piece in pieces_of(vector):
            self.total[piece].add_(vector[piece].to(self.total.dtype) * scale, alpha=weight)
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
