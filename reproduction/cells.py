"""Cells of a paper's tables: each is one run, kept as a small file with its configuration.

A kept file counts for a cell only when the configuration is the same: a changed table runs its
changed cells again.  What only says where and how fast a run computes (`HOW`) is not compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fedquilt
from fedquilt._version import __version__
from fedquilt.common.errors import DataError
from fedquilt.common.schema import (
    ANY_NUMBER,
    ANY_TEXT,
    COUNT,
    NUMBER,
    POSITIVE,
    TEXT,
    ListOf,
    MapOf,
    Object,
    Scalar,
    check,
)
from fedquilt.common.storage import write_file
from fedquilt.common.untrusted import NOTE_BYTES, read_json
from fedquilt.config import (
    CondenseConfig,
    RunConfig,
    option_fields,
    package_names,
    plain_config,
)
from fedquilt.config.option import Flag
from fedquilt.config.run import option_names
from fedquilt.record.folder import RunFolder, finite
from fedquilt.report.paper_figures import consumption_by_group
from fedquilt.sweep import Plan, Point, finished_run, run_sweep

HOW = option_names(Flag.EXECUTION)
"""Options of where and how fast a run computes."""

_CURVE_POINTS = 41
_ROW = {"accuracy": ANY_NUMBER, "rounds": COUNT}
_BYTES = {"bytes_up": COUNT, "bytes_down": COUNT}
_TRUTH = Scalar("true or false", frozenset({bool}))
_KEPT = Object(
    {
        "cell": TEXT,
        "config": Object({}),
        "curve": Object({"rounds": ListOf(COUNT), "accuracy": ListOf(ANY_NUMBER)}),
        **_ROW,
    },
    {
        "how": MapOf(ANY_TEXT),
        "commit": ANY_TEXT,
        "source": TEXT,
        "seconds": ANY_NUMBER,
        "noise_to_signal": ANY_NUMBER,
        "groups": MapOf(ListOf(NUMBER)),
        "tiers": MapOf(Object({"clients": POSITIVE, "accuracy": ANY_NUMBER})),
        "beside": MapOf(Object({**_ROW, **_BYTES, "raw": _TRUTH})),
    },
)
_KEPT_CONDENSATION = Object({**_KEPT.needed, **_BYTES}, _KEPT.known)


@dataclass(frozen=True)
class Cell:
    """One run: its name, which is its file's, and its settings, complete but for `HOW`.

    Beside a condensation stand the baselines of these names.
    """

    name: str
    settings: Mapping[str, Any]
    seed: int
    baselines: tuple[str, ...] = ()

    @property
    def dataset(self) -> str:
        """The data set that the run is on."""
        return str(self.settings["dataset"])

    def config(self) -> dict[str, Any]:
        """Return the whole configuration of the run, without `HOW`."""
        whole = plain_config({**self.settings, "seed": self.seed}).as_dict()
        return {key: value for key, value in whole.items() if key not in HOW}


@dataclass(frozen=True)
class Kept:
    """What is kept of a finished cell."""

    record: Mapping[str, Any]

    @property
    def accuracy(self) -> float:
        """Of the last model, on the test data; NaN where it is not finite."""
        value = self.record["accuracy"]
        return float("nan") if value is None else float(value)

    def as_line(self) -> str:
        """Return what the cell is, what it reached, how long it took and in what."""
        how = self.record.get("how") or {}
        ways = " ".join(str(value) for value in how.values() if value is not None)
        return f"{self.record['cell']} {self.accuracy:.2%}, {self.record.get('seconds')} s, {ways}"


def kept_path(folder: Path, cell: Cell) -> Path:
    """Return where a cell is kept."""
    return folder / f"{cell.name}.json"


def kept_cells(folder: Path, cells: Sequence[Cell]) -> dict[str, Kept]:
    """Return the cells that are kept with their present configuration, by name."""
    found = {}
    for cell in cells:
        path = kept_path(folder, cell)
        if path.is_file():
            record = read_json(path, DataError, NOTE_BYTES)
            condenses = cell.settings.get("method") == "condense"
            check(record, _KEPT_CONDENSATION if condenses else _KEPT, path, DataError)
            same = _completed(record["config"]) == json.loads(json.dumps(cell.config()))
            if same and set(cell.baselines) <= set(record.get("beside", ())):
                found[cell.name] = Kept(record)
    return found


def _completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kept configuration with the options that came later, as it ran without them.

    What a data set's or a method's own defaults make of them is newer than the run.
    """
    kind = CondenseConfig if config.get("method") == CondenseConfig.method else RunConfig
    later = {key: f.default for key, f in option_fields(kind).items() if key not in HOW}
    return {**json.loads(json.dumps(later)), **package_names(kind, config)}


Progress = Callable[["Kept", int, int], None]
"""Called with a cell that has just been kept, how many are, and how many there are."""


def run_cells(
    folder: Path,
    cells: Sequence[Cell],
    work: Path,
    how: Mapping[str, Any],
    *,
    jobs: int = 1,
    only: Collection[str] | None = None,
    progress: Progress | None = None,
    commit: str | None = None,
) -> dict[str, Kept]:
    """Run the cells that are not kept, several at a time, and keep each as it ends.

    Parameters
    ----------
    folder
        Where cells are kept.
    cells
        All cells; those with a kept file are not run.
    work
        Where runs are made; one that was killed goes on from its last checkpoint.
    how
        Options among `HOW`.
    jobs
        Runs at the same time, each with one thread.
    only
        Names of the cells that run now; absent, all.
    progress
        Called after each cell.
    commit
        Of the source, where git cannot say it.
    """
    origin = source_origin(commit)
    points = tuple(
        Point(number, {**cell.settings, **how}, cell.seed) for number, cell in enumerate(cells)
    )
    # Other cells, options, defaults or code are another sweep.
    named = json.dumps(
        [
            origin["source"],
            *(
                [cell.name, cell.config(), p.settings]
                for cell, p in zip(cells, points, strict=True)
            ),
        ]
    )
    place = work / hashlib.sha256(named.encode()).hexdigest()[:12]
    wanted = [cell for cell in cells if only is None or cell.name in only]
    open_ = {cell.name for cell in wanted} - kept_cells(folder, wanted).keys()
    missing = [number for number, cell in enumerate(cells) if cell.name in open_]

    def keep(ended: int = 0, total: int = 0) -> None:
        for number in list(missing):
            found = _keep(folder, cells[number], place, points[number], origin)
            if found is not None:
                missing.remove(number)
                if progress is not None:
                    progress(found, len(wanted) - len(missing), len(wanted))

    if missing:
        table = run_sweep(place, Plan({}, (), points), jobs=jobs, progress=keep, only=list(missing))
        keep()
        failed = {row["point"]: row["message"] for row in table.rows()}
        left = {n: (finished_run(place, points[n]), cells[n].baselines) for n in missing}
        failed |= _run_baselines(left, jobs, keep)
        if missing:
            raise DataError(
                f"{len(missing)} cells could not run: {cells[missing[0]].name}: "
                f"{failed[missing[0]] or 'no result'}"
            )
    return kept_cells(folder, wanted)


def _run_baselines(
    runs: Mapping[int, tuple[RunFolder | None, Sequence[str]]],
    jobs: int,
    ended: Callable[[], None],
) -> dict[int, str]:
    """Compute what stands beside finished runs, several at a time, each in a process of one thread.

    Return why those that failed did, by the number of the cell.  A folder keeps each row as it is
    computed, so that after a kill only the others are computed.
    """
    places = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": places}

    def compute(run: RunFolder, names: Sequence[str]) -> str:
        command = ["fednum-baselines", str(run.path), "--baselines", ",".join(names), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "reproduction", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        return f"its baselines ended with code {done.returncode}: {said[-1]}"

    failed = {}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures = {
                pool.submit(compute, run, names): number
                for number, (run, names) in runs.items()
                if run is not None and names
            }
            for future in as_completed(futures):
                failed[futures[future]] = future.result()
                ended()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def source_origin(commit: str | None = None) -> dict[str, str | None]:
    """Return which code this is: its commit, if known, and a digest of its Python files.

    The digest is SHA-256 over the `.py` files of `fedquilt` and of these experiments in the order
    of their names: `fedquilt/` or `reproduction/` and the name below, a zero byte, the SHA-256 of
    the bytes.
    """
    package = Path(fedquilt.__file__).parent
    files = {
        f"{folder.name}/{path.relative_to(folder).as_posix()}": path
        for folder in (package, Path(__file__).parent)
        for path in folder.rglob("*.py")
    }
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(name.encode() + b"\0" + hashlib.sha256(files[name].read_bytes()).digest())
    return {"commit": commit or _commit_of(package), "source": whole.hexdigest()}


def _commit_of(package: Path) -> str | None:
    """Return the commit of a package in a git checkout, "-dirty" after it where it has changed."""
    git = ["git", "-C", str(package)]
    try:
        # A package that is only installed below somebody else's checkout is not of its commit.
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], **_QUIETLY)
        head = subprocess.run([*git, "rev-parse", "HEAD"], **_QUIETLY).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "--", "."], **_QUIETLY).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed.strip() else head


_QUIETLY: dict[str, Any] = {"check": True, "capture_output": True, "text": True}


def _keep(
    folder: Path, cell: Cell, place: Path, point: Point, origin: Mapping[str, Any]
) -> Kept | None:
    """Keep a cell whose run, and what stands beside it, has ended; None when it has not."""
    run = finished_run(place, point)
    result = None if run is None else run.read_result()
    if run is None or result is None:
        return None
    record = _record(cell, result, run.read_rounds(result["rounds"]))
    if cell.baselines:
        rows = run.read_baselines()
        if not set(cell.baselines) <= set(rows):
            return None
        record["beside"] = {name: rows[name] for name in cell.baselines}
    record = finite({**record, **origin})
    text = json.dumps(record, indent=1, allow_nan=False)
    write_file(kept_path(folder, cell), f"{text}\n".encode(), parents=True)
    return Kept(record)


def _record(
    cell: Cell, result: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what is kept of a run: its end, its curve, who spent what, how noise stood."""
    history, metadata = result["history"], result["metadata"]
    used = metadata["hyperparameters"]
    return {
        "cell": cell.name,
        "version": __version__,
        "config": cell.config(),
        "how": {key: used.get(key) for key in ("device", "engine", "precision")},
        "accuracy": metadata["final_accuracy"],
        "loss": metadata["final_loss"],
        "rounds": result["rounds"],
        "claimed_epsilon": result["statement"]["epsilon_max"],
        "mean_cohort": float(np.mean([len(line["cohort"]) for line in lines])),
        "seconds": round(sum(line.get("seconds") or 0.0 for line in lines), 1),
        "noise_to_signal": _noise_to_signal(lines),
        "curve": {"rounds": history["evaluation_rounds"], "accuracy": history["test_accuracy"]},
        **_groups(history, used["num_clients"]),
        **_tiers(result),
        **_traffic(result),
    }


def _tiers(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many clients hold each width, and what the width's own model reaches."""
    slices = result.get("slices")
    if slices is None:
        return {}
    kept = {
        tier["width"]: {
            "clients": tier["clients"],
            "parameters": tier["parameters"],
            "accuracy": (tier.get("test") or {}).get("accuracy"),
        }
        for tier in slices["tiers"]
    }
    return {"tiers": kept}


def _traffic(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a condensation sent and received, all clients and rounds together."""
    record = result.get("condensation")
    return {} if record is None else {key: record[key] for key in ("bytes_up", "bytes_down")}


def _noise_to_signal(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median over the rounds of the noise's length over the mean update's."""
    ratios = [
        line["noise_norm"] / line["signal_norm"]
        for line in lines
        if line.get("noise_norm") and line.get("signal_norm")
    ]
    return float(np.median(ratios)) if ratios else None


def _groups(history: Mapping[str, Any], num_clients: int) -> dict[str, Any]:
    """Return the nominal budgets of the most and the least frequent fifth, thinned."""
    if not any(value is not None for value in history.get("privacy_budgets", ())):
        return {}
    most, least = consumption_by_group(history, num_clients)
    at = np.unique(np.linspace(0, len(most.mean) - 1, _CURVE_POINTS).astype(int))
    return {
        "groups": {
            "rounds": (at + 1).tolist(),
            "most": [round(float(v), 5) for v in most.mean[at]],
            "least": [round(float(v), 5) for v in least.mean[at]],
        }
    }
