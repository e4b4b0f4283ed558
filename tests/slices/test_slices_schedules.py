"""Who gets which slice, and the helpers of the methods."""

from __future__ import annotations

import copy
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sliceable_models import Residual, images
from torch import nn
from torch.nn import functional

from fedquilt.errors import InvalidValueError
from fedquilt.nn import Scaler
from fedquilt.slices import (
    FixedStructure,
    Prefix,
    RandomUnits,
    Slicer,
    Window,
    self_distillation_loss,
)
from fedquilt.slices import (
    selection as schedules,
)

WIDTHS = ("1/4", "1/2", "3/4", "1")


def chosen(selection: Any, units: int, axis: int = 0) -> list[int]:
    index: list[int] = selection.choose(units, axis).index.tolist()
    return index


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 200))
def test_every_width_keeps_the_floor(units: int, twelfths: int, number: int) -> None:
    width = Fraction(twelfths, 12)
    kept = int(units * twelfths // 12)
    for selection in (Prefix(width), Window(width, number), RandomUnits(width, number)):
        if kept == 0:
            with pytest.raises(InvalidValueError, match="must keep at least one"):
                selection.choose(units, 0)
        else:
            assert len(chosen(selection, units)) == kept
    if kept:
        assert chosen(Prefix(width), units) == list(range(kept))
        window = [(number + k) % units for k in range(kept)]
        assert sorted(chosen(Window(width, number), units)) == sorted(window)
        if kept < units:
            assert chosen(Window(width, number), units) == window


def test_fedrolex_rolls_one_unit_a_round_and_wraps() -> None:
    rounds = [chosen(schedules.fedrolex("1/2", t), 4) for t in range(5)]
    assert rounds == [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1]]
    assert chosen(schedules.fedrolex("1/2", 3, step=2), 8) == [6, 7, 0, 1]
    counts = Counter(u for t in range(12) for u in chosen(schedules.fedrolex("1/4", t), 12))
    assert set(counts.values()) == {3}  # every unit is trained equally often


def test_federated_dropout_is_random_but_repeatable() -> None:
    slices = [schedules.federated_dropout("1/2", np.random.default_rng(s)) for s in (1, 1, 2)]
    assert slices[0] == slices[1] != slices[2]
    assert chosen(slices[0], 20, axis=0) != chosen(slices[0], 20, axis=1)
    generator = np.random.default_rng(0)
    counts = Counter(
        unit
        for _ in range(400)
        for unit in chosen(schedules.federated_dropout("1/4", generator), 8)
    )
    assert all(abs(counts[unit] - 100) < 40 for unit in range(8))


def test_fjord_draws_widths_up_to_the_limit_and_never_zero() -> None:
    generator = np.random.default_rng(0)
    drawn = Counter(schedules.fjord("3/4", WIDTHS, generator).width for _ in range(600))
    assert set(drawn) == {Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)}
    assert all(abs(count - 200) < 60 for count in drawn.values())
    only = {schedules.fjord("1/4", WIDTHS, generator).width for _ in range(20)}
    assert only == {Fraction(1, 4)}
    with pytest.raises(InvalidValueError, match="limit='1/8'"):
        schedules.fjord("1/8", WIDTHS, generator)
    with pytest.raises(InvalidValueError, match="width=0 must be > 0"):
        schedules.fjord("1/4", (0, "1/4"), generator)


def test_mfl_takes_turns_through_all_structures() -> None:
    structures = [schedules.mfl(2, t, axes=3) for t in range(8)]
    assert {one.structure for one in structures} == set(range(8))
    assert schedules.mfl(0, 5, 3) == schedules.mfl(5, 0, 3) == FixedStructure(5, 3)
    # 5 = 101 in binary: second half on axis 0, first on axis 1, second on axis 2
    halves = [chosen(FixedStructure(5, 3), 4, axis) for axis in range(4)]
    assert halves == [[2, 3], [0, 1], [2, 3], [2, 3]]
    covered = {u for s in range(9) for u in chosen(FixedStructure(s, 2, 3), 7, 1)}
    assert covered == set(range(7))
    with pytest.raises(InvalidValueError, match="structure=8"):
        FixedStructure(8, 3)
    with pytest.raises(InvalidValueError, match="pieces=5"):
        FixedStructure(0, 1, 5).choose(4, 0)


def test_records_are_keys() -> None:
    assert len({Prefix("1/2"), Prefix(0.5), Window("1/2", 0), RandomUnits("1/2", 0)}) == 3


def test_scaler_divides_in_training_only() -> None:
    x = torch.tensor([1.0, 2.0])
    scaler = Scaler(0.25)
    assert scaler(x).tolist() == [4.0, 8.0]
    assert scaler.eval()(x).tolist() == [1.0, 2.0]
    assert Scaler(0.25, training=False)(x).tolist() == [1.0, 2.0]
    with pytest.raises(InvalidValueError, match="keep_rate=0"):
        Scaler(0)


def test_self_distillation_loss() -> None:
    student = torch.tensor([[1.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[3.0, 1.0]], requires_grad=True)
    loss = self_distillation_loss(student, teacher, torch.tensor([1]), alpha=0.25, temperature=2.0)
    p, q = (np.exp(z) / np.exp(z).sum() for z in (np.array([1.5, 0.5]), np.array([0.5, 0.0])))
    hard = -np.log(1 / (1 + np.e))
    expected = 0.75 * hard + 0.25 * 4 * float((p * np.log(p / q)).sum())
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert teacher.grad is None
    with pytest.raises(InvalidValueError, match="alpha=2"):
        self_distillation_loss(student, teacher, torch.tensor([1]), alpha=2)


def test_ordered_dropout_trains_the_wide_model_through_its_slice() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    plan = Slicer(model)
    small, held = plan.build("1/4"), plan.slice("1/4")
    x, y = (
        torch.randn(5, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, 2, 0, 1]),
    )
    logits = torch.func.functional_call(small, held.gather(dict(model.named_parameters())), x)
    self_distillation_loss(logits, model(x), y).backward()
    # the same, by masking hidden units of the wide model
    masked = copy.deepcopy(model)
    masked.zero_grad()
    hidden = masked[1](masked[0](x)) * torch.tensor([1.0] * 2 + [0.0] * 6)
    self_distillation_loss(masked[2](hidden), masked(x), y).backward()
    for mine, its in zip(model.parameters(), masked.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    assert functional.relu(logits).shape == (5, 3)


def test_schedules_fit_a_model() -> None:
    plan = Slicer(Residual())
    for selection in (
        Prefix("1/2"),
        schedules.fedrolex("1/2", 9),
        schedules.federated_dropout("1/2", np.random.default_rng(0)),
        schedules.mfl(3, 1, 2),
    ):
        assert plan.build(selection)(images(3, 8)).shape == (4, 5)
