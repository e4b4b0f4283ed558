"""Runs to look at, made once for all tests of pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fedquilt
from fedquilt.config import build_config
from fedquilt.experiment import run_config

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "model": "linear",
    "num_clients": 12,
    "clients_per_round": 5,
    "num_rounds": 6,
    "local_epochs": 1,
    "eval_every": 2,
}


def small_run(place: Path, **changes: Any) -> Path:
    """Run a few rounds and return the folder."""
    done = run_config(build_config({**SMALL, **changes, "output_dir": str(place)}))
    assert done.folder is not None
    return done.folder


def condensation(place: Path) -> Path:
    """Grow a few images, kept after every round."""
    tiny = {"ipc": 1, "dc_iterations": 2, "model_epochs": 1, "model_n": 1, "num_clients": 3}
    settings = {"method": "condense", "dataset": "digits", "num_rounds": 3, "eval_every": 1}
    config = build_config({**settings, **tiny, "output_dir": str(place)})
    done = run_config(config)
    assert done.folder is not None
    return done.folder


def crowd(place: Path, num_clients: int, **settings: Any) -> Path:
    """Run many clients on a few numbers each."""
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(2 * num_clients, 4, generator=source)
    labels = inputs[:, :2].argmax(dim=1)
    clients = [range(2 * i, 2 * i + 2) for i in range(num_clients)]
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    test = (inputs[:50], labels[:50])
    named = {"population": "people"} if settings.get("mode") == "certified" else {}
    done = fedquilt.run(
        model,
        (inputs, labels),
        test,
        clients,
        output_dir=str(place),
        local_epochs=1,
        **named,
        **settings,
    )
    assert done.folder is not None
    return done.folder
