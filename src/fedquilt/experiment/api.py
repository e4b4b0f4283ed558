"""What is called to train: run, run_config, run_in_memory, resume_run, run_task.

`start_run` takes one from its problem to its result: open folder and ledger, build, train.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common.errors import (
    InvalidValueError,
    RunFolderError,
    RunInterrupted,
    StorageError,
    WorkerError,
)
from fedquilt.common.formatting import printable
from fedquilt.common.observer import Observers, as_observer
from fedquilt.config import RunConfig, build_config, check_keys, package_names
from fedquilt.config.choices import FLOWER_ENGINES
from fedquilt.config.condense import CondenseConfig
from fedquilt.config.keywords import Settings
from fedquilt.config.uses import shows_settings
from fedquilt.data.holdings import by_column
from fedquilt.experiment.client_evaluation import make_client_evaluation
from fedquilt.experiment.loop import Experiment, Watching
from fedquilt.experiment.preflight import preflight_lines, tell_owner_of_missing_values
from fedquilt.federation import Federation
from fedquilt.method import Method, RemoteEngine
from fedquilt.models import FeatureModel
from fedquilt.observe.progress import Expectations, Progress
from fedquilt.observe.trackers import tracked as _tracked
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.ledger import LedgerBusyError, LedgerFileError
from fedquilt.privacy.run_account import open_witness
from fedquilt.record.folder import RunFolder, run_stem
from fedquilt.record.result import CUSTOM, RunResult, load
from fedquilt.setup.account import (
    check_account_not_lost,
    check_identity,
    check_same_clients,
    first_weights,
    identity_of,
    is_bounded,
    needs_account,
    open_account,
)
from fedquilt.setup.build_task import build_task, named_clients, task_from, tests_of
from fedquilt.setup.federation import (
    Basis,
    basis_of,
    build_federation,
    build_method,
    engine_for_resume,
    resolve_auto_engine,
)
from fedquilt.setup.mechanism import Build
from fedquilt.setup.task import BuildEngine, BuildMethod, FederatedTask, UserComponents
from fedquilt.training import Engine
from fedquilt.training.metrics import OwnMetric
from fedquilt.training.objective import OwnLoss
from fedquilt.training.optimizers import Factory

_LOG = logging.getLogger(__name__)

Metrics = str | OwnMetric | Sequence[str | OwnMetric] | Mapping[str, str | OwnMetric]
"""What is measured on the test data, by names or by callables."""


def run(
    model: nn.Module,
    train: object,
    test: object,
    clients: Sequence[Sequence[int] | NDArray[Any]]
    | Mapping[str, Sequence[int] | NDArray[Any]]
    | str
    | None = None,
    *,
    client_ids: Iterable[str] | None = None,
    client_tests: Sequence[Any] | Mapping[str, Any] | None = None,
    validation: object = None,
    output_dir: str | Path | None = "./results",
    resume: str | Path | None = None,
    observer: Watching | None = None,
    method: str | BuildMethod | None = None,
    mechanism: Build | type[Certified] | None = None,
    engine: str | Engine | RemoteEngine | BuildEngine | None = None,
    loss: str | OwnLoss | None = None,
    optimizer: str | Factory | None = None,
    metrics: Metrics | None = None,
    preset: str | None = None,
    progress: bool = True,
    quiet: bool = False,
    tracker: str = "none",
    **settings: Unpack[Settings],
) -> RunResult:
    """Train your own model on your own data, and say what may be claimed about every client.

    Without settings the mode is `certified`, at epsilon 6 for every client, and all clients
    join every one of 60 rounds; what that noise will do to your model is said before the
    first.  See `docs/modes.md` for the other modes.

    Parameters
    ----------
    model : nn.Module
        Any model: it returns a tensor, a tuple that begins with one, or an object with
        `logits` or `loss`.  It is copied.
    train, test : data sets
        A pair `(inputs, targets)` of tensors, or of tuples or dictionaries of them, a map-style
        `Dataset`, a `DataLoader`, a dictionary of tensors with `labels`, or an `ImageDataset`.
        `test` may be None: clients then evaluate the model on samples of their own, or nobody
        does.
    clients : sequence of index lists, mapping from client ids to them, or str
        The samples of `train` that each client holds; or the column of `train`, a
        `datasets.Dataset`, a pandas table or a dictionary, that names them.
        Left out where `train` is a list of data sets, one a client, or a mapping from client
        ids to data sets.
    client_ids : sequence of str, optional
        Who the clients are.  A ledger finds each one's account by its id, wherever it
        stands in the list; clients may be absent from a run, and new ones join.
    client_tests : sequence of index lists, or mapping from client ids to them, optional
        The samples of `train` on which each client evaluates the model, instead of a
        share of its own (`client_test_fraction`).
    validation : data set, optional
        In the forms of `test`; no client may hold its samples.  The accuracy on it is
        recorded, and with `early_stopping=True` the run ends when it reaches
        `target_accuracy`.
    output_dir : path or None
        Where the run's folder is made; None keeps everything in memory.
    resume : path, optional
        Continue this run folder, made earlier with the same model and data.
    observer : Observer or callable, optional
        Told what happens; a function is called with the configuration and the line of
        each finished round.
    method, mechanism, engine : optional
        Names as in `RunConfig`, or your own: a method is made from `MethodParts`, an engine
        is an `Engine` or is made from `MethodParts`, and a mechanism is a subclass of
        `Certified` or is made from `MechanismParts`.  See `docs/extending.md`.
    loss : str or callable, optional
        A name as in `RunConfig`, or your own on (outputs, targets) or on (model, batch).
    optimizer : str or callable, optional
        A name as in `RunConfig`, or a factory `params -> torch.optim.Optimizer`, called for
        every client in every round; where it takes `lr`, with the round's learning rate.
    metrics : str, callable, or a sequence or mapping of such, optional
        Names as in `RunConfig`, or your own on all (outputs, targets) of the test data.  The
        first is the headline.  See `docs/tasks/README.md`.
    preset : str, optional
        `paper-mnist` or `paper-cifar10`: the settings of the QuAP-FL paper's experiments, but
        for what they say of the data.
    progress : bool
        Show how far the run has come: a bar in a terminal or a notebook, else a line now and
        then, on the error stream.
    quiet : bool
        Show nothing, neither progress nor what the run may expect.
    tracker : str
        Also log the rounds, what anybody may see of them, to "tensorboard", "wandb" (offline)
        or "mlflow" (one store beside the runs); several joined by commas.
    **settings
        Options, for example `epsilon=3.0, num_rounds=50`.  One that would do nothing in the
        run's mode is refused.

    Returns
    -------
    RunResult
        Record, statement, trained model and folder of the run.
    """
    as_observer(observer)  # a mistake here must not cost a round
    _check_model(model)
    place: str | None = _as_text(output_dir)
    own, names = _own_parts(method, mechanism, engine, loss, optimizer, metrics)
    given: dict[str, Any] = {**{k: _as_text(v) for k, v in settings.items()}, **names}
    if isinstance(clients, str):
        train, clients, (test, validation) = by_column(train, clients, test, validation)
    parts, ids = (None, client_ids) if clients is None else named_clients(clients, client_ids)
    folder = None
    if resume is not None:
        folder = RunFolder.open(resume)
        if preset is not None:
            raise InvalidValueError(f"preset={preset!r} must be left out when a run is resumed")
        config = _resumed_config(folder, given)
    else:
        number = None if parts is None else len(parts) or None
        usual = {"dataset": CUSTOM, "model": CUSTOM, "num_clients": number}
        usual |= {} if place is None else {"output_dir": place}
        brought = own.method is not None or own.mechanism is not None
        like = model.made_as if isinstance(model, FeatureModel) else None
        said = {**usual, **given}
        config = build_config(said, preset=preset, own=True, brought=brought, like=like)
    if test is None and client_tests is None and not config.client_test_fraction:
        _LOG.warning(
            "nothing will be measured, and the result's metrics stay empty: give a test set, or "
            "let clients evaluate on samples of their own (client_test_fraction=0.2)"
        )
    tests = tests_of(client_tests, clients)
    try:
        config, problem = task_from(config, model, train, test, parts, ids, own, tests, validation)
    except InvalidValueError as error:
        raise _explained(error, model) from error.__cause__
    # Copied, and maybe nobody else's.
    del model, train, test, clients, client_ids, client_tests, parts, ids, tests, validation
    if tracker != "none" and folder is None and place is None:
        raise InvalidValueError(f"tracker={tracker!r} needs an output_dir: it writes to the folder")
    with (
        _tracked(tracker, observer) as tracked,
        _shown(config, tracked, progress and not quiet, quiet) as watching,
    ):
        return start_run(config, problem, folder, place, watching)


shows_settings(run)


Prepare = Callable[[RunConfig, FederatedTask], FederatedTask]
"""Exchanges parts of a problem before its run: who trains its clients, and where."""


def _built(
    config: RunConfig, observer: Watching | None, prepare: Prepare | None
) -> tuple[RunConfig, FederatedTask]:
    """Return the named data set's problem; the observer is told what takes long."""
    told = as_observer(observer).working
    config, problem = build_task(config, progress=observer is not None, working=told)
    return config, problem if prepare is None else prepare(config, problem)


def run_config(
    config: RunConfig,
    observer: Watching | None = None,
    prepare: Prepare | None = None,
    *,
    tracker: str = "none",
) -> RunResult:
    """Run what a configuration describes, in a new folder under its output_dir."""
    config, problem = _built(config, observer, prepare)
    with _tracked(tracker, observer) as watching:
        return start_run(config, problem, None, config.output_dir, watching)


def run_in_memory(
    config: RunConfig, observer: Watching | None = None, prepare: Prepare | None = None
) -> RunResult:
    """Run what a configuration describes and write nothing."""
    config, problem = build_task(config)
    problem = problem if prepare is None else prepare(config, problem)
    return start_run(config, problem, None, None, observer)


def resume_run(
    path: str | Path,
    observer: Watching | None = None,
    prepare: Prepare | None = None,
    *,
    tracker: str = "none",
) -> RunResult:
    """Continue a run that was stopped; a finished run returns its result."""
    folder = RunFolder.open(path)
    if folder.read_result() is not None:
        folder.remove_leftovers()
        return load(path)
    config = folder.read_config()
    folder.checkpoint_head()  # of another run, or none: found before data are loaded
    if config.model == CUSTOM or config.dataset == CUSTOM:
        raise RunFolderError(
            f"run folder {str(path)!r} was made from your own model or data: "
            "continue it from Python with fedquilt.run(model, train, test, clients, resume=...)"
        )
    config, problem = _built(config, observer, prepare)
    with _tracked(tracker, observer) as watching:
        return start_run(config, problem, folder, None, watching)


def run_task(
    config: RunConfig,
    problem: FederatedTask,
    *,
    output_dir: str | None,
    resume: str | Path | None = None,
    observer: Watching | None = None,
) -> RunResult:
    """Run a problem that was put together elsewhere, in a new folder or in one to continue."""
    folder = None if resume is None else RunFolder.open(resume)
    return start_run(config, problem, folder, output_dir, observer)


@contextlib.contextmanager
def _shown(
    config: RunConfig, observer: Watching | None, progress: bool, quiet: bool
) -> Iterator[Watching | None]:
    """Yield an observer that shows progress too, or only what may be expected, or neither."""
    if quiet:
        yield observer
        return
    shown = Progress(f"{config.dataset} {config.mode}")
    if not progress:
        yield Observers(Expectations(shown), as_observer(observer))
        return
    with shown:
        yield Observers(shown, as_observer(observer))


def _own_parts(
    method: str | BuildMethod | None,
    mechanism: Build | type[Certified] | None,
    engine: str | Engine | RemoteEngine | BuildEngine | None,
    loss: str | OwnLoss | None = None,
    optimizer: str | Factory | None = None,
    metrics: Metrics | None = None,
) -> tuple[UserComponents, dict[str, str]]:
    """Part what a user brought from what was named; the configuration says `custom`."""
    if isinstance(metrics, list | tuple) and all(isinstance(one, str) for one in metrics):
        metrics = ",".join(str(one) for one in metrics)
    given: dict[str, Any] = {"method": method, "engine": engine, "loss": loss}
    given |= {"optimizer": optimizer, "metrics": metrics}
    told = {key: value for key, value in given.items() if value is not None}
    names = {key: value if isinstance(value, str) else CUSTOM for key, value in told.items()}
    elsewhere = hasattr(engine, "serve")
    own = UserComponents(
        method=None if isinstance(method, str) else method,
        mechanism=mechanism,
        engine=None if isinstance(engine, str) or elsewhere else cast(Engine, engine),
        remote=cast(RemoteEngine, engine) if elsewhere else None,
        loss=None if isinstance(loss, str) else loss,
        optimizer=None if isinstance(optimizer, str) else optimizer,
        metrics=None if isinstance(metrics, str) else metrics,
    )
    return own, names


def _as_text(value: Any) -> Any:
    """Return paths and devices as the texts that a configuration holds, all else as it is."""
    if isinstance(value, torch.device):
        return str(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidValueError(
            f"model={model!r:.60} must be an instance of torch.nn.Module"
            + (": call the class" if isinstance(model, type) else "")
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise InvalidValueError(
            "model has lazy layers without weights: call it once on a sample before the run"
        )


def _explained(error: InvalidValueError, model: nn.Module) -> InvalidValueError:
    """Return the error, with what to do where a model in float64 meets inputs in float32."""
    wide = next((n for n, p in model.named_parameters() if p.dtype == torch.float64), None)
    if wide is None or "dtype" not in str(error):
        return error
    return InvalidValueError(f"{error} ({wide} of the model is float64: use model.float())")


def _resumed_config(folder: RunFolder, settings: dict[str, Any]) -> RunConfig:
    """Return the folder's configuration; other settings beside it must agree."""
    config = folder.read_config()
    settings = package_names(type(config), settings)
    check_keys(settings, "configuration", type(config))
    for key, value in settings.items():
        if getattr(config, key, None) != value and (key, value) != ("engine", "auto"):
            raise InvalidValueError(
                f"{key}={value!r} must be {getattr(config, key, None)!r}, as in the run "
                f"that is resumed ({folder.path})"
            )
    return config


def start_run(
    config: RunConfig,
    problem: FederatedTask,
    folder: RunFolder | None,
    output_dir: str | None,
    observer: Watching | None,
) -> RunResult:
    """Open folder and ledger, go to a checkpoint if there is one, and train."""
    problem = dataclasses.replace(problem, lends_memory=True)
    _spare_torch_a_temporary_folder()
    watching = as_observer(observer)
    with contextlib.ExitStack() as stack:
        resumed = folder is not None
        if folder is not None:
            folder.acquire()
            stack.callback(folder.close)
            if folder.read_result() is not None:
                return load(folder.path, problem.whole_model())
            folder.check_rounds()  # before a ledger is told that the run goes on
        if resumed:
            config = engine_for_resume(config, problem)
        else:
            _refuse_precision(config, problem)
            config, problem = resolve_auto_engine(config, problem)
        identity = _identity_soon(problem) if folder is None and output_dir is not None else None
        method = build_method(config, problem)
        stack.callback(method.close)
        if observer is not None:
            watching.expects(config, preflight_lines(config, problem, resumed=resumed))
        told = tell_owner_of_missing_values(config, problem)
        federation, folder = _open(config, problem, method, folder, output_dir, identity, stack)
        stack.enter_context(method.running())
        clients = make_client_evaluation(config, problem, federation)
        experiment = Experiment(
            config, problem, federation, folder=folder, observer=watching, clients=clients
        )
        if folder is not None:
            experiment.observer.opened(config, folder.path)
        if resumed:
            experiment.restore()
        try:
            done = experiment.finish(experiment.run())
            return dataclasses.replace(done, for_owner=(*told, *done.for_owner))
        except KeyboardInterrupt:
            raise RunInterrupted(None if folder is None else str(folder.path)) from None
        except (WorkerError, StorageError, LedgerFileError, LedgerBusyError) as error:
            error.folder = None if folder is None else str(folder.path)
            raise


def _refuse_precision(config: RunConfig, problem: FederatedTask) -> None:
    """Refuse a precision that is for GPUs where clients train on a CPU of this machine."""
    usual = config.precision == RunConfig.precision or isinstance(config, CondenseConfig)
    own = problem.own.engine or problem.own.method or problem.own.remote or problem.task.is_remote
    if usual or own or config.engine in FLOWER_ENGINES or "cuda" in (config.devices or ""):
        return
    if problem.task.device.type == "cpu":
        raise InvalidValueError(
            f"precision={config.precision!r} must be left out of this run, where it would do "
            "nothing: it is for training on a GPU, and clients train on the CPU here"
        )


def _open(
    config: RunConfig,
    problem: FederatedTask,
    method: Method,
    folder: RunFolder | None,
    output_dir: str | None,
    identity: Future[dict[str, str]] | None,
    stack: contextlib.ExitStack,
) -> tuple[Federation, RunFolder | None]:
    """Open the run's account, where it has one, its folder, and build the federation.

    A ledger that outlives runs is asked first, and the federation is built: when
    either refuses, no folder is left behind.  The ledger of a run on its own lies
    in the run's folder, or in a temporary one when nothing is kept.
    """
    entered = folder.read_account() if folder is not None else None
    basis = basis_of(config, problem, method)
    if folder is not None:
        if entered is None:
            check_account_not_lost(config, problem, folder)
        else:
            check_same_clients(problem, entered, folder.path)
        check_identity(problem, folder)
        earlier = None if entered is None else entered.get("basis")
        if earlier is not None or folder.has_released():
            basis = basis.after(earlier)
    run_id = entered["run_id"] if entered else f"{run_stem(config)}-{secrets.token_hex(4)}"
    own_ledger = config.ledger is None and needs_account(config, problem)
    account = None
    if config.ledger is not None:
        _refuse_doubts(config, problem, basis)
        place = Path(entered["ledger"]) if entered else Path(config.ledger).expanduser().resolve()
        account = open_account(config, problem, place, run_id, resumed=entered is not None)
        stack.callback(account.close)
    note = {"run_id": run_id, "ledger": "ledger.sqlite", "clients": problem.roster.digest}
    note["basis"] = basis.as_json()
    federation = None if own_ledger else build_federation(config, problem, account, method, basis)
    if folder is None and output_dir is not None:
        # Before the configuration: a kill between them leaves no run that has lost its account.
        first = None if account is None else note | {"ledger": str(account.ledger.path.resolve())}
        folder = RunFolder.create(config, output_dir, problem.engine_choice, first)
        stack.callback(folder.close)
        folder.write_clients(identity_of(problem) if identity is None else identity.result())
    if own_ledger:
        place = _scratch(stack) if folder is None else folder.path
        witness = None if folder is None else open_witness(run_id, folder.path)
        if witness is not None:
            stack.callback(witness.close)
        account = open_account(
            config,
            problem,
            place / "ledger.sqlite",
            run_id,
            resumed=entered is not None,
            witness=witness,
        )
        stack.callback(account.close)
        if folder is not None and entered is None:
            folder.write_account(note)
    federation = federation or build_federation(config, problem, account, method, basis)
    if folder is not None and entered is not None:
        folder.note_basis(basis.as_json())
    return federation, folder


def _refuse_doubts(config: RunConfig, problem: FederatedTask, basis: Basis) -> None:
    """Refuse to enter charges that are not true into a ledger that outlives the run."""
    if basis.doubts and is_bounded(config, problem):
        raise InvalidValueError(
            f"ledger={config.ledger!r} must be left out: nothing is known of what clients would "
            f"spend, because {'; '.join(map(printable, basis.doubts))}"
        )


def _identity_soon(problem: FederatedTask) -> Future[dict[str, str]] | None:
    """Begin to digest the data while kernels for a GPU are found or compiled.

    Without a GPU there is nothing to wait for, and engines may fork: then it is done later.
    """
    if problem.task.device.type != "cuda":
        return None
    pool = ThreadPoolExecutor(1)
    begins = first_weights(problem)  # before anybody trains in them
    identity = pool.submit(identity_of, problem, secrets.token_bytes(32), begins)
    pool.shutdown(wait=False)
    return identity


def _spare_torch_a_temporary_folder() -> None:
    """Let torch import its compiler where there is no temporary folder.

    It wants the name of a folder for a cache, also when nothing is compiled, and finds none
    in a read-only container; any folder that is there will do.
    """
    try:
        tempfile.gettempdir()
    except OSError:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.dirname(torch.__file__))


def _scratch(stack: contextlib.ExitStack) -> Path:
    """Return a folder for the ledger of a run that is kept in memory."""
    try:
        return Path(stack.enter_context(tempfile.TemporaryDirectory()))
    except OSError as error:
        raise StorageError(
            f"the ledger of a run in memory needs a temporary folder: {error.strerror or error}. "
            "Name one that can be written (TMPDIR), or an output_dir"
        ) from error
