"""The certified mechanism step by step, against the formulas."""

from __future__ import annotations

import doctest
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian

import fedquilt.privacy.certified
from certified_samples import (
    SIZE,
    joining,
    make_federation,
    make_problem,
    mechanism_of,
)
from fedquilt.aggregation import RunningMean
from fedquilt.errors import InvalidValueError
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.mechanism import RoundPlan, RoundTally
from fedquilt.privacy.noise import SeededNoise
from fedquilt.round import run_round

BUDGET = get_sigma_gaussian(3.0, 1e-5) ** -2  # mu^2 of epsilon 3
WHO = np.asarray([0, 2, 3])
LEFT = np.asarray([BUDGET, 0.4 * BUDGET, 0.05 * BUDGET])
JOINS = np.asarray([0.0, 2.0, 4.0])


def certified(folder: Path, **changes: Any) -> Certified:
    config, problem = make_problem(**changes)
    return mechanism_of(make_federation(config, problem, folder / "ledger"))


def open_round(mechanism: Certified, index: int = 4, left: np.ndarray = LEFT) -> RoundPlan:
    """Plan a round as `run_round` does, all charges granted."""
    plan = mechanism.plan_round(index, WHO, left, JOINS, index)
    plan = mechanism.shrink_to(plan, plan.charges)
    mechanism.open_round(plan)
    return plan


def clipped_of(mechanism: Certified, plan: RoundPlan, client: int, sent: torch.Tensor) -> Any:
    """Return what becomes of a client's update."""
    return mechanism.clip(plan, mechanism.receive(plan, client, sent, 1), RoundTally())


def summed(total: torch.Tensor, weight: float) -> RunningMean:
    """Return a sum as an accumulator has it."""
    made = RunningMean(len(total))
    made.total, made.weight = total.clone(), weight
    return made


def adaptive_share(left: np.ndarray, index: int, rounds: int, rate: float) -> np.ndarray:
    seen = np.minimum(1.0, (JOINS + 7 * rate) / (index + 7))
    return left / (1 + (rounds - index - 1) * seen)


def test_clips_and_charges_of_the_adaptive_policy(folder: Path) -> None:
    """c_i = s sqrt(B_i / r_i) with one noise level, and a charge of (c_i / s)^2."""
    mechanism = certified(folder)
    plan = open_round(mechanism)
    s = 1.0 / math.sqrt(BUDGET / 10)  # everybody joins every round: r = T, clip C = 1
    share = adaptive_share(LEFT, 4, 10, 1.0)
    assert plan.noise_std == pytest.approx(s)
    assert [plan.clips[i] for i in WHO] == pytest.approx(list(s * np.sqrt(share)))
    np.testing.assert_allclose(plan.charges, share, rtol=1e-12)


@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize("clip_norm", [1.0, 0.03])
def test_clips_and_charges_with_quantile_and_bands(
    folder: Path, bands: int, clip_norm: float
) -> None:
    """c_i = s_t sqrt(max(0, B_i / r_i - 1 / (4 sigma_b^2)) / k)."""
    mechanism = certified(folder, clipping="quantile", noise_bands=bands, clip_norm=clip_norm)
    assert mechanism.quantile is not None
    bit = 1 / (4 * mechanism.quantile.bit_noise_std**2)
    factor = sum((math.comb(2 * j, j) / 4**j) ** 2 for j in range(bands))
    typical = BUDGET / 10
    assert mechanism.quantile.bit_noise_std == pytest.approx(2 / math.sqrt(typical))
    plan = open_round(mechanism)
    s = clip_norm * math.sqrt(factor / (typical - bit))
    share = adaptive_share(LEFT, 4, 10, 1.0)
    clips = s * np.sqrt(np.maximum(0, share - bit) / factor)
    assert plan.noise_std == pytest.approx(s)
    assert [plan.clips[i] for i in WHO] == pytest.approx(list(clips))
    np.testing.assert_allclose(plan.charges, factor * (clips / s) ** 2 + bit, rtol=1e-12)


def test_the_noise_with_a_bit_is_that_of_andrew_et_al(folder: Path) -> None:
    """z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2): update and bit cost one join together."""
    mechanism = certified(folder, clipping="quantile", policy="worst_case")
    z = 1 / math.sqrt(BUDGET / 10)
    plan = open_round(mechanism, left=np.full(3, BUDGET))
    assert mechanism.quantile is not None
    z_delta = (z**-2 - (2 * mechanism.quantile.bit_noise_std) ** -2) ** -0.5
    assert plan.noise_std / mechanism.bound == pytest.approx(z_delta)
    assert z_delta == pytest.approx(1.0328 * z, rel=1e-4)
    np.testing.assert_allclose(plan.charges, z**-2)


def test_who_can_pay_the_bit_only_sends_the_bit_only(folder: Path) -> None:
    mechanism = certified(folder, clipping="quantile")
    left = np.asarray([BUDGET, 1.02 * mechanism.bit_cost, 0.4 * BUDGET])
    plan = open_round(mechanism, index=2, left=left)
    assert plan.clips[2] == 0.0
    assert plan.charges is not None
    assert plan.charges[1] == mechanism.bit_cost <= left[1]
    assert torch.count_nonzero(clipped_of(mechanism, plan, 2, torch.ones(SIZE)).vector) == 0


def test_no_clip_is_above_the_cap_and_what_it_saves_is_not_charged(folder: Path) -> None:
    free, capped = certified(folder), certified(folder, clip_cap=1.5)
    dear = open_round(free, index=9, left=np.full(3, BUDGET))
    cheap = open_round(capped, index=9, left=np.full(3, BUDGET))
    assert dear.clips[0] == pytest.approx(math.sqrt(10))
    assert cheap.clips[0] == pytest.approx(1.5)
    assert dear.charges is not None
    assert cheap.charges is not None
    np.testing.assert_allclose(cheap.charges / dear.charges, 1.5**2 / 10)


def test_a_smaller_grant_lowers_the_clip_never_a_larger_one(folder: Path) -> None:
    mechanism = certified(folder, clipping="quantile", noise_bands=2)
    plan = mechanism.plan_round(4, WHO, LEFT, JOINS, 4)
    assert plan.charges is not None
    before = dict(plan.clips)
    shrunk = mechanism.shrink_to(plan, plan.charges * np.asarray([1.0 + 1e-6, 0.5, 1.0]))
    assert plan.clips == before, "a plan is frozen"
    assert shrunk.clips[0] == before[0]
    bit, factor = mechanism.bit_cost, mechanism.noise.cost_factor
    spends = factor * (shrunk.clips[2] / shrunk.noise_std) ** 2 + bit
    assert spends == pytest.approx(0.5 * plan.charges[1])
    with pytest.raises(RuntimeError, match="needs a ledger"):
        mechanism.shrink_to(plan, None)


def test_a_step_follows_its_own_plan_whatever_was_planned_since(folder: Path) -> None:
    mechanism = certified(folder)
    plan = open_round(mechanism)
    sent = torch.full((SIZE,), 50.0)
    before = clipped_of(mechanism, plan, 0, sent).vector
    later = open_round(mechanism, index=9, left=np.full(3, BUDGET))
    assert later.clips[0] != plan.clips[0]
    assert torch.equal(clipped_of(mechanism, plan, 0, sent).vector, before)
    assert float(clipped_of(mechanism, later, 0, sent).vector.norm()) == pytest.approx(
        later.clips[0]
    )


def test_the_first_run_of_an_allowance_ends_exactly_at_it(folder: Path) -> None:
    """A client that joins every round spends its budget: the epsilon is the one asked for."""
    config, problem = make_problem(num_rounds=6)
    federation = make_federation(config, problem, folder / "l")
    joining(federation, lambda index: [0, 1] if index % 2 else [0])
    for index in range(6):
        run_round(federation, index)
    assert federation.account is not None
    spent = federation.account.spent()
    assert get_epsilon_gaussian(spent[0] ** -0.5, 1e-5) == pytest.approx(3.0, rel=1e-6)
    assert get_epsilon_gaussian(spent[1] ** -0.5, 1e-5) == pytest.approx(3.0, rel=1e-6)
    assert spent[2] == spent[3] == 0, "who never joined has spent nothing"


def test_joins_are_kept_as_far_apart_as_the_noise_needs(folder: Path) -> None:
    config, problem = make_problem(noise_bands=3, num_rounds=12)
    federation = make_federation(config, problem, folder / "l")
    joining(federation, lambda index: [0] if index == 1 else [0, 1, 2])
    joined: dict[int, list[int]] = {}
    for index in range(12):
        for client in run_round(federation, index).cohort:
            joined.setdefault(client, []).append(index)
    assert joined[0] == [0, 3, 6, 9]
    assert joined[1] == [0, 3, 6, 9]
    assert all(np.diff(rounds).min() >= 3 for rounds in joined.values())


def test_the_whole_vector_is_clipped_once(folder: Path) -> None:
    mechanism = certified(folder, policy="worst_case")
    plan = open_round(mechanism, left=np.full(3, BUDGET))
    sent = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)) * 50
    clipped = clipped_of(mechanism, plan, 0, sent.clone())
    assert clipped.vector.dtype == torch.float64
    assert clipped.weight == 1.0
    length = float(np.linalg.norm(clipped.vector.numpy()))
    assert 1 - 1e-11 < length <= 1.0
    cosine = float(clipped.vector @ sent.double()) / (length * float(sent.double().norm()))
    assert cosine == pytest.approx(1.0)
    small = mechanism.receive(plan, 2, torch.full((SIZE,), 0.01), 9)
    inside = mechanism.clip(plan, small, RoundTally())
    assert torch.equal(inside.vector, small.vector), "inside: left alone"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_counts_as_zero(folder: Path, bad: float) -> None:
    mechanism = certified(folder)
    plan = open_round(mechanism)
    sent = torch.ones(SIZE)
    sent[3] = bad
    received = mechanism.receive(plan, 0, sent, 9)
    assert (received.finite, received.weight) == (False, 1.0)
    assert torch.count_nonzero(mechanism.clip(plan, received, RoundTally()).vector) == 0


@pytest.mark.parametrize("length", [1e-30, 0.3, 40.0, 1e30])
def test_normalised_updates_have_exactly_their_clip(folder: Path, length: float) -> None:
    mechanism = certified(folder, normalise_updates=True, policy="worst_case")
    plan = open_round(mechanism, left=np.full(3, BUDGET))
    sent = torch.full((SIZE,), length / math.sqrt(SIZE))
    clipped = clipped_of(mechanism, plan, 0, sent)
    assert 1 - 1e-11 < float(np.linalg.norm(clipped.vector.numpy())) <= 1.0


def test_nothing_stays_nothing_when_updates_are_normalised(folder: Path) -> None:
    mechanism = certified(folder, normalise_updates=True)
    plan = open_round(mechanism)
    zero = clipped_of(mechanism, plan, 0, torch.zeros(SIZE))
    assert torch.count_nonzero(zero.vector) == 0


@pytest.mark.parametrize("size", [20, 400])
def test_an_update_too_small_to_measure_is_not_blown_up_beyond_its_clip(
    folder: Path, size: int
) -> None:
    """Squares of such numbers lose their digits: the norm of the vector comes out too small."""
    mechanism = certified(folder, normalise_updates=True, policy="worst_case")
    plan = open_round(mechanism, left=np.full(3, BUDGET))
    sent = torch.full((size,), 1.5e-162, dtype=torch.float64)
    sent[0] = 1e-161
    clipped = clipped_of(mechanism, plan, 0, sent).vector.numpy()
    assert float(np.linalg.norm(clipped)) <= 1.0


def test_the_release_is_the_noised_sum_over_a_public_number(folder: Path) -> None:
    mechanism = certified(folder, clients_per_round=2)
    mechanism.noise.source = SeededNoise(7)
    plan = open_round(mechanism)
    total = torch.arange(SIZE, dtype=torch.float64)
    drawn = SeededNoise(7).stream(4).normal(SIZE)
    for weight in (0.0, 1.0, 3.0):
        update, report = mechanism.release(plan, summed(total, weight), RoundTally())
        expected = (total.numpy() + plan.noise_std * drawn) / 2.0
        np.testing.assert_allclose(update.numpy(), expected, rtol=1e-14)
        assert report.noise_std == plan.noise_std / 2.0
        assert report.epsilon is None


def test_the_bit_looks_at_the_update_before_it_is_clipped(folder: Path) -> None:
    mechanism = certified(folder, clipping="quantile", private_quantile_lr=0.2)
    mechanism.noise.source = SeededNoise(7)
    plan = open_round(mechanism, left=np.full(3, BUDGET))
    tally = RoundTally()
    for client, length in zip(WHO.tolist(), (0.5, 1.5, 30.0), strict=True):
        sent = torch.full((SIZE,), length / math.sqrt(SIZE), dtype=torch.float64)
        mechanism.clip(plan, mechanism.receive(plan, client, sent, 1), tally)
    mechanism.release(plan, summed(torch.zeros(SIZE, dtype=torch.float64), 3.0), tally)
    assert mechanism.quantile is not None
    noise = mechanism.quantile.bit_noise_std * SeededNoise(7).stream(4, 1).normal(1)[0]
    fraction = (0.5 - 0.5 - 0.5 + noise) / 4 + 0.5
    assert mechanism.bound == pytest.approx(math.exp(-0.2 * (fraction - 0.5)))


def test_the_state_has_joins_and_bound_and_no_noise(folder: Path) -> None:
    mechanism = certified(folder, clipping="quantile", noise_bands=2)
    plan = open_round(mechanism)
    mechanism.release(plan, summed(torch.zeros(SIZE, dtype=torch.float64), 3.0), RoundTally())
    state = mechanism.state()
    assert set(state) == {"last_join", "quantile_bound"}
    other = certified(folder, clipping="quantile", noise_bands=2)
    other.load_state(state)
    assert other.bound == mechanism.bound
    allowed = other.eligible(5, np.full(4, BUDGET))
    assert allowed.tolist() == [False, True, False, False]


def test_a_statement_needs_the_ledger(folder: Path) -> None:
    mechanism = certified(folder)
    with pytest.raises(RuntimeError, match="epsilons from the ledger"):
        mechanism.statement(np.zeros(4), None)


def test_statistics_that_training_moves_are_refused() -> None:
    from torch import nn

    from fedquilt.config import build_config
    from fedquilt.setup.build_task import task_from

    config = build_config({"mode": "certified", "dataset": "custom", "model": "custom"})
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3))
    data = (torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InvalidValueError, match="running_mean"):
        task_from(config, model, data, data, [[0, 1], [2, 3]])


def test_what_is_frozen_is_said_and_does_not_travel(folder: Path) -> None:
    config, problem = make_problem(trainable="1.bias")
    federation = make_federation(config, problem, folder / "l")
    assert federation.weights.numel() == 3
    stated = federation.mechanism.statement(np.zeros(4), np.zeros(4))
    assert stated.covered == ("1.bias",)
    assert any("frozen" in note and "1.weight" in note for note in stated.notes)


def test_the_round_by_hand_in_the_docstring_runs() -> None:
    ran = doctest.testmod(fedquilt.privacy.certified)
    assert (ran.failed, ran.attempted > 10) == (0, True)


def test_a_round_without_an_account_releases_nothing(folder: Path) -> None:
    config, problem = make_problem()
    federation = make_federation(config, problem, folder / "l")
    federation.account, before = None, federation.weights.clone()
    with pytest.raises(RuntimeError, match="needs a ledger that bounds it"):
        run_round(federation, 0)
    assert torch.equal(federation.weights, before)
