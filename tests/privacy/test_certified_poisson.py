"""Cohorts by a secret coin: what stays secret, what is charged, who is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    pld,
)

import fedquilt
from certified_samples import SIZE, Sending, make_federation, make_problem, plan_of
from fedquilt.aggregation import RunningMean
from fedquilt.errors import InvalidValueError
from fedquilt.federation import Federation
from fedquilt.population import Cohort
from fedquilt.privacy.accounting import calibrate
from fedquilt.privacy.certified import AmplifiedCertified
from fedquilt.privacy.mechanism import RoundTally
from fedquilt.round import run_round
from fedquilt.setup import mechanism as assemble_mechanism
from fedquilt.training.engines import LocalEngine

CLIENTS, ROUNDS = 6, 5
SECRET: dict[str, Any] = {
    "num_clients": CLIENTS,
    "num_rounds": ROUNDS,
    "clients_per_round": 3,
    "selection": "poisson",
    "amplification": True,
    "policy": "worst_case",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrating takes seconds; most tests do not look at the number."""
    monkeypatch.setattr(assemble_mechanism, "calibrate", lambda *given, **options: 1.5)


def amplified(path: Path, run_id: str = "secret", **changes: Any) -> Federation:
    config, problem = make_problem(**{**SECRET, **changes})
    return make_federation(config, problem, path, run_id)


def keep(federation: Federation, *kept: list[int]) -> None:
    """Let the secret coin of each round fall like this."""
    select = federation.select

    def selected(index: int, allowed: Any) -> Cohort:
        exposed = select(index, allowed).exposed
        return Cohort(np.intersect1d(exposed, kept[index]).astype(np.int64), exposed)

    federation.select = selected


def trained(federation: Federation) -> list[list[int]]:
    assert isinstance(federation.method.engine, Sending)
    return federation.method.engine.trained


def test_everybody_available_is_exposed_and_the_coin_keeps_some(folder: Path) -> None:
    federation = amplified(folder / "l", num_rounds=60)
    records = [run_round(federation, index) for index in range(60)]
    assert all(record.cohort == list(range(CLIENTS)) for record in records)
    kept = trained(federation)
    assert np.mean([len(cohort) for cohort in kept]) == pytest.approx(3.0, abs=0.7)
    assert len({tuple(cohort) for cohort in kept}) > 10


def test_the_coin_does_not_come_from_the_seed(folder: Path) -> None:
    kept = []
    for name in ("one", "two"):
        federation = amplified(folder / name, num_rounds=30)
        for index in range(30):
            run_round(federation, index)
        kept.append(trained(federation))
    assert kept[0] != kept[1], "by chance once in 2^180 times"


def test_the_first_exposure_takes_the_whole_allowance_and_the_others_nothing(folder: Path) -> None:
    federation = amplified(folder / "l")
    assert federation.account is not None
    keep(federation, [0], [1, 2], [], [0, 1], [3])
    whole = federation.account.run.budget_mu2
    for index in range(ROUNDS):
        run_round(federation, index)
        np.testing.assert_allclose(federation.account.spent(), whole, rtol=1e-9)
        assert federation.account.population.joins().tolist() == [index + 1] * CLIENTS


def test_exposures_end_where_the_noise_was_calibrated_for(folder: Path) -> None:
    federation = amplified(folder / "l", policy="cap", max_joins=2)
    cohorts = [run_round(federation, index).cohort for index in range(ROUNDS)]
    assert cohorts == [list(range(CLIENTS))] * 2 + [[]] * 3
    assert federation.account is not None
    assert federation.account.population.joins().max() == 2


def test_a_crash_forgets_no_exposure(folder: Path) -> None:
    """A round that was released and lost is run again, and is one exposure more."""
    federation = amplified(folder / "l", policy="cap", max_joins=3)
    assert federation.account is not None
    run_round(federation, 0)
    saved = federation.state()
    run_round(federation, 1)  # released, and the process dies before it is saved
    federation.account.close()
    resumed = amplified(folder / "l", policy="cap", max_joins=3)
    resumed.load_state(saved)
    assert run_round(resumed, 1).cohort == list(range(CLIENTS))
    assert run_round(resumed, 2).cohort == [], "the three exposures are used up"


def test_an_empty_secret_cohort_releases_noise(folder: Path) -> None:
    federation = amplified(folder / "l")
    keep(federation, [], [0], [], [], [])
    before = federation.weights.clone()
    record = run_round(federation, 0)
    assert trained(federation) == [[]]
    assert record.cohort == list(range(CLIENTS))
    moved = (federation.weights - before).double().numpy()
    assert record.noise.noise_std == 1.5 * 1.0 / 3.0
    assert np.all(moved != 0)
    assert 0.2 < moved.std() / record.noise.noise_std < 3
    assert federation.account is not None
    assert federation.account.population.joins().tolist() == [1] * CLIENTS


def test_the_divisor_does_not_know_the_cohort(folder: Path) -> None:
    federation = amplified(folder / "l")
    keep(federation, [], [0], [0, 1, 2, 3, 4, 5], [1], [2])
    assert isinstance(federation.mechanism, AmplifiedCertified)
    assert federation.mechanism.settings.divisor == 3.0
    stds = [run_round(federation, index).noise.noise_std for index in range(ROUNDS)]
    assert stds == [0.5] * ROUNDS

    def released(weight: float) -> torch.Tensor:
        total = RunningMean(SIZE)
        total.weight = weight
        return federation.mechanism.release(plan_of(federation), total, RoundTally())[0]

    sums = [released(weight).std().item() for weight in (1.0, 9.0)]
    assert 0.2 < sums[0] / sums[1] < 5


def test_no_public_file_knows_who_was_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[list[int]] = []
    train = LocalEngine.train

    def note(self: Any, start: Any, cohort: Any, index: int, rate: float) -> Any:
        kept.append([int(client) for client in cohort])
        return train(self, start, cohort, index, rate)

    monkeypatch.setattr(LocalEngine, "train", note)
    config = {**SECRET, "num_rounds": 12, "engine": "sequential"}
    inputs, labels = torch.randn(60, 1, 2, 2), torch.arange(60) % 3
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    parts = np.arange(60).reshape(CLIENTS, 10)
    result = fedquilt.run(
        *(model, (inputs, labels), (inputs, labels), list(parts)),
        **{**config, "mode": "certified", "availability": "always"},
        output_dir=str(tmp_path),
    )
    assert result.folder is not None
    everybody = list(range(CLIENTS))
    secret = [cohort for cohort in kept if cohort != everybody]
    assert len(secret) >= 6
    for path in result.folder.iterdir():
        text = path.read_bytes().decode("latin-1")
        if path.name != "private.jsonl" and path.suffix in (".json", ".jsonl", ".toml"):
            for cohort in (c for c in secret if len(c) > 1):
                assert json.dumps(cohort) not in text.replace("\n", "").replace("  ", "")
    lines = [json.loads(s) for s in (result.folder / "rounds.jsonl").read_text().splitlines()]
    assert all(line["cohort"] == everybody for line in lines)
    assert result.result["joins"] == [12] * CLIENTS
    assert result.result["cohorts"] == [everybody] * 12
    for name in ("train_loss", "clipped_fraction", "non_finite", "signal_norm", "seconds"):
        assert all(line.get(name) is None for line in lines), f"{name} tells of the coin"


@pytest.mark.parametrize("charged_first", [True, False])
def test_nobody_is_charged_by_two_runs_at_once(folder: Path, charged_first: bool) -> None:
    """A run that begins later on the same ledger must not lend its clients to the secret coin."""
    secret = amplified(folder / "l")
    config, problem = make_problem(CLIENTS, num_rounds=2, policy="worst_case")
    other = make_federation(config, problem, folder / "l", "other")
    if charged_first:
        for index in range(2):
            run_round(other, index)
        cohort = run_round(secret, 0).cohort
        assert cohort == [], "each of them has given its allowance away already"
    else:
        run_round(secret, 0)
        assert run_round(other, 0).cohort == []


def test_what_another_run_has_reserved_is_not_whole(folder: Path) -> None:
    secret = amplified(folder / "l")
    config, problem = make_problem(CLIENTS, num_rounds=2, policy="worst_case")
    other = make_federation(config, problem, folder / "l", "other")
    assert other.account is not None
    reservation = other.account.run.reserve(0, [0, 1], 0.3 * other.account.run.budget_mu2)
    assert run_round(secret, 0).cohort == [2, 3, 4, 5]
    other.account.run.settle(reservation, "used")
    assert run_round(secret, 1).cohort == [2, 3, 4, 5]


def test_two_secret_runs_do_not_share_clients(folder: Path) -> None:
    """Each has its own noise; together they would be more than either was calibrated for."""
    first, second = amplified(folder / "l", "first"), amplified(folder / "l", "second")
    assert run_round(first, 0).cohort == list(range(CLIENTS))
    assert run_round(second, 0).cohort == []
    assert run_round(first, 1).cohort == list(range(CLIENTS))


def test_touched_accounts_and_part_budgets_are_refused(folder: Path) -> None:
    config, problem = make_problem(CLIENTS, num_rounds=4)
    run_round(make_federation(config, problem, folder / "touched", "before"), 0)
    with pytest.raises(InvalidValueError, match="untouched account"):
        amplified(folder / "touched", if_exhausted="sit_out", epsilon=1.0)
    with pytest.raises(InvalidValueError, match="whole allowance"):
        amplified(folder / "part", epsilon=1.0, allowance=2.0)


def test_the_claim_is_that_of_the_subsampled_gaussian(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against dp-accounting; nobody is above the epsilon that was asked for."""
    monkeypatch.setattr(assemble_mechanism, "calibrate", calibrate)
    federation = amplified(folder / "l", epsilon=6.0, num_rounds=4)
    mechanism = federation.mechanism
    assert isinstance(mechanism, AmplifiedCertified)
    assert federation.account is not None
    for index in range(4):
        run_round(federation, index)
    event = PoissonSampledDpEvent(0.5, GaussianDpEvent(mechanism.noise_multiplier))
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = pld.PLDAccountant(relation, value_discretization_interval=1e-3)
    exact = accountant.compose(SelfComposedDpEvent(event, 4)).get_epsilon(1e-5)
    assert exact == pytest.approx(6.0, rel=2e-3)
    stated = mechanism.statement(np.zeros(CLIENTS), federation.account.epsilons())
    assert stated.epsilon_max == pytest.approx(exact, rel=2e-3)
    assert stated.epsilon_max <= 6.0
    assert "secret Poisson coin of 0.5" in stated.notes[0]
    plain = calibrate(6.0, 1e-5, rounds=4, method="gdp")
    assert mechanism.noise_multiplier < plain, "the coin is worth something"
