"""The table that compares modes over seeds: what each reaches, what each may claim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedquilt.bounds import format_bound
from fedquilt.errors import InvalidValueError, RunFolderError
from fedquilt.report.series import as_number, column

MODE_ORDER = ("fedavg", "fixed_dp", "quap_fl", "quap_fl_client", "certified")
NO_GUARANTEE = "no guarantee (ε = ∞)"

Run = Mapping[str, Any]


def comparison_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Summarise the runs by mode; every value can be written as JSON.

    Returns
    -------
    list of dict
        One entry per mode with `mode`; `accuracy_mean` and `accuracy_std` of the
        final accuracies (the sample deviation, divisor n - 1, None for one seed);
        `epsilon_max`, the worst client's epsilon in the worst seed, "inf" when
        any seed has no guarantee; `delta`, the largest of the seeds; `seeds`;
        `accuracies`, one per seed, None where a run has no finite one (these are
        not in the mean); `claim`, in words.
    """
    return [_summary(mode, members) for mode, members in runs_by_mode(runs).items()]


def runs_by_mode(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs of one data set by mode, least private mode first."""
    if not runs:
        raise InvalidValueError("runs=[] must hold at least one run")
    groups: dict[str, list[Run]] = {}
    for index, run in enumerate(runs):
        _check_run(index, run)
        groups.setdefault(run["mode"], []).append(run)
    datasets = sorted({str(run["metadata"].get("dataset")) for run in runs})
    if len(datasets) > 1:
        raise InvalidValueError(
            f"runs of different data sets cannot be compared: {', '.join(datasets)}"
        )
    known = [mode for mode in MODE_ORDER if mode in groups]
    return {mode: groups[mode] for mode in [*known, *(m for m in groups if m not in MODE_ORDER)]}


def _check_run(index: int, run: object) -> None:
    if not isinstance(run, Mapping):
        raise RunFolderError(f"runs[{index}]={run!r:.60} must be the dictionary of a result")
    if not isinstance(run.get("mode"), str):
        raise RunFolderError(f"runs[{index}]['mode']={run.get('mode')!r} must name a mode")
    for key in ("metadata", "history"):
        if not isinstance(run.get(key), Mapping):
            raise RunFolderError(f"runs[{index}] must hold a dictionary {key!r}")


def final_accuracy(run: Run) -> float:
    """Return the accuracy at the end of a run, NaN when there is none."""
    stated = as_number(run["metadata"].get("final_accuracy"))
    if math.isfinite(stated):
        return stated
    recorded = column(run["history"], "test_accuracy")
    return float(recorded[-1]) if recorded.size else math.nan


def _summary(mode: str, runs: Sequence[Run]) -> dict[str, Any]:
    accuracies = np.asarray([final_accuracy(run) for run in runs])
    finite = accuracies[np.isfinite(accuracies)]
    epsilon, delta = _worst_epsilon(runs), _worst_delta(runs)
    return {
        "mode": mode,
        "accuracy_mean": float(finite.mean()) if finite.size else None,
        "accuracy_std": float(finite.std(ddof=1)) if finite.size > 1 else None,
        "epsilon_max": epsilon if math.isfinite(epsilon) else "inf",
        "delta": delta,
        "seeds": [run["metadata"].get("seed") for run in runs],
        "accuracies": [float(value) if np.isfinite(value) else None for value in accuracies],
        "claim": _claim(epsilon, delta, runs),
    }


def _statement(run: Run) -> Mapping[str, Any]:
    statement = run.get("statement")
    return statement if isinstance(statement, Mapping) else {}


def _worst_epsilon(runs: Sequence[Run]) -> float:
    """Return the largest epsilon of the seeds; what states none has none."""
    values = [as_number(_statement(run).get("epsilon_max")) for run in runs]
    return max((value if value >= 0 else math.inf) for value in values)


def _worst_delta(runs: Sequence[Run]) -> float | None:
    values = [as_number(_statement(run).get("delta")) for run in runs]
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) if finite else None


def _claim(epsilon: float, delta: float | None, runs: Sequence[Run]) -> str:
    """Say what a mode may claim; without a delta there is no claim."""
    if not math.isfinite(epsilon) or delta is None:
        return NO_GUARANTEE
    units = {str(_statement(run).get("unit") or "client") for run in runs}
    claim = f"ε ≤ {epsilon_text(epsilon)} for every {' or '.join(sorted(units))}, δ = {delta:g}"
    others = {str(_statement(run).get("adjacency")) for run in runs} - {"zero-out", "None"}
    return ", ".join([claim, *sorted(others)])


def epsilon_text(epsilon: float | str) -> str:
    """Return an epsilon of a record, a number or "inf", as `format_bound` shows it."""
    return format_bound(as_number(epsilon))


def accuracy_text(row: Mapping[str, Any]) -> str:
    """Return "mean ± std", and in words what is missing."""
    if row["accuracy_mean"] is None:
        return "none finite"
    spread = "" if row["accuracy_std"] is None else f" ± {row['accuracy_std']:.4f}"
    lost = sum(value is None for value in row.get("accuracies", ()))
    return f"{row['accuracy_mean']:.4f}{spread}" + (f" ({lost} not finite)" if lost else "")


def render_comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of `comparison_table` as text."""
    from tabulate import tabulate

    body = [
        (
            row["mode"],
            accuracy_text(row),
            str(len(row["seeds"])),
            epsilon_text(row["epsilon_max"]),
            row["claim"],
        )
        for row in rows
    ]
    headings = ["mode", "accuracy mean ± std", "seeds", "worst client's ε", "what it may claim"]
    return tabulate(
        body,
        headers=headings,
        tablefmt="simple",
        disable_numparse=True,
        colalign=("left", "left", "right", "right", "left"),
    )
