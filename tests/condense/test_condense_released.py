"""What is made of a certified release: the head itself, and networks that learn from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from condense_samples import certified

from fedquilt.condense.training import TrainingSettings
from fedquilt.data import load_dataset
from fedquilt.errors import InvalidValueError
from fedquilt.experiment.api import run_config
from fedquilt.record.result import RunResult
from fedquilt.report import condensation_row
from reproduction.baselines import baseline_row
from reproduction.baselines import released as uses
from reproduction.baselines.released import transfer_set


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunResult]:
    """Yield a small certified condensation, whose networks learn little and quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uses, "DRAWINGS", 30)
        patch.setattr(uses, "ON_IMAGES", TrainingSettings(1))
        patch.setattr(uses, "DISTILLATION", TrainingSettings(1, 16))
        yield run_config(certified(output_dir=str(tmp_path_factory.mktemp("runs"))))


def test_the_head_is_the_one_that_was_released(finished: RunResult) -> None:
    release = uses.released(certified(), finished)
    _, test = load_dataset("digits")
    scores = release.front(test.images).flatten(1) @ release.head.T
    expected = float((scores.argmax(dim=1) == test.targets).float().mean())
    row = baseline_row("head", finished)
    assert row["accuracy"] == pytest.approx(expected, abs=1e-6)
    assert row["raw"] is False
    assert "no images are needed" in row["note"]


def test_drawings_and_images_carry_the_heads_soft_labels(finished: RunResult) -> None:
    release = uses.released(certified(), finished)
    images, shares = transfer_set(release, 7, seed=3)
    assert len(images) == len(shares) == 7 + len(release.images)
    assert torch.equal(images[7:], release.images)
    features = release.front(images).flatten(1)
    assert torch.allclose(shares, (features @ release.head.T).softmax(dim=1), atol=1e-5)
    again, _ = transfer_set(release, 7, seed=3)
    assert torch.equal(images, again)
    alone, _ = transfer_set(release, 0, seed=3)
    assert torch.equal(alone, release.images)


def test_networks_are_rows_that_the_folder_keeps(finished: RunResult) -> None:
    rows: dict[str, Any] = {name: baseline_row(name, finished) for name in ("network", "distilled")}
    assert "30 public drawings" in rows["distilled"]["note"]
    assert "neither head nor front" in rows["network"]["note"]
    assert baseline_row("distilled", finished) == rows["distilled"]
    note = condensation_row(finished.result)["note"]
    assert "trained on the images alone" in note
    assert "of the head's condition unmet" in note


def test_only_a_bounded_run_has_released_a_head(finished: RunResult) -> None:
    with pytest.raises(InvalidValueError, match="after a certified condensation"):
        uses.released(certified().replace(mode="fednum"), finished)
