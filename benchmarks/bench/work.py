"""The work of a benchmark: who trains what on which samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator
from fedquilt.config import RunConfig
from fedquilt.setup.build_task import build_task
from fedquilt.training import LocalSettings, Task

ROUNDS_OF_A_RUN = 200
"""How long the run is taken to be of which a benchmark times some rounds."""


@dataclass(frozen=True)
class Kind:
    """A benchmark by name."""

    what: str
    model: str
    clients_a_round: int
    rounds: int


WORKS = {
    "small": Kind("784-64-10 network", "mlp", 20, 20),
    "cnn": Kind("the MNIST network of the QuAP-FL document", "mnist", 15, 4),
}


@dataclass(frozen=True, eq=False)
class Work:
    """The same for everybody: samples, clients, cohorts, network, steps."""

    name: str
    task: Task
    test: tuple[torch.Tensor, torch.Tensor]
    model: nn.Module
    cohorts: list[NDArray[np.int64]]
    settings: LocalSettings
    learning_rate: float

    @property
    def what(self) -> str:
        """The work in words."""
        kind, settings = WORKS[self.name], self.settings
        return (
            f"{kind.what}, {len(self.task.clients)} clients, {len(self.cohorts[0])} a round, "
            f"{settings.epochs} epoch(s), batches of {settings.batch_size}"
        )

    def samples(self, round_index: int) -> int:
        """Return how many samples a round trains on."""
        held = sum(len(self.task.clients[client]) for client in self.cohorts[round_index])
        return held * self.settings.epochs

    def write(self, folder: Path) -> Path:
        """Write the work for frameworks in an environment of their own."""
        path = folder / f"{self.name}.pt"
        content: dict[str, Any] = {
            "name": self.name,
            "inputs": self.task.inputs,
            "targets": self.task.targets.long(),
            "test_inputs": self.test[0],
            "test_targets": self.test[1].long(),
            "clients": [np.asarray(part) for part in self.task.clients],
            "cohorts": self.cohorts,
            "start": self.model.state_dict(),
            "epochs": self.settings.epochs,
            "batch_size": self.settings.batch_size,
            "learning_rate": self.learning_rate,
        }
        torch.save(content, path)
        return path


def make_work(
    name: str,
    *,
    rounds: int | None = None,
    clients_a_round: int | None = None,
    dataset: str = "mnist",
    num_clients: int = 100,
    seed: int = 0,
) -> Work:
    """Return a work of `WORKS` on a data set, dealt by Dirichlet(0.5) of the labels.

    One round more than asked for: the first counts for nothing (processes start).
    """
    if name not in WORKS:
        raise InvalidValueError(f"work={name!r} must be one of {', '.join(map(repr, WORKS))}")
    kind = WORKS[name]
    if rounds is not None:
        checks.integer("rounds", rounds, at_least=1)
    if clients_a_round is not None:
        checks.integer("clients_per_round", clients_a_round, at_least=1)
    config = RunConfig(
        dataset=dataset,
        model=kind.model,
        mode="fedavg",
        partition="dirichlet",
        dirichlet_alpha=0.5,
        num_clients=num_clients,
        seed=seed,
        device="cpu",
    )
    config, problem = build_task(config)
    count = (kind.rounds if rounds is None else rounds) + 1
    size = min(clients_a_round or kind.clients_a_round, num_clients)
    draws = generator(seed, "bench")
    cohorts = [np.sort(draws.choice(num_clients, size, replace=False)) for _ in range(count)]
    settings = LocalSettings(epochs=1, batch_size=32, fedprox_mu=0.0, seed=seed)
    return Work(
        *(name, problem.task, problem.test_data, problem.flat.module, cohorts, settings),
        learning_rate=0.05,
    )
