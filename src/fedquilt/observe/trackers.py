"""Experiment trackers: a run's rounds in Weights & Biases, in TensorBoard and in MLflow.

Trackers only watch.  What they cannot write is lost to them and to nobody else: the
record of a run is its own folder.  By default nothing leaves the machine.

    from fedquilt.observe.trackers import open_trackers

    with open_trackers(
        "wandb,tensorboard", folder, project="digits", run_name="seed 0", config={"seed": 0}
    ) as trackers:
        trackers.log({"round": 0, "train_loss": 2.3, "seconds": 0.8})

Weights & Biases works offline, in the folder `wandb` of the run, unless the environment
variable WANDB_MODE says otherwise; `wandb sync` uploads the folder later.  Machine
statistics, the command line, installed packages, source code and console output are not
collected: a tracker tells of a run what it was given, and no more.
"""

from __future__ import annotations

import importlib
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedquilt.common import checks, optional
from fedquilt.common.errors import InvalidValueError, IrregularFileError, StorageError
from fedquilt.common.storage import check_own_tree, write_file
from fedquilt.observe.mlflow import MlflowTracker, load_mlflow
from fedquilt.observe.tracking import Tracker, Trackers, scalars_of, step_of, withholds_time

__all__ = ["Tracker", "Trackers", "check_trackers", "open_trackers"]

TENSORBOARD_FOLDER = "tensorboard"


class TensorBoardTracker:
    """Writes scalars with torch's SummaryWriter.

    The event file begins with the first round, because only then is known where the
    run goes on: TensorBoard drops what an earlier event file holds from that step on
    (`purge_step`), so the rounds that a resumed run repeats appear once.

    A round that withholds its seconds is stamped with the time of opening.
    """

    def __init__(self, folder: Path) -> None:
        self._module = _tensorboard()
        self._folder = folder / TENSORBOARD_FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._opened = time.time()
        self._writer: Any = None

    def log(self, line: Mapping[str, Any]) -> None:
        """Write one round, and flush it: a killed run keeps its rounds."""
        step = step_of(line)
        clock = self._opened if withholds_time(line) else None
        if self._writer is None:
            self._writer = self._module.SummaryWriter(str(self._folder), purge_step=step)
        for name, value in scalars_of(line).items():
            self._writer.add_scalar(name, value, global_step=step, walltime=clock)
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        """Close the event file; TensorBoard has no place for how a run ended."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except Exception:
            # SummaryWriter gives up at its first error, before it has waited for its thread.
            writer.file_writer.close()
            raise


WANDB_FOLDER = "wandb"
ID_FILE = "run-id.txt"
MODES = ("offline", "online", "disabled", "shared", "dryrun", "run")
# "dryrun" is an older name of "offline".
SENDS_NOTHING = ("offline", "dryrun", "disabled")

_NOTHING_ELSE = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


class WandbTracker:
    """Logs to a run of its own, whose id stays in the folder for the run to be resumed.

    wandb stamps every row with the seconds since the start, and that cannot be turned
    off.  Rounds that withhold their seconds are therefore kept until the tracker is
    closed, and get almost the same stamp.

    wandb gathers offline rows in memory and writes them in blocks and at the end.
    A run that is killed, rather than interrupted, loses the latest ones here.
    """

    def __init__(
        self, folder: Path, *, project: str, run_name: str, config: Mapping[str, Any]
    ) -> None:
        mode = wandb_mode()
        self._kept: list[tuple[int, dict[str, int | float]]] = []
        with _quiet(mode):
            wandb = _wandb()
            id_file = folder / WANDB_FOLDER / ID_FILE
            run_id, resumed = _run_id(id_file)
            try:
                self._run = wandb.init(
                    mode=mode,
                    dir=str(folder),
                    project=project,
                    name=run_name,
                    config=dict(config),
                    id=run_id,
                    resume="allow" if resumed else None,
                    reinit="create_new",  # leaves a run of the caller's alone
                    settings=wandb.Settings(**_NOTHING_ELSE),
                )
            except Exception as error:
                if not resumed:
                    id_file.unlink(missing_ok=True)
                raise InvalidValueError(
                    f"trackers='wandb' cannot start with WANDB_MODE={mode!r}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def log(self, line: Mapping[str, Any]) -> None:
        """Send one round to wandb's own process, which writes it down."""
        row = step_of(line), scalars_of(line)
        if self._kept or withholds_time(line):
            self._kept.append(row)
        else:
            self._send(*row)

    def close(self, *, failed: bool = False) -> None:
        """Send what was kept and end the run; again does nothing."""
        run, kept = self._run, self._kept
        if run is None:
            return
        try:
            for row in kept:
                self._send(*row)
        finally:
            self._run, self._kept = None, []
            run.finish(exit_code=int(failed))

    def _send(self, step: int, values: dict[str, int | float]) -> None:
        # Without `commit` a row waits until the next one comes.
        self._run.log(values, step=step, commit=True)


def wandb_mode() -> str:
    """Return what WANDB_MODE asks for, "offline" when it is unset or empty."""
    return checks.choice("WANDB_MODE", os.environ.get("WANDB_MODE") or "offline", MODES)


def _run_id(file: Path) -> tuple[str, bool]:
    """Return the run id of a folder and whether it was there before."""
    if file.exists():
        written = file.read_text(encoding="utf-8", errors="replace").strip()
        if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", written):
            return written, True
    run_id = uuid.uuid4().hex[:12]
    write_file(file, f"{run_id}\n".encode(), parents=True)
    return run_id, False


@contextmanager
def _quiet(mode: str) -> Iterator[None]:
    """Start wandb without words, and offline without reports of its errors to its makers.

    wandb reads these variables only while it starts; what the user has set stays.
    """
    wanted = {"WANDB_SILENT": "true"}
    if mode in SENDS_NOTHING:
        wanted["WANDB_ERROR_REPORTING"] = "false"
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


NAMES = ("wandb", "tensorboard", "mlflow")
NONE = "none"


def open_trackers(
    names: str,
    folder: str | Path,
    *,
    project: str,
    run_name: str,
    config: Mapping[str, Any],
) -> Trackers:
    """Open the trackers of a run, as a context manager that closes them.

    Parameters
    ----------
    names
        "none", or one or more of "wandb", "tensorboard" and "mlflow", parted by commas.
    folder
        The run's folder; trackers write to folders of their names inside it.  In the
        folder of an earlier run they go on with that run.
    project, run_name, config
        What wandb calls the run, and the settings it shows.

    Raises
    ------
    InvalidValueError
        If a name is unknown, or wandb cannot start.
    MissingPackageError
        If a package is not installed.
    StorageError
        If the folder cannot be written.
    """
    wanted = check_trackers(names)
    opened: dict[str, Tracker] = {}
    try:
        for name in wanted:
            opened[name] = _open(name, Path(folder), project, run_name, config)
    except BaseException:
        Trackers(opened).close(failed=True)
        raise
    return Trackers(opened)


def check_trackers(names: str) -> list[str]:
    """Return the trackers of a list of names; raise where one is unknown or not installed."""
    if not isinstance(names, str):
        raise InvalidValueError(f"trackers={names!r} must be names parted by commas, or {NONE!r}")
    given = [name.strip() for name in names.split(",")]
    if given == [NONE]:
        return []
    allowed = NAMES if len(given) > 1 else (*NAMES, NONE)
    wanted = list(dict.fromkeys(checks.choice("trackers", name, allowed) for name in given))
    if "wandb" in wanted:
        wandb_mode()
        _wandb()
    if "tensorboard" in wanted:
        _tensorboard()
    if "mlflow" in wanted:
        load_mlflow()
    return wanted


def _wandb() -> Any:
    return optional.load("wandb", "trackers='wandb'")


def _tensorboard() -> Any:
    """Return torch's module with SummaryWriter, which needs the package tensorboard."""
    optional.load("tensorboard", "trackers='tensorboard'")
    return importlib.import_module("torch.utils.tensorboard")


def _open(
    name: str, folder: Path, project: str, run_name: str, config: Mapping[str, Any]
) -> Tracker:
    try:
        # Of the same name as the tracker; it may be a stranger's.  wandb itself links the log of
        # its service into the folder of each run, and opens none of an earlier one.
        check_own_tree(folder / name, but=("debug-core.log",) if name == "wandb" else ())
        if name == "wandb":
            return WandbTracker(folder, project=project, run_name=run_name, config=config)
        if name == "mlflow":
            return MlflowTracker(folder, project=project, run_name=run_name, config=config)
        return TensorBoardTracker(folder)
    except IrregularFileError:
        raise
    except OSError as error:
        raise StorageError(
            f"tracker {name} cannot write to {str(folder)!r}: {error.strerror or error}"
        ) from error
