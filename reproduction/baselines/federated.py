"""Baselines that stay federated: FedAvg and FedDM."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fedquilt.common.randomness import generator, torch_seed
from fedquilt.condense.embeds import embedding_model, perturbed
from fedquilt.condense.matching import RealImages, SyntheticSet, match_real
from fedquilt.condense.method import training_of
from fedquilt.condense.training import TrainingSettings
from fedquilt.config import CondenseConfig, RunConfig
from fedquilt.experiment.loop import Experiment
from fedquilt.method import Progress
from fedquilt.setup.federation import build_federation
from fedquilt.setup.task import FederatedTask, build_selector
from fedquilt.training import FlatModel, evaluate
from reproduction.baselines.common import (
    BaselineResult,
    augmentation,
    by_class,
    held_by_class,
    image_bytes,
    matching_settings,
    model_bytes,
    own_model,
    progress_of,
    real_sample,
    train,
)

COHORT = 10
LOCAL_EPOCHS = 1
BATCH_SIZE = 32
# Of 0.01, 0.02, 0.05, 0.1 and 0.2 the best after 5 rounds of convnet-64 on MNIST, level with 0.2
# after 19 (50 clients, Dirichlet 0.1, mean of two seeds), on 10,000 training images held out.
LEARNING_RATE = 0.1


def run_fedavg(
    config: CondenseConfig,
    problem: FederatedTask,
    budget_bytes: int,
    progress: Progress | None = None,
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
    averaging: RunConfig, problem: FederatedTask, progress: Progress | None
) -> list[dict[str, Any]]:
    """Run the rounds on a copy of the problem, evaluating the last; return their lines."""
    problem = dataclasses.replace(
        problem,
        flat=own_model(problem),
        selector=build_selector(averaging, len(problem.task.clients)),
    )
    report = progress_of(progress, "averaging", averaging.num_rounds)

    def observe(_: RunConfig, line: dict[str, Any]) -> None:
        if report is not None:
            report(line["round"] + 1)

    federation = build_federation(averaging, problem)
    with contextlib.closing(federation.method):
        experiment = Experiment(averaging, problem, federation, observer=observe)
        experiment.run()
    return experiment.lines


@dataclasses.dataclass(frozen=True)
class FedDMRounds:
    """Who joins in each round, and how many steps each of them takes in it."""

    cohorts: tuple[tuple[int, ...], ...]
    steps: int
    bytes_up: int
    bytes_down: int


def run_feddm(
    config: CondenseConfig,
    problem: FederatedTask,
    budget_bytes: int,
    progress: Progress | None = None,
) -> BaselineResult:
    """Condense at the clients for as many rounds as fit into the budget, at least one."""
    began = time.perf_counter()
    clients = Clients(config, problem)
    plan = make_plan(config, problem, clients, budget_bytes)
    flat = own_model(problem)
    for index, cohort in enumerate(plan.cohorts):
        union = clients.condense(flat.module, cohort, index, plan.steps, progress)
        if union:
            _train_on_union(config, problem, flat, union, index, progress)
    accuracy, loss = evaluate(flat.module, *problem.test_data)
    used = plan.bytes_up + plan.bytes_down
    over = "; one round is more than the budget" if used > budget_bytes else ""
    return BaselineResult(
        name="feddm",
        accuracy=accuracy,
        loss=loss,
        bytes_up=plan.bytes_up,
        bytes_down=plan.bytes_down,
        rounds=len(plan.cohorts),
        seconds=time.perf_counter() - began,
        raw=config.init_method == "real_sample",
        note=_note(config, plan, used) + over,
    )


def _note(config: CondenseConfig, plan: FedDMRounds, used: int) -> str:
    begin = ", which begin as raw images of theirs" if config.init_method == "real_sample" else ""
    return (
        f"clients send images that they condensed themselves{begin}; local steps a round: "
        f"{plan.steps}; bytes: {used:,}"
    )


class Clients:
    """The clients of a problem and the images each has made so far.

    A client makes `ipc` images of each class that it holds at least `min_group` samples
    of, and goes on with them when it joins again.
    """

    def __init__(self, config: CondenseConfig, problem: FederatedTask) -> None:
        self._config = config
        self._inputs = problem.task.inputs
        self._families = augmentation(config, problem.task)
        self._matching = matching_settings(config, problem, 1, "l2")
        labels = problem.task.targets.cpu().numpy()
        self.held = [
            by_class(labels, np.asarray(samples), config.min_group)
            for samples in problem.task.clients
        ]
        self._made: dict[int, SyntheticSet] = {}

    def images(self, cohort: Sequence[int]) -> int:
        """Return how many images a cohort sends in a round."""
        return sum(self._config.ipc * len(self.held[client]) for client in cohort)

    def condense(
        self,
        model: nn.Module,
        cohort: Sequence[int],
        index: int,
        steps: int,
        progress: Progress | None = None,
    ) -> list[SyntheticSet]:
        """Let a cohort match images around the global model; return what they send."""
        union = []
        report = progress_of(progress, "matching", len(cohort))
        for done, client in enumerate(cohort):
            if self.held[client]:
                self._match(model, client, index, steps)
                union.append(self._made[client])
            if report is not None:
                report(done + 1)
        return union

    def _match(self, model: nn.Module, client: int, index: int, steps: int) -> None:
        config = self._config
        source = generator(config.seed, "feddm", index, client)
        real = RealImages(self._inputs, self.held[client])
        if client not in self._made:
            self._made[client] = self._first(real, source)

        def model_at(step: int) -> nn.Module:
            seed = torch_seed(config.seed, "feddm model", index, client, step)
            moved = perturbed(model, config.rho, seed).eval().requires_grad_(False)
            return embedding_model(moved, config.embed_layer)

        match_real(
            self._made[client],
            real,
            model_at,
            dataclasses.replace(self._matching, iterations=steps),
            config.max_samples or len(self._inputs),
            self._families,
            source,
        )

    def _first(self, real: RealImages, source: np.random.Generator) -> SyntheticSet:
        ipc, images = self._config.ipc, self._inputs
        if self._config.init_method == "real_sample":
            return real_sample(images, real.classes, ipc, source)
        shape = images.shape[1:]
        return SyntheticSet.random(tuple(real.classes), ipc, shape, source, images.device)


def make_plan(
    config: CondenseConfig, problem: FederatedTask, clients: Clients, budget_bytes: int
) -> FedDMRounds:
    """Return the rounds that fit, and the steps that make the work the condensation's.

    A round costs the weights down to everybody who joins and the images up; there are
    no more rounds than the condensation has.  Work is counted in steps of one class's
    images: the condensation takes num_rounds * dc_iterations of them for each class,
    and here they are shared by all (client, class) of all rounds.
    """
    cohorts: list[tuple[int, ...]] = []
    up = down = 0
    for cohort in _cohorts(config, problem):
        more_up = clients.images(cohort) * image_bytes(problem.task)
        more_down = len(cohort) * model_bytes(problem)
        if cohorts and up + down + more_up + more_down > budget_bytes:
            break
        cohorts.append(cohort)
        up, down = up + more_up, down + more_down
    whole = config.num_rounds * config.dc_iterations
    shares = sum(len(clients.held[client]) for cohort in cohorts for client in cohort)
    classes = len(held_by_class(problem.task))
    steps = min(whole, max(1, round(whole * classes / max(1, shares))))
    return FedDMRounds(tuple(cohorts), steps, up, down)


def _cohorts(config: CondenseConfig, problem: FederatedTask) -> Iterator[tuple[int, ...]]:
    """Yield who joins in each round: the same clients as in the condensation.

    Only the coins of a certified one may be secret; here they come from the seed.
    """
    public = dataclasses.replace(config, mode="fednum")
    selector = build_selector(public, len(problem.task.clients))
    for index in range(config.num_rounds):
        yield tuple(int(client) for client in selector.select(index).clients)


def _train_on_union(
    config: CondenseConfig,
    problem: FederatedTask,
    flat: FlatModel,
    union: list[SyntheticSet],
    index: int,
    progress: Progress | None,
) -> None:
    """Train the global model, where it stands, on the images of all clients."""
    images = torch.cat([made.images for made in union])
    labels = torch.cat([made.labels for made in union])
    classes = len(held_by_class(problem.task))
    settings = same_steps(training_of(config), classes * config.ipc, len(images))
    train(
        config, flat, images, labels, settings, augmentation(config, problem.task), index, progress
    )


def same_steps(settings: TrainingSettings, images: int, union: int) -> TrainingSettings:
    """Return settings with the epochs on `union` images that take as many steps as on `images`."""
    before, now = (math.ceil(count / settings.batch_size) for count in (images, union))
    epochs = max(1, math.ceil(settings.epochs * before / now))
    return dataclasses.replace(settings, epochs=epochs)
