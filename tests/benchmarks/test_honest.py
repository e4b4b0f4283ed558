"""The table of accuracies at a proven epsilon: its cells, its page, and that every row can run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import honest
from fedquilt.config import build_config

DOCS = Path(__file__).parents[2] / "docs"
CELLS = [json.loads(line) for line in (DOCS / "honest.jsonl").read_text().splitlines()]


def test_the_page_shows_what_was_measured() -> None:
    assert honest.table(CELLS) in (DOCS / "honest.md").read_text()
    assert honest.summary(CELLS) in (DOCS.parent / "README.md").read_text()


def test_every_cell_keeps_to_the_epsilon_of_its_column() -> None:
    assert CELLS
    for cell in CELLS:
        if cell["row"] == "quap_fl":
            assert cell["stated"] == "inf"
        else:
            assert cell["stated"] <= cell["epsilon"], cell


def test_no_cell_was_run_twice() -> None:
    keys = [(x["set"], x["row"], x["epsilon"], x["seed"]) for x in CELLS]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", honest.SETS)
def test_settings_of_every_row_are_taken(name: str) -> None:
    models = set()
    for row in honest.ROWS:
        made = build_config(honest.settings(name, row, 3.0, 0))
        assert (made.average_late > 0) == row.startswith("ours")
        models |= {made.model} if row != "ours, hog" else set()
    assert len(models) == 1, "one head for all rows"


@pytest.mark.parametrize("row", ["ours", "adaptive clip", "quap_fl"])
def test_glyphs_run_in_every_mode(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(honest, "EACH", 40)
    monkeypatch.setattr(honest, "TESTED", 10)
    cell = honest.run_one("glyphs", row, 6.0, 0)
    assert (cell["stated"] == "inf") == (row == "quap_fl")
    assert cell["accuracy"] > 0
    if row == "ours":  # 17 releases in which 87 of 100 come: sqrt(1280 x 17) / 1.31 / 87
        assert cell["noise_to_signal"] == pytest.approx(1.29, abs=0.03)
