"""The mechanisms of QuAP-FL at their edges; whole runs are in test_round_modes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedquilt.aggregation import RunningMean
from fedquilt.common.vectors import is_finite
from fedquilt.errors import InvalidValueError
from fedquilt.privacy.clip import FixedClipper, QuantileClipper
from fedquilt.privacy.mechanism import (
    Contribution,
    NoiseReport,
    NoPrivacy,
    RoundPlan,
    RoundTally,
)
from fedquilt.privacy.noise import SecretNoise, SeededNoise
from fedquilt.privacy.policies import AdaptivePrivacyAllocator
from fedquilt.privacy.quap_mechanisms import ClientNoise, LayerNoise, QuapMechanism
from fedquilt.privacy.statement import Coverage
from gaussian_oracle import exact_epsilon

K = math.sqrt(2 * math.log(1.25e5))
TENSORS = [("fc1", 0, 2), ("conv", 2, 3), ("fc2", 3, 4)]


def coverage(*chosen: str) -> Coverage:
    return Coverage.make(4, TENSORS, chosen or ("fc1", "conv", "fc2"))


def mechanism(
    kind: type[QuapMechanism] = LayerNoise,
    clipper: Any = None,
    covered: Coverage | None = None,
    noise: Any = None,
    **options: Any,
) -> Any:
    alpha = options.pop("alpha", 0.5)
    return kind(
        AdaptivePrivacyAllocator(epsilon_base=0.5, alpha=alpha, beta=2.0, delta=1e-5),
        clipper if clipper is not None else QuantileClipper(),
        covered if covered is not None else coverage(),
        noise if noise is not None else SeededNoise(1),
        num_clients=6,
        **options,
    )


def one_round(
    what: Any,
    deltas: Sequence[Sequence[float]],
    *,
    index: int = 0,
    lr: float = 0.5,
    clients: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
) -> tuple[torch.Tensor, NoiseReport, float | None, list[Contribution]]:
    """Call the mechanism in the round's order."""
    who = np.arange(len(deltas)) if clients is None else np.asarray(clients)
    shares = np.full(len(who), 0.25) if rates is None else np.asarray(rates)
    plan = what.plan_round(index, who, np.full(len(who), np.inf), shares, index)
    plan = replace(plan, learning_rate=lr, rates=shares)
    what.open_round(plan)
    received = [
        what.receive(plan, int(client), torch.tensor(delta), 10 * (int(client) + 1))
        for client, delta in zip(who, deltas, strict=True)
    ]
    bound, tally = what.clip_bound(plan, received), RoundTally()
    plan = replace(plan, clip_value=bound)
    clipped = [what.noise_client(plan, what.clip(plan, c, tally), tally) for c in received]
    total = RunningMean(4)
    for contribution in clipped:
        if contribution.weight:  # as the round does
            total.add(contribution.vector, contribution.weight)
    update, report = what.release(plan, total, tally)
    return update, report, bound, clipped


def seeded(index: int, *sizes: int) -> list[np.ndarray]:
    sequence = np.random.SeedSequence(1, spawn_key=(index,))
    generator = np.random.Generator(np.random.Philox(sequence))
    return [generator.standard_normal(size) for size in sizes]


def test_layer_noise_by_hand() -> None:
    """lr 0.5 doubles the deltas; the slice is coordinates 0, 1, 3 of four."""
    what = mechanism(covered=coverage("fc1", "fc2"), clipper=QuantileClipper(quantile=0.5))
    update, report, bound, _ = one_round(what, [[0.3, 0.0, 5.0, 0.4], [3.0, 0.0, -1.0, 4.0]])
    assert bound == pytest.approx((1.0 + 10.0) / 2)
    epsilon = 0.5 * (1 + 0.5 * math.exp(-0.5))
    sigma = 5.5 / 2 * K / epsilon
    assert report.epsilon == pytest.approx(epsilon)
    assert report.noise_std == pytest.approx(sigma)
    noise = sigma * seeded(0, 3)[0]
    mean = np.array([(0.6 + 3.3) / 2, 0.0, 4.0, (0.8 + 4.4) / 2])
    assert report.signal_norm == pytest.approx(np.linalg.norm(mean))
    assert report.noise_norm == pytest.approx(np.linalg.norm(noise))
    mean[[0, 1, 3]] += noise
    assert np.allclose(update, 0.5 * mean)
    assert what.nominal_epsilon == pytest.approx([epsilon, epsilon, 0, 0, 0, 0])
    assert what.squared_gdp == pytest.approx([(epsilon / K) ** 2] * 2 + [0] * 4)


def test_client_noise_by_hand() -> None:
    """The whole delta is clipped to C, each client has its own budget and its own noise."""
    what = mechanism(ClientNoise, clipper=FixedClipper(2.0), clip_is_public=True)
    deltas = [[0.3, 0.0, 0.0, 0.4], [3.0, 0.0, 0.0, 4.0]]
    update, report, bound, _ = one_round(what, deltas, clients=[4, 2], rates=[0.0, 1.0])
    epsilons = [0.5 * 1.5, 0.5 * (1 + 0.5 * math.exp(-2.0))]
    sigmas = [2.0 * K / epsilon for epsilon in epsilons]
    first, second = seeded(0, 4, 4)
    noise = (sigmas[0] * first + sigmas[1] * second) / 2
    mean = np.array([(0.3 + 1.2) / 2, 0.0, 0.0, (0.4 + 1.6) / 2])
    assert bound == 2.0
    assert np.allclose(update, mean + noise)
    assert report.epsilon == pytest.approx(np.mean(epsilons))
    assert report.noise_std == pytest.approx(math.hypot(*sigmas) / 2)
    assert report.noise_norm == pytest.approx(np.linalg.norm(noise), rel=1e-6)
    assert report.signal_norm == pytest.approx(1.25, rel=1e-5)
    assert what.nominal_epsilon == pytest.approx([0, 0, epsilons[1], 0, epsilons[0], 0])
    cost = 2.0**2 / (sigmas[0] ** 2 + sigmas[1] ** 2)
    assert what.squared_gdp == pytest.approx([0, 0, cost, 0, cost, 0])


def test_warm_up_uses_the_base_budget_then_the_rates() -> None:
    for kind in (LayerNoise, ClientNoise):
        what = mechanism(kind, warmup_rounds=2)
        budgets = [one_round(what, [[1.0] * 4], index=t)[1].epsilon for t in range(4)]
        later = 0.5 * (1 + 0.5 * math.exp(-0.5))
        assert budgets == pytest.approx([0.5, 0.5, later, later])


@pytest.mark.parametrize("kind", [LayerNoise, ClientNoise])
def test_a_client_that_is_not_finite_counts_as_zero(kind: type[QuapMechanism]) -> None:
    what = mechanism(kind, covered=coverage("fc1", "conv", "fc2"))
    deltas = [[1.0, 0.0, 0.0, 0.0], [float("nan"), 1.0, 1.0, 1.0], [1.0, float("inf"), 0.0, 0.0]]
    update, report, bound, clipped = one_round(what, deltas, lr=1.0)
    assert [c.finite for c in clipped] == [True, False, False]
    assert [c.weight for c in clipped] == [1.0, 1.0, 1.0]
    assert bound == 1.0  # the two others have no say in the bound
    noise_size = 4 if kind is LayerNoise else 12
    drawn = seeded(0, noise_size)[0].reshape(-1, 4).sum(0)
    epsilon = 0.5 * (1 + 0.5 * math.exp(-0.5))
    expected = np.array([1.0, 0, 0, 0]) / 3 + K / epsilon / 3 * drawn
    assert np.allclose(update, expected)
    assert report.noise_std is not None
    assert np.count_nonzero(what.nominal_epsilon) == 3


def test_a_division_by_the_learning_rate_that_overflows_is_not_finite() -> None:
    """3e38 is a float32, 3e38 / 0.01 is not; outside the slice nothing else would catch it."""
    what = mechanism(covered=coverage("fc1"))
    update, _, bound, clipped = one_round(
        what, [[1.0, 0.0, 3e38, 0.0], [1.0, 0.0, 0.0, 0.0]], lr=0.01
    )
    assert [c.finite for c in clipped] == [False, True]
    assert bound == 10.0  # of 100, limited to max_clip
    assert torch.isfinite(update).all()
    assert update[2] == 0.0


def test_a_mean_that_overflows_moves_nothing() -> None:
    what = mechanism(covered=coverage("fc1"), max_agg_norm=10.0)
    plan = RoundPlan(0, np.array([0]), learning_rate=1.0, rates=np.array([0.5]))
    what.open_round(plan)
    received = [what.receive(plan, 0, torch.ones(4, dtype=torch.float64), 1)]
    plan = replace(plan, clip_value=what.clip_bound(plan, received))
    total = RunningMean(4)
    total.add(torch.tensor([1.0, 0.0, math.inf, 0.0], dtype=torch.float64))
    update, _ = what.release(plan, total, RoundTally())
    assert update.tolist() == [0.0] * 4


def test_without_any_finite_update_the_bound_stays_or_is_the_initial_one_or_min_clip() -> None:
    bad = [[math.nan] * 4]
    fresh = mechanism(clipper=QuantileClipper(min_clip=0.2))
    assert one_round(fresh, bad)[2] == 0.2
    assert fresh.clipper.get_current_clip_value() is None
    # Algorithm 1 still takes its first branch once there is something to measure.
    assert one_round(fresh, [[1.0, 0.0, 0.0, 0.0]], index=1, lr=0.5)[2] == 2.0
    assert one_round(fresh, bad, index=2)[2] == 2.0
    assert one_round(mechanism(clipper=QuantileClipper(initial_clip=1.5)), bad)[2] == 1.5
    assert one_round(mechanism(clipper=FixedClipper(3.0), clip_is_public=True), bad)[2] == 3.0


@pytest.mark.parametrize("kind", [LayerNoise, ClientNoise])
def test_the_mean_is_limited_after_the_noise(kind: type[QuapMechanism]) -> None:
    free = one_round(mechanism(kind), [[1.0] * 4], lr=0.1)[0]
    limit = 0.01
    limited = one_round(mechanism(kind, max_agg_norm=limit), [[1.0] * 4], lr=0.1)[0]
    scale = 0.1 if kind is LayerNoise else 1.0  # the paper's mean is in units of 1 / lr
    assert float(limited.norm()) == pytest.approx(limit * scale)
    assert np.allclose(limited / limited.norm(), free / free.norm())


def test_a_clip_rule_that_only_returns_its_bound_is_obeyed() -> None:
    class Half(QuantileClipper):
        def update_clip_value(self, gradients_list: Sequence[Any]) -> float:
            return 0.5

    for kind in (LayerNoise, ClientNoise):
        what = mechanism(kind, clipper=Half(), noise=SeededNoise(1))
        _, report, bound, _ = one_round(what, [[4.0, 0.0, 0.0, 3.0]], lr=1.0)
        assert bound == 0.5
        assert report.signal_norm == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_that_is_none_is_refused(value: float) -> None:
    class Broken(QuantileClipper):
        def update_clip_value(self, gradients_list: Sequence[Any]) -> float:
            return value

    with pytest.raises(InvalidValueError, match="clip value"):
        one_round(mechanism(clipper=Broken()), [[1.0] * 4])


def test_a_release_needs_the_clip_bound_in_its_plan() -> None:
    what = mechanism()
    plan = RoundPlan(0, np.array([0]), learning_rate=1.0, rates=np.array([0.5]))
    with pytest.raises(RuntimeError, match="clip_bound"):
        what.release(plan, RunningMean(4), RoundTally())


def test_only_a_covered_model_with_a_public_clip_and_secret_noise_has_a_bound() -> None:
    cases = [
        (coverage(), FixedClipper(1.0), True, SecretNoise(), True),
        (coverage("fc1"), FixedClipper(1.0), True, SecretNoise(), False),
        (coverage(), QuantileClipper(), False, SecretNoise(), False),
        (coverage(), FixedClipper(1.0), True, SeededNoise(0), False),
    ]
    for covered, clipper, public, noise, bounded in cases:
        what = mechanism(
            clipper=clipper, covered=covered, noise=noise, clip_is_public=public, alpha=0.0
        )
        one_round(what, [[1.0] * 4, [0.5] * 4])
        statement = what.statement(np.array([1.0, 1, 0, 0, 0, 0]), None)
        assert statement.is_bounded == bounded
        assert what.claims == bounded
        assert set(statement.covered) | set(statement.uncovered) == {"fc1", "conv", "fc2"}
        charges = what.plan_round(0, np.array([0, 1]), np.ones(2), np.zeros(2), 0).charges
        if bounded:
            assert charges == pytest.approx([(0.5 / K) ** 2] * 2)
        else:
            assert charges is None


def test_the_bound_is_the_exact_composition_over_the_rounds_joined() -> None:
    what = mechanism(clipper=FixedClipper(1.0), noise=SecretNoise(), clip_is_public=True, alpha=0.0)
    counts = np.zeros(6)
    for index, cohort in enumerate([[0, 1], [0], [0, 2], [0, 1, 2]]):
        one_round(what, [[1.0] * 4] * len(cohort), index=index, clients=cohort)
        counts[cohort] += 1
    statement = what.statement(counts, None)
    per_join = (0.5 / K) ** 2
    most, two = (exact_epsilon(math.sqrt(joins * per_join), 1e-5) for joins in (4, 2))
    assert most <= statement.epsilon_max <= most * 1.0001
    # Joins are 4, 2, 2, 0, 0, 0: the median lies half-way between two and none.
    assert two / 2 <= statement.epsilon_median <= two / 2 * 1.0001
    assert statement.delta == 1e-5
    assert any("at most 2" in note for note in statement.notes)


def test_an_unused_mechanism_spent_nothing() -> None:
    what = mechanism(clipper=FixedClipper(1.0), noise=SecretNoise(), clip_is_public=True)
    assert what.statement(np.zeros(6), None).epsilon_max == 0.0


def test_the_excuses_name_tensors_percentile_and_seed() -> None:
    what = mechanism(covered=coverage("fc2"))
    one_round(what, [[1.0] * 4], clients=[3])
    notes = "\n".join(what.statement(np.array([0, 0, 0, 1.0, 0, 0]), None).notes)
    for words in ("2 tensors leave without clip or noise: fc1, conv", "raw percentile"):
        assert words in notes
    assert "reproducible noise: no privacy" in notes
    assert "spent most (in 1 joins)" in notes


@pytest.mark.parametrize("kind", [LayerNoise, ClientNoise])
def test_a_saved_state_continues_alike(kind: type[QuapMechanism]) -> None:
    whole, first, second = (mechanism(kind) for _ in range(3))
    rounds = [[[float(i + t), 1.0, 0.0, 0.0] for i in range(3)] for t in range(4)]
    updates = [one_round(whole, deltas, index=t)[0] for t, deltas in enumerate(rounds)]
    for t in (0, 1):
        one_round(first, rounds[t], index=t)
    saved = first.state()
    one_round(first, rounds[2], index=2)  # what was handed out does not move on
    second.load_state(saved)
    for t in (2, 3):
        assert torch.equal(one_round(second, rounds[t], index=t)[0], updates[t])
    assert np.array_equal(second.squared_gdp, whole.squared_gdp)
    assert np.array_equal(second.nominal_epsilon, whole.nominal_epsilon)
    assert second.clipper.clip_history == whole.clipper.clip_history


def test_fedavg_weighs_by_examples_and_leaves_out_what_is_not_finite() -> None:
    what = NoPrivacy(["fc1", "conv", "fc2"], 1e-5)
    deltas = [[1.0, 0.0, 0.0, 2.0], [math.nan] * 4, [4.0, 0.0, 0.0, 2.0]]
    update, report, bound, _ = one_round(what, deltas)
    assert np.allclose(update, [(10 * 1 + 30 * 4) / 40, 0, 0, 2.0])
    assert bound is None
    assert report == NoiseReport()
    statement = what.statement(np.ones(6), None)
    assert not statement.is_bounded
    assert statement.uncovered == ("fc1", "conv", "fc2")
    nobody, _, _, _ = one_round(what, [[math.nan] * 4])
    assert nobody.tolist() == [0.0] * 4
    what.load_state(what.state())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_any_entry_that_is_not_finite_is_found(value: float) -> None:
    vector = torch.ones(1001)
    assert is_finite(vector)
    for place in (0, 500, 1000):
        spoiled = vector.clone()
        spoiled[place] = value
        assert not is_finite(spoiled)
    spoiled = vector.clone()
    spoiled[3], spoiled[4] = math.inf, -math.inf
    assert not is_finite(spoiled)
