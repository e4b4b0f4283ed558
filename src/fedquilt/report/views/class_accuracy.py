"""A second look at the released model: accuracy by class, and of the slices that tiers hold.

Only test data are used, which no client holds, so this costs no privacy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.common.errors import FedquiltError
from fedquilt.data import DATASETS, ImageDataset, load_dataset
from fedquilt.record.result import RunResult, load
from fedquilt.report.tables import tier_scores

if TYPE_CHECKING:
    import torch
    from torch import nn

NESTED = ("heterofl", "fjord")
"""Methods in which a narrow client's slice is the front part of everybody's model."""
_BATCH = 1024


def class_accuracy_view(path: Path) -> dict[str, Any] | None:
    """Return what a look at a finished run's model shows, None where there is nothing to see.

    Data that are not on this machine are not fetched for it.
    """
    try:
        done = load(path)
        settings = done.result["metadata"]["hyperparameters"]
        if done.model is None or settings.get("dataset") not in DATASETS:
            return None
        _, test = load_dataset(settings["dataset"], settings.get("data_dir"), download=False)
        return _look(done, test)
    except (FedquiltError, OSError) as error:
        return {"missing": str(error)}


def _look(done: RunResult, test: ImageDataset) -> dict[str, Any]:
    import torch

    assert done.model is not None
    with torch.no_grad():
        right = _right(done.model, test)
        classes = [
            {
                "label": label,
                "samples": int((test.targets == label).sum()),
                "accuracy": round(float(right[test.targets == label].float().mean()), 4),
            }
            for label in range(test.num_classes)
            if bool((test.targets == label).any())
        ]
        return {"classes": classes, "tiers": _tiers(done, test)}


def _right(model: nn.Module, test: ImageDataset) -> torch.Tensor:
    import torch

    model.eval()
    answers = [model(batch).argmax(dim=1) for batch in torch.split(test.images, _BATCH)]
    return torch.cat(answers) == test.targets


def _tiers(done: RunResult, test: ImageDataset) -> dict[str, float]:
    """Return the accuracy of each width: as recorded or, of older runs, of nested slices."""
    record = done.result.get("slices") or {}
    if any("test" in tier for tier in record.get("tiers", ())):
        return {width: round(score, 4) for width, score in tier_scores(record).items()}
    if record.get("method") not in NESTED or done.model is None:
        return {}
    sample, method = test.images[:2], record["method"]
    cut = {str(t["width"]): _slice(done.model, method, t["width"], sample) for t in record["tiers"]}
    return {w: round(float(_right(part, test).float().mean()), 4) for w, part in cut.items()}


def _slice(model: nn.Module, method: str, width: str, sample: torch.Tensor) -> nn.Module:
    from fedquilt.slices import slice_model

    return slice_model(model, width, sample=sample, scaled=method == "heterofl")
