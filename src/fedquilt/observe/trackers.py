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
collected: a tracker tells of a run what it was given, and no more.  MLflow has one store for
the runs of a folder, or the one that MLFLOW_TRACKING_URI names.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError, IrregularFileError, StorageError
from fedquilt.common.observer import Observer, Observers, as_observer
from fedquilt.common.storage import check_own_tree
from fedquilt.observe.tracker_kinds import (
    MlflowTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
    load_mlflow,
    load_tensorboard,
    load_wandb,
    step_number,
    wandb_mode,
)

__all__ = ["Tracked", "Tracker", "Trackers", "check_trackers", "open_trackers", "tracked"]

NAMES = ("wandb", "tensorboard", "mlflow")
NONE = "none"


def open_trackers(
    names: str, folder: str | Path, *, project: str, run_name: str, config: Mapping[str, Any]
) -> Trackers:
    """Open the trackers of a run, as a context manager that closes them.

    Parameters
    ----------
    names
        "none", or one or more of "wandb", "tensorboard" and "mlflow", parted by commas.
    folder
        The run's folder; trackers write to folders of their names inside it, MLflow to one store
        beside it.  In the folder of an earlier run they go on with that run.
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
        load_wandb()
    if "tensorboard" in wanted:
        load_tensorboard()
    if "mlflow" in wanted:
        load_mlflow()
    return wanted


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


logger = logging.getLogger("fedquilt.trackers")


class Trackers:
    """Hands every round to each tracker; one that fails is left behind with a warning.

    Only the process that opened the trackers writes to them: in a forked worker, `log`
    and `close` do nothing, so that nothing is written twice or waited for.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._live = dict(trackers)
        self._pid = os.getpid()
        # Reentrant: a signal handler may close what the same thread is writing to.
        self._lock = threading.RLock()

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers that still work."""
        return tuple(self._live)

    def log(self, line: Mapping[str, Any]) -> None:
        """Hand one round to every tracker.

        Raises
        ------
        InvalidValueError
            If the line has no whole number >= 0 as its "round".
        """
        step_number(line)
        if os.getpid() != self._pid:
            return
        with self._lock:
            for name, tracker in list(self._live.items()):
                try:
                    tracker.log(line)
                except Exception as error:
                    self._leave_behind(name, error)

    def close(self, *, failed: bool = False) -> None:
        """Close every tracker, also when closing one fails; again does nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock, ExitStack() as closing:
            while self._live:
                closing.callback(_close, *self._live.popitem(), failed)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)

    def _leave_behind(self, name: str, error: Exception) -> None:
        _warn(name, error)
        tracker = self._live.pop(name, None)
        if tracker is not None:
            with suppress(Exception):
                tracker.close(failed=True)


def _close(name: str, tracker: Tracker, failed: bool) -> None:
    try:
        tracker.close(failed=failed)
    except Exception as error:
        _warn(name, error)


def _warn(name: str, error: Exception) -> None:
    logger.warning(
        "tracker %s stopped and the run goes on without it: %s: %s",
        name,
        type(error).__name__,
        error,
    )


class Tracked(Observer):
    """Hands every round to the trackers that were named; a context manager that closes them.

    It is given public lines only (`Observer`), so trackers log what anybody may see.
    """

    def __init__(self, names: str) -> None:
        check_trackers(names)
        self._names = names
        self._trackers: Trackers | None = None

    def opened(self, config: Any, folder: Path) -> None:
        """Open the trackers in the run's folder."""
        project, name = tracker_names(config)
        self._trackers = open_trackers(
            self._names, folder, project=project, run_name=name, config=config.as_dict()
        )

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        """Log a round."""
        if self._trackers is not None:
            self._trackers.log(line)

    def __enter__(self) -> Tracked:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._trackers is not None:
            self._trackers.close(failed=kind is not None)


@contextmanager
def tracked(
    names: str, observer: Callable[[Any, dict[str, Any]], None] | None
) -> Iterator[Callable[[Any, dict[str, Any]], None] | None]:
    """Yield an observer that also logs to the named trackers; the observer itself for "none"."""
    if names == "none":
        yield observer
        return
    with Tracked(names) as logging:
        yield Observers(as_observer(observer), logging)


def tracker_names(config: Any) -> tuple[str, str]:
    """Return project and run name, as the FedNum reference writes them for a condensation."""
    if config.method != "condense":
        return f"fedquilt_{config.dataset}", f"{config.mode}_seed{config.seed}"
    people = f"client{config.num_clients}_{config.dirichlet_alpha:g}_{config.partition}"
    rounds = f"cr{config.num_rounds}_join_ratio{config.clients_per_round:g}"
    return f"{config.mode}_{config.dataset}_{people}", f"{config.model}_{rounds}"
