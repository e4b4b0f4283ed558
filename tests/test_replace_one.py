"""Replace-one: a client's data exchanged for any others, charged for the whole way."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import nn

import fedquilt
from certified_samples import (
    SIZE,
    make_federation,
    make_problem,
    memory_folder,
    refine_in_few_steps,
)
from fedquilt.config import build_config, plain_config
from fedquilt.errors import InvalidValueError
from fedquilt.experiment.api import run_in_memory
from fedquilt.privacy import feasibility as planning
from fedquilt.privacy.accounting import Adjacency, Release, calibrate, epsilon
from fedquilt.privacy.ledger.run import Run
from fedquilt.record.result import RunResult
from fedquilt.round import run_round
from gaussian_oracle import exact_epsilon

DELTA = 1e-5


@pytest.fixture
def charges(monkeypatch: pytest.MonkeyPatch) -> list[NDArray[np.float64]]:
    """What the ledger grants, round by round."""
    granted: list[NDArray[np.float64]] = []
    reserve = Run.reserve

    def noted(self: Run, *given: Any) -> Any:
        reservation = reserve(self, *given)
        granted.append(reservation.charges_mu2.copy())
        return reservation

    monkeypatch.setattr(Run, "reserve", noted)
    return granted


def turning(label: int, adjacency: str, **changes: Any) -> RunResult:
    """Run one round in which client 0 holds one sample with this label."""
    draws = np.random.default_rng(0)
    inputs = torch.from_numpy(draws.normal(size=(8, 6))).float()
    labels = torch.tensor([label, 0, 1, 1, 0, 1, 0, 1])
    model = nn.Linear(6, 2, bias=False)
    nn.init.zeros_(model.weight)
    return fedquilt.run(
        model,
        (inputs, labels),
        (inputs, torch.tensor([1, 0, 1, 1, 0, 1, 0, 1])),
        [[client] for client in range(8)],
        output_dir=None,
        mode="certified",
        adjacency=adjacency,
        **{
            "epsilon": 6.0,
            "num_rounds": 1,
            "local_epochs": 1,
            "learning_rate": 0.5,
            "clip_norm": 0.01,
            "availability": "always",
            "clients_per_round": 8,
            "noise_seed": 3,
            **changes,
        },
    )


@pytest.mark.parametrize("clipping", ["fixed", "quantile"])
def test_the_charge_covers_an_update_that_turns_around(
    charges: list[NDArray[np.float64]], clipping: str
) -> None:
    """At zero weights another label turns the gradient of two classes around exactly."""
    one = turning(0, "replace_one", clipping=clipping)
    other = turning(1, "replace_one", clipping=clipping)
    (noise_std,) = one.result["history"]["noise_levels"]
    apart = one.state_dict["weight"].double() - other.state_dict["weight"].double()
    moved = float(apart.norm()) / noise_std  # both are divided by the same public number
    clip = 0.01 / (noise_std * 8)
    assert moved == pytest.approx(2 * clip, rel=1e-5), "the whole way: 2 c_i"
    charged = float(charges[0][0])
    bit = 0.0 if clipping == "fixed" else charged - moved**2
    assert charged >= moved**2 * (1 - 1e-5)
    assert charged == pytest.approx(moved**2 + bit, rel=1e-5)
    # sigma_b is twice the noise multiplier of a join: (1 / sigma_b)^2 of the charge a.
    assert bit == pytest.approx(0.0 if clipping == "fixed" else charged / 16, rel=1e-4)


def test_zero_out_does_not_cover_it(charges: list[NDArray[np.float64]]) -> None:
    """Why there are two: the same pair under zero-out moves twice what is charged."""
    one, other = turning(0, "zero_out"), turning(1, "zero_out")
    (noise_std,) = one.result["history"]["noise_levels"]
    apart = one.state_dict["weight"].double() - other.state_dict["weight"].double()
    assert float(apart.norm()) / noise_std == pytest.approx(2 * math.sqrt(charges[0][0]), rel=1e-5)


def digits(**changes: Any) -> RunResult:
    given: dict[str, Any] = {
        "dataset": "digits",
        "mode": "certified",
        "model": "linear",
        "num_clients": 12,
        "clients_per_round": 6,
        "num_rounds": 6,
        "local_epochs": 1,
        "epsilon": 6.0,
        "eval_every": 6,
    }
    return run_in_memory(plain_config({**given, **changes}))


WAYS: dict[str, dict[str, Any]] = {
    "adaptive": {"policy": "adaptive"},
    "worst case": {"policy": "worst_case"},
    "cap": {"policy": "cap", "max_joins": 3},
    "paper": {"policy": "paper"},
    "bands": {"noise_bands": 2},
    "slices": {"model": "mlp", "method": "fedrolex", "tiers": "1,1/2"},
    "condensation": {
        "method": "condense",
        "model": "hog-linear",
        "availability": "beta",
        "synthetic_images": 40,
        "ipc": 1,
        "model_epochs": 1,
        "normalise_updates": True,
        "local_epochs": 5,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_charges_buy_half_of_what_they_bought(
    charges: list[NDArray[np.float64]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace-one spends the same of the ledger, at twice the noise; clips stay."""
    refine_in_few_steps(monkeypatch)
    noises, counts = [], []
    for adjacency in ("zero_out", "replace_one"):
        done = digits(adjacency=adjacency, **WAYS[way])
        noises.append([n for n in done.result["history"]["noise_levels"] if n is not None])
        counts.append(len(charges))
        assert done.statement.adjacency == adjacency.replace("_", "-")
        assert done.statement.epsilon_max <= 6.0
    before, after = charges[: counts[0]], charges[counts[0] :]
    assert len(before) == len(after) == len(noises[0]) > 2
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
    np.testing.assert_allclose(noises[1], 2 * np.asarray(noises[0]), rtol=1e-9)


def test_a_quantile_keeps_its_share_of_a_join(charges: list[NDArray[np.float64]]) -> None:
    done = [
        digits(adjacency=a, clipping="quantile", num_rounds=1) for a in ("zero_out", "replace_one")
    ]
    np.testing.assert_allclose(charges[0], charges[1], rtol=1e-9)
    first, second = (one.result["history"]["noise_levels"][0] for one in done)
    assert second == pytest.approx(2 * first, rel=1e-9)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_epsilon_is_that_of_the_exact_formula(adjacency: str) -> None:
    """From the noise that was added and who joined, by an accountant written here."""
    done = digits(adjacency=adjacency, policy="worst_case", num_rounds=8, eval_every=8)
    joins = np.asarray(done.result["joins"])
    noise_std = next(n for n in done.result["history"]["noise_levels"] if n is not None)
    divisor = min(12 * 2 / 7, 6)  # Beta(2, 5) availability
    multiplier = noise_std * divisor / 1.0
    moved = 2.0 if adjacency == "replace_one" else 1.0
    worst = exact_epsilon(moved * math.sqrt(joins.max()) / multiplier, DELTA)
    assert 0 < joins.max() < 8, "nobody joined every round, so epsilon is not the asked one"
    assert done.statement.epsilon_max == pytest.approx(worst, rel=1e-6)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_fixed_dp_says_what_its_noise_costs(adjacency: str) -> None:
    done = digits(mode="fixed_dp", noise_layers="all", adjacency=adjacency)
    joins = np.asarray(done.result["joins"])
    multiplier = math.sqrt(2 * math.log(1.25 / DELTA)) / (6.0 / 6)
    moved = 2.0 if adjacency == "replace_one" else 1.0
    worst = exact_epsilon(moved * math.sqrt(joins.max()) / multiplier, DELTA)
    assert done.statement.epsilon_max == pytest.approx(worst, rel=1e-6)
    assert done.statement.adjacency == adjacency.replace("_", "-")


def test_fixed_dp_refuses_a_round_that_costs_more_than_all_of_it() -> None:
    """One round of the classic noise at epsilon 6 keeps zero-out, not replace-one."""
    settings = {"mode": "fixed_dp", "noise_layers": "all", "num_rounds": 1}
    assert digits(**settings).statement.epsilon_max <= 6.0
    with pytest.raises(InvalidValueError, match="use more rounds"):
        digits(**settings, adjacency="replace_one")


def test_rounds_that_run_again_are_planned_as_they_were() -> None:
    """What a crash left in the ledger is rewound in the right units."""

    def update(client: int, index: int) -> torch.Tensor:
        return torch.full((SIZE,), 1.0 + client + index)

    settings = {"num_rounds": 4, "adjacency": "replace_one", "noise_seed": 5}
    config, problem = make_problem(**settings)
    with memory_folder() as folder:
        whole = make_federation(config, problem, folder / "whole", update=update)
        for index in range(4):
            run_round(whole, index)
        broken = make_federation(config, problem, folder / "broken", update=update)
        run_round(broken, 0)
        state, weights = broken.state(), broken.weights.clone()
        run_round(broken, 1)  # settled, and the process dies before it is saved
        assert broken.account is not None
        broken.account.close()
        again = make_federation(config, problem, folder / "broken", update=update)
        again.load_state(state)
        again.weights = weights
        for index in range(1, 4):
            run_round(again, index)
        assert whole.account is not None
        assert again.account is not None
        np.testing.assert_array_equal(again.account.spent(), whole.account.spent())
        assert torch.equal(again.weights, whole.weights)
        whole.account.close()
        again.account.close()


def sampled_delta(eps: float, rate: float, noise: float, count: int) -> float:
    """Return delta of (1-q)N(0)+qN(1) against (1-q)N(0)+qN(-1), `count` times, by FFT."""
    size = 2**19
    x = np.linspace(-13 * noise - 1, 13 * noise + 1, 1_000_001)
    mass = ((1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, 1, noise)) * (x[1] - x[0])
    ahead = np.log1p(rate * np.expm1((x - 0.5) / noise**2))
    loss = ahead - np.log1p(rate * np.expm1((-x - 0.5) / noise**2))
    mean = float(mass @ loss)
    spread = math.sqrt(float(mass @ (loss - mean) ** 2))
    width = max(30.0, count * mean + 30 * spread * math.sqrt(count))
    step = 2 * width / size
    place = np.floor((loss + width) / step).astype(int)
    share = (loss + width) / step - place
    grid = np.bincount(place, mass * (1 - share), size)
    grid += np.bincount(place + 1, mass * share, size)
    total = np.fft.irfft(np.fft.rfft(np.roll(grid, -size // 2)) ** count, size)
    total = np.roll(total, size // 2)
    values = step * np.arange(size) - width
    above = values > eps
    return float(total[above] @ -np.expm1(eps - values[above]))


@pytest.mark.parametrize(("rate", "noise", "count"), [(0.3, 2.0, 1), (0.3, 5.0, 20), (0.1, 3, 50)])
def test_the_secret_coin_under_replace_one(rate: float, noise: float, count: int) -> None:
    """The package's accountant against an integration of its own."""
    release = Release(noise, count, rate)
    stated = epsilon([release], DELTA, method="pld", adjacency=Adjacency.REPLACE_ONE).epsilon
    assert sampled_delta(stated, rate, noise, count) == pytest.approx(DELTA, rel=2e-4)
    assert stated > epsilon([release], DELTA, method="pld").epsilon * 1.3


def test_no_other_pair_of_updates_is_worse() -> None:
    """One release in the plane: u = -v at the clip is the worst of any two directions."""
    rate, noise, eps = 0.3, 1.5, 1.0
    axis = np.linspace(-12, 12, 1201)
    x, y = np.meshgrid(axis, axis)
    cell = (axis[1] - axis[0]) ** 2

    def density(u: tuple[float, float]) -> NDArray[np.float64]:
        kept = np.exp(-((x - u[0]) ** 2 + (y - u[1]) ** 2) / (2 * noise**2))
        rest = np.exp(-(x**2 + y**2) / (2 * noise**2))
        return np.asarray((rate * kept + (1 - rate) * rest) / (2 * math.pi * noise**2))

    def delta(u: tuple[float, float], v: tuple[float, float]) -> float:
        return float(np.maximum(density(u) - math.exp(eps) * density(v), 0).sum() * cell)

    worst = delta((1.0, 0.0), (-1.0, 0.0))
    assert worst == pytest.approx(sampled_delta(eps, rate, noise, 1), rel=1e-3)
    turns = np.linspace(0, math.pi, 7)
    for turn, u, v in itertools.product(turns, (0.5, 1.0), (0.0, 0.6, 1.0)):
        other = (v * math.cos(turn), v * math.sin(turn))
        assert delta((u, 0.0), other) <= worst * (1 + 1e-9)


def test_an_amplified_run_calibrates_for_what_it_states() -> None:
    coin = {"selection": "poisson", "amplification": True, "policy": "worst_case"}
    done = digits(**coin, adjacency="replace_one", availability="always", num_rounds=3)
    noise = calibrate(
        6.0, DELTA, rounds=3, sampling_rate=0.5, method="pld", adjacency=Adjacency.REPLACE_ONE
    )
    assert done.result["history"]["noise_levels"][0] * 6 == pytest.approx(noise, rel=1e-9)
    assert sampled_delta(done.statement.epsilon_max, 0.5, noise, 3) <= DELTA * (1 + 1e-4)
    assert done.statement.epsilon_max == pytest.approx(6.0, rel=1e-3)
    assert "replace-one (its data against any others" in done.statement.as_text()


def test_a_plan_for_replace_one_needs_twice_the_noise() -> None:
    asked = {"population": 100, "rounds": 60, "epsilon": 6.0, "delta": DELTA, "joins": 60}
    one = planning.plan_privacy(**asked, parameters=650, cohort=28)  # type: ignore[arg-type]
    two = planning.plan_privacy(
        **asked,  # type: ignore[arg-type]
        parameters=650,
        cohort=28,
        adjacency="replace_one",
    )
    assert two.noise_multiplier == pytest.approx(2 * one.noise_multiplier, rel=1e-12)
    assert two.noise_to_signal_run == pytest.approx(2 * one.noise_to_signal_run, rel=1e-12)
    assert "replace-one" in planning.plan_table(two)
    assert "zero-out" in planning.plan_table(one)
    # The advice is about the same relation: at its epsilon the run is just workable.
    advised = next(text for text in two.advice if "epsilon" in text)
    needed = float(advised.split("epsilon: ")[1].split(" ")[0])
    reached = planning.plan_privacy(
        **{**asked, "epsilon": needed},  # type: ignore[arg-type]
        parameters=650,
        cohort=28,
        adjacency="replace_one",
    )
    assert 0.98 * planning.WORKABLE < reached.noise_to_signal_run < planning.WORKABLE


def test_only_two_relations_can_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"adjacency='add_remove' must be one of"):
        build_config({"adjacency": "add_remove"})
    file = tmp_path / "run.toml"
    file.write_text('adjacency = "replace_one"\n')
    assert build_config({}, file=str(file)).adjacency == "replace_one"
