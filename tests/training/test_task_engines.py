"""Every engine on every kind of task: losses, optimisers and samples of any form agree."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedquilt.errors import InvalidValueError
from fedquilt.training import make_engine
from fedquilt.training.engines import LocalEngine
from fedquilt.training.engines.workers import ProcessEngine
from fedquilt.training.flat import FlatModel
from fedquilt.training.objective import Objective
from fedquilt.training.optimizers import ClientOptimizer
from fedquilt.training.task import ClientUpdate, Engine, LocalSettings, Task, public_inputs
from fedquilt.training.trainers.autograd import AutogradTrainer
from fedquilt.training.trainers.vmap import why_not_stacked

SIZES = (9, 1, 8, 0, 17, 5)
COHORT = [4, 1, 3, 0, 2, 5]
TOTAL, WORDS, LENGTH = sum(SIZES), 11, 6
RANDOM = torch.Generator().manual_seed(8)
X = torch.randn(TOTAL, 5, generator=RANDOM)
IDS = torch.randint(0, WORDS, (TOTAL, LENGTH), generator=RANDOM)
PADDED = IDS.clone()
PADDED[::3, 4:] = -100
MASK = torch.ones(TOTAL, LENGTH, dtype=torch.int64)
MASK[::2, 5:] = 0
CLASSES = torch.randint(0, 3, (TOTAL,), generator=RANDOM)


class Attending(nn.Module):
    """A small transformer block; scores for every token, or for the whole in `logits`."""

    def __init__(self, outputs: int, pooled: bool = False) -> None:
        super().__init__()
        self.pooled = pooled
        self.embedding = nn.Embedding(WORDS, 8)
        self.norm = nn.LayerNorm(8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, outputs)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        x = self.norm(self.embedding(input_ids))
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 8**0.5
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, :] == 0, -1e9)
        x = x + scores.softmax(-1) @ self.value(x)
        if self.pooled:
            return SimpleNamespace(logits=self.head(x.mean(1)))
        return self.head(x)


class Two(nn.Module):
    """Takes two inputs and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.drop(self.first(left)) + self.second(right).tanh(), None


def log_cosh(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.squeeze(1) - targets).cosh().log()


def whole_batch(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets) + model(inputs).square().mean()


def dealt(inputs: Any, targets: Any, loss: Any) -> Task:
    parts = np.split(np.random.default_rng(4).permutation(TOTAL), np.cumsum(SIZES)[:-1])
    return Task(inputs, targets, parts, objective=Objective(loss))


def linear(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs))


TASKS: dict[str, tuple[Any, Task]] = {
    "regression": (lambda: linear(1), dealt(X, X.sum(1), "mse")),
    "two numbers": (lambda: linear(2), dealt(X, X[:, :2] * 3, "huber")),
    "multi-label": (lambda: linear(4), dealt(X, (X[:, :4] > 0).float(), "binary_cross_entropy")),
    "next token": (lambda: Attending(WORDS), dealt(IDS, IDS, "next_token")),
    "padded tokens": (lambda: Attending(WORDS), dealt(IDS, PADDED, "token_cross_entropy")),
    "dictionary": (
        lambda: Attending(3, pooled=True),
        dealt({"input_ids": IDS, "attention_mask": MASK}, CLASSES, "cross_entropy"),
    ),
    "tuple": (Two, dealt((X, X.flip(1)), CLASSES, "cross_entropy")),
    "own, by sample": (lambda: linear(1), dealt(X, X.sum(1), log_cosh)),
}
OPTIMIZERS = {
    "sgd": ClientOptimizer(),
    "momentum": ClientOptimizer(momentum=0.9, weight_decay=0.01),
    "nesterov, clip": ClientOptimizer("nesterov", momentum=0.5, gradient_clip=0.5),
    "adam": ClientOptimizer("adam"),
    "adamw": ClientOptimizer("adamw", weight_decay=0.1),
}


def how(optimizer: ClientOptimizer = OPTIMIZERS["sgd"], **changes: Any) -> LocalSettings:
    return dataclasses.replace(LocalSettings(2, 4, 0.0, 9, optimizer=optimizer), **changes)


def made(build: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return build()  # type: ignore[no-any-return]


def updates(engine: Engine, model: nn.Module, task: Task, rate: float = 0.05) -> list[ClientUpdate]:
    start = FlatModel(model, task.public().inputs).read().clone()
    try:
        return list(engine.train(start, COHORT, 0, rate))
    finally:
        engine.close()


def assert_agree(ours: list[ClientUpdate], wanted: list[ClientUpdate], slack: float) -> None:
    for one, other in zip(ours, wanted, strict=True):
        assert (one.client, one.num_examples) == (other.client, other.num_examples)
        assert one.loss == pytest.approx(other.loss, rel=1e-5, nan_ok=True)
        assert float((one.delta - other.delta).norm()) <= slack * float(other.delta.norm())
    assert sum(float(one.delta.norm()) > 0 for one in ours) == len(COHORT) - 1


@pytest.mark.parametrize("name", TASKS)
def test_batched_is_sequential_on_every_task(name: str) -> None:
    build, task = TASKS[name]
    model = made(build)
    alone = updates(make_engine("sequential", model, task, how()), model, task)
    assert_agree(updates(make_engine("batched", model, task, how()), model, task), alone, 1e-5)


@pytest.mark.parametrize("mu", [0.0, 0.4])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_batched_is_sequential_with_every_rule(rule: str, mu: float) -> None:
    # Not attention: the gradient of its keys' bias is zero but for rounding, and Adam makes a
    # step of full size of that.
    build, task = TASKS["two numbers"]
    model, settings = made(build), how(OPTIMIZERS[rule], fedprox_mu=mu)
    alone = updates(make_engine("sequential", model, task, settings), model, task)
    assert_agree(updates(make_engine("batched", model, task, settings), model, task), alone, 1e-5)


@pytest.mark.parametrize("rule", ["momentum", "nesterov, clip", "adam"])
def test_a_stacked_row_does_not_depend_on_its_neighbours(rule: str) -> None:
    build, task = TASKS["tuple"]
    model, settings = made(build), how(OPTIMIZERS[rule], group_rows=6)
    start = FlatModel(model, task.public().inputs).read().clone()
    engine = make_engine("batched", model, task, settings)
    whole = {u.client: u.delta.clone() for u in engine.train(start, COHORT, 0, 0.05)}
    for cohort in ([4, 0], [1, 0, 5], [0]):
        for update in engine.train(start, cohort, 0, 0.05):
            assert torch.equal(update.delta, whole[update.client])


@pytest.mark.parametrize(
    ("name", "rule"),
    [("dictionary", OPTIMIZERS["adam"]), ("own, by sample", OPTIMIZERS["nesterov, clip"])],
)
def test_processes_are_sequential_bit_by_bit(
    name: str, rule: ClientOptimizer, one_thread: None
) -> None:
    build, task = TASKS[name]
    model = made(build)
    alone = updates(make_engine("sequential", model, task, how(rule)), model, task)
    engine = ProcessEngine(model, task, how(rule), workers=2)
    for one, other in zip(updates(engine, model, task), alone, strict=True):
        assert torch.equal(one.delta, other.delta)
        assert one.loss == other.loss or one.num_examples == 0


def test_processes_take_a_factory_and_a_loss_on_batches(one_thread: None) -> None:
    task = dealt(X, CLASSES, whole_batch)
    model = made(lambda: linear(3))
    settings = how(ClientOptimizer("custom", factory=torch.optim.RMSprop))
    alone = updates(make_engine("sequential", model, task, settings), model, task)
    engine = ProcessEngine(model, task, settings, workers=1)
    for one, other in zip(updates(engine, model, task), alone, strict=True):
        assert torch.equal(one.delta, other.delta)


REFUSALS = [
    (whole_batch, ClientOptimizer(), r"callable on \(model, batch\)"),
    (lambda outputs, targets: outputs.mean(), ClientOptimizer(), "one number for a batch"),
    ("cross_entropy", ClientOptimizer("custom", factory=torch.optim.Adam), "optimizer is your own"),
]


@pytest.mark.parametrize(("loss", "rule", "reason"), REFUSALS)
def test_batched_names_what_it_cannot_and_auto_picks_another(
    loss: Any, rule: ClientOptimizer, reason: str
) -> None:
    task, model = dealt(X, CLASSES, loss), made(lambda: linear(3))
    assert why_not_stacked(model, task, how(rule)) is not None
    with pytest.raises(InvalidValueError, match=f"engine='batched' cannot.*{reason}"):
        make_engine("batched", model, task, how(rule))
    engine = make_engine("auto", model, task, how(rule))
    assert isinstance(engine, LocalEngine)
    assert isinstance(engine.trainer, AutogradTrainer)


def test_processes_name_what_cannot_be_pickled() -> None:
    task, model = dealt(X, CLASSES, lambda outputs, targets: outputs.mean()), linear(3)
    with pytest.raises(InvalidValueError, match="loss must be picklable for engine='processes'"):
        make_engine("processes", model, task, how())
    own = ClientOptimizer("custom", factory=lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(InvalidValueError, match="optimizer must be picklable"):
        make_engine("processes", model, dealt(X, CLASSES, "cross_entropy"), how(own))


def test_a_factory_that_keeps_its_optimiser_is_refused() -> None:
    class Keeping:
        """Keeps its state where nobody can put it back: in a generator's frame."""

        def __init__(self) -> None:
            self.makes = self._make()
            next(self.makes)

        def _make(self) -> Any:
            made, params = None, None
            while True:
                params = yield made
                made = made or torch.optim.Adam(params, lr=0.1)

        def __call__(self, params: Any) -> torch.optim.Optimizer:
            return self.makes.send(params)  # type: ignore[no-any-return]

    task, model = dealt(X, CLASSES, "cross_entropy"), linear(3)
    with pytest.raises(InvalidValueError, match="must train alike from the same state"):
        make_engine("sequential", model, task, how(ClientOptimizer("custom", factory=Keeping())))


def test_a_loss_with_a_memory_is_nobody_s_in_a_program_of_many() -> None:
    seen: list[float] = []

    def remembering(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(1.0)
        return nn.functional.cross_entropy(outputs, targets, reduction="none") * len(seen)

    task, model = dealt(X, CLASSES, remembering), linear(3)
    with pytest.raises(InvalidValueError, match=r"engine='batched' cannot.*changes loss"):
        make_engine("batched", model, task, how())
    engine = make_engine("sequential", model, task, how())
    start = FlatModel(model).read().clone()
    first = [u.delta.clone() for u in engine.train(start, [0, 4], 0, 0.1)]
    other = [u.delta.clone() for u in engine.train(start, [4, 0], 0, 0.1)]
    assert torch.equal(first[0], other[1])
    assert torch.equal(first[1], other[0])


COUNTER = [0]


def counting(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    COUNTER[0] += 1
    return nn.functional.cross_entropy(outputs, targets) * (1 + 0.1 * COUNTER[0])


def test_a_loss_with_a_global_state_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"must train alike.*the loss or the optimizer"):
        make_engine("sequential", linear(3), dealt(X, CLASSES, counting), how())


def test_a_client_that_cannot_be_trained_is_silent_where_it_is_protected() -> None:
    ids = IDS.clone()
    build, task = TASKS["next token"]
    task = dataclasses.replace(task, inputs=ids, targets=ids)
    model = made(build)
    alone = updates(make_engine("sequential", model, task, how()), model, task)
    ids[task.clients[2]] = 99
    with pytest.raises(IndexError):
        updates(make_engine("sequential", model, task, how()), model, task)
    engines = [
        make_engine("sequential", model, task, how(silent=True)),
        ProcessEngine(model, task, how(silent=True), workers=1),
    ]
    for engine in engines:
        for one, other in zip(updates(engine, model, task), alone, strict=True):
            if one.client == 2:
                assert bool(one.delta.isnan().all())
            else:
                assert torch.allclose(one.delta, other.delta, rtol=1e-6, atol=1e-7)


def test_public_samples_have_the_form_of_the_real_ones() -> None:
    flags = torch.zeros(7, 4, dtype=torch.bool)
    like = {"ids": IDS[:7], "attention_mask": MASK[:7], "x": (X[:7], flags), "padding_mask": flags}
    public = public_inputs(like, 3)
    assert {key: type(part) for key, part in public.items()} == {
        "ids": torch.Tensor, "attention_mask": torch.Tensor, "x": tuple,
        "padding_mask": torch.Tensor,
    }  # fmt: skip
    assert public["ids"].tolist() == [[0] * LENGTH, [1] * LENGTH, [0] * LENGTH]
    assert bool((public["attention_mask"] == 1).all())
    assert public["x"][0].shape == (3, 5)
    assert public["x"][1][0].tolist() == [True, False, True, False]
    assert not public["padding_mask"].any()
    zero_ignored = Task(IDS, IDS, [], objective=Objective("next_token", ignore_index=0))
    assert bool((zero_ignored.public().targets == 1).all()), "the trial must have a loss"
