"""Weighted means of update vectors, in float64, one vector at a time."""

from __future__ import annotations

import torch

from fedquilt.errors import InvalidValueError


class RunningMean:
    """Sum of w_k x_k and of w_k; the mean is their quotient.

    Only the sum is held, so a cohort of any size costs one vector.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.weight = 0.0

    def add(self, vector: torch.Tensor, weight: float = 1.0) -> None:
        """Add one client's vector with its weight."""
        if not weight > 0:
            raise InvalidValueError(f"weight={weight!r} must be > 0")
        if vector.shape != self.total.shape:
            raise InvalidValueError(
                f"vector of shape {tuple(vector.shape)} must have the shape "
                f"{tuple(self.total.shape)}"
            )
        self.total.add_(vector, alpha=weight)
        self.weight += weight

    def mean(self) -> torch.Tensor:
        """Return the weighted mean; zero when nothing was added."""
        return self.total / self.weight if self.weight else self.total.clone()
