"""Small federations on slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sliced_federation import CLASSES, HIDDEN, INPUTS
from torch import nn

from fedquilt.config import RunConfig, plain_config
from fedquilt.federation import Federation
from fedquilt.setup.account import open_account
from fedquilt.setup.build_task import task_from
from fedquilt.setup.federation import build_federation
from fedquilt.setup.task import FederatedTask

SIZES = (3, 5, 2, 6, 4, 4)
RATE, EPOCHS = 0.3, 2


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[np.ndarray]]:
    """Return inputs, labels and six clients; some lack a class, one has a single one."""
    random = np.random.default_rng(seed)
    count = sum(SIZES)
    inputs = torch.from_numpy(random.standard_normal((count, INPUTS)).astype(np.float32))
    labels = torch.from_numpy(random.integers(0, CLASSES, count))
    labels[:3] = 1
    return inputs, labels, np.split(np.arange(count), np.cumsum(SIZES)[:-1])


def network(seed: int = 1) -> nn.Module:
    """Return the oracle's network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()),
            nn.Linear(HIDDEN, CLASSES),
        )


def problem(model: nn.Module | None = None, **settings: Any) -> tuple[RunConfig, FederatedTask]:
    """Return a run in which all six clients take part, each in one batch an epoch."""
    shared = {
        "dataset": "custom",
        "model": "custom",
        "availability": "always",
        "clients_per_round": 6,
        "num_rounds": 4,
        "learning_rate": RATE,
        "local_epochs": EPOCHS,
        "batch_size": 100,
        "tiers": "1,1/2,1/4",
        "device": "cpu",
    }
    config = plain_config({**shared, **settings})
    inputs, labels, clients = data()
    both = (inputs, labels)
    return task_from(config, network() if model is None else model, both, both, clients)


def federation(
    folder: Path | None = None, model: nn.Module | None = None, **settings: Any
) -> Federation:
    """Return the federation of a configuration, with a ledger where a folder is given."""
    config, its = problem(model, **settings)
    account = None if folder is None else open_account(config, its, folder / "ledger", "run")
    return build_federation(config, its, account)
