"""From the names of trackers to open trackers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt import validate
from fedquilt.errors import InvalidValueError, StorageError
from fedquilt.trackers import extras
from fedquilt.trackers.fan_out import Trackers
from fedquilt.trackers.tensorboard_events import TensorBoardTracker
from fedquilt.trackers.tracker import Tracker
from fedquilt.trackers.wandb_run import WandbTracker, wandb_mode

NAMES = ("wandb", "tensorboard")
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
        "none", or one or more of "wandb" and "tensorboard", parted by commas.
    folder
        The run's folder; trackers write to `wandb` and `tensorboard` inside it.  In the
        folder of an earlier run they go on with that run.
    project, run_name, config
        What wandb calls the run, and the settings it shows.

    Raises
    ------
    InvalidValueError
        If a name is unknown, its package is not installed, or wandb cannot start.
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
    wanted = _parse(names)
    _check(wanted)
    return wanted


def _parse(names: str) -> list[str]:
    if not isinstance(names, str):
        raise InvalidValueError(f"trackers={names!r} must be names parted by commas, or {NONE!r}")
    given = [name.strip() for name in names.split(",")]
    if given == [NONE]:
        return []
    allowed = NAMES if len(given) > 1 else (*NAMES, NONE)
    return list(dict.fromkeys(validate.choice("trackers", name, allowed) for name in given))


def _check(names: list[str]) -> None:
    """Find what is missing before anything is written."""
    if "wandb" in names:
        wandb_mode()
        extras.wandb()
    if "tensorboard" in names:
        extras.tensorboard_writer()


def _open(
    name: str, folder: Path, project: str, run_name: str, config: Mapping[str, Any]
) -> Tracker:
    try:
        if name == "wandb":
            return WandbTracker(folder, project=project, run_name=run_name, config=config)
        return TensorBoardTracker(folder)
    except OSError as error:
        raise StorageError(
            f"tracker {name} cannot write to {str(folder)!r}: {error.strerror or error}"
        ) from error
