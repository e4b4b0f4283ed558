"""The clients' rules against torch.optim, alone and stacked."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedquilt.config.choices import CLIENT_OPTIMIZERS
from fedquilt.errors import InvalidValueError
from fedquilt.training.optimizers import (
    ClientOptimizer,
    RuleState,
    clip_gradients,
    make_client_optimizer,
    row_norms,
)

RATE, STEPS = 0.05, 5
RULES: dict[str, tuple[ClientOptimizer, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (ClientOptimizer(), functools.partial(torch.optim.SGD)),
    "decay": (
        ClientOptimizer(weight_decay=0.1), functools.partial(torch.optim.SGD, weight_decay=0.1)
    ),
    "momentum": (ClientOptimizer(momentum=0.8), functools.partial(torch.optim.SGD, momentum=0.8)),
    "nesterov": (
        ClientOptimizer("nesterov", momentum=0.8, weight_decay=0.2),
        functools.partial(torch.optim.SGD, momentum=0.8, nesterov=True, weight_decay=0.2),
    ),
    "adam": (ClientOptimizer("adam"), torch.optim.Adam),
    "adam, decay": (
        ClientOptimizer("adam", weight_decay=0.3),
        functools.partial(torch.optim.Adam, weight_decay=0.3),
    ),
    "adamw": (
        ClientOptimizer("adamw", weight_decay=0.3),
        functools.partial(torch.optim.AdamW, weight_decay=0.3),
    ),
}  # fmt: skip


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def gradients(step: int, like: list[torch.Tensor]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=random) * (1 + step) for p in like]


def moved(rule: ClientOptimizer, mu: float = 0.0) -> list[torch.Tensor]:
    weights = [p.detach().clone() for p in model().parameters()]
    anchors = [w.clone() for w in weights] if mu else None
    steps = rule.begin(weights, anchors, RATE, mu)
    for step in range(STEPS):
        steps.step(gradients(step, weights))
    return weights


def test_a_name_without_a_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*CLIENT_OPTIMIZERS, "lion")
    monkeypatch.setattr("fedquilt.training.optimizers.CLIENT_OPTIMIZERS", names)
    with pytest.raises(InvalidValueError, match="optimizer='lion' must be"):
        moved(ClientOptimizer("lion"))
    for name in CLIENT_OPTIMIZERS:
        moved(ClientOptimizer(name))


def by_torch(
    make: Callable[..., torch.optim.Optimizer], clip: float | None = None, mu: float = 0.0
) -> list[torch.Tensor]:
    parameters = list(model().parameters())
    anchors = [p.detach().clone() for p in parameters]
    optimizer = make(parameters, lr=RATE)
    for step in range(STEPS):
        for p, g in zip(parameters, gradients(step, parameters), strict=True):
            p.grad = g
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        for p, anchor in zip(parameters, anchors, strict=True):
            assert p.grad is not None
            p.grad = p.grad + mu * (p.detach() - anchor)
        optimizer.step()
    return [p.detach() for p in parameters]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_torchs(name: str) -> None:
    rule, make = RULES[name]
    assert_same(moved(rule), by_torch(make))


@pytest.mark.parametrize("name", RULES)
def test_clip_and_fedprox_come_before_the_rule(name: str) -> None:
    rule, make = RULES[name]
    ours = moved(changed(rule, gradient_clip=2.0), mu=0.7)
    assert_same(ours, by_torch(make, clip=2.0, mu=0.7))


def changed(rule: ClientOptimizer, **changes: Any) -> ClientOptimizer:
    return dataclasses.replace(rule, **changes)


@pytest.mark.parametrize("name", RULES)
def test_a_stack_steps_each_row_as_alone(name: str) -> None:
    rule = changed(RULES[name][0], gradient_clip=3.0)
    alone = moved(rule)
    start = [p.detach() for p in model().parameters()]
    stack = [torch.stack([w, w + 1.0, w]) for w in start]
    state = RuleState(rule, stack, stacked=True)
    for step in range(STEPS):
        rows = [
            torch.stack([g, 9.0 * g, torch.full_like(g, float("nan"))])
            for g in gradients(step, start)
        ]
        moving = torch.tensor([True, True, False])
        state.step(stack, rows, None, RATE, 0.0, moving)
    assert_same([w[0] for w in stack], alone)
    for w, first in zip(stack, start, strict=True):
        assert torch.equal(w[2], first), "a row without a batch stays, whatever its gradient is"
        assert not torch.equal(w[1], first + 1.0)


def test_a_state_serves_the_first_rows_of_its_stack() -> None:
    rule = ClientOptimizer("adam")
    whole = [torch.zeros(4, 2)]
    state = RuleState(rule, whole, stacked=True)
    for _ in range(2):
        state.step([whole[0][:2]], [torch.ones(2, 2)], None, RATE, 0.0)
    assert not whole[0][2:].any()
    torch.testing.assert_close(whole[0][:2], torch.full((2, 2), -2 * RATE))


def test_a_gradient_that_is_missing_moves_nothing() -> None:
    weights = [torch.ones(2), torch.ones(3)]
    steps = ClientOptimizer("adamw", weight_decay=0.5).begin(weights, None, RATE, 0.0)
    steps.step([None, torch.ones(3)])
    assert weights[0].tolist() == [1.0, 1.0]
    assert float(weights[1][0]) < 1.0


def test_norms_are_each_rows_own() -> None:
    rows = [torch.tensor([[3.0], [0.0]]), torch.tensor([[4.0], [1.0]])]
    assert row_norms(rows).tolist() == [5.0, 1.0]
    small = clip_gradients(rows, 1.0, stacked=True)
    assert small[0] is not None
    assert small[0].flatten().tolist() == pytest.approx([0.6, 0.0], abs=1e-6)
    assert clip_gradients(rows, None, stacked=True) == rows


def own(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=0.3)


@pytest.mark.parametrize(
    ("factory", "rate"),
    [
        (torch.optim.RMSprop, RATE),
        (own, 0.3),
        (functools.partial(torch.optim.RMSprop, lr=0.3), 0.3),
        (functools.partial(torch.optim.RMSprop, alpha=0.99), RATE),
    ],
)
def test_a_factory_gets_the_rate_where_it_takes_one(factory: Any, rate: float) -> None:
    rule = make_client_optimizer("custom", factory=factory)
    parameters = list(copy.deepcopy(model()).parameters())
    steps = rule.begin(parameters, None, RATE, 0.0)
    assert steps._optimizer.param_groups[0]["lr"] == rate  # type: ignore[attr-defined]
    steps.step(gradients(0, parameters))
    wanted = list(copy.deepcopy(model()).parameters())
    optimizer = torch.optim.RMSprop(wanted, lr=rate)
    for p, g in zip(wanted, gradients(0, wanted), strict=True):
        p.grad = g
    optimizer.step()
    assert_same([p.detach() for p in parameters], [p.detach() for p in wanted])


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (torch.optim.SGD([torch.zeros(1)], lr=0.1), "must be a factory, params -> optimiser"),
        (7, "optimizer=7 must be a name or a callable"),
    ],
)
def test_what_is_no_factory(factory: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make_client_optimizer("custom", factory=factory)


def test_a_factory_must_make_an_optimiser_that_steps_by_itself() -> None:
    weights = [torch.ones(2, requires_grad=True)]
    with pytest.raises(InvalidValueError, match="Optimizer, got list"):
        make_client_optimizer("custom", factory=list).begin(weights, None, RATE, 0.0)
    steps = make_client_optimizer("custom", factory=torch.optim.LBFGS).begin(
        weights, None, RATE, 0.0
    )
    with pytest.raises(InvalidValueError, match="LBFGS must step without a closure"):
        steps.step([torch.ones(2)])


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="optimizer='no-such-rule' must be one of"):
        ClientOptimizer("no-such-rule")
