"""Certified federations without data: clients send what a test prescribes."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.condense.certified import GrowingSettings
from fedquilt.config import RunConfig, plain_config
from fedquilt.federation import Federation
from fedquilt.population import Cohort
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.mechanism import RoundPlan
from fedquilt.setup.account import open_account
from fedquilt.setup.build_task import task_from
from fedquilt.setup.federation import build_federation
from fedquilt.setup.task import FederatedTask
from fedquilt.training import ClientUpdate, Engine

SIZE = 15  # parameters of the model
BASE: dict[str, Any] = {
    "mode": "certified",
    "dataset": "custom",
    "model": "custom",
    "availability": "always",
    "num_rounds": 10,
    "epsilon": 3.0,
    "delta": 1e-5,
}


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Yield a folder in memory where there is such a thing: syncing is free there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


def make_problem(num_clients: int = 4, **changes: Any) -> tuple[RunConfig, FederatedTask]:
    """Return a certified configuration and clients with one sample each."""
    config = plain_config({**BASE, "clients_per_round": num_clients, **changes})
    inputs, labels = torch.zeros(num_clients, 1, 2, 2), torch.zeros(num_clients, dtype=torch.int64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    parts = [[client] for client in range(num_clients)]
    return task_from(config, model, (inputs, labels), (inputs, labels), parts)


class Sending(Engine):
    """An engine whose clients send what `update(client, round)` returns."""

    def __init__(self, update: Callable[[int, int], torch.Tensor]) -> None:
        self.update = update
        self.trained: list[list[int]] = []

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        self.trained.append([int(client) for client in cohort])
        for client in self.trained[-1]:
            yield ClientUpdate(client, self.update(client, round_index), 1, 1.0)

    def close(self) -> None:
        pass


def ones(client: int, index: int) -> torch.Tensor:
    """Return an update far above any clip."""
    return torch.full((SIZE,), 1e3)


def make_federation(
    config: RunConfig,
    problem: FederatedTask,
    path: Path,
    run_id: str = "run",
    update: Callable[[int, int], torch.Tensor] = ones,
) -> Federation:
    """Return the federation of a configuration on the ledger at `path`."""
    federation = build_federation(config, problem, open_account(config, problem, path, run_id))
    federation.method.engine = Sending(update)
    note_plans(federation)
    return federation


def note_plans(federation: Federation) -> None:
    """Let `plan_of` know the plan of the round in progress, as it was opened."""
    mechanism = federation.mechanism
    open_round = mechanism.open_round

    def noting(plan: RoundPlan) -> None:
        vars(mechanism)["noted_plan"] = plan
        open_round(plan)

    mechanism.open_round = noting  # type: ignore[method-assign]


def plan_of(federation: Federation) -> RoundPlan:
    """Return the plan of the newest round."""
    plan = vars(federation.mechanism)["noted_plan"]
    assert isinstance(plan, RoundPlan)
    return plan


def joining(federation: Federation, cohorts: Callable[[int], Sequence[int]]) -> None:
    """Let exactly these clients be there in each round, as far as they may join."""

    def select(index: int, allowed: NDArray[np.bool_] | None) -> Cohort:
        there = np.asarray(sorted(cohorts(index)), dtype=np.int64)
        picked = there if allowed is None else there[allowed[there]]
        return Cohort(picked, picked)

    federation.select = select


def mechanism_of(federation: Federation) -> Certified:
    """Return the federation's mechanism, which is a certified one."""
    assert isinstance(federation.mechanism, Certified)
    return federation.mechanism


def true_costs(federation: Federation) -> dict[int, float]:
    """Return what the round in progress costs each client: k (c_i / s)^2 plus the bit.

    From clip and noise as they are applied, not from what the ledger was told.
    """
    mechanism, plan = mechanism_of(federation), plan_of(federation)
    quantile = mechanism.quantile
    bit = 0.0 if quantile is None else (0.5 / quantile.bit_noise_std) ** 2
    factor = float(np.sum(np.square(mechanism.noise.coefficients)))
    return {
        client: factor * (clip / plan.noise_std) ** 2 + bit for client, clip in plan.clips.items()
    }


def refine_in_few_steps(patch: pytest.MonkeyPatch) -> None:
    """Let the images of certified condensations be refined in a few steps."""
    few = functools.partial(GrowingSettings, steps=15)
    patch.setattr("fedquilt.condense.method.GrowingSettings", few)
