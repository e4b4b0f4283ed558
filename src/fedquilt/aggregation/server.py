"""Server optimisers: how the mean update moves the global model.

With the mean update d as the (negative) gradient of the server (Reddi et al.
2021, "Adaptive Federated Optimization"):

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

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common import checks
from fedquilt.config.choices import SERVER_LEARNING_RATES, SERVER_OPTIMIZERS

BETA_1, BETA_2, TAU = 0.9, 0.99, 1e-3


class ServerStep(Protocol):
    """What a server makes of a release."""

    def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Return the weights after the release `update`, in the type of the old ones."""

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
        """Return the new weights, in the type of the old ones."""
        direction = self._direction(update.to(torch.float64))
        return (weights.to(torch.float64) + self.lr * direction).to(weights.dtype)

    def _direction(self, update: torch.Tensor) -> torch.Tensor:
        if self.name == "sgd":
            return update
        first = torch.zeros_like(update) if self._first is None else self._first
        if self.name == "momentum":
            self._first = self.momentum * first + update
            return self._first
        square = update * update
        second = torch.full_like(update, TAU**2) if self._second is None else self._second
        self._first = BETA_1 * first + (1 - BETA_1) * update
        if self.name == "adam":
            self._second = BETA_2 * second + (1 - BETA_2) * square
        else:
            self._second = second - (1 - BETA_2) * square * torch.sign(second - square)
        return self._first / (self._second.sqrt() + TAU)

    def report(self) -> dict[str, float]:
        """Return no measurements."""
        return {}

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the moments as arrays, for a checkpoint."""
        moments = {"first": self._first, "second": self._second}
        return {key: m.cpu().numpy() for key, m in moments.items() if m is not None}

    def load_state(self, state: dict[str, NDArray[Any]], device: torch.device) -> None:
        """Restore what `state` returned."""
        moments = {
            key: torch.from_numpy(np.array(value, dtype=np.float64)).to(device)
            for key, value in state.items()
        }
        self._first, self._second = moments.get("first"), moments.get("second")


def make_server_optimizer(name: str, lr: float | None, momentum: float) -> ServerOptimizer:
    """Return the optimiser of a name, with its usual learning rate when none is given."""
    checks.choice("server_optimizer", name, SERVER_OPTIMIZERS)
    return ServerOptimizer(name, SERVER_LEARNING_RATES[name] if lr is None else lr, momentum)
