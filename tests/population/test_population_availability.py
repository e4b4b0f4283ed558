"""Who is there: the laws of the coins, and the trace file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedquilt.common.randomness import generator
from fedquilt.errors import DataError, InvalidValueError
from fedquilt.population import (
    UNIFORM_PROBABILITY,
    Availability,
    CohortSelector,
    load_trace,
    propensities,
)


def joins(availability: Availability, rounds: int, seed: int = 0) -> np.ndarray:
    """Count how often each client is there."""
    counts = np.zeros(availability.num_clients)
    for index in range(rounds):
        counts[availability.available(index, generator(seed, "select", index))] += 1
    return counts


def test_propensities_follow_beta_2_5() -> None:
    draws = propensities(4000, np.random.default_rng(1))
    assert stats.kstest(draws, stats.beta(2, 5).cdf).pvalue > 1e-3


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_beta_makes_a_long_tail_of_participation(seed: int) -> None:
    """100 clients, 200 rounds, everybody there is picked: some always come, some hardly ever."""
    draws = propensities(100, generator(seed, "propensity"))
    availability = Availability.make("beta", 100, draws)
    selector = CohortSelector(availability, draws, rule="uniform", limit=100, seed=seed)
    counts = np.zeros(100)
    for index in range(200):
        counts[selector.select(index).clients] += 1
    rates = counts / 200
    assert np.sum(rates > 0.5) >= 1
    assert np.sum(rates < 0.05) >= 1
    assert np.mean(rates) == pytest.approx(2 / 7, abs=0.06)


def test_each_client_flips_its_own_coin() -> None:
    """Counts are Binomial(rounds, q_i): the squared residuals are chi-square, q_i is kept."""
    draws = propensities(300, np.random.default_rng(5))
    counts = joins(Availability.make("beta", 300, draws), 400)
    residuals = (counts - 400 * draws) / np.sqrt(400 * draws * (1 - draws))
    assert 1e-3 < stats.chi2(300).cdf(np.sum(residuals**2)) < 1 - 1e-3


def test_coins_are_independent_over_clients() -> None:
    """The number of those present has the variance of a sum of independent coins."""
    availability = Availability.make("uniform", 500, np.empty(0))
    sizes = [availability.available(t, generator(3, "select", t)).size for t in range(2000)]
    expected = 500 * UNIFORM_PROBABILITY * (1 - UNIFORM_PROBABILITY)
    assert np.var(sizes) == pytest.approx(expected, rel=0.15)
    assert np.mean(sizes) == pytest.approx(500 * 2 / 7, rel=0.01)


def test_always_is_everybody() -> None:
    availability = Availability.make("always", 4, np.empty(0))
    assert availability.available(9, np.random.default_rng()).tolist() == [0, 1, 2, 3]


def test_expected_rates_come_from_public_knowledge(tmp_path: Path) -> None:
    draws = np.array([0.9, 0.9, 0.9])
    assert Availability.make("beta", 3, draws).expected_rate == 2 / 7
    assert Availability.make("uniform", 3, draws).expected_rate == 2 / 7
    assert Availability.make("always", 3, draws).expected_rate == 1.0
    path = tmp_path / "trace.csv"
    path.write_text("round,client\n0,0\n3,1\n3,2\n")
    assert Availability.make(str(path), 3, draws).expected_rate == pytest.approx(3 / (4 * 3))


@pytest.mark.parametrize("kind", ["betta", "", "trace.txt", "Always"])
def test_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(InvalidValueError, match=r"availability=.*'beta', 'uniform', 'always' or"):
        Availability.make(kind, 3, np.empty(0))


@pytest.mark.parametrize(
    "text",
    [
        "round,client\n0,2\n0,1\n2,0\n0,2\n",
        "client,round\n2,0\n1,0\n0,2\n",
        "\ufeffround,client\r\n0,2\r\n0,1\r\n2,0\r\n",
        "round,client,device\n0,2,phone\n0,1,\n\n2,0,watch\n",
    ],
)
def test_a_trace_lists_who_is_there(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8", newline="")
    trace = Availability.make(str(path), 3, np.empty(0))
    present = [trace.available(t, np.random.default_rng()).tolist() for t in range(4)]
    assert present == [[1, 2], [], [0], []]
    assert trace.available(0, np.random.default_rng()).dtype == np.int64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("round,client\n0,3\n", r"line 2: client=3 must be < num_clients=3"),
        ("round,client\n0,1\n0,-1\n", r"line 3: client='-1' must be a whole number >= 0"),
        ("round,client\n0,1\n1.5,1\n", r"line 3: round='1.5' must be a whole number >= 0"),
        ("round,client\n0\n", r"line 2: client=None must be"),
        ("round,client\n,1\n", r"line 2: round='' must be"),
        ("0,1\n0,2\n", r"expected a header with 'round' and 'client'"),
        ("", r"expected a header"),
    ],
)
def test_a_torn_trace_is_named_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load_trace(path, 3)


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"nowhere.csv' cannot be read: No such file"):
        load_trace(tmp_path / "nowhere.csv", 3)
    with pytest.raises(InvalidValueError, match="cannot be read"):
        load_trace(tmp_path, 3)
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"round,client\n\xff\xfe,1\n")
    with pytest.raises(DataError, match="not a CSV text file"):
        load_trace(path, 3)
