"""Whole runs of the seeds' modes against a federation written in numpy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.config import RunConfig
from fedquilt.config.uses import is_effective
from fedquilt.experiment.api import RunResult
from numpy_federation import LAYERS, Net, NumpyFederation, Outcome, Settings

SIZES = (4, 5, 3, 3)
# Round 3 has nobody, round 5 only client 2, whose training breaks where it is broken.
COHORTS = [[0, 1, 2], [0, 3], [1, 2, 3, 4], [], [0, 2, 4], [2], [0, 1, 4], [3]]
SHARED = [f.name for f in dataclasses.fields(Settings) if f.name not in ("mode", "initial_clip")]
TOO_LARGE = 1e30


class Network(nn.Module):
    """The numpy network in torch, in float64; inputs above 1e30 stand for a broken client."""

    def __init__(self) -> None:
        super().__init__()
        for layer, before, after in zip(LAYERS, SIZES[:-1], SIZES[1:], strict=True):
            self.add_module(layer, nn.Linear(before, after, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.where(x > TOO_LARGE, torch.nan, x.double())
        return self.fc2(torch.tanh(self.mid(torch.tanh(self.fc1(x)))))


class Case:
    """Data, model and trace of one comparison."""

    def __init__(self, folder: Path, broken: set[int]) -> None:
        rng = np.random.default_rng(8)
        counts = [6, 3, 9, 1, 5]
        stops = np.cumsum(counts)
        self.x = rng.standard_normal((stops[-1], SIZES[0])).astype(np.float32)
        self.y = rng.integers(0, SIZES[-1], stops[-1])
        self.parts = [np.arange(b - n, b) for n, b in zip(counts, stops, strict=True)]
        self.clients = [(self.x[part].astype(np.float64), self.y[part]) for part in self.parts]
        self.broken = broken
        for client in broken:
            self.x[self.parts[client][0], 0] = 2e30
        torch.manual_seed(3)
        self.model = Network()
        lines = [f"{t},{c}" for t, cohort in enumerate(COHORTS) for c in cohort]
        self.trace = folder / "trace.csv"
        self.trace.write_text("round,client\n" + "\n".join(lines) + "\n")

    def start(self) -> np.ndarray:
        return np.concatenate([p.detach().numpy().ravel() for p in self.model.parameters()])

    def expected(self, settings: Settings) -> Outcome:
        federation = NumpyFederation(Net(SIZES), self.clients, settings, self.broken)
        return federation.run(self.start(), COHORTS)

    def ours(self, settings: Settings, **options: Any) -> RunResult:
        values = {name: getattr(settings, name) for name in SHARED}
        values["noise_layers"] = ",".join(settings.noise_layers)
        whole = {**RunConfig().as_dict(), "mode": settings.mode}
        values = {name: value for name, value in values.items() if is_effective(name, whole)}
        options = {name: value for name, value in options.items() if is_effective(name, whole)}
        test = self.x[self.parts[1]], self.y[self.parts[1]]
        return fedquilt.run(
            self.model,
            (self.x, self.y),
            test,
            self.parts,
            output_dir=None,
            mode=settings.mode,
            availability=str(self.trace),
            clients_per_round=1.0,
            batch_size=100,
            **values,
            **options,
        )


def assert_same(result: RunResult, expected: Outcome) -> None:
    vector = torch.cat([tensor.flatten() for tensor in result.state_dict.values()]).numpy()
    assert np.allclose(vector, expected.weights, rtol=1e-8, atol=1e-10)
    history = result.result["history"]
    for name in ("clip_values", "noise_levels", "privacy_budgets"):
        assert_series(history[name], getattr(expected, name))
    stats = history["noise_stats"]
    assert_series([line["noise_norm"] for line in stats], expected.noise_norms)
    assert_series([line["signal_norm"] for line in stats], expected.signal_norms)
    assert history["client_participation"] == COHORTS


def assert_series(ours: list[float | None], expected: list[float | None]) -> None:
    assert [value is None for value in ours] == [value is None for value in expected]
    present = [value for value in ours if value is not None]
    assert present == pytest.approx([value for value in expected if value is not None], rel=1e-8)


MODES = ["fedavg", "fixed_dp", "quap_fl", "quap_fl_client"]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm-up": {"warmup_rounds": 3},
    "moving-average": {"participation_ema": 0.3, "warmup_rounds": 1},
    "whole-model": {"noise_layers": ("all",)},
    "middle-only": {"noise_layers": ("mid",)},
    "limited": {"max_agg_norm": 0.2},
    "fedprox": {"fedprox_mu": 0.4},
    "tight-clip": {"clip_norm": 0.01, "min_clip": 0.001, "max_clip": 0.02},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_the_documents_arithmetic(tmp_path: Path, mode: str, variant: str) -> None:
    case = Case(tmp_path, broken=set())
    settings = Settings(mode, len(COHORTS), **VARIANTS[variant])
    assert_same(case.ours(settings), case.expected(settings))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("broken", [{2}, {0, 1, 2}, {0, 1, 2, 3, 4}])
def test_broken_clients_do_exactly_what_is_documented(
    tmp_path: Path, mode: str, broken: set[int]
) -> None:
    """They count as zero where there is noise and are left out of fedavg."""
    case = Case(tmp_path, broken)
    settings = Settings(mode, len(COHORTS), warmup_rounds=2)
    result = case.ours(settings)
    assert_same(result, case.expected(settings))
    assert all(torch.isfinite(tensor).all() for tensor in result.state_dict.values())


def test_the_comparison_would_notice_a_change(tmp_path: Path) -> None:
    """Each setting matters: the numpy run with another value is far away."""
    case = Case(tmp_path, broken=set())
    settings = Settings("quap_fl", len(COHORTS), warmup_rounds=2, participation_ema=0.3)
    result = case.ours(settings)
    changes: list[dict[str, Any]] = [
        {"warmup_rounds": 0},
        {"participation_ema": None},
        {"budget_beta": 3.1},
        {"clip_quantile": 0.5},
        {"clip_momentum": 0.6},
        {"noise_layers": ("fc2",)},
        {"lr_decay": 0.91},
        {"noise_seed": 18},
        {"max_agg_norm": 0.2},
        {"local_epochs": 1},
        {"initial_clip": 1.0},
    ]
    for change in changes:
        other = case.expected(dataclasses.replace(settings, **change))
        with pytest.raises(AssertionError):
            assert_same(result, other)


def test_warm_up_counts_who_joins(tmp_path: Path) -> None:
    """The rounds of the warm-up are in the history: round 1's rates are of two rounds."""
    case = Case(tmp_path, broken=set())
    settings = Settings("quap_fl", len(COHORTS), warmup_rounds=1)
    budgets = case.ours(settings).result["history"]["privacy_budgets"]
    base = settings.epsilon / settings.num_rounds
    # Client 0 joined 2 of 2 rounds, client 3 joined 1 of 2.
    assert budgets[0] == pytest.approx(base)
    assert budgets[1] == pytest.approx(base * (1 + 0.7 * np.exp(-3.0 * 0.75)))


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seeds_give_the_same_run_and_another_noise_another(
    tmp_path: Path, mode: str
) -> None:
    case = Case(tmp_path, broken=set())
    settings = Settings(mode, len(COHORTS))
    first, again = (case.ours(settings, seed=5) for _ in range(2))
    other = case.ours(dataclasses.replace(settings, noise_seed=99), seed=5)
    for key, tensor in first.state_dict.items():
        assert torch.equal(tensor, again.state_dict[key])
        assert torch.equal(tensor, other.state_dict[key]) == (mode == "fedavg")
