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
from fedquilt.common.pieces import pieces_of
from fedquilt.config.choices import SERVER_LEARNING_RATES, SERVER_OPTIMIZERS

BETA_1, BETA_2, TAU = 0.9, 0.99, 1e-3


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
        for piece in pieces_of(weights):
            direction = self._direction(update[piece].to(torch.float64), piece)
            weights[piece] = weights[piece].to(torch.float64) + self.lr * direction
        return weights

    def _direction(self, update: torch.Tensor, piece: slice) -> torch.Tensor:
        """Move the moments of a piece, in place, and return where its weights go."""
        if self._first is None:
            return update
        first = self._first[piece]
        if self._second is None:
            first.copy_(self.momentum * first + update)
            return first
        square, second = update * update, self._second[piece]
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


def make_server_optimizer(name: str, lr: float | None, momentum: float) -> ServerOptimizer:
    """Return the optimiser of a name, with its usual learning rate when none is given."""
    checks.choice("server_optimizer", name, SERVER_OPTIMIZERS)
    return ServerOptimizer(name, SERVER_LEARNING_RATES[name] if lr is None else lr, momentum)
