"""Cells that were computed elsewhere are kept only where they are cells of the tables."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
CELL = "heflwr/full/iid-cifar10-depthfl-seed0.json"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool on a copy of the page that lacks two cells."""
    spec = importlib.util.spec_from_file_location("gpu_cells", ROOT / "tools" / "gpu_cells.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shutil.copytree(ROOT / "docs" / "reproduction", tmp_path / "reproduction")
    shutil.copy(ROOT / "docs" / "reproduction.md", tmp_path)
    for name in (CELL, "fednum/full/default-cifar10-seed0.json"):
        (tmp_path / "reproduction" / name).unlink(missing_ok=True)
    monkeypatch.setattr(module, "KEPT", tmp_path / "reproduction")
    return module


def _given(tmp_path: Path, **changes: object) -> argparse.Namespace:
    record = json.loads((ROOT / "docs" / "reproduction" / CELL).read_text())
    record["config"] |= changes
    path = tmp_path / "cells.jsonl"
    path.write_text(json.dumps({"path": CELL, "record": record}) + "\n")
    return argparse.Namespace(file=str(path))


def test_an_imported_cell_is_the_file_and_the_row_that_were_missing(
    tool: ModuleType, tmp_path: Path
) -> None:
    tool.import_cells(_given(tmp_path))
    kept = json.loads((tmp_path / "reproduction" / CELL).read_text())
    assert kept == json.loads((ROOT / "docs" / "reproduction" / CELL).read_text())
    row = next(
        line
        for line in (tmp_path / "reproduction.md")
        .read_text()
        .split("#### CIFAR-10, split")[1]
        .splitlines()
        if line.startswith("| DepthFL")
    )
    assert f"{100 * kept['accuracy']:.2f}" in row


def test_a_cell_of_other_settings_is_refused_and_leaves_nothing(
    tool: ModuleType, tmp_path: Path
) -> None:
    before = (tmp_path / "reproduction.md").read_bytes()
    with pytest.raises(SystemExit, match="not that of the table"):
        tool.import_cells(_given(tmp_path, num_rounds=1))
    assert not (tmp_path / "reproduction" / CELL).exists()
    assert (tmp_path / "reproduction.md").read_bytes() == before


def test_what_is_missing_is_run_longest_first(tool: ModuleType, tmp_path: Path) -> None:
    given = argparse.Namespace(
        out=str(tmp_path / "out"),
        work=str(tmp_path / "work"),
        scale="full",
        papers="fednum,heflwr",
        rounds=None,
        only="default-cifar10-seed0,iid-cifar10-depthfl-*,iid-mnist-*",
    )
    names = [cell.name for _, cell in tool.Driver(given).missing()]
    assert names == ["default-cifar10-seed0", "iid-cifar10-depthfl-seed0"]
