"""What a run leaves behind: its rounds, its history, its model, its statement."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common.errors import RunFolderError
from fedquilt.config import RunConfig
from fedquilt.data import ImageDataset, load_condensed
from fedquilt.privacy.statement import Statement
from fedquilt.round import RoundRecord
from fedquilt.run_folder import RunFolder, finite
from fedquilt.slices import slice_model

_PER_ROUND = {
    "train_loss": "train_loss",
    "clip_values": "clip_value",
    "noise_levels": "noise_std",
    "privacy_budgets": "epsilon",
    "client_participation": "cohort",
}


# What a condensing server says of its rounds.
_SERVER = ("bytes_up", "bytes_down", "groups", "matching_loss", "epoch_avg_loss")

# Statistics of the clients' data: public only where nothing is claimed.
PRIVATE = (
    "train_loss",
    "noise_norm",
    "signal_norm",
    "clipped_fraction",
    "non_finite",
    "seconds",  # how long clients take tells how much they hold
)


def as_line(record: RoundRecord, seconds: float) -> dict[str, Any]:
    """Return a round as the flat dictionary of rounds.jsonl."""
    return {
        "round": record.round,
        "cohort": record.cohort,
        "train_loss": record.train_loss,
        "clip_value": record.clip_value,
        "epsilon": record.noise.epsilon,
        "noise_std": record.noise.noise_std,
        "noise_norm": record.noise.noise_norm,
        "signal_norm": record.noise.signal_norm,
        "clipped_fraction": record.noise.clipped_fraction,
        "non_finite": record.non_finite,
        "without_allowance": record.without_allowance,
        "seconds": round(seconds, 6),
        **record.server,
    }


def split_private(line: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part a line into what may be published and what may not."""
    public = {key: None if key in PRIVATE else value for key, value in line.items()}
    return public, {key: line[key] for key in PRIVATE}


def build_history(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Gather the rounds into the documented lists.

    Lists per round: train_loss, clip_values, noise_levels, noise_stats,
    privacy_budgets, client_participation; entries are None where a mode has no
    such thing; a condensation has bytes_up, bytes_down, groups, matching_loss and
    epoch_avg_loss beside them.  Lists per evaluation: test_accuracy, test_loss,
    evaluation_rounds (finished rounds, from 1), participation_stats.
    """
    history: dict[str, list[Any]] = {
        name: [line[key] for line in lines] for name, key in _PER_ROUND.items()
    }
    for name in _SERVER:
        if any(name in line for line in lines):
            history[name] = [line.get(name) for line in lines]
    history["noise_stats"] = [
        {
            "sigma": line["noise_std"],
            "noise_norm": line["noise_norm"],
            "signal_norm": line["signal_norm"],
        }
        for line in lines
    ]
    evaluated = [line for line in lines if "test_accuracy" in line]
    history["evaluation_rounds"] = [line["round"] + 1 for line in evaluated]
    for name in ("test_accuracy", "test_loss", "participation_stats"):
        history[name] = [line[name] for line in evaluated]
    return history


CUSTOM = "custom"


@dataclass(frozen=True, eq=False)
class RunResult:
    """A finished run: its record, its trained model, its statement, its folder.

    `model` is None only when a run of somebody's own model is loaded without
    passing that model; `state_dict` holds the trained tensors in any case.
    `synthetic` is the synthetic set that a condensation has grown.
    """

    result: dict[str, Any] = field(repr=False)
    statement: Statement
    state_dict: dict[str, torch.Tensor] = field(repr=False)
    model: nn.Module | None = field(repr=False)
    folder: Path | None
    synthetic: ImageDataset | None = field(default=None, repr=False)

    @property
    def final_accuracy(self) -> float | None:
        """Accuracy on the test set after the last round."""
        accuracy: float | None = self.result["metadata"]["final_accuracy"]
        return accuracy

    def summary(self) -> dict[str, Any]:
        """Return the object that `fedquilt run --json` prints."""
        metadata = self.result["metadata"]
        own: dict[str, Any] = {
            k: self.result[k] for k in ("slices", "condensation", "ledger") if k in self.result
        }
        if self.result.get("stopped"):
            own["stopped"] = self.result["stopped"]
        return {
            "mode": self.result["mode"],
            "dataset": metadata["dataset"],
            "seed": metadata["seed"],
            "rounds": self.result["rounds"],
            "final_accuracy": metadata["final_accuracy"],
            "final_loss": metadata["final_loss"],
            "statement": self.result["statement"],
            "output": None if self.folder is None else str(self.folder),
            **own,
        }


def load(path: str | Path, model: nn.Module | None = None) -> RunResult:
    """Give back a finished run: record, statement and trained model.

    Models that fedquilt knows by name are rebuilt; for a model of your own pass
    it as `model`, and a copy with the trained weights comes back.
    """
    folder = RunFolder.open(path)
    result = folder.read_result()
    if result is None:
        raise RunFolderError(f"run folder {str(path)!r} is not finished: resume it first")
    checkpoint = folder.load_checkpoint()
    if checkpoint is None:
        raise RunFolderError(f"run folder {str(path)!r} has no checkpoint.safetensors")
    tensors = checkpoint.model
    try:
        statement = Statement.from_json(result["statement"])
        rebuilt = _rebuild(folder.read_config(), result) if model is None else copy.deepcopy(model)
    except (KeyError, TypeError) as error:
        raise RunFolderError(f"{folder.path / 'result.json'} lacks or spoils {error}") from error
    if rebuilt is not None:
        load_tensors(rebuilt, tensors, folder.path)
    grown = folder.synthetic_path()
    synthetic = load_condensed(grown) if grown.exists() else None
    return RunResult(result, statement, tensors, rebuilt, folder.path, synthetic)


def build_result(
    config: RunConfig,
    lines: list[dict[str, Any]],
    statement: Statement,
    counts: NDArray[np.float64],
) -> dict[str, Any]:
    """Return the content of result.json."""
    history = finite(build_history(lines))
    accuracy, loss = history["test_accuracy"], history["test_loss"]
    return {
        "mode": config.mode,
        "rounds": len(lines),
        "metadata": {
            "dataset": config.dataset,
            "seed": config.seed,
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "target_accuracy": config.target_accuracy,
            "final_accuracy": accuracy[-1] if accuracy else None,
            "final_loss": loss[-1] if loss else None,
            "hyperparameters": config.as_dict(),
        },
        "history": history,
        "cohorts": history["client_participation"],
        "joins": [int(count) for count in counts],
        "statement": statement.as_json(),
    }


def _rebuild(config: RunConfig, result: dict[str, Any]) -> nn.Module | None:
    """Build the named model of a run anew, None for a model fedquilt does not know."""
    from fedquilt.models import make_model

    metadata = result["metadata"]
    if config.model == CUSTOM:
        return None
    model = make_model(config.model, metadata["input_shape"], metadata["num_classes"], 0)
    width = metadata.get("model_width", "1")
    if width == "1":
        return model
    return slice_model(model, width, sample=torch.zeros(2, *metadata["input_shape"]))


def load_tensors(module: nn.Module, tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise RunFolderError(
            f"{path}: the model does not fit the saved weights: {error}"
        ) from error
