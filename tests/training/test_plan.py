"""Plans of networks: what has one, and whether its kernels compute what autograd does.

Kernels run in Triton's interpreter here, which computes what a GPU would, slowly.  It has to be
chosen before Triton is imported, so these tests run once more, in a process of their own.
"""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedquilt.models.networks import MLP, CIFAR10Model, DigitsModel, MNISTModel
from fedquilt.training import ClassMask, LocalSettings, Task, make_engine
from fedquilt.training.flat import FlatModel
from fedquilt.training.optimizers import ClientOptimizer
from fedquilt.training.trainers import gpu, trial
from fedquilt.training.trainers.autograd import epoch_batches
from fedquilt.training.trainers.batches import Shuffles
from fedquilt.training.trainers.gpu import GpuTrainer
from fedquilt.training.trainers.manual_layers import check_layers
from fedquilt.training.trainers.plan import (
    Conv,
    Dense,
    Dropout,
    NoPlanError,
    is_interpreted,
    plan_layers,
)
from tiers import rest_is_slow


def small_cnn() -> nn.Module:
    """Two convolutions without padding, dropout of channels, of an image and of a vector."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout2d(0.25), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, 12), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(12, 5)),
    )


def padded_cnn() -> nn.Module:
    """Padding, images of odd size, and a bias that is missing."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 5), nn.LogSoftmax(1)),
    )


def normed_cnn() -> nn.Module:
    """Norms of groups, channels and a vector, pools by themselves, a mean of the whole image."""
    return nn.Sequential(
        *(nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.InstanceNorm2d(6, affine=True)),
        *(nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 5, 1), nn.GroupNorm(5, 5, affine=False)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 9), nn.LayerNorm(9), nn.ReLU()),
        *(nn.Dropout(0.3), nn.Linear(9, 5)),
    )


def grouped_cnn() -> nn.Module:
    """A norm of groups of an image, a mean of parts of it, and a norm of a vector."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(16, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 5)),
    )


def unpooled_cnn() -> nn.Module:
    """Convolutions with nothing behind them but a dropout, and a dense layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Flatten(), nn.Linear(24, 5)),
    )


class TokenMean(nn.Module):
    """A mean over tokens, with a row for padding, and what may follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, 6, padding_idx=2)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.norm(self.rows(x).mean(1)).relu())
        return scores


def token_rows() -> nn.Module:
    """A row for each token, through a rectifier and a dropout."""
    rows = nn.Embedding(40, 4, padding_idx=-1)  # more than a block of rows
    return nn.Sequential(rows, nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(24, 5))


def token_bag() -> nn.Module:
    """A mean over those tokens that are not padding."""
    return nn.Sequential(nn.EmbeddingBag(9, 5, padding_idx=0), nn.Dropout(0.2), nn.Linear(5, 5))


ONE_NETWORK = "test_a_plan_trains_as_the_sequential_engine_does and small"
interpreted = pytest.mark.skipif(not is_interpreted(), reason="runs in the interpreter's process")


@pytest.mark.skipif(is_interpreted(), reason="this is the interpreter's process")
@pytest.mark.processes
@pytest.mark.timeout(900)  # all of them: a hundred seconds of an idle core
@pytest.mark.parametrize("which", rest_is_slow([ONE_NETWORK, ""], [ONE_NETWORK]))
def test_kernels_in_the_interpreter(which: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", which]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert " passed" in ended.stdout


NETWORKS = {
    "small": (small_cnn, (1, 8, 8)),
    "padded": (padded_cnn, (3, 5, 5)),
    "normed": (normed_cnn, (2, 8, 8)),
    "grouped": (grouped_cnn, (2, 4, 4)),
    "unpooled": (unpooled_cnn, (1, 6, 6)),
    "vector": (lambda: nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 5)), (7,)),
    "token_rows": (token_rows, (6,)),
    "token_mean": (TokenMean, (6,)),
    "token_bag": (token_bag, (6,)),
}
VOCABULARIES = {"token_rows": 40, "token_mean": 11, "token_bag": 9}
SIZES = [3, 7, 0, 1, 9]


@pytest.fixture(autouse=True)
def _one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter computes alike each time: a trial need not be repeated."""
    monkeypatch.setattr(gpu, "_REPEATS", 0)
    if is_interpreted():  # sums in two parts show what sums in many do, in less time
        from fedquilt.training.trainers.gpu import program

        monkeypatch.setattr(program, "_SUM_SPLIT", 2)
        monkeypatch.setattr(gpu, "SCALES", (1.0,))


def make_task(
    shape: tuple[int, ...], sizes: list[int] = SIZES, seed: int = 0, tokens: int = 0
) -> Task:
    """Samples of a shape, or of so many tokens."""
    random = np.random.default_rng(seed)
    count = sum(sizes)
    inputs = torch.from_numpy(random.standard_normal((count, *shape), dtype=np.float32))
    if tokens:
        inputs = torch.from_numpy(random.integers(0, tokens, (count, *shape)))
    targets = torch.from_numpy(random.integers(0, 5, count))
    parts = np.split(np.arange(count), np.cumsum(sizes)[:-1])
    return Task(inputs, targets, parts)


def how(**changes: Any) -> LocalSettings:
    return LocalSettings(**{"epochs": 1, "batch_size": 4, "fedprox_mu": 0.0, "seed": 1} | changes)


def updates(engine: Any, model: nn.Module, cohort: list[int]) -> dict[int, torch.Tensor]:
    start = FlatModel(model).read().clone()
    return {u.client: u.delta.clone() for u in engine.train(start, cohort, 3, 0.1)}


@interpreted
@pytest.mark.parametrize("name", NETWORKS)
def test_a_plan_trains_as_the_sequential_engine_does(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model, task = make(), make_task(shape, tokens=VOCABULARIES.get(name, 0))
    engine = make_engine("batched", model, task, how())
    assert isinstance(engine.trainer, GpuTrainer)
    wanted = updates(make_engine("sequential", model, task, how()), model, [4, 1, 2, 0, 3])
    got = updates(engine, model, [4, 1, 2, 0, 3])
    for client, delta in wanted.items():
        assert torch.allclose(got[client], delta, rtol=1e-4, atol=1e-6), client


@interpreted
@pytest.mark.parametrize("name", ["vector", "unpooled", "token_bag"])
def test_fedprox_pulls_as_in_the_sequential_engine(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    task = make_task(shape, tokens=VOCABULARIES.get(name, 0))
    model, settings = make(), how(fedprox_mu=0.7, epochs=2)
    engine = make_engine("batched", model, task, settings)
    assert isinstance(engine.trainer, GpuTrainer)
    wanted = updates(make_engine("sequential", model, task, settings), model, [4, 1, 0])
    got = updates(engine, model, [4, 1, 0])
    for client, delta in wanted.items():
        assert torch.allclose(got[client], delta, rtol=1e-4, atol=1e-6), client


@interpreted
@pytest.mark.parametrize("value", [0.0, -torch.inf])
def test_hidden_classes_are_left_alone(value: float) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS["vector"]
    task = make_task(shape)
    hidden = torch.zeros(len(SIZES), 5, dtype=torch.bool)
    for client, samples in enumerate(task.clients):
        hidden[client] = ~torch.isin(torch.arange(5), task.targets[samples])
    assert hidden.any()
    task = dataclasses.replace(task, class_mask=ClassMask(hidden, value))
    model = make()
    engine = make_engine("batched", model, task, how())
    assert isinstance(engine.trainer, GpuTrainer)
    wanted = updates(make_engine("sequential", model, task, how()), model, [4, 1, 3, 0])
    got = updates(engine, model, [4, 1, 3, 0])
    for client, delta in wanted.items():
        assert torch.allclose(got[client], delta, rtol=1e-4, atol=1e-6), client


@interpreted
@pytest.mark.parametrize("name", ["padded", "grouped", "token_rows"])
def test_a_client_computes_the_same_bits_in_any_company(name: str) -> None:
    make, shape = NETWORKS[name]
    model, tokens = make(), VOCABULARIES.get(name, 0)
    # Another world: the others hold other numbers of other samples.
    sizes = [5, 7, 2, 10, 0]
    task, other = make_task(shape, tokens=tokens), make_task(shape, sizes, 1, tokens)
    alone = updates(make_engine("batched", model, task, how()), model, [1])[1]
    inputs, targets = other.inputs.clone(), other.targets.clone()
    inputs[other.clients[1]], targets[other.clients[1]] = (
        task.inputs[task.clients[1]],
        task.targets[task.clients[1]],
    )
    world = Task(inputs, targets, other.clients)
    engine = make_engine("batched", model, world, how())
    assert isinstance(engine.trainer, GpuTrainer)
    for cohort in ([1, 0, 2, 3, 4], [3, 1]):
        assert torch.equal(updates(engine, model, cohort)[1], alone), cohort


@interpreted
def test_a_finished_client_does_not_move_when_its_outputs_overflow() -> None:
    """Its row only fills the program up while others train on: nothing of it may change."""
    model = MLP((1, 2, 2), 5, hidden=4)
    task = make_task((1, 2, 2), [4, 12])
    inputs = task.inputs.clone()
    inputs[task.clients[0]] *= 1e30
    world = Task(inputs, task.targets, task.clients)
    engine = make_engine("batched", model, world, how(epochs=1))
    alone, beside = updates(engine, model, [0])[0], updates(engine, model, [0, 1])[0]
    assert torch.equal(alone.view(torch.int32), beside.view(torch.int32))


@interpreted
def test_ignored_labels_do_not_count() -> None:
    model, task = NETWORKS["vector"][0](), make_task((7,), [6, 4])
    task.targets[[1, 2, 7]] = -100
    wanted = updates(make_engine("sequential", model, task, how()), model, [0, 1])
    engine = make_engine("batched", model, task, how())
    assert isinstance(engine.trainer, GpuTrainer)
    got = updates(engine, model, [0, 1])
    for client in (0, 1):
        assert torch.allclose(got[client], wanted[client], rtol=1e-4, atol=1e-6)


@interpreted
def test_a_token_that_names_no_row_spoils_its_client_alone() -> None:
    torch.manual_seed(0)
    model, task = token_bag(), make_task((6,), [5, 4, 3, 2, 4], tokens=9)
    engine = make_engine("batched", model, task, how())
    assert isinstance(engine.trainer, GpuTrainer)
    before = updates(engine, model, [0, 1, 2, 3, 4])
    for client, token in ((0, 2**40), (1, -1), (3, 9)):
        task.inputs[task.clients[client][0], 3] = token
    after = updates(engine, model, [0, 1, 2, 3, 4])
    for client, update in after.items():
        if client in (2, 4):
            assert torch.equal(update, before[client])
        else:  # the whole of the layers behind the rows
            assert update[9 * 5 :].isnan().all()


@interpreted
def test_rows_that_no_token_names_and_the_one_of_padding_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model, task = token_bag(), make_task((6,), [4, 9], tokens=9)
    task.inputs[task.clients[0]] %= 4
    moved = updates(make_engine("batched", model, task, how()), model, [0, 1])[0][: 9 * 5].view(
        9, 5
    )
    assert (moved != 0).any(1).tolist() == [False, True, True, True, *[False] * 5]


@interpreted
def test_an_embedding_in_half_precision() -> None:
    """By itself: the interpreter has no products of bfloat16, of which dense layers are made."""
    from fedquilt.training.trainers.gpu.program import Program

    torch.manual_seed(0)
    model, task = token_rows(), make_task((6,), tokens=40)
    plan = plan_layers(model, task.inputs)
    program = Program(plan, task.inputs, task.targets, 2, 4, torch.bfloat16)
    program.load({name: tensor.detach()[None] for name, tensor in model.named_parameters()})
    first, table = program._saved[0], model[0].weight.detach()  # type: ignore[index]
    first.x.copy_(task.inputs[:8].view(2, 4, 6))
    first.d.normal_()
    program._embed(first, 2)
    assert torch.equal(first.out, table[first.x].relu().to(torch.bfloat16))
    program._sizes[0, 0] = 4  # the other client has no samples
    program._rate.fill_(0.5)
    program._embed_back(first, None, 2)
    gradient = torch.zeros(40, 4).index_add(0, first.x[0].flatten(), first.d[0].float().view(24, 4))
    gradient[39] = 0.0  # of padding
    moved = program.weight("0.weight", 2)
    assert torch.allclose(moved[0], table - 0.5 * gradient, rtol=1e-5, atol=1e-6)
    assert torch.equal(moved[1], table)
    # The interpreter cuts bits off where a GPU rounds.
    assert torch.allclose(program._used["0.weight"].float(), moved, rtol=2**-7, atol=0.0)


@pytest.mark.parametrize(
    ("model", "shape", "kinds"),
    [
        (MNISTModel(), (1, 28, 28), [Conv, Conv, Dropout, Dense, Dropout, Dense]),
        (CIFAR10Model(), (3, 32, 32), [Conv, Conv, Conv, Dense, Dropout, Dense, Dense]),
        (DigitsModel(), (1, 8, 8), [Conv, Dense, Dense]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_papers_networks_have_plans(
    model: nn.Module, shape: tuple[int, ...], kinds: list[type]
) -> None:
    plan = plan_layers(model.train(), torch.zeros(2, *shape))
    assert [type(layer) for layer in plan.layers] == kinds
    assert {weights.name for weights in plan.weights} == set(dict(model.named_parameters()))
    for weights in plan.weights:
        tensor = dict(model.named_parameters())[weights.name].detach()[None]
        assert torch.equal(weights.to_model(weights.to_plan(tensor)).reshape(tensor.shape), tensor)


def image_net(*layers: nn.Module) -> nn.Module:
    """These layers and a head; only looked at, so the head's size does not matter."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 5))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 7)
        self.out = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(x + self.fc(x))
        return scores


class Hooked(nn.Linear):
    """A layer of somebody's own is no standard layer, whatever it inherits."""


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (Residual(), (7,), "does not follow"),
        (nn.Sequential(Hooked(7, 5)), (7,), "standard layer|does not follow"),
        (nn.Sequential(nn.Linear(7, 5), nn.Softmax(1)), (7,), "Softmax"),
        (nn.Sequential(nn.Linear(7, 5), nn.ReLU()), (7,), "does not end in a linear layer"),
        (image_net(nn.Conv2d(1, 4, 3, stride=2)), (1, 8, 8), "stride 1"),
        (image_net(nn.Conv2d(1, 4, 3), nn.MaxPool2d(3)), (1, 8, 8), "2 x 2"),
        (image_net(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), (1, 8, 8), "BatchNorm2d"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_plan_says_why(model: nn.Module, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(NoPlanError, match=reason):
        plan_layers(model.train(), torch.zeros(2, *shape))


class Pooled(nn.Module):
    """Something done to the rows of an embedding."""

    def __init__(self, pool: Callable[[torch.Tensor], torch.Tensor], **how: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 5, **how)
        self.out = nn.Linear(5, 5)
        self.pool = pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.pool(self.rows(x)))
        return scores


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Pooled(lambda x: x.mean(1), max_norm=1.0), "max_norm"),
        (Pooled(lambda x: x.mean(1), sparse=True), "sparse"),
        (Pooled(lambda x: x.mean(1), scale_grad_by_freq=True), "frequency"),
        (Pooled(lambda x: x.mean(2)), "mean is not a mean or sum over the tokens"),
        (Pooled(lambda x: x.mean(1, keepdim=True)), "mean is not a mean or sum over the tokens"),
        (Pooled(lambda x: x.relu().sum(1)), "sum_1 is not a mean or sum over the tokens"),
        (Pooled(lambda x: x.amax(1)), "amax"),
        (nn.Sequential(nn.EmbeddingBag(7, 5, mode="max"), nn.Linear(5, 5)), "max of a bag"),
        (nn.Sequential(nn.Embedding(7, 5), nn.GroupNorm(1, 5), nn.Linear(5, 5)), "tokens"),
        (nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5)), "one vector a sample"),
        (nn.Sequential(nn.Linear(5, 5)), "whole numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_tokens_have_no_plan_for_says_why(model: nn.Module, reason: str) -> None:
    with pytest.raises(NoPlanError, match=reason):
        plan_layers(model.train(), torch.zeros(2, 5, dtype=torch.int64))


def test_an_embedding_is_not_written_for_a_cpu() -> None:
    plan = plan_layers(TokenMean(), torch.zeros(2, 6, dtype=torch.int64))
    with pytest.raises(NoPlanError, match="Embedding is not written"):
        check_layers(plan)


@interpreted
@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"optimizer": ClientOptimizer("adam")}, "plain SGD"), ({"batch_size": 512}, "above 256")],
    ids=["adam", "width"],
)
def test_settings_without_a_plan_say_why(changes: dict[str, Any], reason: str) -> None:
    model, task = NETWORKS["vector"][0](), make_task((7,))
    flat = FlatModel(model, task.public().inputs)
    flat.remember()
    with pytest.raises(NoPlanError, match=reason):
        GpuTrainer(flat, task, how(**changes), None)


@interpreted
def test_a_plan_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial beside autograd: here a layer that the plan forgets."""

    def forgetful(module: nn.Module, sample: torch.Tensor) -> Any:
        plan = plan_layers(module, sample)
        return type(plan)(tuple(_without_relu(x) for x in plan.layers), plan.weights, (7,))

    monkeypatch.setattr(trial, "plan_layers", forgetful)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 5))
    task = make_task((7,))
    flat = FlatModel(model, task.public().inputs)
    flat.remember()
    with pytest.raises(NoPlanError, match="away from autograd"):
        GpuTrainer(flat, task, how(), None)


def _without_relu(layer: Any) -> Any:
    return Dense(layer.weight, layer.bias, layer.inputs, layer.outputs)


def test_a_network_that_draws_from_pythons_generators_has_no_plan() -> None:
    """What was drawn when it was followed would stand in the plan for good."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if random.random() < 0.9 else self.layer(x.relu())

    with pytest.raises(NoPlanError, match="generators of Python"):
        plan_layers(Sometimes(), torch.zeros(2, 4))


def test_shuffles_are_those_of_one_client_at_a_time() -> None:
    held = [np.arange(9), np.arange(20, 23), np.zeros(0, dtype=np.int64), np.arange(30, 35)]
    shuffles = Shuffles(held, [5, 6, 7, 8], batch_size=4, epochs=3)
    table = shuffles.table()
    for row, part in enumerate(held):
        shuffle = torch.Generator().manual_seed(5 + row)
        index = torch.from_numpy(part)
        for epoch in range(3 if len(part) else 0):
            batches = torch.cat(epoch_batches(index, 4, shuffle, 1))
            place = shuffles.places[epoch, row]
            assert table[place : place + len(part)].tolist() == batches.tolist()
    assert len(table) == shuffles.length == 3 * 17 + 1
    # Nothing is needed before it comes: client 1 begins its last epoch at step 2.
    first = {chunk.step: chunk.place for chunk in shuffles.chunks()}
    assert list(first) == sorted(first)
    assert shuffles.places[2, 1] >= first[2]
