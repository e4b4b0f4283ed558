"""`fedquilt compare`: several modes and seeds side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedquilt
from fedquilt.common.colors import identities
from fedquilt.config import MODES, RunConfig, build_config
from fedquilt.config.modes import mode_colors, rules_for, strength
from fedquilt.experiment.api import run_config
from fedquilt.report.html_page import with_comparison
from fedquilt.report.runs import series_of
from fedquilt.report.style import looks_of
from fedquilt.report.views import page_view
from run_samples import assert_same_run, flags, tiny

Cli = Callable[..., Any]


def compare_flags(**changes: Any) -> list[str]:
    """The options of a small comparison; `mode` and `seed` are not among them."""
    dropped = {"mode": None, "noise_seed": None, "clip_norm": None, "normalise_updates": None}
    return flags(**{**dropped, "epsilon": None, **changes})


def test_json(cli: Cli, here: Path) -> None:
    said = cli(
        *("compare", *compare_flags(epsilon=3.0)),
        *("--modes", "fixed_dp,fedavg", "--seeds", "0,1,5", "--json"),
    )
    record = said.json()
    assert list(record) == ["runs", "table", "figure"]
    assert [(run["mode"], run["seed"]) for run in record["runs"]] == [
        (mode, seed) for mode in ("fixed_dp", "fedavg") for seed in (0, 1, 5)
    ]
    assert (here / record["figure"]).read_bytes().startswith(b"\x89PNG")
    assert {"mode", "accuracy_mean", "accuracy_std", "epsilon_max"} <= record["table"][0].keys()
    rows = {row["mode"]: row for row in record["table"]}
    assert list(rows) == ["fedavg", "fixed_dp"]
    for mode, row in rows.items():
        runs = [run for run in record["runs"] if run["mode"] == mode]
        accuracies = [run["final_accuracy"] for run in runs]
        assert row["accuracy_mean"] == pytest.approx(statistics.mean(accuracies))
        assert row["accuracy_std"] == pytest.approx(statistics.stdev(accuracies))
        assert row["accuracy_std"] > 0
    worst = max(r["statement"]["epsilon_max"] for r in record["runs"] if r["mode"] == "fixed_dp")
    assert rows["fixed_dp"]["epsilon_max"] == worst
    assert rows["fedavg"]["epsilon_max"] == "inf"
    assert said.err == ""
    alone = run_config(tiny(mode="fedavg", seed=5, output_dir=str(here / "alone")))
    assert alone.final_accuracy == record["runs"][-1]["final_accuracy"]
    compared = fedquilt.load(here / record["runs"][-1]["output"])
    assert compared.result["cohorts"] == alone.result["cohorts"]


def test_every_run_has_its_own_folder(cli: Cli, here: Path) -> None:
    options = [*compare_flags(noise_seed=2, epsilon=3.0), "--tracker", "tensorboard"]
    said = cli("compare", *options, "--modes", "quap_fl", "--seeds", "3")
    assert said.code == 0
    (together,) = (here / "results").iterdir()
    assert together.name.startswith("compare_digits_")
    (folder,) = [path for path in together.iterdir() if path.is_dir()]
    assert folder.name.startswith("digits_quap_fl_seed3_")
    assert (folder / "tensorboard").is_dir()
    assert {f"comparison.{ending}" for ending in ("png", "json", "csv", "md", "tex")} == {
        path.name for path in together.iterdir() if path.is_file()
    }
    alone = tiny(mode="quap_fl", seed=3, noise_seed=2, noise_layers="all", output_dir=str(here))
    done = fedquilt.load(folder)
    # What the mode does not use is what the modes of a comparison share.
    assert_same_run(done, run_config(alone.replace(clip_norm=0.2, normalise_updates=True)))
    assert "quap_fl" in said.out
    assert "comparison.png" in said.out
    assert said.out.endswith(f"next: fedquilt report results/{together.name}\n")


def test_a_comparison_of_runs_that_diverged(cli: Cli) -> None:
    options = compare_flags(server_lr=1e300)
    record = cli("compare", *options, "--modes", "fedavg", "--seeds", "0", "--json").json()
    assert record["runs"][0]["final_loss"] is None
    assert record["table"][0]["accuracy_std"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--modes", "fedavg,quapfl"], "modes='quapfl' must be one of"),
        (["--modes", "fedavg,quapfl"], "did you mean 'quap_fl'?"),
        (["--modes", ""], "modes='' must be one of"),
        (["--modes", "fedavg,fedavg"], "must not repeat"),
        (["--seeds", "0,0"], "must not repeat"),
        (["--seeds", "0,one"], "seeds='0,one' must be whole numbers joined by commas"),
        (["--seeds", "0,1.5"], "seeds='0,1.5' must be whole numbers joined by commas"),
        (["--seeds", ""], "seeds='' must be whole numbers joined by commas"),
        (["--seeds", "1,-2"], "seeds=-2 must be >= 0"),
        (["--seed", "1"], "--seed"),
        (["--mode", "fedavg"], "--mode"),
        (["--learning-rate", "0"], "learning_rate=0.0 must be > 0"),
        (["--dataset", "minst"], "did you mean 'mnist'?"),
        (["--modes", "fedavg,quap_fl", "--noise-layers", "nix"], "noise_layers='nix' must match"),
        (["--modes", "fedavg", "--clients-per-round", "11"], "clients_per_round=11"),
    ],
    ids=str,
)
def test_mistakes_are_found_before_the_first_run(
    cli: Cli, here: Path, options: list[str], words: str
) -> None:
    said = cli("compare", *compare_flags(), *options)
    assert said.code == 2
    assert words in said.words
    assert said.out == ""
    assert "Traceback" not in said.err
    assert list(here.iterdir()) == []


def test_policies_of_certified_stand_side_by_side(cli: Cli, here: Path) -> None:
    """Worst-case accounting at the same epsilon, in the table and in the figure."""
    arms = "certified:worst_case,certified"
    options = compare_flags(epsilon=2.0, num_rounds=3, availability="beta")
    record = cli("compare", *options, "--modes", arms, "--seeds", "0", "--json").json()
    assert [row["mode"] for row in record["table"]] == ["certified", "certified:worst_case"]
    configs = [fedquilt.load(here / run["output"]).result["metadata"] for run in record["runs"]]
    assert [one["hyperparameters"]["policy"] for one in configs] == ["worst_case", "adaptive"]
    assert {one["hyperparameters"]["epsilon"] for one in configs} == {2.0}
    names, result = (
        ["certified:worst_case", *MODES],
        fedquilt.load(here / record["runs"][0]["output"]),
    )
    runs = [{**result.result, "mode": name} for name in names]
    assert len({look.color for look in looks_of(series_of(runs))}) == len(names)


def test_a_page_shows_each_setting_as_the_figure_does(cli: Cli, here: Path) -> None:
    """comparison.png and the page of the same runs: one look a series, whichever ran first."""
    arms = "certified:worst_case,certified,fedavg"
    options = compare_flags(num_rounds=2, epsilon=2.0)
    record = cli("compare", *options, "--modes", arms, "--seeds", "0", "--json").json()
    paths = [here / run["output"] for run in record["runs"]]
    named = zip(arms.split(","), paths, strict=True)
    drawn = series_of([{**fedquilt.load(path).result, "mode": arm} for arm, path in named])
    data = with_comparison(page_view(paths, look=False))
    looks = identities([one.looks_as for one in drawn], mode_colors())
    figure = {one.label: look.color for one, look in zip(drawn, looks, strict=True)}
    shown = {one["label"].replace(", policy=", ":"): one["color"] for one in data["series"]}
    assert shown == figure
    assert shown["certified"] == mode_colors()["certified"]


def test_an_arm_may_have_an_epsilon_of_its_own(cli: Cli, here: Path) -> None:
    arms = ("--modes", "fixed_dp,fixed_dp:1.5", "--seeds", "0", "--json")
    record = cli("compare", *compare_flags(num_rounds=3, epsilon=2.0), *arms).json()
    assert [row["mode"] for row in record["table"]] == ["fixed_dp", "fixed_dp:1.5"]
    configs = [fedquilt.load(here / run["output"]).result["metadata"] for run in record["runs"]]
    assert [one["hyperparameters"]["epsilon"] for one in configs] == [2.0, 1.5]


def test_an_option_may_be_for_one_policy_only(cli: Cli, here: Path) -> None:
    arms = ("--modes", "certified:worst_case,certified:cap", "--seeds", "0", "--json")
    record = cli("compare", *compare_flags(num_rounds=2), "--max-joins", 1, *arms).json()
    assert len(record["runs"]) == 2


def test_the_default_comparison_is_the_demos(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """One federation for all modes, worst-case accounting among them; `certified` as in a run."""
    seen: list[RunConfig] = []

    def remember(config: RunConfig, observer: object = None) -> None:
        seen.append(config)
        if len(seen) % 6 == 0:
            raise SystemExit(0)

    monkeypatch.setattr("fedquilt.experiment.api.run_config", remember)
    demo = Path(__file__).parents[2] / "demo.toml"
    cli("compare", "--seeds", "0", "--config", demo)
    assert [one.mode for one in seen] == [*MODES, "certified"]
    assert [one.policy for one in seen] == ["adaptive"] * 4 + ["worst_case", "adaptive"]
    same = {"mode": "certified", "policy": "adaptive", "output_dir": "x"}
    *shared, own = [one.replace(**same) for one in seen]
    assert set(shared) == {shared[0]}
    assert own == build_config({"mode": "certified"}, file=demo).replace(**same)
    rules = rules_for(strength(6.0, 1e-5, 100), 60)
    assert own == shared[0].replace(**rules) != shared[0]
    cli("compare", "--seeds", "0")
    again = [one.replace(output_dir="x") for one in seen[6:]]
    assert again == [one.replace(output_dir="x", num_clients=None) for one in seen[:6]]


def test_who_says_how_to_train_compares_modes_that_all_do_so(cli: Cli) -> None:
    """No recipe then, nor where certified names its policy; the model is one for all."""
    for options, arm in (({"learning_rate": 0.2}, {}), ({}, {"policy": "adaptive"})):
        arms = [{"mode": "fedavg"}, {"mode": "certified", **arm}]
        two = [build_config({**options, **one}, arms=arms) for one in arms]
        assert two[0] == two[1].replace(mode="fedavg")
    arms = [{"mode": "fedavg"}, {"mode": "certified"}]
    two = [build_config({"dataset": "mnist", **one}, arms=arms) for one in arms]
    assert two[0].model == two[1].model == "hog-linear"
    assert two[1].rounds_per_release > two[0].rounds_per_release
    swept = build_config({}, arms=[{"mode": "fedavg"}, {"mode": "certified"}])
    assert swept.rounds_per_release == 1


def test_the_table_says_which_row_follows_the_recipe(cli: Cli, here: Path) -> None:
    options = ("--num-rounds", 6, "--num-clients", 20, "--modes", "certified:worst_case,certified")
    said = cli("compare", *options, "--seeds", "0", "--quiet")
    assert "\ncertified: recipe: N mu =" in said.out
    assert "worst_case: recipe" not in said.out


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        ("certified:worst", "modes='worst' must be one of 'adaptive'"),
        ("fedavg:cap", "modes='fedavg:cap' must be 'certified' to name a policy"),
        ("fedavg:54", "modes='fedavg:54' must be a mode with noise, to name epsilon"),
        ("fixed_dp:-1", "epsilon=-1.0 must be"),
        ("certified:cap", "policy='cap' needs max_joins"),
    ],
)
def test_policies_that_are_none(cli: Cli, modes: str, words: str) -> None:
    said = cli("compare", "--modes", modes)
    assert said.code == 2
    assert words in said.words


def test_what_no_compared_mode_uses_is_refused(cli: Cli, here: Path) -> None:
    said = cli("compare", "--modes", "fedavg,certified", "--noise-layers", "all")
    assert said.code == 2
    assert "noise_layers='all' must be left out" in said.words
