"""Model cards: metadata that parse, figures of the statement, nothing that is not public."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import fedquilt
from fedquilt.experiment.api import RunResult, run_config
from fedquilt.report.views.claim import model_card
from run_samples import tiny


def certified(folder: Path, **changes: Any) -> RunResult:
    """Return a run of somebody's own clients, whose names and folder are nobody's business."""
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    people = {
        f"patient-{name}": range(k, 40, 4) for k, name in enumerate(("ann", "bo", "cy", "di"))
    }
    settings: dict[str, Any] = {"mode": "certified", "epsilon": 5.0, "num_rounds": 2, **changes}
    return fedquilt.run(
        nn.Linear(6, 2), (x, y), (x, y), people, output_dir=folder, quiet=True, **settings
    )


def test_the_metadata_parse_and_every_figure_is_the_statement_s(tmp_path: Path, cli: Any) -> None:
    done = certified(tmp_path / "secret-place")
    assert cli("card", done.folder).code == 0
    assert done.folder is not None
    text = (done.folder / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(text.split("---\n")[1])
    told = done.statement
    assert front["privacy"] == {
        "epsilon": 5.0,
        "delta": told.delta,
        "unit": "client",
        "adjacency": "zero-out",
        "covered": 2,
    }
    assert 4.99 < told.epsilon_max <= 5.0
    assert "differential-privacy" in front["tags"]
    assert front["metrics"] == list(done.metrics)
    assert told.claim[1:] in text
    assert all(note in text for note in told.notes)
    for name, value in done.metrics.items():
        assert f"| test {name} | {value:.6g} |" in text
    assert "4 clients" in text
    assert "in 2 rounds" in text
    assert fedquilt.load(done.folder, nn.Linear(6, 2)).metrics == done.metrics, "still a run"
    again = cli("card", done.folder)
    assert (again.code, "must not exist" in again.err) == (2, True)


def test_nothing_private_is_in_it(tmp_path: Path) -> None:
    done = certified(tmp_path / "secret-place")
    assert done.folder is not None
    text = model_card(done.result)
    assert "patient" not in text
    assert "secret-place" not in text
    assert str(tmp_path) not in text
    private = (done.folder / "private.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["train_loss"] for line in private]
    public = json.loads((done.folder / "result.json").read_text(encoding="utf-8"))
    known = {float(n) for n in re.findall(r"\d+\.\d+", json.dumps(public))}
    shown = {float(n) for n in re.findall(r"\d+\.\d+", text)}
    assert not shown & {loss for loss in losses if loss not in known}


def test_on_a_ledger_the_claim_is_the_lifetime_s_and_no_path_is_told(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"population": "people", "allowance": 8.0}
    shared["ledger"] = tmp_path / "secret-place" / "people.sqlite"
    shared["ledger"].parent.mkdir()
    done = [certified(tmp_path / str(i), epsilon=1.0, **shared) for i in range(2)][1]
    lifetime = done.result["ledger"]["lifetime_epsilon_max"]
    text = model_card(done.result)
    front = yaml.safe_load(text.split("---\n")[1])["privacy"]
    assert front["epsilon"] == 1.0
    assert lifetime <= front["lifetime_epsilon"] <= lifetime + 0.01
    assert front["lifetime_epsilon"] > 1.4
    claim = text.split("## What is claimed")[1].split("##")[0]
    assert claim.strip().startswith(
        "**Every client, over all runs of its ledger until this one ended: "
        f"epsilon <= {front['lifetime_epsilon']}"
    )
    assert "This run alone: every client: epsilon <= 1 " in claim
    assert "ledger people.sqlite" in text
    assert str(tmp_path) not in text
    assert "secret-place" not in text


@pytest.mark.parametrize("mode", ["fedavg", "quap_fl"])
def test_where_nothing_is_claimed_the_card_says_so(mode: str, tmp_path: Path) -> None:
    text = model_card(run_config(tiny(mode=mode, output_dir=str(tmp_path))).result)
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["privacy"]["epsilon"] == "inf"
    assert "differential-privacy" not in front["tags"]
    assert front["datasets"] == ["digits"]
    assert "no guarantee" in text
    assert "nothing is claimed" in text


def test_a_name_cannot_forge_a_line(tmp_path: Path) -> None:
    result = run_config(tiny(output_dir=str(tmp_path))).result
    result["statement"]["notes"].append("fine\n## What is claimed\n\nepsilon 0")
    assert model_card(result).count("\n## What is claimed\n") == 1
