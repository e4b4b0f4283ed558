"""Windows: a cohort that is gathered over several rounds, in which everybody counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import get_sigma_gaussian

from fedquilt.errors import InvalidValueError
from fedquilt.experiment.api import RunResult, resume_run, run_config
from fedquilt.population import Availability, CohortSelector
from fedquilt.privacy.ledger import Ledger
from run_samples import tiny

SIZE = 200


def selector(kind: str = "beta", limit: int = SIZE, **options: Any) -> CohortSelector:
    draws = np.random.default_rng(3).beta(2, 5, SIZE)
    options = {"rule": "uniform", "limit": limit, "seed": 5, **options}
    return CohortSelector(Availability.make(kind, SIZE, draws), draws, **options)


def test_a_window_is_the_union_of_its_rounds() -> None:
    plain, gathered = selector(), selector(window=4, num_rounds=10)
    for index, rounds in enumerate([(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]):
        union = np.unique(np.concatenate([plain.select(t).clients for t in rounds]))
        np.testing.assert_array_equal(gathered.select(index).clients, union)


def test_who_was_picked_makes_room_for_others_and_nobody_counts_twice() -> None:
    cohort = selector("always", limit=30, window=3).select(0)
    assert len(np.unique(cohort.clients)) == len(cohort.clients) == 90
    allowed = np.arange(SIZE) < 50
    few = selector("always", limit=30, window=3).select(0, allowed)
    np.testing.assert_array_equal(few.clients, np.arange(50))


@pytest.mark.parametrize("window", [2, 5, 20])
def test_the_expected_window_is_that_of_the_public_law(window: int) -> None:
    beta = selector(window=window).expected_cohort / SIZE
    assert beta == pytest.approx(1 - 30 / ((window + 5) * (window + 6)), abs=1e-7)
    drawn = np.random.default_rng(0).random((100_000, window)) < 2 / 7
    uniform = selector("uniform", window=window).expected_cohort / SIZE
    assert uniform == pytest.approx(drawn.any(1).mean(), abs=0.006)
    assert selector("always", limit=10, window=window).expected_cohort == min(10 * window, SIZE)


@pytest.mark.parametrize("rule", ["uniform", "poisson"])
@pytest.mark.parametrize("kind", ["always", "beta"])
def test_the_mean_window_is_that_of_many_windows(kind: str, rule: str) -> None:
    chosen = selector(kind, limit=20, rule=rule, window=4)
    sizes = [len(chosen.select(index).clients) for index in range(300)]
    assert chosen.mean_cohort == pytest.approx(np.mean(sizes), rel=0.03)


def test_the_windows_of_a_trace_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("round,client\n0,1\n1,1\n1,2\n3,0\n")
    draws = np.ones(4)
    availability = Availability.make(str(path), 4, draws)
    chosen = CohortSelector(availability, draws, rule="uniform", limit=4, seed=0, window=2)
    assert [chosen.select(k).clients.tolist() for k in (0, 1)] == [[1, 2], [0]]
    assert chosen.expected_cohort == chosen.mean_cohort == 1.5


def test_a_secret_coin_takes_no_windows() -> None:
    with pytest.raises(InvalidValueError, match="rounds_per_release=2 must be 1"):
        selector(rule="poisson", secret=True, window=2)
    coin = {"amplification": True, "selection": "poisson", "policy": "worst_case"}
    with pytest.raises(InvalidValueError, match="rounds_per_release=1, not 2"):
        tiny(mode="certified", noise_seed=None, rounds_per_release=2, **coin)


def windowed(folder: Path, **changes: Any) -> RunResult:
    settings = {
        "mode": "certified",
        "num_rounds": 8,
        "rounds_per_release": 3,
        "noise_seed": None,
        "epsilon": 3.0,
    }
    settings |= {"availability": "beta", "policy": "worst_case", "clients_per_round": 10}
    return run_config(tiny(**{**settings, **changes, "output_dir": str(folder)}))


def test_a_client_is_charged_once_for_each_window_in_which_it_joined(tmp_path: Path) -> None:
    result = windowed(tmp_path)
    assert result.folder is not None
    with Ledger.open(result.folder / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok
        written = ledger.export()
    releases = [entry for entry in written["entries"] if entry["kind"] == "settle"]
    assert sorted(entry["round"] for entry in releases) == [0, 1, 2]  # of eight rounds
    (population,) = written["populations"]
    spent = np.asarray([float(row["mu2_spent"]) for row in population["client_rows"]])
    cohorts = result.result["cohorts"]
    joins = np.bincount(np.concatenate(cohorts).astype(int), minlength=10)
    assert len(cohorts) == 3
    assert 0 < joins.max() <= 3
    budget = get_sigma_gaussian(3.0, 1e-5) ** -2  # for at most three joins of a client
    np.testing.assert_allclose(spent, joins * budget / 3, rtol=1e-4)
    assert any("counts once" in note for note in result.statement.notes)
    assert resume_run(result.folder).statement == result.statement
