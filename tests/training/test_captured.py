"""Captured steps: what a replay does without running Python again, and what is not captured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedquilt.slices.engine import loss_of_slice
from fedquilt.slices.slicing import Slicing
from fedquilt.training import ClassMask, FlatModel, LocalSettings, StepLoss, Task
from fedquilt.training.optimizers import ClientOptimizer
from fedquilt.training.trainers import Trainer
from fedquilt.training.trainers.autograd import AutogradTrainer
from fedquilt.training.trainers.captured import CapturedTrainer

SIZES = (19, 8, 5, 16, 0)
RULES = [
    ClientOptimizer(),
    ClientOptimizer("sgd", momentum=0.9, weight_decay=0.01),
    ClientOptimizer("nesterov", momentum=0.9),
    ClientOptimizer("adam", gradient_clip=0.5),
    ClientOptimizer("adamw", weight_decay=0.1),
]


class Recorder:
    """Records the operations of a step as a CUDA graph does: a replay runs them and no Python."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        tape = _Tape()
        with tape:
            function()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        values: dict[int, Any] = {}

        def now(value: Any) -> Any:
            return values.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, out in self._calls:
            again = func(
                *torch.utils._pytree.tree_map(now, args),
                **torch.utils._pytree.tree_map(now, kwargs),
            )
            old, new = (torch.utils._pytree.tree_leaves(each) for each in (out, again))
            for one, other in zip(old, new, strict=True):
                if isinstance(one, torch.Tensor):
                    values[id(one)] = other


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
    )


def make_task() -> Task:
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randn(sum(SIZES), 2, 6, 6, generator=drawn)
    targets = torch.randint(3, (sum(SIZES),), generator=drawn)
    ends = np.cumsum(SIZES)
    clients = [np.arange(end - size, end) for size, end in zip(SIZES, ends, strict=True)]
    return Task(inputs, targets, clients)


def settings(rule: ClientOptimizer = RULES[3], **others: Any) -> LocalSettings:
    return replace(LocalSettings(2, 8, 0.0, 3, optimizer=rule), **others)


def updates(engine: Trainer, model: nn.Module, cohort: Any = (0, 1, 2, 3, 4)) -> Any:
    start = FlatModel(model, engine.task.public().inputs).read().clone()
    found = []
    for round_index, rate in enumerate((0.1, 0.01)):
        for update in engine.train(start, list(cohort), round_index, rate):
            found.append((update.delta.clone(), update.loss))
    return found


def assert_alike(ours: Any, theirs: Any) -> None:
    for (delta, loss), (wanted, other) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(delta, wanted, rtol=2e-4, atol=2e-6)
        assert loss == pytest.approx(other, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name + str(rule.weight_decay))
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_captured_steps_are_those_of_autograd(rule: ClientOptimizer, mu: float) -> None:
    """Rates change from round to round, Adam's correction from step to step, batches are short."""
    model, task, local = network(), make_task(), settings(rule, fedprox_mu=mu)
    recorder = Recorder()
    engine = CapturedTrainer(model, task, local, recorder=recorder)
    assert engine.captured is not None
    before = recorder.replays
    assert_alike(updates(engine, model), updates(AutogradTrainer(model, task, local), model))
    full = 2 * sum(size // 8 for size in SIZES)
    assert (recorder.captures, recorder.replays - before) == (1, 2 * full)


def test_an_update_does_not_depend_on_who_trained_before() -> None:
    model, task, local = network(), make_task(), settings()
    engine = CapturedTrainer(model, task, local, recorder=Recorder())
    together = updates(engine, model)
    alone = updates(CapturedTrainer(model, task, local, recorder=Recorder()), model, [3])
    for place, round_index in ((3, 0), (8, 1)):
        assert torch.equal(together[place][0], alone[round_index][0])


def test_hidden_classes_are_each_clients_own() -> None:
    hidden = torch.zeros(len(SIZES), 3, dtype=torch.bool)
    hidden[0, 1] = hidden[1, 2] = hidden[3, 0] = True
    model = network()
    task = replace(make_task(), class_mask=ClassMask(hidden, 0.0))
    engine = CapturedTrainer(model, task, settings(), recorder=Recorder())
    assert engine.captured is not None
    assert_alike(updates(engine, model), updates(AutogradTrainer(model, task, settings()), model))


def test_a_loss_that_decides_is_captured_once_a_decision() -> None:
    model, task = network(), make_task()
    slicing = Slicing(
        "fjord", [Fraction(1), Fraction(1, 2)] * 3, 0, network(), [], task.public().inputs
    )

    def loss_of(client: int, round_index: int) -> Any:
        return loss_of_slice(slicing, slicing.model)(0, 10 * round_index + client)  # type: ignore[misc]

    recorder = Recorder()
    engine = CapturedTrainer(model, task, settings(), loss_of, recorder)
    assert engine.captured is not None
    ours = updates(engine, model)
    assert recorder.captures == 2
    assert_alike(ours, updates(AutogradTrainer(model, task, settings(), loss_of), model))


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = network(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(x) / self.calls


class _Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x + torch.rand(()))


class _Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(72, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.view(len(x), -1))


UNCAPTURED = {
    "dropout": (nn.Sequential(nn.Dropout(0.5), network()), {}, "draw random numbers"),
    "generator": (_Draws(), {}, "random generators"),
    "counter": (_Counts(), {}, "changes calls"),
    "optimizer": (
        network(),
        {"rule": ClientOptimizer("custom", factory=torch.optim.SGD)},
        "not one of the named ones",
    ),
    "batch": (network(), {"batch_size": 10**6}, "are above"),
}


@pytest.mark.parametrize("name", UNCAPTURED)
def test_what_a_replay_would_not_do_again_trains_by_autograd(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, others, reason = UNCAPTURED[name]
    task, local = make_task(), settings(**others)
    with caplog.at_level(logging.INFO):
        engine = CapturedTrainer(model, task, local, recorder=Recorder())
    assert engine.captured is None
    assert reason in caplog.text
    ours = updates(engine, model)
    theirs = updates(AutogradTrainer(model, task, local), model)
    for (delta, _), (wanted, _) in zip(ours, theirs, strict=True):
        assert torch.equal(delta, wanted)


def test_an_unknown_loss_trains_by_autograd(caplog: pytest.LogCaptureFixture) -> None:
    def loss_of(client: int, round_index: int) -> Any:
        return lambda module, inputs, targets: module(inputs).sum() * (client + 1)

    with caplog.at_level(logging.INFO):
        engine = CapturedTrainer(network(), make_task(), settings(), loss_of, Recorder())
    assert engine.captured is None
    assert "something else in every step" in caplog.text


def test_steps_that_compute_something_else_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(function: Callable[[], None]) -> Callable[[], None]:
        right = Recorder()(function)

        def replay() -> None:
            right()
            right()

        return replay

    with caplog.at_level(logging.INFO):
        engine = CapturedTrainer(network(), make_task(), settings(), recorder=wrong)
    assert engine.captured is None
    assert "away from autograd's" in caplog.text


def test_a_recorder_that_fails_is_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    def fails(function: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    with caplog.at_level(logging.INFO):
        engine = CapturedTrainer(network(), make_task(), settings(), recorder=fails)
    assert engine.captured is None
    assert "not permitted when stream is capturing" in caplog.text
    assert "and more" not in caplog.text


def test_a_model_that_needs_channels_first_gets_them() -> None:
    model, task = _Views(), make_task()
    engine = CapturedTrainer(model, task, settings(), recorder=Recorder())
    assert engine.captured is not None
    assert_alike(updates(engine, model), updates(AutogradTrainer(model, task, settings()), model))


def test_a_step_loss_decides_before_every_step() -> None:
    decisions = iter([2.0, 3.0])
    loss = StepLoss(lambda module, inputs, targets, d: inputs.sum() * d, lambda: next(decisions))
    ones = torch.ones(2)
    assert float(loss(nn.Identity(), ones, ones)) == 4.0
    name, decided = loss.decided()
    assert name == 3.0
    assert float(decided(nn.Identity(), ones, ones)) == 6.0
