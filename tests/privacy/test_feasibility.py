"""The plan of a run against the feasibility law worked out by hand."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from pathlib import Path

import pytest

from fedquilt.errors import InvalidValueError, StorageError
from fedquilt.privacy.accounting import Release, epsilon, gaussian_mu
from fedquilt.privacy.feasibility import Feasibility, plan_privacy, plan_table
from fedquilt.report.ledger import plan_figure

GOLDEN = tomllib.loads((Path(__file__).parents[1] / "golden" / "privacy.toml").read_text())
LAW = GOLDEN["feasibility"]
EVERYBODY = {
    "population": 100,
    "rounds": 200,
    "epsilon": 6.0,
    "delta": 1e-5,
    "parameters": LAW["hopeless_parameters"],
    "joins": None,
    "cohort": 100,
}


def asked(**changes: object) -> Feasibility:
    return plan_privacy(**{**EVERYBODY, **changes})  # type: ignore[arg-type]


def figures(text: str) -> list[float]:
    return [float(word.replace(",", "")) for word in re.findall(r"\d[\d,]*\.?\d*", text)]


def test_ratios_by_hand():
    result = asked(clip_norm=0.5, parameters=10_000, cohort=50)
    z = math.sqrt(200) / gaussian_mu(6.0, 1e-5)
    assert result.noise_multiplier == pytest.approx(z)
    assert result.noise_std_on_mean == pytest.approx(z * 0.5 / 50)
    noise_norm = result.noise_std_on_mean * math.sqrt(10_000)
    assert result.noise_to_signal_round == pytest.approx(noise_norm / 0.5)
    run_noise, run_signal = math.sqrt(200) * noise_norm, 200 * 0.5
    assert result.noise_to_signal_run == pytest.approx(run_noise / run_signal)


def test_the_plan_keeps_its_promise():
    result = asked(joins=60, cohort=30)
    spent = epsilon([Release(result.noise_multiplier, 60)], 1e-5, method="gdp").epsilon
    assert spent == pytest.approx(6.0, rel=1e-6)
    assert spent <= 6.0


def test_feasibility_law():
    hopeless = asked()
    assert not hopeless.workable
    assert hopeless.noise_to_signal_round > 100
    assert LAW["usable_magnitude"] / 2 < hopeless.usable_parameters < 2 * LAW["usable_magnitude"]
    assert asked(parameters=5_000).workable
    drowned = LAW["drowned_in_a_round_from"]
    assert asked(parameters=drowned + 1).noise_to_signal_round > 1
    assert asked(parameters=drowned).noise_to_signal_round < 1


@pytest.mark.slow
def test_feasibility_law_with_sampling():
    sampled = asked(cohort=30, sampling_rate=0.3)
    assert sampled.method == "pld"
    assert sampled.noise_to_signal_round == pytest.approx(LAW["noise_norm_sampled"], rel=3e-3)
    everybody = asked()
    assert sampled.noise_to_signal_run == pytest.approx(everybody.noise_to_signal_run, rel=0.05)
    assert "change little" in sampled.advice[2]


@pytest.mark.parametrize("rounds", [1, 10, 1000])
def test_rounds_cancel_when_everybody_joins_every_round(rounds):
    assert asked(rounds=rounds).noise_to_signal_run == pytest.approx(
        asked().noise_to_signal_run, rel=1e-9
    )


def test_levers_work_as_stated():
    """Each advised figure just turns the verdict; one less does not."""
    now = asked(parameters=100_000)
    parameters, cohort, joins, larger_epsilon = now.advice
    usable = int(figures(parameters)[0])
    assert usable == now.usable_parameters
    assert asked(parameters=usable).workable
    assert not asked(parameters=usable + 1).workable

    needed, _, people, _ = (int(x) for x in figures(cohort))
    assert needed == people == now.usable_cohort
    changed = {"parameters": 100_000, "population": people}
    assert asked(**changed, cohort=needed).workable
    assert not asked(**changed, cohort=needed - 1).workable

    most, _, people, _ = (int(x) for x in figures(joins))
    assert people == math.ceil(100 * 200 / most)
    changed = {"parameters": 100_000, "population": people}
    assert asked(**changed, joins=most).workable
    assert not asked(**{**changed, "population": 2 * people}, joins=most + 1).workable

    enough = figures(larger_epsilon)[0]
    assert asked(parameters=100_000, epsilon=enough).workable
    assert not asked(parameters=100_000, epsilon=enough * 0.99).workable


def test_advice_is_ordered_and_plain():
    advice = asked(parameters=100_000).advice
    openings = ["Train fewer parameters", "Let more clients", "Let each client join", "Accept"]
    assert [a.startswith(o) for a, o in zip(advice, openings, strict=True)] == [True] * 4
    assert "Fewer rounds alone change nothing" in advice[2]
    assert "too weak to mean much" in advice[3]


def test_advice_when_no_lever_is_enough():
    tiny = asked(population=2, cohort=0.02, joins=2, epsilon=0.01)
    assert tiny.usable_parameters == 0
    assert "even one would drown" in tiny.advice[0]
    assert "even one join" in tiny.advice[2]
    assert "Fewer rounds at the same joins make it worse" in tiny.advice[2]


def test_workable_advice():
    result = asked(parameters=3_920, rounds=50)
    assert result.workable
    assert result.advice[0].startswith("workable: over the run the noise is 0.478 times")
    assert len(result.advice) == 1
    assert result.line == "noise over the run: 0.48 of a typical update, workable"


@pytest.mark.parametrize(
    ("parameters", "verdict"),
    [(5_187, "workable"), (5_188, "hard"), (38_583, "hard"), (38_600, "hopeless")],
)
def test_the_verdict_has_three_words(parameters, verdict):
    result = asked(parameters=parameters)
    assert result.verdict == verdict
    assert verdict in result.line
    assert ("; first train fewer parameters" in result.line) == (verdict != "workable")
    assert verdict in plan_table(result).splitlines()[1]


def test_advice_names_only_what_exists():
    """There is no option for averaging a model over rounds, nor for low-rank updates."""
    from fedquilt.config import option_fields
    from fedquilt.config.choices import POLICIES

    for parameters in (5, 10_000, 100_000):
        told = " ".join(asked(parameters=parameters).advice)
        assert "verage the model" not in told
        assert "low-rank" not in told
        assert set(re.findall(r"`(\w+)`", told)) <= set(option_fields())
        assert set(re.findall(r"policy '(\w+)'", told)) <= set(POLICIES)


def test_a_noise_that_is_known_is_taken():
    """Levers follow: at this noise, 30.5 joins on average cost epsilon 6."""
    z = math.sqrt(30.5) / gaussian_mu(6.0, 1e-5)
    known = asked(joins=30.5, cohort=15, noise_multiplier=z, parameters=1000)
    assert known.noise_multiplier == z
    enough = figures(known.advice[3])[0]
    usable = 0.55 * 15 * math.sqrt(200 / 1000)
    spent = epsilon([Release(usable / math.sqrt(30.5), 1)], 1e-5, method="gdp").epsilon
    assert enough == pytest.approx(spent, rel=1e-2)


def test_more_clients_help_and_population_alone_does_not():
    assert asked(population=1000, cohort=1000).noise_to_signal_run == pytest.approx(
        asked().noise_to_signal_run / 10
    )
    assert asked(population=1000).noise_to_signal_run == asked().noise_to_signal_run


def test_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        asked().epsilon = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"population": 0}, r"population=0 must be >= 1"),
        ({"rounds": 1.5}, r"rounds=1.5 must be a whole number"),
        ({"epsilon": 0.0}, r"epsilon=0.0 must be > 0"),
        ({"delta": 1.0}, r"delta=1.0 must be > 0 and < 1"),
        ({"parameters": 0}, r"parameters=0 must be >= 1"),
        ({"joins": 0}, r"joins=0 must be >= 1"),
        ({"joins": 201}, r"joins=201 must be <= 200"),
        ({"cohort": 0}, r"cohort=0 must be > 0"),
        ({"cohort": 101}, r"cohort=101 must be <= 100 "),
        ({"joins": 60, "cohort": 31}, r"cohort=31 must be <= 30 .*all the joins there are"),
        ({"sampling_rate": 0.3, "cohort": 31}, r"cohort=31 must be <= 30 "),
        ({"sampling_rate": 0.0}, r"sampling_rate=0.0 must be > 0"),
        ({"clip_norm": -1.0}, r"clip_norm=-1.0 must be > 0"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(InvalidValueError, match=message):
        asked(**changes)


def test_table_holds_the_figures():
    rows = dict(re.split(r"\s{2,}", line) for line in plan_table(asked()).splitlines()[1:-1])
    assert rows["trainable parameters"] == "1,200,000"
    assert rows["noise multiplier, on the sum"] == "10.8"
    assert rows["noise / signal of the run"] == "8.37"
    assert rows["verdict"] == "hopeless"
    assert "workable" in plan_table(asked(parameters=100)).splitlines()[1]


def test_figure_is_written_in_the_format_of_its_suffix(tmp_path):
    path = plan_figure(asked(), tmp_path / "plan.svg")
    text = path.read_text()
    assert text.startswith("<?xml")
    assert "</svg>" in text
    picture = plan_figure(asked(parameters=5), str(tmp_path / "plan.png"))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_figure_lines_are_the_ratio():
    from matplotlib.figure import Figure

    from fedquilt.report.ledger import _draw_plan

    axes = Figure().add_subplot()
    now = asked()
    _draw_plan(axes, now)
    for factor, line in zip((1, 10, 100), axes.get_lines(), strict=False):
        right, height = line.get_xdata()[-1], line.get_ydata()[-1]
        expected = asked(parameters=int(right), population=100 * factor, cohort=100 * factor)
        assert height == pytest.approx(expected.noise_to_signal_run)
        assert line.get_label().startswith(f"{100 * factor:,} clients per round")
    marked = axes.get_lines()[-1]
    assert list(marked.get_xdata()) == [now.parameters]
    assert list(marked.get_ydata()) == [now.noise_to_signal_run]
    assert "5,187 parameters" in axes.get_lines()[0].get_label()


def test_figure_errors(tmp_path):
    with pytest.raises(InvalidValueError, match=r"suffix of the figure='.gif'"):
        plan_figure(asked(), tmp_path / "plan.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot (write|create) .*"):
        plan_figure(asked(), tmp_path / "file" / "plan.png")
