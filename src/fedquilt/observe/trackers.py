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

import importlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from fedquilt.common import checks, optional
from fedquilt.common.errors import InvalidValueError, IrregularFileError, StorageError
from fedquilt.common.observer import Observer, Observers, as_observer
from fedquilt.common.storage import check_own_folder, check_own_tree, write_file

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

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
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


ID_FILE = "run-id.txt"
"""In the folder of a tracker: which of its runs this is, for a resumed run to go on with."""
MEASURED = "test_"
# Of a condensation: the loss of the network that the server trains.
KEYS = {"epoch_avg_loss": "train_loss"}
EPSILONS = {"worst": "epsilon_max", "median": "epsilon_median"}


class Tracker(Protocol):
    """Takes the rounds of a run, in order, and is closed once at the end."""

    def log(self, line: Mapping[str, Any]) -> None:
        """Take one round."""

    def close(self, *, failed: bool = False) -> None:
        """Write what is left and stop; `failed` says that the run did not end well."""


def step_number(line: Mapping[str, Any]) -> int:
    """Return how many rounds are over after this one: rounds count from 0, steps from 1."""
    return checks.integer("round", line.get("round"), at_least=0) + 1


def scalars_of(line: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the numbers of a round under plain names.

    What is measured on test data has the metric's own name (`accuracy`, `loss`, `auroc`), unless
    something else of the line has it; `epsilon_max` and `epsilon_median` are those of the clients
    so far.  Other dictionaries are flattened with "/"; lists, texts and None are left out, and so
    is the round itself, which is the step.  Truth values are 0 and 1.
    """
    known = {key: value for key, value in line.items() if key != "round" and value is not None}
    spent = known.get("epsilon_spent")
    if isinstance(spent, Mapping):
        found = {EPSILONS[name]: spent[name] for name in EPSILONS if name in spent}
        others = {name: value for name, value in spent.items() if name not in EPSILONS}
        known = {**known, "epsilon_spent": others, **found}
    plain = {key: KEYS.get(key, key.removeprefix(MEASURED)) for key in known}
    taken = {*known, "round"}
    renamed = {key if plain[key] in taken else plain[key]: known[key] for key in known}
    return dict(_flatten("", renamed))


def withholds_time(line: Mapping[str, Any]) -> bool:
    """Tell whether a round keeps its duration to itself.

    How long clients take tells how much they hold, so a run with a privacy claim does
    not publish its seconds.  The clock times that trackers add would give them away.
    """
    return line.get("seconds") is None


def _flatten(prefix: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, int | float]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(f"{name}/", value)
        elif isinstance(value, int):
            yield name, int(value)
        elif isinstance(value, Real):
            yield name, float(value)


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables meanwhile; what the user has set stays."""
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


TENSORBOARD_FOLDER = "tensorboard"


class TensorBoardTracker:
    """Writes scalars with torch's SummaryWriter.

    The event file begins with the first round, because only then is known where the
    run goes on: TensorBoard drops what an earlier event file holds from that step on
    (`purge_step`), so the rounds that a resumed run repeats appear once.

    A round that withholds its seconds is stamped with the time of opening.
    """

    def __init__(self, folder: Path) -> None:
        self._module = load_tensorboard()
        self._folder = folder / TENSORBOARD_FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._opened = time.time()
        self._writer: Any = None

    def log(self, line: Mapping[str, Any]) -> None:
        """Write one round, and flush it: a killed run keeps its rounds."""
        step = step_number(line)
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
            wandb = load_wandb()
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
        row = step_number(line), scalars_of(line)
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


def _quiet(mode: str) -> AbstractContextManager[None]:
    """Start wandb without words, and offline without reports of its errors to its makers.

    wandb reads these variables only while it starts.
    """
    wanted = {"WANDB_SILENT": "true"}
    if mode in SENDS_NOTHING:
        wanted["WANDB_ERROR_REPORTING"] = "false"
    return _environment(wanted)


def load_wandb() -> Any:
    """Return the package."""
    return optional.require("wandb", "trackers='wandb'")


def load_tensorboard() -> Any:
    """Return torch's module with SummaryWriter, which needs the package tensorboard."""
    optional.require("tensorboard", "trackers='tensorboard'")
    return importlib.import_module("torch.utils.tensorboard")


MLFLOW_FOLDER = "mlflow"
_LONGEST = 6000  # characters of a parameter that MLflow takes
_MOST_AT_ONCE = 100
# MLflow reports its use to its makers unless told otherwise, and calls files old-fashioned.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


class MlflowTracker:
    """Logs to a run of its own in the store that MLFLOW_TRACKING_URI names.

    Unless that is set, it is the folder `mlflow` beside the run's: runs of one folder of results
    are compared with `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri RESULTS/mlflow`.

    A round that withholds its seconds is stamped with the time of opening, and sent at the end
    where the store may be another machine's.  A resumed run goes on in the same MLflow run; a round
    that comes out as before is not logged twice.
    """

    def __init__(
        self, folder: Path, *, project: str, run_name: str, config: Mapping[str, Any]
    ) -> None:
        place = folder / MLFLOW_FOLDER
        place.mkdir(parents=True, exist_ok=True)
        self._opened = int(1000 * time.time())
        self._elsewhere = os.environ.get("MLFLOW_TRACKING_URI")
        self._kept: list[Mapping[str, Any]] = []
        uri = self._elsewhere or _store(place).resolve().as_uri()
        with _environment(_ENVIRONMENT):
            load_mlflow()
            import mlflow.entities as entities
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient

            self._entities, self._refusal = entities, MlflowException
            try:
                self._client = MlflowClient(tracking_uri=uri)
                self._run_id = self._begin(place / ID_FILE, project, run_name, config)
                self._known = self._logged()
            except MlflowException as error:
                raise InvalidValueError(f"mlflow cannot write to {uri!r}: {error}") from error

    def _begin(self, file: Path, project: str, run_name: str, config: Mapping[str, Any]) -> str:
        """Return the run of this folder, made where the store has none."""
        written = file.read_text(encoding="utf-8").strip() if file.exists() else ""
        if re.fullmatch(r"[0-9a-f]{32}", written):
            with suppress(self._refusal):  # of another store
                self._client.update_run(written, status="RUNNING")
                return written
        experiment, tags = self._experiment(project), {"mlflow.user": "fedquilt"}
        made = self._client.create_run(experiment, self._opened, tags, run_name)
        run_id = str(made.info.run_id)
        given = [self._entities.Param(key, str(value)[:_LONGEST]) for key, value in config.items()]
        for start in range(0, len(given), _MOST_AT_ONCE):
            self._client.log_batch(run_id, params=given[start : start + _MOST_AT_ONCE])
        write_file(file, f"{run_id}\n".encode())
        return run_id

    def _experiment(self, project: str) -> str:
        with suppress(self._refusal):  # it is there, maybe made by a run beside this one just now
            return str(self._client.create_experiment(project))
        found = self._client.get_experiment_by_name(project)
        assert found is not None
        return str(found.experiment_id)

    def _logged(self) -> set[tuple[str, int, float]]:
        """Return what an earlier process has logged."""
        names = self._client.get_run(self._run_id).data.metrics
        return {
            (name, metric.step, metric.value)
            for name in names
            for metric in self._client.get_metric_history(self._run_id, name)
        }

    def log(self, line: Mapping[str, Any]) -> None:
        """Write one round."""
        if self._kept or (self._elsewhere and withholds_time(line)):
            self._kept.append(dict(line))
        else:
            self._send(line)

    def _send(self, line: Mapping[str, Any]) -> None:
        step, stamp = step_number(line), self._stamp(line)
        metrics = [
            self._entities.Metric(name, float(value), stamp, step)
            for name, value in scalars_of(line).items()
            if (name, step, float(value)) not in self._known
        ]
        with _environment(_ENVIRONMENT):
            self._client.log_batch(self._run_id, metrics=metrics)

    def _stamp(self, line: Mapping[str, Any]) -> int:
        return self._opened if withholds_time(line) else int(1000 * time.time())

    def close(self, *, failed: bool = False) -> None:
        """Send what was kept and say how the run ended; its end is stamped like its start."""
        status = "FAILED" if failed else "FINISHED"
        kept, self._kept = self._kept, []
        for line in kept:
            self._send(line)
        with _environment(_ENVIRONMENT):
            self._client.set_terminated(self._run_id, status=status, end_time=self._opened)


def _store(place: Path) -> Path:
    """Return the folder of the store: beside the run, or in it where an older version made one."""
    if any(one.is_dir() for one in place.iterdir()):
        return place
    store = place.parents[1] / MLFLOW_FOLDER
    check_own_folder(store)
    store.mkdir(mode=0o700, exist_ok=True)
    for experiment in store.iterdir():
        if not experiment.name.startswith("."):
            check_own_folder(experiment)
    return store


def load_mlflow() -> Any:
    """Return the package, told to keep to itself."""
    with _environment(_ENVIRONMENT):
        return optional.require("mlflow", "trackers='mlflow'")
