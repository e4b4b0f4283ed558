"""Small models that have what a model may have: randomness, state, a frozen part.

Some of them carry something from one batch to the next.  Whoever trains one client
after the other on one module hands it on from client to client, unless it is put back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from fedquilt.models import FeatureModel
from fedquilt.models.exits import ExitNet
from fedquilt.randomness import torch_seed

CLASSES = 3
SIDE = 4  # of an image of one channel
CONDENSED_SIDE = 8  # of one that gradients can be taken of
_WIDTH = 8


class Net(nn.Module):
    """Two layers; what stands between them is up to the kinds below."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE**2, _WIDTH)
        self.last = nn.Linear(_WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        out: torch.Tensor = self.last(self.between(functional.relu(self.first(x.flatten(1)))))
        return out

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden values as they are."""
        return hidden


class FunctionalDropout(Net):
    """Dropout that no layer tells of."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Drop half of the values."""
        return functional.dropout(hidden, 0.5, self.training)


class MovingCentre(Net):
    """A frozen parameter that every forward pass moves, as a momentum teacher's are."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(_WIDTH), requires_grad=False)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Move the centre and subtract it."""
        if self.training:
            self.centre.data.lerp_(_mean(hidden), 0.5)
        return hidden - self.centre


class PlainAttribute(Net):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(_WIDTH)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Remember a mean of all batches and subtract it."""
        if self.training:
            self.memory = 0.5 * self.memory.to(hidden.device) + 0.5 * _mean(hidden)
        return hidden - self.memory.to(hidden.device)


class LateBuffer(Net):
    """A buffer that stays as it is for the first two calls."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(_WIDTH))
        self.calls = 0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Move the centre from the third call on, and subtract it."""
        self.calls += self.training
        if self.training and self.calls > 2:
            self.centre.lerp_(_mean(hidden), 0.5)
        return hidden - self.centre


class GradientBuffer(Net):
    """A buffer that moves only where gradients are recorded."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(_WIDTH))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Move the centre in training steps, and subtract it."""
        if torch.is_grad_enabled():
            self.centre.lerp_(_mean(hidden), 0.5)
        return hidden - self.centre


class PixelMeans(nn.Module):
    """A frozen front: means of neighbouring pixels."""

    num_features = SIDE**2 // 4

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return one row an image."""
        return functional.avg_pool2d(images, 2).flatten(1)


def _mean(hidden: torch.Tensor) -> torch.Tensor:
    # A value that is not finite would spoil the memory for good, and show at once.
    return torch.nan_to_num(hidden.detach().mean(0), 0.0, 9.0, -9.0).clamp(-9.0, 9.0)


def _dropout_layer() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE**2, _WIDTH), nn.ReLU(), nn.Dropout(0.5), nn.Linear(_WIDTH, 3)
    )


def _log_softmax() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE**2, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 3), nn.LogSoftmax(1)
    )


def _on_condensed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(CONDENSED_SIDE**2, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "dropout layer": _dropout_layer,
    "dropout call": FunctionalDropout,
    "frozen parameter": MovingCentre,
    "attribute": PlainAttribute,
    "late buffer": LateBuffer,
    "gradient buffer": GradientBuffer,
    "log-softmax": _log_softmax,
    "frozen front": lambda: FeatureModel(PixelMeans(), CLASSES),
    "exits": lambda: ExitNet(CLASSES, 1, (4, 4)),
    "condensed": _on_condensed,
}


def audit_model(name: str, seed: int) -> nn.Module:
    """Return one of `MODELS` with weights drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed(seed, "audit model"))
        return MODELS[name]()
