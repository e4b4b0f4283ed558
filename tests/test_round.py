"""One round: its order, and its numbers against plain NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.aggregation import RunningMean, make_server_optimizer
from fedquilt.config import MODES, RunConfig
from fedquilt.federation import Federation
from fedquilt.method import Method
from fedquilt.population import Cohort, ParticipationTracker
from fedquilt.privacy.ledger import BudgetExceededError
from fedquilt.privacy.mechanism import Contribution, NoiseReport, RoundPlan, RoundTally, Summed
from fedquilt.round import run_round
from fedquilt.setup.build_task import build_task
from fedquilt.setup.federation import build_federation
from fedquilt.setup.mechanism import MechanismParts, make_mechanism
from fedquilt.setup.task import build_selector
from fedquilt.training import ClientUpdate, FlatModel
from run_samples import tiny

RATE = 0.05
UPDATES = {
    0: [3.0, 0.0, 4.0, 0.0, 12.0],
    1: [0.1, -0.2, 0.05, 0.0, 0.3],
    2: [-1.0, 2.0, -3.0, 4.0, -5.0],
}
EXAMPLES = {0: 10, 1: 30, 2: 60}


class Two(nn.Module):
    """Five parameters: `conv` (2, uncovered by fc*) and `fc` (3)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Parameter(torch.zeros(2))
        self.fc = nn.Parameter(torch.zeros(3))


class FixedUpdates:
    """An engine whose clients send what the test says."""

    def __init__(self, updates: dict[int, list[float]], seen: list[str] | None = None) -> None:
        self.updates = updates
        self.seen = [] if seen is None else seen

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        for client in cohort:
            self.seen.append(f"train {client}")
            delta = torch.tensor(self.updates[int(client)], dtype=torch.float32)
            yield ClientUpdate(int(client), delta, EXAMPLES[int(client)], 0.5 + int(client))

    def close(self) -> None:
        pass


class KnownNoise:
    """A source whose every draw is 1, 2, 3, ..."""

    description = "known"
    reproducible = False

    def stream(self, *keys: int) -> KnownNoise:
        return self

    def normal(self, size: int) -> NDArray[np.float64]:
        return np.arange(1.0, size + 1.0)


class Given(Method):
    """Whole updates of five numbers, from a given engine to a given server."""

    def __init__(self, engine, server) -> None:  # type: ignore[no-untyped-def]
        super().__init__(engine, server, released=FlatModel(Two()).names)

    def new_sum(self) -> RunningMean:
        return RunningMean(5)


def cohort_of(clients: Sequence[int]) -> Cohort:
    who = np.asarray(clients, dtype=np.int64)
    return Cohort(who, who)


def federation_of(
    config: RunConfig, updates: dict[int, list[float]] = UPDATES, cohort: Sequence[int] = (0, 1, 2)
) -> Federation:
    method = Given(FixedUpdates(updates), make_server_optimizer("sgd", None, 0.9))
    selector = build_selector(config, 3)
    parts = MechanismParts(config, FlatModel(Two()), method, selector, None)
    mechanism = make_mechanism(parts)
    if config.mode != "fedavg":
        mechanism.noise = KnownNoise()  # type: ignore[attr-defined]
    return Federation(
        select=lambda round_index, allowed: cohort_of(cohort),
        tracker=ParticipationTracker(3),
        method=method,
        mechanism=mechanism,
        learning_rate_at=lambda round_index: RATE,
        weights=torch.zeros(5),
    )


def clipped(vector: NDArray[np.float64], bound: float) -> NDArray[np.float64]:
    return vector * min(1.0, bound / float(np.linalg.norm(vector)))


def deviation(clip: float, epsilon: float, delta: float = 1e-5) -> float:
    return clip * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def test_fedavg_is_the_mean_weighted_by_examples() -> None:
    federation = federation_of(tiny(mode="fedavg"))
    record = run_round(federation, 0)
    expected = sum(EXAMPLES[k] * np.asarray(UPDATES[k]) for k in UPDATES) / 100
    np.testing.assert_allclose(federation.weights.numpy(), expected, rtol=1e-6)
    assert record.cohort == [0, 1, 2]
    assert record.train_loss == 1.5
    assert record.clip_value is None
    assert record.noise == NoiseReport()


def test_fixed_dp_clips_the_covered_slice_and_noises_the_mean_once() -> None:
    config = tiny(mode="fixed_dp", clip_norm=1.5, epsilon=8.0, num_rounds=4)
    federation = federation_of(config)
    record = run_round(federation, 0)
    scaled = [np.asarray(UPDATES[k]) / RATE for k in UPDATES]
    head = np.mean([vector[:2] for vector in scaled], axis=0)
    tail = np.mean([clipped(vector[2:], 1.5) for vector in scaled], axis=0)
    noise_std = deviation(1.5, 8.0 / 4) / 3
    tail = tail + noise_std * np.array([1.0, 2.0, 3.0])
    expected = RATE * np.concatenate([head, tail])
    np.testing.assert_allclose(federation.weights.numpy(), expected, rtol=1e-5)
    assert record.clip_value == 1.5
    assert record.noise.epsilon == 2.0
    assert record.noise.noise_std == pytest.approx(noise_std, rel=1e-12)
    assert record.noise.noise_norm == pytest.approx(noise_std * math.sqrt(14), rel=1e-12)


def test_quap_fl_takes_bound_and_budget_from_the_cohort() -> None:
    config = tiny(mode="quap_fl", epsilon=8.0, num_rounds=4, max_clip=70.0, clip_quantile=0.9)
    federation = federation_of(config)
    record = run_round(federation, 0)
    scaled = [np.asarray(UPDATES[k]) / RATE for k in UPDATES]
    bound = min(70.0, np.percentile([np.linalg.norm(v[2:]) for v in scaled], 90))
    epsilon = 2.0 * (1 + 0.5 * math.exp(-2.0))  # everybody joined in the only round
    noise_std = deviation(bound, epsilon) / 3
    tail = np.mean([clipped(v[2:], bound) for v in scaled], axis=0) + noise_std * np.arange(1, 4)
    expected = RATE * np.concatenate([np.mean([v[:2] for v in scaled], axis=0), tail])
    np.testing.assert_allclose(federation.weights.numpy(), expected, rtol=1e-5)
    assert record.clip_value == pytest.approx(bound, rel=1e-6)
    assert record.noise.epsilon == pytest.approx(epsilon, rel=1e-12)


def test_quap_fl_client_noises_every_client_by_its_own_budget() -> None:
    config = tiny(mode="quap_fl_client", epsilon=8.0, num_rounds=4)
    federation = federation_of(config, cohort=(0, 1, 2))
    federation.tracker.update([0])  # client 0 has joined before, so its budget is smaller
    record = run_round(federation, 1)
    vectors = [np.asarray(UPDATES[k]) for k in UPDATES]
    bound = float(np.percentile([np.linalg.norm(v) for v in vectors], 90))
    bound = min(max(bound, 0.1), 10.0)
    budgets = [2.0 * (1 + 0.5 * math.exp(-2.0 * rate)) for rate in (1.0, 0.5, 0.5)]
    deviations = [deviation(bound, epsilon) for epsilon in budgets]
    noised = [
        clipped(v, bound) + s * np.arange(1, 6) for v, s in zip(vectors, deviations, strict=True)
    ]
    np.testing.assert_allclose(federation.weights.numpy(), np.mean(noised, axis=0), rtol=1e-4)
    assert record.noise.epsilon == pytest.approx(np.mean(budgets), rel=1e-12)
    assert record.noise.noise_std == pytest.approx(math.hypot(*deviations) / 3, rel=1e-9)


def test_an_aggregate_above_the_limit_is_scaled_down_to_it() -> None:
    config = tiny(mode="fixed_dp", max_agg_norm=0.25)
    federation = federation_of(config)
    run_round(federation, 0)
    assert float(federation.weights.norm()) == pytest.approx(RATE * 0.25, rel=1e-5)


@pytest.mark.parametrize("mode", ["fedavg", "fixed_dp", "quap_fl", "quap_fl_client"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_client_that_diverges_does_not_spoil_the_round(mode: str, bad: float) -> None:
    spoiled = {**UPDATES, 1: [0.1, bad, 0.0, 0.0, 0.0]}
    federation = federation_of(tiny(mode=mode), spoiled)
    record = run_round(federation, 0)
    assert record.non_finite == [1]
    assert bool(torch.isfinite(federation.weights).all())
    if mode == "fedavg":
        expected = (10 * np.asarray(UPDATES[0]) + 60 * np.asarray(UPDATES[2])) / 70
    else:  # counts as a client that sent zero: the cohort's size is public
        zeroed = federation_of(tiny(mode=mode), {**UPDATES, 1: [0.0] * 5})
        if mode != "fixed_dp":
            return  # a zero update takes part in the percentile, a diverged one does not
        run_round(zeroed, 0)
        expected = zeroed.weights.numpy()
    np.testing.assert_allclose(federation.weights.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("mode", ["fedavg", "fixed_dp", "quap_fl", "quap_fl_client"])
def test_a_round_in_which_everybody_diverges(mode: str) -> None:
    federation = federation_of(tiny(mode=mode), {k: [math.nan] * 5 for k in UPDATES})
    record = run_round(federation, 0)
    assert record.non_finite == [0, 1, 2]
    assert bool(torch.isfinite(federation.weights).all())
    if mode == "fedavg":
        assert torch.equal(federation.weights, torch.zeros(5))


@pytest.mark.parametrize("mode", ["fixed_dp", "quap_fl"])
def test_an_update_that_overflows_when_it_is_divided_by_the_rate(mode: str) -> None:
    federation = federation_of(tiny(mode=mode), {**UPDATES, 2: [1e30] * 5})
    federation.learning_rate_at = lambda round_index: 1e-20
    run_round(federation, 0)
    assert bool(torch.isfinite(federation.weights).all())


def test_a_learning_rate_that_has_decayed_to_nothing_leaves_finite_weights() -> None:
    federation = federation_of(tiny(mode="quap_fl"), {k: [0.0] * 5 for k in UPDATES})
    federation.learning_rate_at = lambda round_index: 0.0
    run_round(federation, 0)
    assert bool(torch.isfinite(federation.weights).all())


@pytest.mark.parametrize("mode", ["fedavg", "fixed_dp", "quap_fl", "quap_fl_client"])
def test_nobody_came(mode: str) -> None:
    federation = federation_of(tiny(mode=mode), {}, cohort=())
    federation.weights = torch.arange(5.0)
    record = run_round(federation, 0)
    assert torch.equal(federation.weights, torch.arange(5.0))
    assert record.cohort == []
    assert record.train_loss is None
    assert record.clip_value is None
    assert record.noise == NoiseReport()
    assert federation.tracker.total_rounds == 1  # the round counts, for everybody's rate


class Watching:
    """A mechanism that only writes down what it is asked, in order."""

    def __init__(self, seen: list[str], whole: bool) -> None:
        self.seen = seen
        self.needs_whole_cohort = whole

    def eligible(self, round_index: int, remaining: NDArray[np.float64]) -> NDArray[np.bool_]:
        self.seen.append("eligible")
        return self.has_allowance(remaining)

    def has_allowance(self, remaining: NDArray[np.float64]) -> NDArray[np.bool_]:
        return remaining > 0.5

    def plan_round(self, round_index: int, clients: NDArray[np.int64], *facts: object) -> RoundPlan:
        self.seen.append(f"plan {clients.tolist()}")
        return RoundPlan(round_index, clients, np.full(len(clients), 0.25))

    def shrink_to(self, plan: RoundPlan, granted: NDArray[np.float64] | None) -> RoundPlan:
        self.seen.append(f"granted {None if granted is None else granted.tolist()}")
        return replace(plan, noise_std=3.0)

    def open_round(self, plan: RoundPlan) -> None:
        self.seen.append(f"open {plan.round_index} {plan.rates.tolist()}")

    def receive(
        self, plan: RoundPlan, client: int, delta: torch.Tensor, num_examples: int
    ) -> Contribution:
        assert plan.learning_rate == RATE
        self.seen.append(f"receive {client}")
        return Contribution(client, delta, 1.0)

    def clip_bound(self, plan: RoundPlan, received: Any) -> float:
        if self.needs_whole_cohort:
            assert len(received) == 2
        self.seen.append("bound")
        return 1.0

    def clip(self, plan: RoundPlan, contribution: Contribution, tally: RoundTally) -> Contribution:
        tally.clipped += 1
        self.seen.append(f"clip {contribution.client}")
        return contribution

    def noise_client(
        self, plan: RoundPlan, contribution: Contribution, tally: RoundTally
    ) -> Contribution:
        self.seen.append(f"noise {contribution.client}")
        return contribution

    def release(
        self, plan: RoundPlan, summed: Summed, tally: RoundTally
    ) -> tuple[torch.Tensor, NoiseReport]:
        assert (plan.clip_value, tally.clipped) == (1.0, 2)
        self.seen.append(f"release {summed.weight:g}")
        return summed.total / summed.weight, NoiseReport()


class WatchingAccount:
    """A ledger account that writes down what it is asked; `refusals` reservations fail."""

    def __init__(self, seen: list[str], refusals: int = 0) -> None:
        self.seen = seen
        self.refusals = refusals

    def remaining(self, round_index: int) -> NDArray[np.float64]:
        self.seen.append("remaining")
        return np.array([1.0, 0.25, 1.0])

    def reserve(
        self, round_index: int, clients: NDArray[np.int64], charges: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        self.refusals -= 1
        if self.refusals >= 0:
            self.seen.append("refused")
            taken = np.array([0.0])
            raise BudgetExceededError("another run was faster", clients[:1], taken, taken)
        self.seen.append(f"reserve {clients.tolist()} {charges.tolist()}")
        return charges / 2

    def settle(self, release: torch.Tensor) -> None:
        self.seen.append(f"settle {release.tolist()}")


def watched(
    whole: bool, account: WatchingAccount | None = None, seen: list[str] | None = None
) -> list[str]:
    seen = [] if seen is None else seen

    class Tracker(ParticipationTracker):
        def update(self, participating_clients: Any) -> None:
            super().update(participating_clients)
            seen.append("count")

    class Server:
        def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
            seen.append("step")
            return weights + update

        def report(self) -> dict[str, float]:
            return {"norm": 1.0}

    def select(round_index: int, allowed: NDArray[np.bool_] | None) -> Cohort:
        seen.append("select" if allowed is None else f"select {allowed.tolist()}")
        return cohort_of([0, 2])

    federation = Federation(
        select=select,
        tracker=Tracker(3),
        method=Given(FixedUpdates(UPDATES, seen), Server()),
        mechanism=Watching(seen, whole),  # type: ignore[arg-type]
        learning_rate_at=lambda round_index: RATE,
        weights=torch.zeros(5),
        account=account,  # type: ignore[arg-type]
    )
    assert run_round(federation, 0).without_allowance == (0 if account is None else 1)
    return seen


def test_the_nine_steps_come_in_their_order() -> None:
    """Participation counts before the budget looks at it; the bound is known before a clip."""
    assert watched(whole=True) == [
        *("select", "plan [0, 2]", "granted None", "count", "open 0 [1.0, 1.0]"),
        *("train 0", "receive 0", "train 2", "receive 2", "bound"),
        *("clip 0", "noise 0", "clip 2", "noise 2", "release 2", "step"),
    ]


def test_a_public_bound_needs_one_update_at_a_time() -> None:
    assert watched(whole=False) == [
        *("select", "plan [0, 2]", "granted None", "count", "open 0 [1.0, 1.0]", "bound"),
        *("train 0", "receive 0", "clip 0", "noise 0"),
        *("train 2", "receive 2", "clip 2", "noise 2", "release 2", "step"),
    ]


RESERVED = [
    *("remaining", "eligible", "select [True, False, True]", "plan [0, 2]"),
    *("reserve [0, 2] [0.25, 0.25]", "granted [0.125, 0.125]", "count"),
]


def test_the_ledger_reserves_before_training_and_settles_before_the_release_is_used() -> None:
    seen: list[str] = []
    watched(False, WatchingAccount(seen), seen)
    assert seen[: len(RESERVED)] == RESERVED
    assert seen[-3:] == ["release 2", "settle [1.0, 1.0, 0.5, 2.0, 3.5]", "step"]
    assert seen.index("count") < seen.index("train 0")


def test_a_round_is_planned_anew_when_another_run_was_faster() -> None:
    seen: list[str] = []
    watched(False, WatchingAccount(seen, refusals=2), seen)
    again = [*RESERVED[:4], "refused"]
    assert seen[: 10 + len(RESERVED)] == [*again, *again, *RESERVED]
    with pytest.raises(BudgetExceededError):
        watched(False, WatchingAccount([], refusals=1000))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "certified"])
def test_state_is_all_that_the_next_rounds_need(mode: str) -> None:
    config = tiny(mode=mode, server_optimizer="yogi", participation_ema=0.4)
    config, problem = build_task(config)
    first, second = build_federation(config, problem), build_federation(config, problem)
    for round_index in range(3):
        run_round(first, round_index)
    second.weights = first.weights.clone()
    second.load_state({key: array.copy() for key, array in first.state().items()})
    for round_index in (3, 4):
        ours, theirs = run_round(first, round_index), run_round(second, round_index)
        assert ours == theirs
        assert torch.equal(first.weights, second.weights)
    states = first.state(), second.state()
    assert states[0].keys() == states[1].keys()
    assert all(states[0][key].tobytes() == states[1][key].tobytes() for key in states[0])


def test_a_round_depends_on_its_number_and_not_on_what_ran_before() -> None:
    config, problem = build_task(tiny(mode="fedavg"))
    first, second = build_federation(config, problem), build_federation(config, problem)
    for round_index in range(3):
        run_round(first, round_index)
    first.weights = second.weights.clone()
    ours, theirs = run_round(first, 3), run_round(second, 3)
    assert (ours.cohort, ours.train_loss) == (theirs.cohort, theirs.train_loss)
    assert torch.equal(first.weights, second.weights)
    assert run_round(second, 4).cohort != theirs.cohort


def test_a_whole_round_of_real_training_by_hand() -> None:
    """FedAvg with one full batch: softmax regression's gradient, written out."""
    config, problem = build_task(tiny(mode="fedavg", batch_size=2000, learning_rate=0.1))
    federation = build_federation(config, problem)
    start = {
        s.name: federation.weights[s.start : s.stop].numpy().copy() for s in problem.flat.segments
    }
    weight, bias = start["fc.weight"].reshape(10, 64).astype(np.float64), start["fc.bias"]
    record = run_round(federation, 0)
    steps, sizes = [], []
    for client in record.cohort:
        index = problem.task.clients[client]
        x = problem.task.inputs[index].reshape(len(index), -1).numpy().astype(np.float64)
        y = problem.task.targets[index].numpy()
        logits = x @ weight.T + bias
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        chances[np.arange(len(y)), y] -= 1
        steps.append((chances.T @ x / len(y), chances.mean(axis=0)))
        sizes.append(len(y))
    share = np.asarray(sizes) / sum(sizes)
    new_weight = weight - 0.1 * sum(s * step[0] for s, step in zip(share, steps, strict=True))
    new_bias = bias - 0.1 * sum(s * step[1] for s, step in zip(share, steps, strict=True))
    moved = {s.name: federation.weights[s.start : s.stop].numpy() for s in problem.flat.segments}
    np.testing.assert_allclose(moved["fc.weight"].reshape(10, 64), new_weight, atol=2e-6)
    np.testing.assert_allclose(moved["fc.bias"], new_bias, atol=2e-6)


@pytest.mark.parametrize("empty", [1, 3, 5])
@pytest.mark.parametrize("personal", ["none", "fedper"])
def test_late_models_are_averaged_whoever_came(tmp_path: Path, empty: int, personal: str) -> None:
    """Rounds without a release count, the last one too; so does what was resumed in the middle."""
    trace = tmp_path / "trace.csv"
    there = (f"{t},{client}" for t in range(6) if t != empty for client in range(4))
    trace.write_text("\n".join(["round,client", *there]))
    said = {"mode": "fedavg", "model": "mlp", "num_rounds": 6, "personal": personal}
    plain, problem = build_task(tiny(**said, availability=str(trace)))
    first, second = (
        build_federation(plain.replace(average_late=share), problem) for share in (0.0, 0.5)
    )
    models = []
    for round_index in range(6):
        run_round(first, round_index)
        models.append(first.weights.clone().double())
        if round_index == 4:  # as a checkpoint has it
            later = build_federation(plain.replace(average_late=0.5), problem)
            later.weights = second.weights.clone()
            later.load_state({key: array.copy() for key, array in second.state().items()})
            later.load_client_state(second.client_state())
            second = later
        run_round(second, round_index)
    assert torch.equal(second.weights, torch.stack(models[3:]).mean(0).float())
    assert not torch.equal(first.weights, second.weights)
