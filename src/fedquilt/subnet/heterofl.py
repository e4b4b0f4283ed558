"""HeteroFL's helpers: the Scaler and the masked loss (Diao et al. 2021, sections 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedquilt import validate


class Scaler(nn.Module):
    """x / keep_rate in training mode, x in evaluation.

    A layer that keeps the share r of its inputs gives outputs that are r times
    as large on average; dividing by r while the slice trains lets the whole
    model be used without a change, as inverted dropout does.

    Parameters
    ----------
    keep_rate : float
        The share that is kept, in (0, 1].
    training : bool
        False builds a Scaler that never scales.
    """

    def __init__(self, keep_rate: float, training: bool = True) -> None:
        super().__init__()
        rate = validate.number("keep_rate", keep_rate, above=0, at_most=1)
        self.keep_rate = rate if training else 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Scale in training mode."""
        return x / self.keep_rate if self.training and self.keep_rate != 1 else x

    def extra_repr(self) -> str:
        """Return the rate."""
        return f"keep_rate={self.keep_rate}"


@dataclass(frozen=True)
class _ScaleOutput:
    """A forward hook that does what a Scaler behind the layer would."""

    keep_rate: float

    def __call__(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output / self.keep_rate if layer.training else output


def scale_outputs(layer: nn.Module, keep_rate: float) -> None:
    """Let a layer act as if a Scaler followed it; names in the state dict do not change."""
    rate = validate.number("keep_rate", keep_rate, above=0, at_most=1)
    if rate < 1:
        layer.register_forward_hook(_ScaleOutput(rate))


def masked_cross_entropy(
    logits: Tensor, labels: Tensor, held_classes: Sequence[int] | Tensor
) -> Tensor:
    """Return the cross entropy with the logits of classes a client has not set to zero.

    A client that has never seen a class then does not push its output down.
    """
    held = torch.as_tensor(held_classes, device=logits.device, dtype=torch.long)
    mask = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    mask[held] = True
    return functional.cross_entropy(logits.masked_fill(~mask, 0.0), labels)
