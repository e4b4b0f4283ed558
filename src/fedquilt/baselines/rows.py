"""The rows of the table in which a condensation stands beside its baselines."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedquilt.baselines import run_baseline
from fedquilt.baselines.common import BaselineResult, Progress
from fedquilt.config import CondenseConfig, build_config
from fedquilt.errors import InvalidValueError, RunFolderError
from fedquilt.problem import build_problem
from fedquilt.results import RunResult
from fedquilt.run_folder import RunFolder


def condensation_row(finished: RunResult) -> dict[str, Any]:
    """Return the row of the condensation itself."""
    record, metadata = finished.result["condensation"], finished.result["metadata"]
    settings = metadata["hyperparameters"]
    return {
        "name": finished.result["mode"],
        "accuracy": metadata["final_accuracy"],
        "loss": metadata["final_loss"],
        "bytes_up": record["bytes_up"],
        "bytes_down": record["bytes_down"],
        "rounds": finished.result["rounds"],
        "seconds": record["seconds"],
        "raw": settings["init_method"] == "real_sample",
        "note": _note(record["classes_not_sent"], settings["min_group"]),
    }


def _note(missing: list[int], min_group: int) -> str:
    """Say which classes are missing, and why."""
    if not missing:
        return ""
    names = ", ".join(map(str, missing))
    return (
        f"nobody sent the classes {names}: no client holds min_group={min_group} samples of "
        "them; they are left out of the images and of training"
    )


def baseline_row(
    name: str, finished: RunResult, progress: Progress | None = None
) -> dict[str, Any]:
    """Return the row of a baseline; the run's folder keeps it, and it is computed once."""
    folder = None if finished.folder is None else RunFolder(finished.folder)
    rows = {} if folder is None else folder.read_baselines()
    if name not in rows:
        config = build_config(finished.result["metadata"]["hyperparameters"])
        if not isinstance(config, CondenseConfig):
            raise InvalidValueError("baselines stand beside a condensation, which this run is not")
        config, problem = build_problem(config)
        assert isinstance(config, CondenseConfig)
        record = finished.result["condensation"]
        budget = record["bytes_up"] + record["bytes_down"]
        rows[name] = dataclasses.asdict(run_baseline(name, config, problem, budget, progress))
        if folder is not None:
            folder.write_baselines(rows)
    row: dict[str, Any] = rows[name]
    lacking = {field.name for field in dataclasses.fields(BaselineResult)} - row.keys()
    if lacking:
        raise RunFolderError(
            f"baselines.json of {str(finished.folder)!r} lacks {', '.join(sorted(lacking))} of "
            f"{name!r}; remove the file, and it is computed again"
        )
    return row
