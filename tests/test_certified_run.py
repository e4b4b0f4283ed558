"""Whole certified runs: what they claim, what they publish, what the ledger remembers."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian

from fedquilt.errors import InvalidValueError, RunFolderError
from fedquilt.experiment.api import RunResult, resume_run, run_config
from fedquilt.privacy.ledger import BudgetExceededError, Ledger
from fedquilt.record.folder import RunFolder
from run_processes import Nursery, environment
from run_samples import flags, folder_of, only_folder, rounds_without_clock, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

CLIENTS, DELTA = 10, 1e-5
CERTIFIED: dict[str, Any] = {"mode": "certified", "noise_seed": None, "batch_size": 1024}
RAW = ("train_loss", "noise_norm", "signal_norm", "clipped_fraction", "non_finite", "seconds")
CAMPAIGN = Path(__file__).resolve().parents[1] / "benchmarks" / "kill_campaign.py"


def certify(folder: Path, **changes: Any) -> RunResult:
    return run_config(tiny(**{**CERTIFIED, **changes, "output_dir": str(folder)}))


def exported(path: Path) -> dict[str, Any]:
    with Ledger.open(path, read_only=True) as ledger:
        assert ledger.verify().ok
        return ledger.export()


def spent_by(path: Path) -> np.ndarray:
    """Return the squared GDP units each client has spent in a ledger of one population."""
    (population,) = exported(path)["populations"]
    return np.asarray([float(row["mu2_spent"]) for row in population["client_rows"]])


def settled_rounds(path: Path) -> Counter[int]:
    """Return how many releases of each round were charged."""
    entries = exported(path)["entries"]
    return Counter(entry["round"] for entry in entries if entry["kind"] == "settle")


def epsilon_of(mu2: float) -> float:
    return float(get_epsilon_gaussian(mu2**-0.5, DELTA)) if mu2 else 0.0


def adaptive_charges(cohorts: list[list[int]], rounds: int, epsilon: float) -> np.ndarray:
    """Return what each client spends by the public history alone: B_i / r_i a join."""
    budget = get_sigma_gaussian(epsilon, DELTA) ** -2
    spent, joins = np.zeros(CLIENTS), np.zeros(CLIENTS)
    usual = len(cohorts[0]) / CLIENTS
    typical = budget / (1 + (rounds - 1) * usual)
    for index, cohort in enumerate(cohorts):
        rate = np.minimum(1, (joins[cohort] + 7 * usual) / (index + 7))
        share = (budget - spent[cohort]) / (1 + (rounds - index - 1) * rate)
        spent[cohort] += np.minimum(share, 4.0**2 * typical)
        joins[cohort] += 1
    return spent


def until_refused(folder: Path, **changes: Any) -> tuple[list[RunResult], str]:
    """Start runs until one is refused; return those that were not, and the refusal."""
    results: list[RunResult] = []
    try:
        while len(results) < 20:
            results.append(certify(folder, **changes))
    except BudgetExceededError as refused:
        return results, str(refused)
    raise AssertionError("the allowance never ended")


def test_the_claim_follows_from_the_public_history(tmp_path: Path) -> None:
    result = certify(tmp_path, num_rounds=6)
    spent = spent_by(folder_of(result) / "ledger.sqlite")
    np.testing.assert_allclose(spent, adaptive_charges(result.result["cohorts"], 6, 3.0), rtol=1e-8)
    epsilons = [epsilon_of(mu2) for mu2 in spent]
    assert result.statement.epsilon_max == pytest.approx(max(epsilons), rel=1e-7)
    assert result.statement.epsilon_median == pytest.approx(np.median(epsilons), rel=1e-7)
    assert result.statement.epsilon_max <= 3.0
    assert result.statement.uncovered == ()
    assert result.statement.noise_source == "operating system generator"


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "worst_case"},
        {"policy": "cap", "max_joins": 2},
        {"policy": "paper"},
        {"clipping": "quantile"},
        {"noise_bands": 2},
        {"normalise_updates": True, "clipping": "quantile", "noise_bands": 2},
        {"mode": "fixed_dp", "noise_layers": "all"},
    ],
    ids=str,
)
def test_every_policy_claims_what_its_ledger_says(tmp_path: Path, changes: dict[str, Any]) -> None:
    result = certify(tmp_path, **changes)
    spent = spent_by(folder_of(result) / "ledger.sqlite")
    assert result.statement.epsilon_max == pytest.approx(epsilon_of(spent.max()), rel=1e-6)
    assert 0 < result.statement.epsilon_max <= 3.0
    assert [float(spent[i] > 0) for i in range(CLIENTS)] == [
        float(joins > 0) for joins in result.result["joins"]
    ]


def test_what_is_measured_on_the_data_stays_in_the_private_file(tmp_path: Path) -> None:
    folder = folder_of(certify(tmp_path, clipping="quantile", eval_every=1))
    private = folder / "private.jsonl"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    measured = [json.loads(line) for line in private.read_text().splitlines()]
    assert len(measured) == 4
    assert all(isinstance(line["train_loss"], float) for line in measured)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert all(line.get(name) is None for line in lines for name in RAW)
    history = json.loads((folder / "result.json").read_text())["history"]
    assert history["train_loss"] == [None] * 4
    assert all(
        stats["noise_norm"] is stats["signal_norm"] is None for stats in history["noise_stats"]
    )
    public = "".join((folder / name).read_text() for name in ("rounds.jsonl", "result.json"))
    for line in measured:
        for name in ("train_loss", "noise_norm", "signal_norm"):
            assert repr(line[name]) not in public


def test_a_mode_without_a_claim_has_no_private_file(tmp_path: Path) -> None:
    folder = folder_of(certify(tmp_path, mode="fedavg"))
    assert not (folder / "private.jsonl").exists()
    line = json.loads((folder / "rounds.jsonl").read_text().splitlines()[0])
    assert isinstance(line["train_loss"], float)


def test_a_noise_seed_is_stamped_and_claims_nothing(tmp_path: Path) -> None:
    result = certify(tmp_path, noise_seed=3)
    assert result.statement.epsilon_max == math.inf
    assert "reproducible noise: no privacy" in result.statement.as_text()
    saved = json.loads((folder_of(result) / "result.json").read_text())
    assert saved["statement"]["epsilon_max"] == "inf"
    assert saved["ledger"]["lifetime_epsilon_max"] == "inf"
    joined = np.asarray(result.result["joins"]) > 0
    assert np.array_equal(np.isinf(spent_by(folder_of(result) / "ledger.sqlite")), joined)


def test_a_rehearsal_does_not_touch_a_ledger_that_outlives_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="noise_seed=3 must not be used with ledger"):
        certify(tmp_path / "runs", noise_seed=3, ledger=str(tmp_path / "l"))
    assert list(tmp_path.iterdir()) == []


def test_runs_share_an_allowance_until_it_is_refused(tmp_path: Path) -> None:
    ledger, runs = tmp_path / "ledger.sqlite", tmp_path / "runs"
    shared = {"ledger": str(ledger), "allowance": 6.0, "epsilon": 3.0, "clients_per_round": 5}
    results, message = until_refused(runs, **shared)
    assert len(results) == 3, "mu^2 of epsilon 6 is 3.3 times that of epsilon 3"
    for words in ("epsilon=3.0", "of 10 clients", "The largest epsilon that everybody", "sit_out"):
        assert words in message
    assert len(list(runs.iterdir())) == 3, "a refused run leaves no folder"
    spent = spent_by(ledger)
    assert all(epsilon_of(mu2) <= 6.0 for mu2 in spent)
    totals = np.sum([adaptive_charges(r.result["cohorts"], 4, 3.0) for r in results], axis=0)
    np.testing.assert_allclose(spent, totals, rtol=1e-8)
    lifetime = [result.result["ledger"]["lifetime_epsilon_max"] for result in results]
    assert lifetime == sorted(lifetime)
    assert lifetime[-1] == pytest.approx(epsilon_of(spent.max()), rel=1e-6)

    payable = float(message.split("can still pay is ")[1].split(",")[0])
    last = certify(runs, **{**shared, "epsilon": math.floor(payable * 1000) / 1000})
    assert last.statement.epsilon_max <= payable
    assert all(epsilon_of(mu2) <= 6.0 for mu2 in spent_by(ledger))


def test_who_has_less_left_sits_out(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    shared = {"ledger": str(ledger), "epsilon": 3.0, "clients_per_round": 4, "num_rounds": 2}
    first = certify(tmp_path / "runs", **shared)
    spent = {client for cohort in first.result["cohorts"] for client in cohort}
    assert 0 < len(spent) < CLIENTS
    second = certify(tmp_path / "runs", **shared, if_exhausted="sit_out")
    joined = {client for cohort in second.result["cohorts"] for client in cohort}
    assert joined
    assert not joined & spent
    lines = rounds_without_clock(folder_of(second))
    assert lines[0]["without_allowance"] == len(spent)
    _, message = until_refused(tmp_path / "runs", **shared, if_exhausted="sit_out")
    assert "more than any client" in message
    assert all(epsilon_of(mu2) <= 3.0 for mu2 in spent_by(ledger))


@pytest.mark.parametrize("mode", ["fedavg", "quap_fl", "quap_fl_client"])
def test_a_run_without_a_bound_puts_its_clients_at_infinity(tmp_path: Path, mode: str) -> None:
    ledger = tmp_path / "ledger.sqlite"
    loose = certify(tmp_path / "runs", mode=mode, ledger=str(ledger), num_rounds=1)
    (cohort,) = loose.result["cohorts"]
    assert np.flatnonzero(np.isinf(spent_by(ledger))).tolist() == cohort
    assert loose.result["ledger"]["lifetime_epsilon_max"] == "inf"
    assert not (folder_of(loose) / "private.jsonl").exists()
    with pytest.raises(BudgetExceededError, match="3 of 10 clients"):
        certify(tmp_path / "runs", ledger=str(ledger))
    strict = certify(tmp_path / "runs", ledger=str(ledger), if_exhausted="sit_out")
    joined = {client for one in strict.result["cohorts"] for client in one}
    assert not joined & set(cohort)
    assert strict.statement.epsilon_max <= 3.0


def test_a_run_ends_when_nobody_has_allowance_left(tmp_path: Path) -> None:
    result = certify(tmp_path, num_rounds=6, policy="cap", max_joins=2, clients_per_round=CLIENTS)
    assert result.result["rounds"] == 2
    assert result.result["stopped"] == "no client has allowance left for another round"
    assert result.result["joins"] == [2] * CLIENTS
    assert result.statement.epsilon_max == pytest.approx(3.0, rel=1e-6)
    assert result.result["history"]["evaluation_rounds"] == [2], "the end is evaluated"
    assert resume_run(folder_of(result)).result["rounds"] == 2


def killed(nursery: Nursery, parent: Path, moment: tuple[str, int], **changes: Any) -> Path:
    """Start a run in a process of its own and let it die; return its folder."""
    arguments = flags(**{**CERTIFIED, **changes, "output_dir": parent})
    ended = nursery.run("run", *arguments, "--quiet", die_at=moment)
    assert ended.code == -signal.SIGKILL, ended
    return only_folder(parent)


@pytest.mark.parametrize("moment", [("reserved", 3), ("settled", 3), ("recorded", 3)], ids=str)
def test_a_lost_round_with_seeded_noise_is_not_charged_twice(
    nursery: Nursery, tmp_path: Path, moment: tuple[str, int]
) -> None:
    folder = killed(nursery, tmp_path, moment, noise_seed=5)
    finished = rounds_without_clock(folder)[:2]
    resume_run(folder)
    assert rounds_without_clock(folder)[:2] == finished
    assert settled_rounds(folder / "ledger.sqlite") == Counter(range(4))


@pytest.mark.parametrize("moment", [("reserved", 3), ("settled", 3), ("recorded", 3)], ids=str)
def test_a_lost_round_with_secret_noise_is_charged_for_each_release(
    nursery: Nursery, tmp_path: Path, moment: tuple[str, int]
) -> None:
    ledger = tmp_path / "shared.sqlite"
    folder = killed(nursery, tmp_path / "runs", moment, ledger=ledger)
    before = spent_by(ledger)
    finished = rounds_without_clock(folder)[:2]
    result = resume_run(folder)
    assert rounds_without_clock(folder)[:2] == finished
    lost = 0 if moment[0] == "reserved" else 1
    assert settled_rounds(ledger) == Counter(range(4)) + Counter({2: lost})
    after = spent_by(ledger)
    assert np.all(after >= before)
    assert result.statement.epsilon_max == pytest.approx(epsilon_of(after.max()), rel=1e-6)
    assert result.statement.epsilon_max <= 3.0
    (population,) = exported(ledger)["populations"]
    assert population["open_reservations"] == 0


def test_a_dead_run_keeps_what_it_reserved_until_it_goes_on(
    nursery: Nursery, tmp_path: Path
) -> None:
    ledger = tmp_path / "shared.sqlite"
    changes = {"ledger": ledger, "clients_per_round": CLIENTS, "num_rounds": 2}
    folder = killed(nursery, tmp_path / "dead", ("reserved", 1), **changes)
    with pytest.raises(BudgetExceededError):
        certify(tmp_path / "other", **{**changes, "ledger": str(ledger)})
    resume_run(folder)
    assert settled_rounds(ledger) == Counter(range(2))


@pytest.mark.parametrize("how", ["rolled back", "deleted"])
def test_a_ledger_that_has_forgotten_is_refused(nursery: Nursery, tmp_path: Path, how: str) -> None:
    folder = killed(nursery, tmp_path, ("recorded", 2))
    ledger, old = folder / "ledger.sqlite", tmp_path / "old.sqlite"
    exported(ledger)
    shutil.copy(ledger, old)
    ended = nursery.run("run", "--resume", folder, "--quiet", die_at=("recorded", 2))
    assert ended.code == -signal.SIGKILL, ended
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    if how == "rolled back":
        shutil.copy(old, ledger)
    lines = rounds_without_clock(folder)
    with pytest.raises(RunFolderError, match="rolled back or exchanged"):
        resume_run(folder)
    assert rounds_without_clock(folder) == lines, "a refusal changes nothing"
    assert RunFolder.open(folder).read_result() is None


@pytest.mark.slow
def test_a_few_random_kills(tmp_path: Path) -> None:
    """The short form of the campaign: a ledger never below what was released."""
    numbers = ("--kills", "8", "--cold", "1", "--rounds", "8", "--seed", "1")
    ended = subprocess.run(
        [sys.executable, str(CAMPAIGN), *numbers, "--folder", str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^kills +8$", ended.stdout, re.MULTILINE)
    assert re.search(r"^runs finished +[1-9]", ended.stdout, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_the_campaign_would_notice(tmp_path: Path) -> None:
    """Its checks fail for a ledger that is below what was released, and for a changed past."""
    spec = importlib.util.spec_from_file_location("kill_campaign", CAMPAIGN)
    assert spec is not None
    assert spec.loader is not None
    campaign = importlib.util.module_from_spec(spec)
    sys.modules["kill_campaign"] = campaign
    spec.loader.exec_module(campaign)

    ledger = tmp_path / "l"
    result = certify(tmp_path / "runs", ledger=str(ledger), num_rounds=2)
    spent = spent_by(ledger)
    log = tmp_path / "log"
    log.write_text(json.dumps({"round": 0, "cost": {"0": float(spent[0]), "7": float(spent[7])}}))
    assert campaign.below_released(ledger, log) == []
    more = {"round": 1, "cost": {"7": 0.01}}
    log.write_text(log.read_text() + "\n" + json.dumps(more) + "\n")
    assert campaign.below_released(ledger, log) == [7]

    folder = folder_of(result)
    known: dict[Path, list[str]] = {}
    assert campaign.changed_rounds(folder, known) == 0
    assert len(known[folder]) == 2
    path = folder / "rounds.jsonl"
    path.write_text(path.read_text().replace('"round": 0', '"round":  0'))
    assert campaign.changed_rounds(folder, known) == 1
