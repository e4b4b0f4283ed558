"""Certified condensation: what a client sends is bounded, what is charged, what is public."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from condense_samples import Linear, certified, certify, images_of, small
from dp_accounting import get_epsilon_gaussian
from numpy.typing import NDArray
from torch import nn

from certified_samples import memory_folder, note_plans, plan_of, refine_in_few_steps
from fedquilt.condense.certified import KAPPA, CertifiedEngine, GrowingServer, Released, Schedule
from fedquilt.condense.method import make_condensation
from fedquilt.data import load_dataset
from fedquilt.data.holdings import Holdings
from fedquilt.errors import InvalidValueError
from fedquilt.experiment.api import RunResult, run_config, run_in_memory
from fedquilt.models.features import make_feature_model, precompute
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.ledger import BudgetExceededError, Ledger
from fedquilt.privacy.mechanism import Contribution, RoundPlan, RoundTally
from fedquilt.round import run_round
from fedquilt.setup.account import open_account
from fedquilt.setup.build_task import build_task
from fedquilt.setup.federation import build_federation, build_method
from fedquilt.setup.task import FederatedTask
from fedquilt.training import Task
from run_samples import folder_of

DELTA = 1e-5
RAW = ("train_loss", "noise_norm", "signal_norm", "clipped_fraction", "non_finite", "seconds")
ALLOWED = {
    *("schema_version", "round", "cohort", "clip_value", "epsilon", "noise_std"),
    *(
        "without_allowance",
        "epsilon_spent",
        "bytes_up",
        "bytes_down",
        "matching_loss",
        "epoch_avg_loss",
    ),
    *("test_accuracy", "test_loss", "participation_stats"),
}


def front() -> nn.Module:
    return make_feature_model("hog-linear", (1, 8, 8), 10).front


def digits(count: int = 60) -> Task:
    train, _ = load_dataset("digits")
    nobody = np.zeros(0, dtype=np.int64)
    clients = [np.arange(30), np.arange(30, count), nobody]
    return Task(train.images[:count].clone(), train.targets[:count], clients)


def make_engine(task: Task, **changes: Any) -> CertifiedEngine:
    made = front()
    width = precompute(made, task.inputs[:1]).shape[1]
    released = Released.nothing(10, width, torch.device("cpu"))
    return CertifiedEngine(task, made, released, Schedule(4, 2, 0.8), **changes)


def sent(engine: CertifiedEngine, cohort: list[int], index: int) -> list[NDArray[np.float64]]:
    updates = engine.train(torch.zeros(1), cohort, index, 0.1)
    return [update.delta.double().numpy().reshape(10, -1) for update in updates]


def test_schedule() -> None:
    schedule = Schedule(rounds=10, mean_rounds=2, head_step=0.8)
    assert [schedule.asks_for_means(index) for index in range(4)] == [True, True, False, False]
    steps = [schedule.step_at(index) for index in range(2, 10)]
    np.testing.assert_allclose(steps, np.linspace(0.8, 0.1, 8))
    assert Schedule(3, 3, 0.8).asks_for_means(2)


def test_the_front_gives_features_of_one_length() -> None:
    features = precompute(front(), digits().inputs)
    lengths = torch.linalg.vector_norm(features, dim=1)
    torch.testing.assert_close(
        lengths, torch.full((60,), features.shape[1] ** 0.5), rtol=1e-3, atol=0
    )


def test_rounds_ask_first_for_means_then_for_residuals() -> None:
    task = digits()
    engine = make_engine(task)
    features = precompute(front(), task.inputs).double().numpy()
    labels, width = task.targets.numpy(), features.shape[1]
    engine.released.head = 0.1 * torch.randn(10, width, generator=torch.Generator().manual_seed(0))
    means, residuals = sent(engine, [1], 1)[0], sent(engine, [1], 2)[0]
    own = np.arange(30, 60)
    for label in range(10):
        of_class = features[own[labels[own] == label]]
        wanted = of_class.mean(axis=0) / width**0.5 if len(of_class) else np.zeros(width)
        np.testing.assert_allclose(means[label, :-1], wanted, atol=1e-6)
        assert means[label, -1] == pytest.approx(KAPPA if len(of_class) else 0)
    scores = features[own] @ engine.released.head.double().numpy().T
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    weights = np.bincount(labels[own], minlength=10)[labels[own]] ** -0.5
    wanted = ((np.eye(10)[labels[own]] - chances) * weights[:, None]).T @ features[own]
    np.testing.assert_allclose(residuals[:, :-1], wanted, rtol=1e-3, atol=1e-3)
    assert not residuals[:, -1].any()


def test_a_client_without_samples_sends_zeros() -> None:
    engine = make_engine(digits())
    for index in (0, 3):
        assert not sent(engine, [2], index)[0].any()


def test_a_clients_table_depends_on_nobody_else() -> None:
    task = digits()
    before = sent(make_engine(task), [0, 1], 0)
    task.inputs[30:] = torch.nan
    after = sent(make_engine(task), [0, 1], 0)
    np.testing.assert_array_equal(before[0], after[0])
    assert np.isnan(after[1]).any()


def test_traffic_is_counted_for_a_public_number_of_clients() -> None:
    engine = make_engine(digits())
    numbers = engine.released.means_total.numel()
    sent(engine, [0, 1], 0)
    assert (engine.bytes_up, engine.bytes_down) == (8 * numbers, 8 * (numbers - 10))
    secret = make_engine(digits(), senders=5)
    counts = []
    for cohort in ([], [0], [0, 1]):
        sent(secret, cohort, 0)
        counts.append((secret.bytes_up, secret.bytes_down))
    assert counts == [(20 * numbers, 20 * (numbers - 10))] * 3


def test_a_secret_coin_is_not_told_by_traffic() -> None:
    coin = {"selection": "poisson", "amplification": True, "policy": "worst_case"}
    config, problem = build_task(certified(**coin, clients_per_round=0.5))
    engine = build_method(config, problem).engine
    assert isinstance(engine, CertifiedEngine)
    assert engine.senders == config.cohort_limit(4) == 2
    _, public = build_task(certified())
    engine = build_method(certified(), public).engine
    assert isinstance(engine, CertifiedEngine)
    assert engine.senders is None


def spoil_nan(problem: FederatedTask) -> None:
    problem.task.inputs[problem.task.clients[0]] = torch.nan


def spoil_huge(problem: FederatedTask) -> None:
    problem.task.inputs[problem.task.clients[0]] = 1e30


def spoil_one_class(problem: FederatedTask) -> None:
    problem.task.targets[problem.task.clients[0]] = 3


def spoil_empty(problem: FederatedTask) -> None:
    emptied = Holdings([[], *problem.task.clients[1:]])
    object.__setattr__(problem.task, "clients", emptied)  # a task is frozen
    assert len(problem.task.clients[0]) == 0


def spoil_nothing(problem: FederatedTask) -> None:
    pass


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    "spoil", [spoil_nothing, spoil_nan, spoil_huge, spoil_one_class, spoil_empty]
)
def test_what_a_client_adds_is_bounded_whatever_its_data(
    monkeypatch: pytest.MonkeyPatch, spoil: Any, normalise: bool
) -> None:
    """Every vector in the sum is within its client's clip, and the charge covers it."""
    config, problem = build_task(certified(normalise_updates=normalise, eval_every=9, noise_seed=1))
    spoil(problem)
    lengths: dict[int, float] = {}
    clip = Certified.clip

    def measured(
        mechanism: Certified, plan: RoundPlan, contribution: Contribution, tally: RoundTally
    ) -> Contribution:
        clipped = clip(mechanism, plan, contribution, tally)
        lengths[clipped.client] = float(np.linalg.norm(clipped.vector.numpy()))
        return clipped

    monkeypatch.setattr(Certified, "clip", measured)
    with memory_folder() as folder:
        account = open_account(config, problem, folder / "ledger.sqlite", "run")
        federation = build_federation(config, problem, account)
        mechanism = federation.mechanism
        assert isinstance(mechanism, Certified)
        note_plans(federation)
        spent = account.spent().copy()
        for index in range(3):  # means, means, residuals
            record = run_round(federation, index)
            charged, spent = account.spent() - spent, account.spent().copy()
            assert set(lengths) == {0, 1, 2, 3}
            plan = plan_of(federation)
            for client, length in lengths.items():
                assert length <= plan.clips[client]
                cost = (length / plan.noise_std) ** 2
                assert cost <= charged[client] * (1 + 1e-9)
            assert record.non_finite == ([0] if spoil is spoil_nan else [])
            if normalise and spoil is spoil_nothing:
                assert lengths[0] == pytest.approx(plan.clips[0])
        account.close()
    assert isinstance(federation.method.engine, CertifiedEngine)
    released = federation.method.engine.released
    assert torch.isfinite(released.head).all()
    assert released.means_seen == 2


def epsilons_in(path: Path) -> list[float]:
    """Return what each client has spent by the ledger, converted by another library."""
    with Ledger.open(path, read_only=True) as ledger:
        assert ledger.verify().ok
        (population,) = ledger.populations()
        spent = population.spent()
    return [float(get_epsilon_gaussian(mu2**-0.5, DELTA)) if mu2 else 0.0 for mu2 in spent]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A certified condensation with secret noise."""
    with pytest.MonkeyPatch.context() as patch:
        refine_in_few_steps(patch)
        return run_config(certified(output_dir=str(tmp_path_factory.mktemp("certified"))))


def test_every_client_stays_within_epsilon(finished: RunResult) -> None:
    epsilons = epsilons_in(folder_of(finished) / "ledger.sqlite")
    assert len(epsilons) == 4
    assert max(epsilons) <= 6
    assert min(epsilons) > 5.99  # everybody joined every round
    assert finished.statement.epsilon_max == pytest.approx(max(epsilons), rel=1e-5)


def test_the_statement_says_what_is_covered(finished: RunResult) -> None:
    text = finished.statement.as_text()
    assert "every client: epsilon <= 6 (median 6) at delta 1e-05" in text
    assert "covered    class statistics, synthetic images, the model trained on them" in text
    assert "uncovered  nothing" in text
    assert "noise      operating system generator" in text
    assert "computed from the noised sums alone" in text
    assert "public front (hog-linear)" in text


def test_what_is_public_and_what_is_not(finished: RunResult) -> None:
    folder = folder_of(finished)
    public = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    private = [json.loads(line) for line in (folder / "private.jsonl").read_text().splitlines()]
    assert len(public) == len(private) == 4
    for line in public:
        assert set(line) <= ALLOWED | set(RAW)
        assert all(line[key] is None for key in RAW)
    for line in private:
        assert set(line) == {"schema_version", "round", *RAW}
        assert line["signal_norm"] > 0
        assert line["seconds"] > 0
    assert stat.S_IMODE((folder / "private.jsonl").stat().st_mode) == 0o600
    assert finished.result["condensation"]["seconds"] is None
    raw = json.dumps(finished.result)
    for line in private:
        assert str(line["signal_norm"]) not in raw
        assert str(line["noise_norm"]) not in raw


def test_traffic_of_a_run(finished: RunResult) -> None:
    numbers = 10 * (precompute(front(), torch.zeros(1, 1, 8, 8)).shape[1] + 1)
    history = finished.result["history"]
    assert history["bytes_up"] == [4 * 4 * numbers] * 4
    assert history["bytes_down"] == [4 * 4 * (numbers - 10)] * 4
    assert finished.result["condensation"]["bytes_up"] == 4 * 16 * numbers
    assert [value is None for value in history["matching_loss"]] == [True, False, True, False]


def test_images_have_pixels_in_range(finished: RunResult) -> None:
    from fedquilt.data import DATASETS

    spec = DATASETS["digits"]
    pixels = images_of(finished) * spec.std[0] + spec.mean[0]
    assert pixels.shape == (10, 1, 8, 8)
    assert pixels.min() > -1e-6
    assert pixels.max() < 1 + 1e-6


@pytest.mark.usefixtures("quick")
def test_secret_noise_differs_and_a_seed_repeats(finished: RunResult) -> None:
    again = run_in_memory(certified())
    assert not torch.equal(images_of(again), images_of(finished))
    first, second = (run_in_memory(certified(noise_seed=3)) for _ in "ab")
    assert torch.equal(images_of(first), images_of(second))
    assert all(
        torch.equal(first.state_dict[key], second.state_dict[key]) for key in first.state_dict
    )
    assert first.statement.epsilon_max == float("inf")


@pytest.mark.usefixtures("quick")
def test_who_joins_rarely_spends_at_most_epsilon(tmp_path: Path) -> None:
    config = certified(
        num_clients=8, availability="beta", num_rounds=12, eval_every=12, output_dir=str(tmp_path)
    )
    result = run_config(config)
    joins = np.asarray(result.result["joins"])
    epsilons = epsilons_in(folder_of(result) / "ledger.sqlite")
    assert joins.min() > 0 or epsilons[int(joins.argmin())] == 0
    assert joins.min() < joins.max()
    assert max(epsilons) <= 6


@pytest.mark.usefixtures("quick")
def test_a_spent_allowance_refuses_a_second_run(tmp_path: Path) -> None:
    shared = {"ledger": str(tmp_path / "ledger.sqlite"), "output_dir": str(tmp_path / "runs")}
    run_config(certified(**shared))
    with pytest.raises(BudgetExceededError, match=r"asks more than any client .* pay is 0"):
        run_config(certified(**shared))
    assert len(list((tmp_path / "runs").iterdir())) == 1, "a refused run leaves no folder"
    assert max(epsilons_in(tmp_path / "ledger.sqlite")) <= 6


@pytest.mark.usefixtures("quick")
def test_after_a_run_that_claims_nothing_no_bound_is_given(tmp_path: Path) -> None:
    """Group means put their clients at infinity in a ledger that outlives the run."""
    shared = {"ledger": str(tmp_path / "ledger.sqlite"), "output_dir": str(tmp_path / "runs")}
    run_config(small(num_clients=4, allowance=6.0, **shared))
    with pytest.raises(BudgetExceededError, match=r"asks more than any client .* pay is 0"):
        run_config(certified(**shared))


@pytest.mark.usefixtures("quick")
def test_a_run_that_ends_early_still_has_images_and_a_model() -> None:
    """Nobody may join after two rounds; the next evaluation would be after five."""
    cap = {"policy": "cap", "max_joins": 2, "num_rounds": 6, "eval_every": 5, "noise_seed": 2}
    result = run_in_memory(certified(**cap))
    assert result.result["rounds"] == 2
    assert result.result["stopped"] == "no client has allowance left for another round"
    history = result.result["history"]
    assert history["evaluation_rounds"] == [2]
    assert history["matching_loss"][0] is None
    assert history["matching_loss"][1] > 0
    # The same rounds, evaluated where they end, give the same images.
    same = run_in_memory(certified(**{**cap, "eval_every": 2}))
    assert torch.equal(images_of(result), images_of(same))
    assert result.final_accuracy == same.final_accuracy


@pytest.mark.usefixtures("quick")
def test_nobody_at_the_last_round_is_made_up_for(tmp_path: Path) -> None:
    there = tmp_path / "there.csv"
    there.write_text("round,client\n0,0\n0,1\n1,2\n")
    result = run_in_memory(certified(availability=str(there), eval_every=4, noise_seed=2))
    assert result.result["cohorts"] == [[0, 1], [2], [], []]
    assert result.result["history"]["matching_loss"][:3] == [None] * 3
    assert result.result["history"]["matching_loss"][3] > 0


def test_enough_allowance_teaches_digits() -> None:
    loose = {"epsilon": 1e4, "num_rounds": 8, "eval_every": 8, "mean_rounds": None}
    result = run_in_memory(certified(**loose, synthetic_images=300, model_epochs=60, noise_seed=1))
    assert result.final_accuracy is not None
    assert result.final_accuracy > 0.5


@pytest.mark.usefixtures("quick")
def test_the_servers_state_is_all_there_is() -> None:
    _, problem = build_task(certified())
    made = [make_condensation(certified(), problem.flat.module, problem.task, 10) for _ in "ab"]
    first, second = (one.server for one in made)
    assert isinstance(first, GrowingServer)
    assert isinstance(second, GrowingServer)
    weights = problem.flat.read()
    update = torch.rand(first.engine.released.means_total.numel(), dtype=torch.float64)
    first.engine.round_index = 0
    first.step(weights, update)
    second.load_state(first.state(), weights.device)
    for server in (first, second):
        server.engine.round_index = 2
        server.step(weights, 2 * update)
    ours, theirs = first.train_if_stale(weights), second.train_if_stale(weights)
    assert torch.equal(ours[0], theirs[0])
    assert ours[1] == theirs[1]
    assert not torch.equal(ours[0], weights)
    for key, array in first.state().items():
        np.testing.assert_array_equal(array, second.state()[key])
    spoilt = first.state()
    spoilt["head"] = spoilt["head"][:, :1]
    with pytest.raises(InvalidValueError, match="saved head of shape"):
        second.load_state(spoilt, weights.device)


@pytest.mark.usefixtures("quick")
def test_classes_of_a_certified_run() -> None:
    train, test = load_dataset("digits")
    two, few = train.targets < 2, test.targets < 2
    pair = (train.images[two], train.targets[two]), (test.images[few], test.targets[few])
    halves = [range(60), range(60, 120)]
    result = certify(Linear(2), clients=halves, train=pair[0], test=pair[1])
    assert images_of(result).shape == (2, 1, 8, 8)
    assert torch.isfinite(images_of(result)).all()
    one = train.images[:40], torch.zeros(40, dtype=torch.int64)
    with pytest.raises(InvalidValueError, match="at least two classes"):
        certify(Linear(1), clients=[range(20), range(20, 40)], train=one, test=one)


@pytest.mark.usefixtures("quick")
def test_colour_images_begin_as_leaves() -> None:
    train, test = load_dataset("digits")
    colour = [(part.images.repeat(1, 3, 1, 1), part.targets) for part in (train, test)]
    model = Linear(pixels=192)
    result = certify(model, train=colour[0], test=colour[1], num_rounds=2, mean_rounds=1)
    assert images_of(result).shape == (10, 3, 8, 8)


@pytest.mark.usefixtures("quick")
def test_batch_norm_may_be_trained_by_a_server_alone() -> None:
    """Its statistics are those of synthetic images: no release of their own."""
    done = certify(nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 10)))
    assert done.statement.covered[0] == "class statistics"
    assert "0.running_mean" in done.state_dict
