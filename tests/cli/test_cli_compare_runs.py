"""`fedquilt compare RUN...`: finished runs, four tables, figures."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedquilt.common.formatting import format_bound
from fedquilt.experiment.api import run_config
from fedquilt.privacy.ledger import Ledger
from fedquilt.report.comparison import as_csv, as_latex, as_markdown
from run_samples import tiny

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five finished runs: a mode with two seeds, a mode in two settings, one with a budget."""
    place = tmp_path_factory.mktemp("compared")
    changes: list[dict[str, Any]] = [{"mode": "fedavg", "seed": seed} for seed in (0, 1)]
    changes += [{"mode": "certified", "noise_seed": None, "epsilon": e} for e in (2.0, 4.0)]
    for change in [*changes, {"mode": "quap_fl"}]:
        run_config(tiny(**change, output_dir=str(place)))
    return place


def test_tables_in_four_formats(folder: Path, cli: Cli) -> None:
    said = cli("compare", folder, "-o", "out", "--figures", "none", "--json")
    record = said.json()
    assert record["figures"] == []
    assert set(record["tables"]) == {"json", "csv", "md", "tex"}
    stored = json.loads(Path("out/comparison.json").read_text())
    assert stored["rows"] == record["table"]
    labels = [row["label"] for row in stored["rows"]]
    assert labels == ["certified, epsilon=2.0", "certified, epsilon=4.0", "fedavg", "quap_fl"]
    assert stored["rows"][2]["seeds"] == [0, 1]
    assert stored["rows"][2]["interval"] is None, "two seeds have none"
    lines = list(csv.DictReader(Path("out/comparison.csv").read_text().splitlines()))
    assert [line["label"] for line in lines] == labels
    assert float(lines[2]["accuracy_mean"]) == stored["rows"][2]["accuracy_mean"]
    assert Path("out/comparison.md").read_text().count("\n") == 6
    tex = Path("out/comparison.tex").read_text()
    assert r"quap\_fl" in tex
    assert tex.count(r"\multicolumn") == 3


@pytest.mark.parametrize(
    ("ending", "figures"),
    [pytest.param("pdf", "all", marks=pytest.mark.slow), ("svg", "training,paper")],
)
def test_every_figure_takes_several_runs(folder: Path, cli: Cli, ending: str, figures: str) -> None:
    said = cli("compare", folder, "-o", "out", "--figures", figures, "--format", ending, "--json")
    names = [Path(path).name for path in said.json()["figures"]]
    assert f"training.{ending}" in names[:2]
    assert names[-2:] == [f"figure2_accuracy.{ending}", f"figure3_privacy_by_group.{ending}"]
    assert sum(name.startswith("seeds_") for name in names) == (4 if figures == "all" else 0)
    for name in names:
        content = Path("out", name).read_bytes()
        if ending == "pdf":
            assert b"/FontFile2" in content  # TrueType, embedded
            assert b"/Type3" not in content
        else:
            assert b"<text" not in content  # letters are paths: no font is needed


def test_runs_of_one_ledger_end_with_what_they_cost_together(cli: Cli, tmp_path: Path) -> None:
    ledger = tmp_path / "people.sqlite"
    shared = {"mode": "certified", "noise_seed": None, "ledger": str(ledger), "allowance": 8.0}
    for epsilon in (2.0, 3.0):
        run_config(tiny(**shared, epsilon=epsilon, output_dir=str(tmp_path / "runs")))
    with Ledger.open(ledger, read_only=True) as opened:
        most = format_bound(float(opened.populations()[0].epsilons().max()))
    said = cli("compare", tmp_path / "runs", "-o", "out", "--figures", "none")
    together = " ".join(said.out.split())
    assert "Every client, over the runs of the ledger's population" in together
    assert f": ε ≤ {most} at δ = 1e-05" in together
    record = cli("compare", tmp_path / "runs", "-o", "out", "--figures", "none", "--json").json()
    assert [(one["runs"], one["bounded"]) for one in record["together"]] == [(2, True)]
    assert f"fedquilt ledger show {ledger}" in cli("compare", ledger).words


def test_what_cannot_be_compared_is_said(folder: Path, cli: Cli, tmp_path: Path) -> None:
    assert "name RUN... alone" in cli("compare", folder, "--epsilon", "3").words
    assert "figures='pie'" in cli("compare", folder, "--figures", "pie").words
    assert "format='gif'" in cli("compare", folder, "--format", "gif").words
    running = tmp_path / "running"
    running.mkdir()
    some = next(folder.glob("*fedavg_seed0*"))
    (running / "config.toml").write_bytes((some / "config.toml").read_bytes())
    assert "must be finished" in cli("compare", running).words


def test_a_run_that_is_not_finished_is_left_out_with_its_resume_command(
    folder: Path, cli: Cli, tmp_path: Path
) -> None:
    some = next(folder.glob("*fedavg_seed0*"))
    text = (some / "config.toml").read_text()
    place = tmp_path / "runs"
    (place / "done").mkdir(parents=True)
    for file in some.iterdir():
        if file.is_file():
            (place / "done" / file.name).write_bytes(file.read_bytes())
    (place / "killed").mkdir()
    (place / "killed" / "config.toml").write_text(text)
    (place / "own").mkdir()
    own = re.sub(r"(?m)^dataset = .*$", 'dataset = "custom"', text)
    assert own != text
    (place / "own" / "config.toml").write_text(own)
    said = cli("compare", place, "-o", "out", "--figures", "none")
    assert said.code == 0, said.err
    assert "fedavg" in said.out
    killed, made = [line for line in said.err.splitlines() if line.startswith("warning:")]
    assert f"fedquilt run --resume {place / 'killed'}" in killed
    assert f"resume='{place / 'own'}')" in made
    none = cli("compare", place / "killed", place / "own")
    assert none.code == 2
    assert "must be finished" in none.words
    assert "fedquilt run --resume" in none.words


def row(**changes: Any) -> dict[str, Any]:
    plain = {
        "level": "No guarantee (ε = ∞)",
        "label": "a|b_c & 100 % {x} \\\\ ~^#$",
        "metric": "accuracy",
        "mean": 0.5,
        "std": None,
        "interval": None,
        "seeds": [0],
        "epsilon_max": "inf",
        "claim": "none",
    }
    return {**plain, **changes}


def test_odd_names_stay_in_their_cells() -> None:
    assert r"a\|b_c" in as_markdown([row()])
    text = as_latex([row()])
    assert r"a|b\_c \& 100 \% \{x\} " in text
    assert r"\textbackslash{}" in text
    assert "$\\varepsilon$ = $\\infty$" in text
    (line,) = csv.DictReader(as_csv([row()]).splitlines())
    assert line["label"] == row()["label"]
    assert line["interval"] == ""
