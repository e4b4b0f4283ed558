"""Steps by hand on a CPU: the same updates as autograd's, the same random streams."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.models import MLP, DigitsModel, Linear, make_model
from fedquilt.training import (
    FlatModel,
    LocalSettings,
    Task,
    engines,
    make_engine,
)
from fedquilt.training.draws import ClientDraws
from fedquilt.training.engines import LocalEngine
from fedquilt.training.optimizers import ClientOptimizer
from fedquilt.training.trainers import manual, trial
from fedquilt.training.trainers.autograd import AutogradTrainer, find_draws
from fedquilt.training.trainers.manual import ManualTrainer, try_manual
from fedquilt.training.trainers.plan import NoPlanError, is_interpreted
from fedquilt.training.trainers.vmap import why_not_stacked

pytestmark = pytest.mark.skipif(is_interpreted(), reason="kernels stand in for this there")


def cnn() -> nn.Module:
    """Two convolutions, dropout of channels, of an image and of a vector."""
    return nn.Sequential(
        *(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2)),
        *(nn.Dropout2d(0.25), nn.Flatten(), nn.Dropout(0.3), nn.Linear(72, 12), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(12, 5, bias=False), nn.LogSoftmax(1)),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLP((1, 4, 4), 5, hidden=8), (1, 4, 4)),
    "linear": (lambda: Linear((1, 4, 4), 5), (1, 4, 4)),
    "deep": (
        lambda: nn.Sequential(
            *(nn.Linear(7, 9, bias=False), nn.ReLU(), nn.Dropout(0.4), nn.Linear(9, 6)),
            *(nn.ReLU(), nn.Linear(6, 5)),
        ),
        (7,),
    ),
    "digits": (lambda: DigitsModel(5), (1, 8, 8)),
    "cnn": (cnn, (2, 8, 8)),
}
RULES = {
    "plain": {},
    "fedprox": {"fedprox_mu": 0.5},
    "momentum": {"optimizer": ClientOptimizer("sgd", momentum=0.9, weight_decay=0.01)},
    "clip": {"optimizer": ClientOptimizer("sgd", gradient_clip=0.1)},
}
SIZES = [9, 4, 0, 1]
COHORT = [3, 0, 2, 1]


def make_task(shape: tuple[int, ...], sizes: list[int] = SIZES, seed: int = 0) -> Task:
    random = np.random.default_rng(seed)
    count = sum(sizes)
    inputs = torch.from_numpy(random.standard_normal((count, *shape), dtype=np.float32))
    targets = torch.from_numpy(random.integers(0, 5, count))
    return Task(inputs, targets, np.split(np.arange(count), np.cumsum(sizes)[:-1]))


def how(**changes: Any) -> LocalSettings:
    return LocalSettings(**{"epochs": 2, "batch_size": 4, "fedprox_mu": 0.0, "seed": 1} | changes)


def trained(engine: Any, model: nn.Module, cohort: list[int] = COHORT) -> dict[int, Any]:
    start = FlatModel(model).read().clone()
    return {u.client: u for u in engine.train(start, cohort, 3, 0.1)}


def by_hand(model: nn.Module, task: Task, settings: LocalSettings) -> LocalEngine:
    engine = make_engine("batched", model, task, settings)
    assert isinstance(engine, LocalEngine)
    assert isinstance(engine.trainer, ManualTrainer)
    return engine


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_by_hand_are_those_of_the_sequential_engine(name: str, rule: str) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model, task, settings = make(), make_task(shape), how(**RULES[rule])
    wanted = trained(make_engine("sequential", model, task, settings), model)
    got = trained(by_hand(model, task, settings), model)
    assert list(got) == list(wanted) == COHORT
    for client, update in wanted.items():
        far = (got[client].delta - update.delta).norm()
        assert far <= 1e-5 * update.delta.norm(), client
        assert got[client].loss == pytest.approx(update.loss, rel=1e-5, nan_ok=True)
        assert got[client].num_examples == update.num_examples


def test_a_client_computes_the_same_bits_whoever_was_trained_before() -> None:
    model = cnn()
    alone = trained(by_hand(model, make_task((2, 8, 8)), how()), model, [1])[1].delta
    other = make_task((2, 8, 8), [2, 4, 11, 7], seed=5)
    task = make_task((2, 8, 8))
    inputs, targets = other.inputs.clone(), other.targets.clone()
    inputs[other.clients[1]] = task.inputs[task.clients[1]]
    targets[other.clients[1]] = task.targets[task.clients[1]]
    engine = by_hand(model, Task(inputs, targets, other.clients), how())
    for cohort in ([2, 0, 1], [1, 3]):
        assert torch.equal(trained(engine, model, cohort)[1].delta, alone)


def test_the_head_behind_given_features_trains_by_hand() -> None:
    """Fronts that learn nothing are asked once; what is left is a dense layer."""
    torch.manual_seed(0)
    model = make_model("hog-linear", (1, 8, 8), 5, seed=1).on_features()
    task = make_task((model.front.num_features,), [9, 13, 4])
    wanted = trained(make_engine("sequential", model, task, how()), model, [0, 1, 2])
    got = trained(by_hand(model, task, how()), model, [0, 1, 2])
    for client, update in wanted.items():
        assert (got[client].delta - update.delta).norm() <= 1e-5 * update.delta.norm()


@pytest.mark.parametrize("size", [100, 512])
def test_large_batches_are_as_exact_as_small_ones(size: int) -> None:
    """A small learning rate: what rounds the weights more than once a step shows in the update."""
    torch.manual_seed(0)
    model, settings = MLP((1, 10, 10), 5), how(epochs=2, batch_size=size)
    task = make_task((1, 10, 10), [2 * size])
    start = FlatModel(model).read().clone()
    engines = make_engine("sequential", model, task, settings), by_hand(model, task, settings)
    wanted, got = (next(iter(engine.train(start, [0], 3, 0.01))) for engine in engines)
    assert (got.delta - wanted.delta).norm() <= 1e-5 * wanted.delta.norm()


def test_clients_that_train_together_compute_the_bits_of_one_alone() -> None:
    """Other sizes, other values and NaN beside it: nothing of them reaches a client."""
    torch.manual_seed(0)
    sizes = [9, 13, 4, 0, 31, 8, 22, 9, 1]
    model, task = MLP((1, 4, 4), 5), make_task((1, 4, 4), sizes)
    engine = by_hand(model, task, how(epochs=2))
    training = engine.trainer
    assert isinstance(training, ManualTrainer)
    assert training.together > 1
    alone = {c: trained(engine, model, [c])[c] for c in range(len(sizes))}
    task.inputs[task.clients[4][:3]] = float("nan")
    task.inputs[task.clients[6]] *= 1e30
    for cohort in ([0, 1, 2, 3, 4, 5, 6, 7, 8], [8, 6, 4, 2, 0], [7, 5, 4, 3, 1]):
        got = trained(engine, model, cohort)
        assert list(got) == cohort
        for client in set(cohort) - {4, 6}:
            assert torch.equal(got[client].delta, alone[client].delta), client
            assert got[client].loss == pytest.approx(alone[client].loss, abs=0, nan_ok=True)


@pytest.mark.parametrize(("batch_size", "bias"), [(2, True), (33, True), (4, False)])
def test_where_a_client_lies_in_memory_does_not_show_in_its_bits(
    batch_size: int, bias: bool
) -> None:
    """Products may round differently where a matrix begins in the middle of a cache line."""
    for hidden in (31, 9, 64, 2):
        torch.manual_seed(hidden)
        widths = (16, hidden, 31, 8, 5)
        layers = [nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)]
        parts = [part for layer in layers for part in (layer, nn.ReLU())]
        model = nn.Sequential(*parts[:-1])
        task = make_task((16,), [21, 5, 23, 14, 3, 14, 6, 34, 60, 8])
        engine = by_hand(model, task, how(batch_size=batch_size))
        alone = {c: trained(engine, model, [c])[c].delta for c in range(10)}
        for client, update in trained(engine, model, list(range(10))).items():
            assert torch.equal(update.delta, alone[client]), (hidden, client)


def test_threads_added_later_do_not_make_company_show() -> None:
    """On two threads a large product is cut up, alone in another way than beside others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 5))
    task, settings = make_task((784,), [1500, 1024, 1100]), how(epochs=1, batch_size=512)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        engine = by_hand(model, task, settings)
        torch.set_num_threads(2)
        alone = {c: trained(engine, model, [c])[c].delta for c in range(3)}
        got = trained(engine, model, [0, 1, 2])
        assert [c for c in got if not torch.equal(got[c].delta, alone[c])] == []
    finally:
        torch.set_num_threads(before)


def test_an_error_in_the_middle_of_a_step_is_that_of_one_client() -> None:
    model, task = MLP((1, 4, 4), 5), make_task((1, 4, 4), [9, 8, 8, 9])
    alone = trained(by_hand(model, task, how()), model, [0, 2, 3])
    task.clients[1][3] = -1  # a label of the last sample, but no sample
    with pytest.raises((IndexError, RuntimeError), match="index"):
        trained(by_hand(model, task, how()), model, [0, 1, 2, 3])
    got = trained(by_hand(model, task, how(silent=True)), model, [0, 1, 2, 3])
    assert got[1].delta.isnan().all()
    for client, update in alone.items():
        assert torch.equal(got[client].delta, update.delta)


def test_a_large_client_does_not_make_memory_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that train together take as much as the largest: 6 x 40 samples of 5 classes here."""
    monkeypatch.setattr(manual, "_LAID_OUT", 6 * 4 * 5, raising=False)
    model, task = MLP((1, 4, 4), 5), make_task((1, 4, 4), [4, 3, 40, 2, 4, 1, 30])
    engine = by_hand(model, task, how())
    alone = {c: trained(engine, model, [c])[c].delta for c in range(7)}
    training, groups = engine.trainer, []
    assert isinstance(training, ManualTrainer)
    inner = training._train

    def noting(begin: Any, inputs: Any, group: Any, rate: float) -> list[float]:
        groups.append([len(member.labels) for member in group])
        return inner(begin, inputs, group, rate)

    monkeypatch.setattr(training, "_train", noting)
    got = trained(engine, model, list(range(7)))
    assert groups == [[1, 2, 3, 4, 4], [30], [40]]
    for client, update in got.items():
        assert torch.equal(update.delta, alone[client])


def test_where_company_changes_bits_clients_train_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another library of products may round batches of them in another way."""
    torch.manual_seed(0)
    model, task = MLP((1, 4, 4), 5), make_task((1, 4, 4), [9, 13, 4, 8])
    wanted = trained(make_engine("sequential", model, task, how()), model, [0, 1, 2, 3])
    product = torch.baddbmm

    def rounding(into: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        made = product(into, *given, **named)
        return made.mul_(1 + 1e-6) if len(into) > 1 else made

    monkeypatch.setattr(torch, "baddbmm", rounding)
    with caplog.at_level(logging.INFO):
        engine = by_hand(model, task, how())
    assert "train one by one" in caplog.text
    got = trained(engine, model, [0, 1, 2, 3])
    for client, update in wanted.items():
        assert (got[client].delta - update.delta).norm() <= 1e-5 * update.delta.norm()


@pytest.mark.parametrize("rule", ["plain", "momentum"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_client_of_nan_leaves_nothing_behind(name: str, rule: str) -> None:
    make, shape = NETWORKS[name]
    model, task = make(), make_task(shape)
    task.inputs[task.clients[1]] = float("nan")
    engine = by_hand(model, task, how(**RULES[rule]))
    alone = trained(engine, model, [0])[0].delta
    assert trained(engine, model, [1])[1].delta.isnan().any()
    assert torch.equal(trained(engine, model, [0])[0].delta, alone)


def test_left_out_labels_are_trained_by_autograd() -> None:
    model, task = MLP((1, 4, 4), 5), make_task((1, 4, 4), [6, 5])
    task.targets[[1, 2]] = -100
    wanted = trained(make_engine("sequential", model, task, how()), model, [0, 1])
    got = trained(by_hand(model, task, how()), model, [0, 1])
    for client in (0, 1):
        assert torch.allclose(got[client].delta, wanted[client].delta, rtol=1e-5, atol=1e-7)


def test_a_label_out_of_range_is_an_error_or_nothing_at_all() -> None:
    model, task = MLP((1, 4, 4), 5), make_task((1, 4, 4), [6, 5])
    task.targets[0] = 7
    with pytest.raises(IndexError, match="7"):
        trained(by_hand(model, task, how()), model, [0, 1])
    got = trained(by_hand(model, task, how(silent=True)), model, [0, 1])
    assert got[0].delta.isnan().all()
    assert got[1].delta.isfinite().all()


class Counting(nn.Module):
    """Counts its passes where torch.fx follows them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 5)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        scores: torch.Tensor = self.fc(x) * self.passes
        return scores


@pytest.mark.parametrize(
    ("model", "shape", "changes", "reason"),
    [
        (Counting(), (7,), {}, "standard layer"),
        (nn.Sequential(nn.Linear(7, 5).double()), (7,), {}, "float32"),
        (nn.Linear(7, 5), (7,), {"batch_size": 5000}, "above 1024"),
    ],
    ids=["layer", "type", "batch"],
)
def test_what_has_no_steps_by_hand_says_why(
    model: nn.Module,
    shape: tuple[int, ...],
    changes: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = make_task(shape)
    if reason == "float32":
        task = Task(task.inputs.double(), task.targets, task.clients)
    flat = FlatModel(model, task.public().inputs)
    flat.remember()
    with caplog.at_level(logging.INFO):
        assert try_manual(flat, task, how(**changes), None) is None
    assert reason in caplog.text
    assert getattr(flat.module, "passes", 0) == 0


def test_a_plan_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make = trial.plan_layers

    def forgetful(module: nn.Module, sample: torch.Tensor) -> Any:
        plan = make(module, sample)
        layers = tuple(type(x)(x.weight, x.bias, x.inputs, x.outputs) for x in plan.layers)  # type: ignore
        return type(plan)(layers, plan.weights, plan.input_shape)

    monkeypatch.setattr(trial, "plan_layers", forgetful)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 5))
    task = make_task((7,))
    flat = FlatModel(model, task.public().inputs)
    flat.remember()
    draws: ClientDraws | None = find_draws(flat, task.public())
    before = flat.read().clone()
    with pytest.raises(NoPlanError, match="away from autograd"):
        ManualTrainer(flat, task, how(), draws)
    assert torch.equal(flat.read(), before), "a run by autograd starts from the model's own weights"


class Called(nn.Sequential):
    """Does something around its forward pass."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x.clamp(-5, 5))


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def around(how: str) -> nn.Module:
    """Return a network with something around its forward pass, which acts on large values only."""
    layers = (nn.Sequential(nn.Linear(7, 9), nn.ReLU()), nn.Linear(9, 5))
    model: nn.Module = Called(*layers) if how == "call" else nn.Sequential(*layers)
    forward = model.forward
    if how == "forward of the object":
        model.forward = lambda x: forward(x.clamp(-5, 5))  # type: ignore[method-assign]
    elif how == "parametrization":
        nn.utils.parametrize.register_parametrization(layers[1], "weight", Doubled())
    elif how == "input":
        model.register_forward_pre_hook(lambda _, x: (x[0].clamp(-5, 5),))
    elif how == "output":
        model.register_forward_hook(lambda _, x, y: y.clamp(-5, 5))
    elif how == "inside":
        layers[0].register_forward_hook(lambda _, x, y: y.clamp(max=5))
    elif how == "gradient":
        layers[0].register_full_backward_hook(lambda _, before, after: (before[0],))
        model.register_full_backward_pre_hook(lambda _, after: (after[0] * 3,))
    return model


AROUND = ("call", "forward of the object", "parametrization", "input", "output", "inside")


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("what", [*AROUND, "gradient"])
def test_what_is_done_around_a_forward_pass_is_done_by_every_engine(what: str) -> None:
    torch.manual_seed(0)
    model, task = around(what), make_task((7,))
    task = Task(30 * task.inputs, task.targets, task.clients)
    wanted = trained(make_engine("sequential", model, task, how()), model)
    plain = nn.Sequential(nn.Sequential(nn.Linear(7, 9), nn.ReLU()), nn.Linear(9, 5))
    if what != "parametrization":
        plain.load_state_dict(model.state_dict())
        other = trained(make_engine("sequential", plain, task, how()), plain)
        assert (other[0].delta - wanted[0].delta).norm() > 0.1 * wanted[0].delta.norm()
    engines = [make_engine("auto", model, task, how())]
    if why_not_stacked(model, task, how()) is None:
        engines.append(make_engine("batched", model, task, how()))
    for engine in engines:
        got = trained(engine, model)
        for client, update in wanted.items():
            apart = (got[client].delta - update.delta).norm()
            assert apart <= 1e-4 * update.delta.norm()


def test_a_hook_of_all_modules_leaves_training_to_autograd() -> None:
    model, task = nn.Linear(7, 5), make_task((7,))
    handle = nn.modules.module.register_module_forward_pre_hook(lambda _, x: (x[0].clamp(-5, 5),))
    try:
        engine = make_engine("auto", model, task, how())
    finally:
        handle.remove()
    assert isinstance(engine, LocalEngine)
    assert isinstance(engine.trainer, AutogradTrainer)


class Warming(nn.Module):
    """Computes something else after forty passes: `torch.fx` sees the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.passes = nn.Linear(7, 5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.fc(x).relu() if self.passes > 40 else self.fc(x)


def test_a_network_that_keeps_something_between_passes_trains_by_autograd() -> None:
    engine = make_engine("auto", Warming(), make_task((7,)), how())
    assert isinstance(engine, LocalEngine)
    assert isinstance(engine.trainer, AutogradTrainer)


def test_auto_trains_one_client_after_the_other_by_hand() -> None:
    model, task = cnn(), make_task((2, 8, 8))
    engine = make_engine("auto", model, task, how())
    assert isinstance(engine, LocalEngine)
    assert isinstance(engine.trainer, ManualTrainer)
    got = trained(engine, model)
    wanted = trained(by_hand(model, task, how()), model)
    for client in COHORT:
        assert torch.equal(got[client].delta, wanted[client].delta)


@pytest.mark.parametrize("reason", ["is Tanh", "more than 10"])
def test_auto_trains_by_autograd_where_that_is_better_and_says_why(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model: nn.Module = nn.Linear(7, 5)
    if reason == "is Tanh":
        model = nn.Sequential(model, nn.Tanh())
    else:
        monkeypatch.setattr(engines, "LARGE", 10)
    task = make_task((7,))
    with caplog.at_level(logging.INFO):
        got = trained(make_engine("auto", model, task, how()), model)
    assert reason in caplog.text
    wanted = trained(make_engine("sequential", model, task, how()), model)
    for client in COHORT:
        assert torch.equal(got[client].delta, wanted[client].delta)


def test_a_client_that_cannot_be_trained_by_hand_is_an_error_or_nan() -> None:
    model, task = MLP((1, 4, 4), 5), make_task((1, 4, 4), [6, 5])
    task.targets[0] = 7
    with pytest.raises(IndexError, match="7"):
        trained(make_engine("auto", model, task, how()), model, [0, 1])
    got = trained(make_engine("auto", model, task, how(silent=True)), model, [0, 1])
    assert got[0].delta.isnan().all()
    assert got[1].delta.isfinite().all()


def test_small_networks_take_one_thread_and_give_the_others_back() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 5))
    inputs, targets = torch.randn(20, 1, 8, 8), torch.arange(20) % 5
    task = Task(inputs, targets, [np.arange(12), np.arange(12, 20)])
    before = torch.get_num_threads()
    seen: list[int] = []
    try:
        torch.set_num_threads(2)
        engine = by_hand(model, task, LocalSettings(1, 4, 0.0, 1))
        training = engine.trainer
        assert isinstance(training, ManualTrainer)
        step = training._program.step

        def noting(*given: Any) -> Any:
            seen.append(torch.get_num_threads())
            return step(*given)

        training._program.step = noting  # type: ignore[method-assign]
        list(engine.train(FlatModel(model).read().clone(), [0, 1], 0, 0.1))
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["small", "digits"])
def test_a_run_of_a_small_network_has_one_thread_and_gives_the_others_back(kind: str) -> None:
    """Between rounds, too: a second one would wait for work on a core that a worker needs."""
    model = MLP((1, 8, 8), 5) if kind == "small" else DigitsModel()
    inputs, targets = torch.randn(20, 1, 8, 8), torch.arange(20) % 5
    before = torch.get_num_threads()
    seen: list[int] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        seen.append(torch.get_num_threads())
        return 0.0

    try:
        torch.set_num_threads(2)
        fedquilt.run(
            *(model, (inputs, targets), (inputs, targets), np.split(np.arange(20), 4)),
            num_rounds=2,
            batch_size=4,
            engine="batched",
            mode="fedavg",
            output_dir=None,
            quiet=True,
            metrics={"seen": loss},
            device="cpu",
        )
        assert set(seen) == {1 if kind == "small" else 2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
