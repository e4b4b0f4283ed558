"""`tools/house.py`, which measures the source: its rounds run, and it sees what it counts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedquilt.config import build_config

TOOL = Path(__file__).resolve().parents[1] / "tools" / "house.py"


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "house", module)
    spec.loader.exec_module(module)
    return module


def test_its_runs_are_accepted(house: ModuleType) -> None:
    modes = {name: build_config(settings).mode for name, settings in house.ROUNDS.items()}
    assert modes["fedavg"] == "fedavg"
    assert modes["certified"] == modes["certified, heterofl"] == "certified"


def test_one_round_is_followed(house: ModuleType) -> None:
    source = TOOL.parents[1] / "src" / "fedquilt"
    trace = house.trace_round(house.ROUNDS["fedavg"], source)
    assert any(name.endswith("fedquilt/round.py") for name, _ in trace.seen)
    assert trace.num_functions > trace.num_files > 5


def test_cycles_are_found(house: ModuleType) -> None:
    edges = {"a": {"b"}, "b": {"a"}, "c": {"a"}}
    assert house.cycles(edges) == [["a", "b"]]
