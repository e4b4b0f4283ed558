"""What a run says before it spends, against what then happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.config import MODES, build_config
from fedquilt.errors import InvalidValueError
from fedquilt.experiment.api import run_in_memory
from fedquilt.experiment.preflight import cohort_line, noise_feasibility, preflight_lines
from fedquilt.population import Availability, CohortSelector, propensities
from fedquilt.privacy.mechanism import RoundPlan
from fedquilt.privacy.secure import SecureCertified
from fedquilt.setup.build_task import build_task
from fedquilt.setup.task import build_selector
from run_samples import flags

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")
Cli = Callable[..., Any]
SMALL = {"model": "linear", "num_clients": 20, "num_rounds": 6, "eval_every": 6}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"availability": "always"},
        {"policy": "worst_case"},
        {"policy": "cap", "max_joins": 2},
        {"clipping": "quantile", "clip_norm": 1.0},
        {"adjacency": "replace_one"},
        {"noise_bands": 2},
        {"secure_aggregation": "simulated", "availability": "always"},
        {"epsilon": 1.0, "delta": 1e-6, "clip_norm": 3.0, "clients_per_round": 0.2},
        {"availability": "always", "selection": "poisson", "clients_per_round": 0.5},
        {
            "availability": "always",
            "selection": "poisson",
            "clients_per_round": 0.5,
            "policy": "worst_case",
            "amplification": True,
        },
        {"mode": "fixed_dp", "noise_layers": "all"},
        {"mode": "quap_fl", "noise_layers": "all", "min_clip": 1.0, "max_clip": 1.0001},
    ],
    ids=str,
)
def test_the_noise_is_the_runs(changes: dict[str, Any]) -> None:
    """The planned deviation on the mean is that of the first release, at this clip."""
    config = build_config({**SMALL, **changes})
    settled, problem = build_task(config)
    planned = noise_feasibility(settled, problem.selector, 650)
    done = run_in_memory(config)
    first = done.result["history"]["noise_stats"][0]["sigma"]
    expected = planned.noise_std_on_mean
    if changes.get("policy") == "cap":  # joins run out, so that a round has fewer on average
        expected *= planned.cohort / problem.selector.expected_cohort
    if settled.mode != "certified":  # divided by who came, not by who was expected
        expected *= planned.cohort / len(done.result["cohorts"][0])
        if settled.mode == "quap_fl":  # whose budget is a little above the base
            assert 1.0 <= expected / first <= 1.5
            return
    assert first == pytest.approx(expected, rel=2e-4)


def test_the_plan_says_bits_and_survivors_of_secure_aggregation(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[RoundPlan] = []
    plan_round = SecureCertified.plan_round

    def noting(mechanism: SecureCertified, *args: Any) -> RoundPlan:
        plans.append(plan_round(mechanism, *args))
        return plans[-1]

    monkeypatch.setattr(SecureCertified, "plan_round", noting)
    settings = {**SMALL, "availability": "always", "secure_aggregation": "simulated"}
    run_in_memory(build_config(settings))
    bits, size = plans[0].bits, -(-plans[0].bits * 650 // 8)
    options = [part for k, v in settings.items() for part in (f"--{k.replace('_', '-')}", str(v))]
    said = " ".join(cli("plan", *options).out.split())
    record = cli("plan", *options, "--json").json()["secure_aggregation"]
    assert (record["bits"], record["bytes_update"], record["least"]) == (bits, size, plans[0].least)
    assert record["price"] == pytest.approx(1.005, abs=0.003)
    assert f"{bits} bits a number, {size:,} bytes a client and round" in said
    assert f"{plans[0].least} of 20 must answer; noise 1.0" in said


def test_the_number_of_parameters_is_the_runs(cli: Cli) -> None:
    for options, count in (
        (["--model", "linear"], 650),
        (["--model", "hog-linear"], 1280),
        (["--model", "digits", "--trainable", "fc*"], None),
        (["--mode", "quap_fl", "--model", "digits"], None),
    ):
        named = dict(zip([o[2:] for o in options[::2]], options[1::2], strict=True))
        config, problem = build_task(build_config(named))
        line = preflight_lines(config, problem)[1]
        record = cli("plan", *options, "--json").json()
        assert noise_feasibility(config, problem.selector, record["parameters"]).line == line
        assert count in (None, record["parameters"])


@pytest.mark.parametrize(
    ("kind", "rule", "limit"),
    [
        *(("beta", "uniform", limit) for limit in (5, 25, 30, 100)),
        *(("uniform", "uniform", 30), ("always", "uniform", 30), ("always", "weighted", 7)),
        *(("beta", "poisson", 40), ("always", "poisson", 40)),
    ],
)
def test_the_mean_cohort_is_what_rounds_have(kind: str, rule: str, limit: int) -> None:
    draws = propensities(100, np.random.default_rng(1))
    availability = Availability.make(kind, 100, draws)
    selector = CohortSelector(availability, draws, rule=rule, limit=limit, seed=3)
    sizes = [len(selector.select(index).clients) for index in range(800)]
    assert selector.mean_cohort == pytest.approx(np.mean(sizes), rel=0.02)


def test_a_trace_has_the_mean_of_its_rounds(here: Path) -> None:
    (here / "trace.csv").write_text("round,client\n0,1\n0,2\n0,3\n2,4\n")
    config = build_config({"availability": "trace.csv", "num_clients": 10, "mode": "fedavg"})
    selector = build_selector(config.replace(clients_per_round=2), 10)
    assert selector.mean_cohort == 1.0
    assert cohort_line(selector) == "on average 1 of 10 clients join a round"


@pytest.mark.parametrize("mode", MODES)
def test_a_run_says_who_joins_and_what_the_noise_does(cli: Cli, mode: str) -> None:
    said = cli("run", *flags(mode=mode, noise_seed=None, num_rounds=1))
    assert said.code == 0
    lines = said.err.splitlines()
    assert lines[0] == f"digits {mode}: on average 3 of 10 clients join a round"
    noise = [line for line in lines if "noise over the run" in line]
    assert len(noise) == (mode != "fedavg")
    if mode not in ("fedavg", "certified"):
        assert noise[0].endswith("adds noise far above what its epsilon needs.")


def test_the_long_tail_of_a_data_set_is_said(cli: Cli) -> None:
    said = cli(
        "run", "--mode", "fedavg", "--num-rounds", 1, "--model", "linear", "--local-epochs", 1
    )
    assert "digits fedavg: on average 27.4 of 100 clients join a round" in said.err


def test_a_hopeless_run_is_said_before_anything_is_spent(here: Path) -> None:
    """The line comes before the ledger exists."""
    heard: list[str] = []

    class Listener(fedquilt.Observer):
        def expects(self, config: Any, lines: Any) -> None:
            heard.extend(lines)
            assert not (here / "l.sqlite").exists()

    data = torch.zeros(4, 200), torch.zeros(4, dtype=torch.int64)
    run = (nn.Linear(200, 2), data, data, [[0, 1], [2, 3]])
    settings = {"ledger": "l.sqlite", "population": "two", "num_rounds": 1}
    fedquilt.run(*run, observer=Listener(), quiet=True, **settings)  # type: ignore[arg-type]
    assert heard[0] == "all 2 clients join every round"
    assert ", hopeless; first train fewer parameters: " in heard[1]
    assert heard[2].startswith("the run goes on all the same: Ctrl-C stops it")
    assert (here / "l.sqlite").exists()


@pytest.mark.parametrize("observer", [3, "print", [print]])
def test_an_observer_that_cannot_be_called_costs_nothing(here: Path, observer: Any) -> None:
    data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(InvalidValueError, match=r"^observer=.* must be an Observer, or a function"):
        fedquilt.run(nn.Linear(2, 2), data, data, [[0, 1], [2, 3]], observer=observer)
    assert list(here.iterdir()) == []


PLANS = [
    ["--policy", "worst_case"],
    ["--availability", "always", "--clients-per-round", "0.5"],
    ["--clipping", "quantile"],
    ["--preset", "paper-mnist", "--mode", "certified"],
    ["--mode", "quap_fl"],
    ["--num-clients", "79", "--clients-per-round", "1.0", "--num-rounds", "25", "--epsilon", "6"],
]


@pytest.mark.parametrize("options", PLANS, ids=str)
def test_a_plan_takes_the_options_of_a_run(cli: Cli, options: list[str]) -> None:
    record = cli("plan", *options, "--json").json()
    assert record["verdict"] in ("workable", "hard", "hopeless")
    shown = cli("plan", *options)
    assert f"verdict                                   {record['verdict']}" in shown.out
    assert "clients join" in shown.out
    assert "low-rank" not in shown.out


def test_a_plan_knows_who_will_be_there(cli: Cli) -> None:
    """A long tail is 2 of 7 on average, however many are allowed."""
    record = cli("plan", *PLANS[-1], "--json").json()
    assert record["cohort"] == pytest.approx(79 * 2 / 7)
    assert cli("plan", *PLANS[0], "--json").json()["joins"] == 60
    by_hand = cli("plan", "--clip-norm", "0.2", "--json").json()
    assert by_hand["joins"] == pytest.approx(1 + 59 * 2 / 7)
    by_recipe = 1 + 19 * (1 - 30 / (8 * 9))  # windows of three rounds
    assert cli("plan", "--json").json()["joins"] == pytest.approx(by_recipe)
    said = cli("plan").out
    assert "recipe: N mu = 131 affords 20 releases, one every 3 rounds" in said
    assert re.search(r"releases +20\n", said), "not rounds: of those there are 60"
    assert "with seed 0, on average 59.7 of 100 clients join a window of 3 rounds" in said
    assert "20 releases, one a round, in which" in cli("plan", "--num-rounds", 20).out


def test_a_plan_without_noise_is_none(cli: Cli) -> None:
    said = cli("plan", "--mode", "fedavg")
    assert said.code == 2
    assert "mode='fedavg' must be one of 'fixed_dp'" in said.words
