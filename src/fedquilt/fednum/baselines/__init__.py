"""What a condensation is compared with: baselines on the same data and first weights.

| name | what it is | what leaves clients |
|---|---|---|
| coreset | `ipc` random real images of each class: the floor | raw images |
| dm | DM on pooled data (Zhao and Bilen 2023): the ceiling | raw images, all of them |
| feddm | FedDM (Xiong et al. 2023): every client condenses its own data | synthetic images |
| fedavg | federated averaging of the same model | weights |

Each of them is a row of the table that `fedquilt condense` prints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fedquilt.assemble_problem import build_problem
from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.config import CondenseConfig, plain_config
from fedquilt.fednum.baselines.central import run_coreset, run_dm
from fedquilt.fednum.baselines.common import BaselineResult
from fedquilt.fednum.baselines.federated import run_fedavg, run_feddm
from fedquilt.fednum.baselines.released import RELEASED, run_released
from fedquilt.method import Progress
from fedquilt.problem import Problem
from fedquilt.record import RunResult
from fedquilt.run_folder import RunFolder

__all__ = ["BASELINES", "BaselineResult", "Progress", "run_baseline"]

BASELINES: dict[str, Callable[[CondenseConfig, Problem, int, Progress | None], BaselineResult]] = {
    "coreset": run_coreset,
    "dm": run_dm,
    "feddm": run_feddm,
    "fedavg": run_fedavg,
}


def run_baseline(
    name: str,
    config: CondenseConfig,
    problem: Problem,
    budget_bytes: int,
    progress: Progress | None = None,
) -> BaselineResult:
    """Run the baseline of a name beside the condensation of a configuration.

    Parameters
    ----------
    name
        One of `BASELINES`.
    config, problem
        As `build_problem` returns them; the problem is not changed.  It must not have
        been run: its model would start where that run ended.
    budget_bytes
        What the condensation sent and received, all clients and rounds together;
        decides the rounds of fedavg and feddm.
    progress
        Told what is being done, and which part of it is done, from 0 to 1.
    """
    checks.choice("baseline", name, BASELINES)
    checks.integer("budget_bytes", budget_bytes, at_least=0)
    if not isinstance(config, CondenseConfig):
        raise InvalidValueError(
            f"method={config.method!r} must be 'condense': baselines stand beside a condensation"
        )
    return BASELINES[name](config, problem, budget_bytes, progress)


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
        "raw": settings.get("init_method") == "real_sample",
        "note": _certified_note(finished)
        if finished.result["mode"] == "certified"
        else _note(record, settings.get("min_group")),
    }


def _certified_note(finished: RunResult) -> str:
    """Say what the accuracy of a certified condensation is of."""
    settings = finished.result["metadata"]["hyperparameters"]
    gaps = [gap for gap in finished.result["history"].get("matching_loss", []) if gap is not None]
    left = f"; the images leave {gaps[-1]:.0%} of the head's condition unmet" if gaps else ""
    return (
        f"the model {settings.get('model')}, trained on the images alone; a head needs the public "
        f"front as well{left}; networks from scratch: --baselines head,network,distilled"
    )


def _note(record: dict[str, Any], min_group: int | None) -> str:
    """Say which classes are missing, and why."""
    missing = record["classes_not_sent"]
    if not missing:
        return ""
    too_small = record.get("classes_too_small")
    if too_small is None:
        because = [(missing, f"nobody who joined holds min_group={min_group} samples of them")]
    else:
        small = [label for label in missing if label in too_small]
        because = [
            (small, f"no client holds min_group={min_group} samples of them"),
            ([c for c in missing if c not in small], "no client that holds enough of them joined"),
        ]
    reasons = "; ".join(
        f"nobody sent the classes {', '.join(map(str, labels))}: {why}"
        for labels, why in because
        if labels
    )
    return f"{reasons}; they are left out of the images and of training"


def baseline_row(
    name: str, finished: RunResult, progress: Progress | None = None
) -> dict[str, Any]:
    """Return the row of a baseline; the run's folder keeps it, and it is computed once."""
    folder = None if finished.folder is None else RunFolder(finished.folder)
    rows = {} if folder is None else folder.read_baselines()
    if name not in rows:
        config = plain_config(finished.result["metadata"]["hyperparameters"])
        if not isinstance(config, CondenseConfig):
            raise InvalidValueError("baselines stand beside a condensation, which this run is not")
        config, problem = build_problem(config)
        assert isinstance(config, CondenseConfig)
        rows[name] = dataclasses.asdict(_made(name, config, problem, finished, progress))
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


def _made(
    name: str,
    config: CondenseConfig,
    problem: Problem,
    finished: RunResult,
    progress: Progress | None,
) -> BaselineResult:
    if name in RELEASED:
        return run_released(name, config, problem, finished, progress)
    record = finished.result["condensation"]
    budget = record["bytes_up"] + record["bytes_down"]
    return run_baseline(name, config, problem, budget, progress)
