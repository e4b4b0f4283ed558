"""The budget allocator: the documents' formulas, types and refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.errors import FedquiltError
from fedquilt.privacy.noise import SeededNoise
from fedquilt.privacy.policies import AdaptivePrivacyAllocator

K = math.sqrt(2 * math.log(1.25e5))  # sqrt(2 ln(1.25 / 1e-5)) = 4.8448...


def allocator(**options: Any) -> AdaptivePrivacyAllocator:
    return AdaptivePrivacyAllocator(**options)


def test_the_defaults_are_the_documents() -> None:
    default = AdaptivePrivacyAllocator()
    assert (default.epsilon_base, default.alpha, default.beta, default.delta) == (
        0.015,
        0.5,
        2.0,
        1e-5,
    )


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.0, 0.015 * 1.5),
        (0.1, 0.015 * (1 + 0.5 * 0.8187307530779818)),
        (0.9, 0.015 * (1 + 0.5 * 0.16529888822158653)),
        (1.0, 0.015 * (1 + 0.5 * 0.1353352832366127)),
    ],
)
def test_the_budget_is_equation_5(rate: float, expected: float) -> None:
    assert allocator().compute_privacy_budget(rate) == pytest.approx(expected, rel=1e-14)


@given(
    base=st.floats(1e-6, 10),
    alpha=st.floats(0, 50),
    beta=st.floats(1e-3, 50),
    rates=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_rare_clients_never_get_less_and_all_stay_in_the_bound(
    base: float, alpha: float, beta: float, rates: tuple[float, float]
) -> None:
    rule = allocator(epsilon_base=base, alpha=alpha, beta=beta)
    rare, frequent = (rule.compute_privacy_budget(rate) for rate in sorted(rates))
    assert base <= frequent <= rare <= base * (1 + alpha) * (1 + 1e-15)


def test_alpha_zero_is_a_flat_budget_and_alpha_has_no_upper_limit() -> None:
    flat = allocator(alpha=0)
    assert {flat.compute_privacy_budget(rate) for rate in (0.0, 0.3, 1.0)} == {0.015}
    assert allocator(alpha=7.5).compute_privacy_budget(0) == pytest.approx(0.015 * 8.5)


@pytest.mark.parametrize("rate", [0.25, np.float32(0.25), np.array(0.25), torch.tensor([0.25])])
def test_rates_come_as_numbers_of_any_library(rate: Any) -> None:
    assert allocator().compute_privacy_budget(rate) == pytest.approx(
        0.015 * (1 + 0.5 * math.exp(-0.5))
    )


@pytest.mark.parametrize(
    "rate", [-0.01, 1.01, float("nan"), float("inf"), "0.5", None, torch.tensor([0.1, 0.2]), [0.5]]
)
def test_a_rate_outside_0_1_is_a_value_error(rate: Any) -> None:
    with pytest.raises(ValueError, match="participation_rate") as caught:
        allocator().compute_privacy_budget(rate)
    assert isinstance(caught.value, FedquiltError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epsilon_base", 0.0),
        ("epsilon_base", -1.0),
        ("epsilon_base", float("inf")),
        ("alpha", -0.1),
        ("alpha", float("nan")),
        ("beta", 0.0),
        ("delta", 0.0),
        ("delta", 1.0),
        ("delta", "1e-5"),
    ],
)
def test_bad_construction_is_a_value_error(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        allocator(**{name: value})


@pytest.mark.parametrize(
    ("epsilon", "clip_norm", "delta", "expected"),
    [
        (0.015, 1.0, None, K / 0.015),
        (0.03, 2.5, None, 2.5 * K / 0.03),
        (1.0, 1.0, 1e-6, math.sqrt(2 * math.log(1.25e6))),
        (np.float64(1.0), torch.tensor(1.0), torch.tensor(1e-2), math.sqrt(2 * math.log(125.0))),
    ],
)
def test_the_noise_is_the_classic_gaussian(
    epsilon: Any, clip_norm: Any, delta: Any, expected: float
) -> None:
    std = allocator().compute_noise_multiplier(epsilon, clip_norm, delta)
    assert std == pytest.approx(expected, rel=1e-6)
    assert abs(K - 4.8448) < 1e-4  # the constant that the paper's runs used


@pytest.mark.parametrize(
    "arguments",
    [
        (0.0, 1.0),
        (-1.0, 1.0),
        (1.0, 0.0),
        (1.0, -1.0),
        (1.0, float("nan")),
        (1.0, float("inf")),
        (1.0, 1.0, 0.0),
        (1.0, 1.0, 1.0),
        ("1", 1.0),
        (torch.ones(2), 1.0),
    ],
)
def test_a_bad_noise_level_is_a_value_error(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"(epsilon|clip_norm|delta)="):
        allocator().compute_noise_multiplier(*arguments)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (np.arange(6.0), np.float64),
        (np.arange(6, dtype=np.float32).reshape(2, 3), np.float32),
        (np.arange(6), np.float64),
        (torch.arange(6.0), torch.float32),
        (torch.arange(6.0, dtype=torch.float64).reshape(3, 2), torch.float64),
        (torch.arange(6), torch.float64),
    ],
)
def test_noise_is_added_in_the_datas_own_form(data: Any, kind: Any) -> None:
    rule = allocator(noise=SeededNoise(4).stream(9))
    before = np.asarray(data).copy()
    noised = rule.add_gaussian_noise(data, epsilon=2.0, clip_norm=0.5)
    drawn = np.random.Generator(
        np.random.Philox(np.random.SeedSequence(4, spawn_key=(9,)))
    ).standard_normal(6)
    expected = before + 0.5 * K / 2.0 * drawn.reshape(before.shape)
    assert type(noised) is type(data)
    assert noised.dtype == kind
    assert np.allclose(np.asarray(noised), expected, rtol=1e-6)
    assert np.array_equal(np.asarray(data), before)


def test_noise_by_default_is_secret_and_has_the_promised_spread() -> None:
    rule = allocator()
    zeros = np.zeros(100_000)
    first, second = (rule.add_gaussian_noise(zeros, 0.5, 2.0) for _ in range(2))
    assert not np.array_equal(first, second)
    assert np.std(first) == pytest.approx(2.0 * K / 0.5, rel=0.02)


def test_a_bad_budget_adds_nothing() -> None:
    data = np.ones(3)
    with pytest.raises(ValueError, match="epsilon"):
        allocator().add_gaussian_noise(data, 0.0, 1.0)
    assert data.tolist() == [1, 1, 1]


def test_losses_add_up_over_joins() -> None:
    rule = allocator(epsilon_base=0.1, alpha=1.0, beta=1.0)
    rates, counts = np.array([0.0, 0.5, 1.0]), [0, 10, 20]
    budgets = 0.1 * (1 + np.exp(-rates))
    losses = rule.compute_cumulative_privacy_loss(rates, counts)
    assert np.allclose(losses, budgets * counts)
    analysis = rule.get_privacy_analysis(torch.tensor(rates), np.array(counts))
    assert analysis == {
        "mean_cumulative_loss": pytest.approx(losses.mean()),
        "max_cumulative_loss": pytest.approx(losses.max()),
        "min_cumulative_loss": 0.0,
        "theoretical_upper_bound": pytest.approx(20 * 0.1 * 2),
        "privacy_efficiency": pytest.approx(losses.mean() / (10 * 0.1 * 2)),
    }
    assert analysis["max_cumulative_loss"] <= analysis["theoretical_upper_bound"]
    assert rule.get_privacy_analysis([0.0], [0])["privacy_efficiency"] == 0.0


@pytest.mark.parametrize(
    ("rates", "counts"),
    [([0.1, 0.2], [1]), ([0.1], [-1]), ([0.1], [float("nan")]), ([1.5], [1]), ([], [])],
)
def test_bad_histories_are_value_errors(rates: list[float], counts: list[float]) -> None:
    with pytest.raises(ValueError, match="participation"):
        allocator().get_privacy_analysis(rates, counts)


def test_the_accounting_has_the_documents_name() -> None:
    assert allocator().get_accounting_method() == "Basic Composition (Conservative Upper Bound)"


def test_a_subclass_changes_every_sum_that_is_built_on_its_budget() -> None:
    class Doubled(AdaptivePrivacyAllocator):
        def compute_privacy_budget(self, participation_rate: float) -> float:
            return 2 * super().compute_privacy_budget(participation_rate)

    plain, doubled = AdaptivePrivacyAllocator(), Doubled()
    rates, counts = [0.2, 0.4], [3, 4]
    assert np.allclose(
        doubled.compute_cumulative_privacy_loss(rates, counts),
        2 * plain.compute_cumulative_privacy_loss(rates, counts),
    )
