"""The trainers' arithmetic against loops that are written out here, in NumPy and plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.training import Engine, FlatModel, LocalSettings, Task, as_engine, make_engine
from fedquilt.training.engines import LocalEngine
from fedquilt.training.optimizers import ClientOptimizer
from fedquilt.training.task import ClientUpdate, client_seed
from fedquilt.training.trainers.autograd import AutogradTrainer
from fedquilt.training.trainers.manual import ManualTrainer
from fedquilt.training.trainers.plan import is_interpreted
from fedquilt.training.trainers.vmap import VmapTrainer

pytestmark = pytest.mark.skipif(is_interpreted(), reason="kernels stand in for this there")

SIZES, BATCH, RATE, ROUND = (11, 4, 0, 7, 9), 4, 0.2, 3
Matrix = NDArray[np.float64]


def problem() -> tuple[nn.Module, Task]:
    torch.manual_seed(5)
    random = np.random.default_rng(1)
    inputs = torch.from_numpy(random.standard_normal((sum(SIZES), 6), dtype=np.float32))
    targets = torch.from_numpy(random.integers(0, 3, sum(SIZES)))
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return model, Task(inputs, targets, np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1]))


def how(**changes: Any) -> LocalSettings:
    return LocalSettings(
        **{"epochs": 2, "batch_size": BATCH, "fedprox_mu": 0.0, "seed": 1, **changes}
    )


def engines(model: nn.Module, task: Task, settings: LocalSettings) -> dict[str, LocalEngine]:
    made = {
        "autograd": AutogradTrainer(model, task, settings),
        "vmap": VmapTrainer(model, task, settings),
    }
    found = {name: LocalEngine(trainer) for name, trainer in made.items()}
    by_hand = make_engine("local", model, task, settings)
    assert isinstance(by_hand, LocalEngine)
    assert isinstance(by_hand.trainer, ManualTrainer)
    return {**found, "manual": by_hand}


def by_numpy(
    weights: list[Matrix],
    x: Matrix,
    y: NDArray[np.int64],
    order: list[NDArray[np.int64]],
    mu: float,
) -> tuple[list[Matrix], float]:
    """Train relu(x A^T + a) B^T + b by SGD with the FedProx term, in float64; mean loss, too."""
    a, a0, b, b0 = (weight.copy() for weight in weights)
    loss = 0.0
    for samples in order:
        inner = x[samples] @ a.T + a0
        hidden = np.maximum(inner, 0)
        scores = hidden @ b.T + b0
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        loss -= np.log(shares[np.arange(len(samples)), y[samples]]).sum()
        d = shares
        d[np.arange(len(samples)), y[samples]] -= 1
        d /= len(samples)
        back = (d @ b) * (inner > 0)
        gradients = [back.T @ x[samples], back.sum(0), d.T @ hidden, d.sum(0)]
        moves = zip((a, a0, b, b0), gradients, weights, strict=True)
        for weight, gradient, start in moves:
            weight -= RATE * (gradient + mu * (weight - start))
    return [a, a0, b, b0], loss / sum(map(len, order))


def orders(settings: LocalSettings, client: int, held: NDArray[np.int64]) -> list[Any]:
    """Batches of all epochs: each one a permutation from the client's own generator."""
    shuffle = torch.Generator().manual_seed(client_seed(settings, ROUND, client))
    return [
        held[epoch[first : first + BATCH]]
        for epoch in (torch.randperm(len(held), generator=shuffle).numpy() for _ in range(2))
        for first in range(0, len(held), BATCH)
    ]


@pytest.mark.parametrize("mu", [0.0, 0.6])
@pytest.mark.parametrize("trainer", ["autograd", "manual", "vmap"])
def test_updates_are_those_of_a_loop_in_numpy(trainer: str, mu: float) -> None:
    model, task = problem()
    settings = how(fedprox_mu=mu)
    engine = engines(model, task, settings)[trainer]
    assert engine.trainer.name == trainer
    start = FlatModel(model).read().clone()
    weights = [p.detach().double().numpy() for p in model.parameters()]
    x, y = task.inputs.double().numpy(), task.targets.numpy()
    for update in engine.train(start, [3, 0, 4, 2, 1], ROUND, RATE):
        held = task.clients[update.client]
        assert update.num_examples == len(held)
        if not len(held):
            assert not update.delta.any()
            assert np.isnan(update.loss)
            continue
        order = orders(settings, update.client, held)
        trained, loss = by_numpy(weights, x, y, order, mu)
        moved = [(new - old).ravel() for new, old in zip(trained, weights, strict=True)]
        np.testing.assert_allclose(update.delta.numpy(), np.concatenate(moved), atol=2e-6)
        assert update.loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("trainer", ["autograd", "manual", "vmap"])
def test_momentum_is_that_of_torch_optim(trainer: str) -> None:
    model, task = problem()
    settings = how(optimizer=ClientOptimizer("sgd", momentum=0.9, weight_decay=0.01))
    start = FlatModel(model).read().clone()
    for update in engines(model, task, settings)[trainer].train(start, [0, 4], ROUND, 0.05):
        torch.manual_seed(5)
        plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        rule = torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
        for samples in orders(settings, update.client, task.clients[update.client]):
            rule.zero_grad()
            nn.functional.cross_entropy(
                plain(task.inputs[samples]), task.targets[samples]
            ).backward()
            rule.step()
        wanted = torch.cat([p.detach().flatten() for p in plain.parameters()]) - start
        torch.testing.assert_close(update.delta, wanted, rtol=1e-4, atol=2e-6)


class Bare:
    """A user's own engine: it says nothing of what it can do."""

    closed, colour = False, "red"

    def train(self, start: Any, cohort: Any, round_index: int, learning_rate: float) -> Any:
        for client in cohort:
            yield ClientUpdate(int(client), -start, 1, 0.0)

    def close(self) -> None:
        self.closed = True


def test_an_engine_that_declares_nothing_gets_the_defaults() -> None:
    bare = Bare()
    engine = as_engine(bare)
    assert (engine.is_small, engine.starts_early) == (False, False)
    engine.lend_updates()
    (update,) = engine.train(torch.ones(2), [4], 0, 0.1)
    assert (update.client, update.delta.tolist()) == (4, [-1, -1])
    assert engine.colour == "red"  # type: ignore[attr-defined]
    engine.close()
    assert bare.closed


def test_what_an_engine_declares_is_kept() -> None:
    class Early(Bare):
        starts_early = True

    class Whole(Engine):
        is_small = True

    assert as_engine(Early()).starts_early
    assert not as_engine(Early()).is_small
    whole = Whole()
    assert as_engine(whole) is whole
    assert whole.is_small
