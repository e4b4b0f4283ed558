"""Small condensations: a linear embedding on digits, and settings that take milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import fedquilt
from fedquilt.config import CondenseConfig, RunConfig, build_config
from fedquilt.data import load_dataset
from fedquilt.experiment.api import RunResult

WIDTH = 6  # numbers of the embedding
SMALL: dict[str, Any] = {
    "method": "condense",
    "num_rounds": 2,
    "eval_every": 1,
    "ipc": 2,
    "dc_iterations": 3,
    "model_epochs": 2,
    "model_n": 2,
    "min_group": 4,
    # The plain form, which oracles are written for.
    "tiles": 1,
    "moments": 1,
    "image_optimizer": "sgd",
    "init_method": "random",
    "model_schedule": "step",
    "cutmix": 0.0,
}
CERTIFIED: dict[str, Any] = {
    "method": "condense",
    "mode": "certified",
    "num_rounds": 4,
    "mean_rounds": 2,
    "eval_every": 2,
    "ipc": 1,
    "synthetic_images": 40,
    "model_epochs": 2,
    "epsilon": 6.0,
}
PARTS = (range(200), range(200, 500))


class Linear(nn.Module):
    """A model whose embedding is a matrix product, without embed()."""

    def __init__(self, classes: int = 10, pixels: int = 64) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(pixels, WIDTH))
            self.fc = nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x))  # type: ignore[no-any-return]


def small(**changes: Any) -> CondenseConfig:
    """Return the configuration of a condensation of digits."""
    named = {"dataset": "digits", "model": "convnet-32", "num_clients": 3}
    return checked(build_config({**SMALL, **named, **changes}))


def certified(**changes: Any) -> CondenseConfig:
    """Return the configuration of a certified condensation of digits."""
    return checked(build_config({**CERTIFIED, "dataset": "digits", "num_clients": 4, **changes}))


def checked(config: RunConfig) -> CondenseConfig:
    """Return the configuration, which is one of a condensation."""
    assert isinstance(config, CondenseConfig)
    return config


def condense(
    model: nn.Module | None = None,
    clients: Sequence[Any] = PARTS,
    train: Any = None,
    test: Any = None,
    **changes: Any,
) -> RunResult:
    """Condense digits, or other data, of these clients with somebody's own model."""
    digits = load_dataset("digits")
    grouped = changes.get("mode") != "certified"
    usual = {**SMALL, "embed_layer": "body"} if grouped else CERTIFIED
    settings = {**usual, "output_dir": None, **changes}
    return fedquilt.run(
        Linear() if model is None else model,
        digits[0] if train is None else train,
        digits[1] if test is None else test,
        clients,
        **settings,
    )


def certify(model: nn.Module | None = None, **changes: Any) -> RunResult:
    """Condense digits under a bound, with somebody's own model."""
    return condense(model, mode="certified", **changes)


def images_of(result: RunResult) -> torch.Tensor:
    """Return the synthetic images of a run."""
    assert result.synthetic is not None
    return result.synthetic.images
