"""`fedquilt compare`: several modes and seeds side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedquilt
from fedquilt.experiment import run_config
from run_samples import assert_same_run, flags, tiny

Cli = Callable[..., Any]


def compare_flags(**changes: Any) -> list[str]:
    """The options of a small comparison; `mode` and `seed` are not among them."""
    return flags(**{"noise_layers": "all", "noise_seed": None, **changes})


def test_json(cli: Cli, here: Path) -> None:
    said = cli(
        "compare", *compare_flags(), "--modes", "fixed_dp,fedavg", "--seeds", "0,1,5", "--json"
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
    options = [*compare_flags(noise_seed=2), "--tracker", "tensorboard"]
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
    assert_same_run(fedquilt.load(folder), run_config(alone))
    assert "quap_fl" in said.out
    assert "comparison.png" in said.out


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
