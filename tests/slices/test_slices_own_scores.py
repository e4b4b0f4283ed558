"""What each width's own small model reaches on the test data: record, table, figure, page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from slices_samples import data, network, problem

import fedquilt
from fedquilt.report import plot_training_history, slices_table
from fedquilt.report.views.run import run_view
from fedquilt.setup.federation import build_method
from fedquilt.slices import slice_model
from fedquilt.slices.method import Slices


def run(folder: Path, **more: Any) -> fedquilt.RunResult:
    inputs, labels, clients = data()
    settings: dict[str, Any] = {"num_rounds": 4, "eval_every": 2, "quiet": True, "tiers": "1,1/2"}
    both = (inputs, labels)
    return fedquilt.run(
        *(network(), both, both, clients), output_dir=str(folder), **{**settings, **more}
    )


@pytest.mark.parametrize("mode", ["fedavg", "certified"])
def test_every_width_is_scored_by_itself_and_that_is_public(tmp_path: Path, mode: str) -> None:
    done = run(tmp_path, method="fjord", mode=mode)
    assert done.folder is not None
    assert done.model is not None
    written = (done.folder / "rounds.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in written]
    assert ["tiers" in line for line in lines] == [False, True, False, True]
    inputs, labels, _ = data()
    with torch.no_grad():
        outputs = slice_model(done.model, "1/2")(inputs)
    accuracy = float((outputs.argmax(1) == labels).float().mean())
    assert lines[-1]["tiers"]["1/2"]["accuracy"] == pytest.approx(accuracy)
    assert lines[-1]["tiers"]["1"]["accuracy"] == done.final_accuracy
    assert done.result["history"]["tiers"] == [lines[1]["tiers"], lines[3]["tiers"]]
    tiers = {tier["width"]: tier["test"] for tier in done.result["slices"]["tiers"]}
    assert tiers == lines[-1]["tiers"]
    again = fedquilt.load(done.folder, network())
    table = slices_table(again.result["slices"])
    assert "test accuracy" in table
    assert f"{accuracy:.4f}" in table
    view = run_view(done.folder, private=False)
    assert view["tiers"]["rounds"] == [2, 4]
    assert view["tiers"]["widths"]["1/2"][-1] == pytest.approx(accuracy, abs=1e-3)


def test_heterofls_small_model_is_scored_with_its_scaler(tmp_path: Path) -> None:
    """As it was trained: without the scaler it is another model."""
    done = run(tmp_path, method="heterofl")
    assert done.model is not None
    inputs, labels, _ = data()
    own = done.result["slices"]["tiers"][1]["test"]
    small = slice_model(done.model, "1/2", scaled=True)
    with torch.no_grad():
        losses = [
            float(torch.nn.functional.cross_entropy(small.train(scaled)(inputs), labels))
            for scaled in (True, False)
        ]
    assert own["loss"] == pytest.approx(losses[0], rel=1e-5)
    assert own["loss"] != pytest.approx(losses[1], rel=1e-3)


def test_without_test_data_nothing_is_scored(tmp_path: Path) -> None:
    inputs, labels, clients = data()
    done = fedquilt.run(
        *(network(), (inputs, labels), None, clients),
        output_dir=str(tmp_path),
        method="heterofl",
        tiers="1,1/2",
        num_rounds=1,
        quiet=True,
    )
    assert all("test" not in tier for tier in done.result["slices"]["tiers"])
    assert "test accuracy" not in slices_table(done.result["slices"])


def test_the_figure_shows_the_widths(tmp_path: Path) -> None:
    history = run(tmp_path, method="fedrolex").result["history"]
    drawn = plot_training_history(history, "custom", 0, None, tmp_path / "with.png")
    plain = {key: value for key, value in history.items() if key != "tiers"}
    without = plot_training_history(plain, "custom", 0, None, tmp_path / "without.png")
    assert Path(drawn).read_bytes() != Path(without).read_bytes()


@pytest.mark.parametrize("secret", [False, True])
def test_a_secret_coin_is_not_told_by_the_widths_that_train(secret: bool) -> None:
    claims = {"mode": "certified", "policy": "worst_case", "selection": "poisson"}
    config, its = problem(method="heterofl", **claims, amplification=secret)
    method = build_method(config, its)
    assert isinstance(method, Slices)
    told: list[str] = []
    method.report_to(lambda what, share: told.append(what))
    list(method.engine.train(its.flat.read().clone(), [0, 1, 2, 3, 4, 5], 0, 0.1))
    assert (told == []) is secret
