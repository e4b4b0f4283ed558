"""Federated averaging (McMahan et al. 2017) for the bytes that a condensation needs."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

from fedquilt.baselines.common import BaselineResult, Progress, model_bytes, own_model, told
from fedquilt.config import CondenseConfig, RunConfig
from fedquilt.experiment import train_rounds
from fedquilt.problem import Problem, build_engine, build_federation, build_selector

COHORT = 10
LOCAL_EPOCHS = 1
BATCH_SIZE = 32
# Of 0.01, 0.02, 0.05, 0.1 and 0.2 the best after 5 rounds of convnet-64 on MNIST, level with 0.2
# after 19 (50 clients, Dirichlet 0.1, mean of two seeds), on 10,000 training images held out.
LEARNING_RATE = 0.1


def run_fedavg(
    config: CondenseConfig, problem: Problem, budget_bytes: int, progress: Progress | None = None
) -> BaselineResult:
    """Average models for as many rounds as fit into the budget, at least one."""
    began = time.perf_counter()
    size, num_clients = model_bytes(problem), len(problem.task.clients)
    averaging = fedavg_config(config, num_clients, size, budget_bytes)
    lines = _train(averaging, problem, progress)
    joins = sum(len(line["cohort"]) for line in lines)
    over = "; one round is more than the budget" if 2 * joins * size > budget_bytes else ""
    return BaselineResult(
        name="fedavg",
        accuracy=lines[-1]["test_accuracy"],
        loss=lines[-1]["test_loss"],
        bytes_up=joins * size,
        bytes_down=joins * size,
        rounds=len(lines),
        seconds=time.perf_counter() - began,
        raw=False,
        note=f"weights travel both ways for {averaging.clients_per_round} clients a round, "
        f"learning rate {LEARNING_RATE:g}{over}",
    )


def fedavg_config(
    config: CondenseConfig, num_clients: int, size: int, budget_bytes: int
) -> RunConfig:
    """Return the run of the mode fedavg that fits into the budget.

    A round of a full cohort costs 2 * cohort * size bytes, `size` being the bytes of
    the model.
    """
    cohort = min(COHORT, num_clients)
    rounds = max(1, budget_bytes // (2 * cohort * size))
    return RunConfig(
        dataset=config.dataset,
        model=config.model,
        mode="fedavg",
        num_clients=num_clients,
        clients_per_round=cohort,
        availability=config.availability,
        num_rounds=rounds,
        eval_every=rounds,
        local_epochs=LOCAL_EPOCHS,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        seed=config.seed,
        device=config.device,
    )


def _train(
    averaging: RunConfig, problem: Problem, progress: Progress | None
) -> list[dict[str, Any]]:
    """Run the rounds on a copy of the problem, evaluating the last; return their lines."""
    problem = dataclasses.replace(
        problem,
        flat=own_model(problem),
        selector=build_selector(averaging, len(problem.task.clients)),
        condensing=None,
    )
    teller = told(progress, "averaging", averaging.num_rounds)

    def observe(_: RunConfig, line: dict[str, Any]) -> None:
        if teller is not None:
            teller(line["round"] + 1)

    lines: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        engine = build_engine(averaging, problem)
        stack.callback(engine.close)
        federation = build_federation(averaging, problem, engine=engine)
        train_rounds(averaging, problem, federation, lines, observer=observe)
    return lines
