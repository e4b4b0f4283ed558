"""One run from its problem to its result: open folder and ledger, build, train."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from fedquilt.common.errors import InvalidValueError, RunInterrupted, StorageError, WorkerError
from fedquilt.common.formatting import printable
from fedquilt.common.observer import as_observer
from fedquilt.config import RunConfig
from fedquilt.config.choices import FLOWER_ENGINES
from fedquilt.config.condense import CondenseConfig
from fedquilt.experiment.client_evaluation import make_client_evaluation
from fedquilt.experiment.loop import Experiment, Watching
from fedquilt.experiment.preflight import preflight_lines, tell_owner_of_missing_values
from fedquilt.federation import Federation
from fedquilt.method import Method
from fedquilt.privacy.ledger import LedgerBusyError, LedgerFileError
from fedquilt.privacy.run_account import open_witness
from fedquilt.record.folder import RunFolder, run_stem
from fedquilt.record.result import RunResult, load
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
from fedquilt.setup.basis import Basis, basis_of
from fedquilt.setup.federation import (
    build_federation,
    build_method,
    engine_for_resume,
    resolve_auto_engine,
)
from fedquilt.setup.task import FederatedTask


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
