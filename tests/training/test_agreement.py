"""Every mode and the built-in models, cohort by cohort: the engines train what sequential does.

`benchmarks/agreement.py` has all models, and the engines that start processes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fedquilt.config.modes import MODES
from fedquilt.models import MODELS
from fedquilt.training import ClientUpdate
from fedquilt.training.trainers.manual import ManualTrainer

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "agreement.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("agreement", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["agreement"] = module
    spec.loader.exec_module(module)
    return module


agreement = load()
IN_PROCESS = ("batched", "stacked")


def test_every_built_in_model_has_its_row() -> None:
    assert set(agreement.SHAPES) == set(MODELS)


@pytest.mark.parametrize("mode", [*MODES, agreement.AMPLIFIED])
def test_engines_agree_in_every_mode(mode: str) -> None:
    cells = agreement.compare("digits", mode, IN_PROCESS)
    assert set(cells) == set(IN_PROCESS)
    for gaps in cells.values():
        # A client may meet a tie: a rectifier at zero, which rounding sends either way.
        assert all(gap.far <= agreement.LIMIT or gap.by_chance for gap in gaps), cells
        assert 0 < max(gap.far for gap in gaps) < 1e-2, cells


@pytest.mark.parametrize("model", ["mlp", "linear", "hog-linear"])
def test_engines_agree_on_small_models(model: str) -> None:
    cells = agreement.compare(model, "fedavg", IN_PROCESS)
    assert all(gap.far <= agreement.LIMIT for gaps in cells.values() for gap in gaps), cells


def test_a_difference_is_seen() -> None:
    """In an update, a loss, the number of samples, and who it is of."""

    def update(client: int = 0, value: float = 1.0, samples: int = 3, loss: float = 0.5) -> list:
        return [ClientUpdate(client, torch.tensor([value, 2.0]), samples, loss)]

    assert agreement.differences(update(), update()) == [0]
    assert 1e-3 < agreement.differences(update(value=1.01), update())[0] < 1e-2
    assert agreement.differences(update(loss=0.6), update()) == [pytest.approx(0.1)]
    for other in (update(client=1), update(samples=2), update(value=float("nan"))):
        assert agreement.differences(other, update()) == [float("inf")]


def test_what_is_not_rounding_is_not_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is wrong by a thousandth is wrong, whatever nudges of the start do."""
    train = ManualTrainer.train

    def wrong(self: Any, *given: Any) -> Iterator[ClientUpdate]:
        for update in train(self, *given):
            yield dataclasses.replace(update, delta=update.delta * 1.001)

    monkeypatch.setattr(ManualTrainer, "train", wrong)
    monkeypatch.setattr(agreement, "DRAWS", 1)
    cells = agreement.compare("mlp", "fedavg", ["batched"])
    assert not any(gap.by_chance or gap.far < 9e-4 for gap in cells["batched"])
