"""Where the gradient of a step by hand goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Update:
    """Where the gradient of a step goes: `into <- keep * into + scale * gradient`.

    Plain SGD adds to the weights (keep 1, scale -r / n); other rules ask for the gradient
    itself (keep 0, scale 1 / n).
    """

    keep: float
    scale: float

    def put(self, into: torch.Tensor, gradient: torch.Tensor) -> None:
        """Do so with a gradient that is there."""
        if self.keep:
            into.add_(gradient, alpha=self.scale)
        else:
            torch.mul(gradient, self.scale, out=into)
