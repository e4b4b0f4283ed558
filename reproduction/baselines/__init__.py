"""What a condensation is compared with: baselines on the same data and first weights.

| name | what it is | what leaves clients |
|---|---|---|
| coreset | `ipc` random real images of each class: the floor | raw images |
| dm | DM on pooled data (Zhao and Bilen 2023): the ceiling | raw images, all of them |
| feddm | FedDM (Xiong et al. 2023): every client condenses its own data | synthetic images |
| fedavg | federated averaging of the same model | weights |

Each is a row below that of the condensation, from `python -m reproduction fednum-baselines RUN`.
Beside a certified condensation there are also the uses of what it released (`released`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.config import CondenseConfig, plain_config
from fedquilt.method import Progress
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import RunResult, load
from fedquilt.report import condensation_row
from fedquilt.setup.build_task import build_task
from fedquilt.setup.task import FederatedTask
from fedquilt.sweep.plan import parse_axis
from reproduction.baselines.central import run_coreset, run_dm
from reproduction.baselines.common import BaselineResult
from reproduction.baselines.federated import run_fedavg, run_feddm
from reproduction.baselines.released import RELEASED, run_released

BASELINES: dict[
    str, Callable[[CondenseConfig, FederatedTask, int, Progress | None], BaselineResult]
] = {
    "coreset": run_coreset,
    "dm": run_dm,
    "feddm": run_feddm,
    "fedavg": run_fedavg,
}


def run_baseline(
    name: str,
    config: CondenseConfig,
    problem: FederatedTask,
    budget_bytes: int,
    progress: Progress | None = None,
) -> BaselineResult:
    """Run the baseline of a name beside the condensation of a configuration.

    Parameters
    ----------
    name
        One of `BASELINES`.
    config, problem
        As `build_task` returns them; the problem is not changed.  It must not have
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


def comparison(
    run: str | Path,
    names: str | None = None,
    changes: Sequence[str] = (),
    progress: Progress | None = None,
) -> tuple[RunResult, list[dict[str, Any]]]:
    """Return a finished condensation, and its row followed by those of baselines.

    Parameters
    ----------
    names
        Joined by commas, or all; absent: those that an older version was asked for, or the
        usual ones.
    changes
        `key=value`: what baselines take another value of than the condensation.
    """
    finished = load(run)
    if finished.folder is None or "condensation" not in finished.result:
        raise InvalidValueError(f"run={str(run)!r} must be a finished condensation")
    folder = RunFolder(finished.folder)
    chosen = _names(names, folder)
    changed = dict(map(_change, changes))
    rows = [baseline_row(name, finished, _naming(name, progress), changed) for name in chosen]
    return finished, [condensation_row(finished.result), *rows]


def _naming(name: str, progress: Progress | None) -> Progress | None:
    return None if progress is None else lambda what, share: progress(f"{name}: {what}", share)


_USUAL = ("coreset", "fedavg")
_USUAL_BOUNDED = ("head",)  # networks from scratch take minutes on a CPU


def _names(text: str | None, folder: RunFolder) -> list[str]:
    """Return the rows that are asked for.

    Beside a run that is bounded there is the head that it released, and no baselines unless
    asked for: they read the clients' data, and their accuracies are covered by no claim.
    """
    bounded = folder.read_config().is_bounded(covered=True)
    possible = (*RELEASED, *BASELINES) if bounded else tuple(BASELINES)
    if text is None:
        before = folder.wanted_baselines()
        return before or list(_USUAL_BOUNDED if bounded else _USUAL)
    if text == "all":
        return list(possible)
    names = [checks.choice("baselines", part.strip(), possible) for part in text.split(",")]
    if len(set(names)) != len(names):
        raise InvalidValueError(f"baselines={text!r} must not repeat a name")
    return names


def _change(text: str) -> tuple[str, Any]:
    axis = parse_axis(text, CondenseConfig)
    if len(axis.values) != 1:
        raise InvalidValueError(f"set={text!r} must be one key=value")
    return axis.key, axis.values[0]


def baseline_row(
    name: str,
    finished: RunResult,
    progress: Progress | None = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the row of a baseline; the run's folder keeps it, and it is computed once.

    With `changes`, options that have another value than in the run, it is not kept.
    """
    folder = None if finished.folder is None or changes else RunFolder(finished.folder)
    rows = {} if folder is None else folder.read_baselines()
    if name not in rows:
        config = plain_config({**finished.result["metadata"]["hyperparameters"], **(changes or {})})
        if not isinstance(config, CondenseConfig):
            raise InvalidValueError("baselines stand beside a condensation, which this run is not")
        config, problem = build_task(config)
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
    problem: FederatedTask,
    finished: RunResult,
    progress: Progress | None,
) -> BaselineResult:
    if name in RELEASED:
        return run_released(name, config, problem, finished, progress)
    record = finished.result["condensation"]
    budget = record["bytes_up"] + record["bytes_down"]
    return run_baseline(name, config, problem, budget, progress)
