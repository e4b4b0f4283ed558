"""Local training against plain torch loops, and evaluation against a recount."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedquilt.models import MLP
from fedquilt.training import make_engine
from fedquilt.training.draws import seeded_layers
from fedquilt.training.flat import FlatModel
from fedquilt.training.metrics import evaluate
from fedquilt.training.task import LocalSettings, Task, client_seed
from fedquilt.training.trainers.autograd import (
    epoch_batches,
    refuse_hidden_state,
    train_client,
)

RANDOM = torch.Generator().manual_seed(1)
INPUTS = torch.randn(60, 6, generator=RANDOM)
TARGETS = torch.randint(0, 4, (60,), generator=RANDOM)
INDEX = torch.arange(5, 42)


def settings(epochs: int = 1, batch_size: int = 8, mu: float = 0.0) -> LocalSettings:
    return LocalSettings(epochs=epochs, batch_size=batch_size, fedprox_mu=mu, seed=3)


def batches_of(how: LocalSettings, seed: int) -> list[torch.Tensor]:
    """Write the order of the samples out: one permutation an epoch, the last batch kept."""
    shuffle = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(how.epochs):
        order = torch.randperm(len(INDEX), generator=shuffle)
        batches += [
            INDEX[order[start : start + how.batch_size]]
            for start in range(0, len(INDEX), how.batch_size)
        ]
    return batches


def trained(model: nn.Module, how: LocalSettings, lr: float, seed: int) -> tuple[nn.Module, float]:
    flat = FlatModel(model, INPUTS[:2])
    start = flat.read().clone()
    loss = train_client(flat, start, INPUTS, TARGETS, INDEX, lr, how, seed)
    return flat.module, loss


def assert_same_weights(one: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def test_an_epoch_is_that_of_torchs_own_sgd() -> None:
    model, how = MLP((6,), 4, hidden=5), settings(epochs=2)
    ours, loss = trained(model, how, 0.3, seed=77)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.3)
    losses, counts = [], []
    for batch in batches_of(how, 77):
        optimizer.zero_grad()
        batch_loss = nn.CrossEntropyLoss()(reference(INPUTS[batch]), TARGETS[batch])
        batch_loss.backward()
        optimizer.step()
        losses.append(batch_loss.item())
        counts.append(len(batch))
    assert_same_weights(ours, reference)
    assert loss == pytest.approx(np.average(losses, weights=counts), rel=1e-5)


@pytest.mark.parametrize("mu", [0.1, 2.0])
def test_fedprox_is_the_gradient_of_the_whole_objective(mu: float) -> None:
    """F(w) + mu/2 ||w - w_0||^2, differentiated by autograd."""
    model, how = MLP((6,), 4, hidden=5), settings(epochs=2, mu=mu)
    ours, _ = trained(model, how, 0.2, seed=5)
    reference = copy.deepcopy(model)
    anchors = [parameter.detach().clone() for parameter in reference.parameters()]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.2)
    for batch in batches_of(how, 5):
        optimizer.zero_grad()
        objective = functional.cross_entropy(reference(INPUTS[batch]), TARGETS[batch])
        for parameter, anchor in zip(reference.parameters(), anchors, strict=True):
            objective = objective + mu / 2 * (parameter - anchor).square().sum()
        objective.backward()
        optimizer.step()
    assert_same_weights(ours, reference)
    plain, _ = trained(model, settings(epochs=2), 0.2, seed=5)
    distances = [
        sum((p - a).square().sum() for p, a in zip(m.parameters(), anchors, strict=True))
        for m in (ours, plain)
    ]
    assert distances[0] < distances[1]


def test_the_loss_is_reported_without_the_proximal_term() -> None:
    model = MLP((6,), 4, hidden=5)
    _, plain = trained(model, settings(batch_size=100), 0.2, seed=5)
    _, close = trained(model, settings(batch_size=100, mu=5.0), 0.2, seed=5)
    expected = functional.cross_entropy(model(INPUTS[INDEX]), TARGETS[INDEX])
    assert plain == close == pytest.approx(float(expected.detach()), rel=1e-5)


class Casting(nn.Module):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.fc = nn.Linear(6, 4).to(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.to(self.kind))


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_other_precisions_train_with_and_without_fedprox(kind: torch.dtype, mu: float) -> None:
    model, how = Casting(kind), settings(mu=mu)
    ours, _ = trained(model, how, 0.2, seed=5)
    reference = copy.deepcopy(model).double()
    reference.kind = torch.float64
    anchors = [parameter.detach().clone() for parameter in reference.parameters()]
    for batch in batches_of(how, 5):
        loss = functional.cross_entropy(reference(INPUTS[batch]), TARGETS[batch])
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        with torch.no_grad():
            for p, g, a in zip(reference.parameters(), gradients, anchors, strict=True):
                p -= 0.2 * (g + mu * (p - a))
    tolerance = 1e-12 if kind == torch.float64 else 3e-2
    assert all(parameter.dtype == kind for parameter in ours.parameters())
    assert_same_weights(copy.deepcopy(ours).double(), reference, tolerance)


def test_dropout_draws_from_the_clients_seed_and_global_state_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    one, _ = trained(model, settings(), 0.2, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    again, _ = trained(model, settings(), 0.2, seed=5)
    other, _ = trained(model, settings(), 0.2, seed=6)
    assert_same_weights(one, again, 0.0)
    assert not torch.equal(one[0].weight, other[0].weight)


def test_seeded_layers_put_the_state_back_after_an_error() -> None:
    def failing() -> None:
        with seeded_layers(torch.device("cpu"), 3):
            torch.rand(5)
            raise KeyError

    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        failing()
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_hold_every_sample_once_and_small_rests_go_only_when_they_must() -> None:
    def sizes(count: int, batch_size: int, smallest: int) -> list[int]:
        index = torch.arange(100, 100 + count)
        batches = epoch_batches(index, batch_size, torch.Generator().manual_seed(0), smallest)
        seen = torch.cat([*batches, torch.empty(0, dtype=torch.int64)])
        assert len(seen.unique()) == len(seen)
        assert set(seen.tolist()) <= set(index.tolist())
        return [len(batch) for batch in batches]

    assert sizes(10, 4, 1) == [4, 4, 2]
    assert sizes(9, 4, 1) == [4, 4, 1]
    assert sizes(9, 4, 2) == [4, 4]
    assert sizes(10, 4, 2) == [4, 4, 2]
    assert sizes(1, 4, 2) == []
    assert sizes(0, 4, 1) == []


def test_batchnorm_clients_of_one_sample_or_one_too_many_do_not_break() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    task = Task(INPUTS, TARGETS, [np.array([3]), np.arange(9), np.arange(8)])
    engine = make_engine("sequential", model, task, settings(batch_size=8))
    start = FlatModel(model, INPUTS[:2]).read().clone()
    single, nine, eight = engine.train(start, [0, 1, 2], 0, 0.1)
    assert single.delta.abs().max() == 0
    assert single.num_examples == 1
    assert nine.delta.abs().max() > 0
    # One batch of eight each: the batch count moved by one.
    assert nine.delta[-1] == eight.delta[-1] == 1


def test_the_sequential_engine_trains_each_client_from_the_start() -> None:
    model, how = MLP((6,), 4, hidden=5), settings()
    clients = [np.arange(20), np.arange(20, 45)]
    engine = make_engine("sequential", model, Task(INPUTS, TARGETS, clients), how)
    start = FlatModel(model).read().clone()
    kept = start.clone()
    updates = list(engine.train(start, np.array([1, 0]), 4, 0.3))
    assert torch.equal(start, kept)
    assert [update.client for update in updates] == [1, 0]
    assert [update.num_examples for update in updates] == [25, 20]
    for update in updates:
        flat = FlatModel(model)
        seed = client_seed(how, 4, update.client)
        index = torch.from_numpy(clients[update.client])
        loss = train_client(flat, start, INPUTS, TARGETS, index, 0.3, how, seed)
        assert torch.equal(update.delta, flat.read() - start)
        assert update.loss == loss
    again = next(iter(engine.train(start, [0], 5, 0.3)))
    assert not torch.equal(again.delta, updates[1].delta)  # another round, another order
    engine.close()


def test_client_seeds_differ_by_round_and_client() -> None:
    seeds = {client_seed(settings(), t, c) for t in range(20) for c in range(20)}
    assert len(seeds) == 400


def test_evaluation_is_a_recount_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 4))
    model.train()
    before = copy.deepcopy(model.state_dict())
    accuracy, loss = evaluate(model, INPUTS, TARGETS, batch_size=7)
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    with torch.no_grad():
        scores = model.eval()(INPUTS).double().numpy()
    shifted = scores - scores.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    labels = TARGETS.numpy()
    assert accuracy == np.mean(scores.argmax(1) == labels)
    assert loss == pytest.approx(-np.mean(logs[np.arange(60), labels]), rel=1e-5)
    assert evaluate(model, INPUTS, TARGETS) == pytest.approx((accuracy, loss))
    assert not model.training


_SEEN: list[bool] = []


class _Looks(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _SEEN.append(torch.backends.cudnn.deterministic)
        return super().forward(x.flatten(1))


def test_the_trial_for_hidden_state_adds_up_in_a_fixed_order() -> None:
    """A sum in another order, and Adam's first step, would look like state that moves."""
    inputs = torch.randn(4, 6)
    task = Task(inputs, torch.tensor([0, 1, 0, 1]), [np.arange(4)])
    model = _Looks(6, 2)
    flat = FlatModel(model, inputs)
    _SEEN.clear()
    refuse_hidden_state(flat, task.public(), settings(), None)
    assert _SEEN
    assert all(_SEEN)
    assert not torch.backends.cudnn.deterministic
