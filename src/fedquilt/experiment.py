"""One run: build, rounds, evaluate, record, resume."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.assemble import (
    Problem,
    build_engine,
    build_federation,
    build_problem,
    named_clients,
    problem_from,
)
from fedquilt.assemble_account import (
    account_notes,
    check_not_rolled_back,
    check_same_clients,
    needs_account,
    open_account,
    open_witness,
)
from fedquilt.common.errors import InvalidValueError, RunFolderError, RunInterrupted
from fedquilt.condense.run_hooks import (
    condensation_record,
    grown_set,
    keep_images,
    report_progress,
    train_if_stale,
)
from fedquilt.condense.server import freed_memory_kept
from fedquilt.config import CondenseConfig, RunConfig, build_config, check_keys
from fedquilt.config.condense import with_package_names
from fedquilt.learning import Engine, evaluate
from fedquilt.record import (
    CUSTOM,
    RunResult,
    as_line,
    build_result,
    load,
    load_tensors,
    published,
    split_private,
)
from fedquilt.round import Federation, run_round
from fedquilt.run_folder import RunFolder, run_stem

# A checkpoint costs a flush to disk; once a second it costs nothing one would notice.
CHECKPOINT_SECONDS = 1.0

Observer = Callable[[RunConfig, dict[str, Any]], None]
"""Called with the configuration and the line of each finished round.

An observer may also have `opened(config, folder)`, called once before the first round,
`working(what, share)`, called within a round of a condensation, and `kept(path)`, called
when its images were written.
"""


def run(
    model: nn.Module,
    train: object,
    test: object,
    clients: Sequence[Sequence[int] | NDArray[Any]] | Mapping[str, Sequence[int] | NDArray[Any]],
    *,
    client_ids: Iterable[str] | None = None,
    output_dir: str | None = "./results",
    resume: str | Path | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> RunResult:
    """Train your own model on your own data.

    Parameters
    ----------
    model : nn.Module
        Any classifier that returns logits or log-probabilities; it is copied.
    train, test : data sets
        An `ImageDataset`, a pair `(inputs, labels)`, or anything with `len` and
        `[i] -> (tensor, int)`.
    clients : sequence of index lists, or mapping from client ids to them
        The samples of `train` that each client holds.
    client_ids : sequence of str, optional
        Who the clients are.  A ledger finds each one's account by its id, wherever it
        stands in the list; clients may be absent from a run, and new ones join.
    output_dir : str or None
        Where the run's folder is made; None keeps everything in memory.
    resume : path, optional
        Continue this run folder, made earlier with the same model and data.
    observer : callable, optional
        Called with the configuration and the line of each finished round.
    **settings
        Any field of `RunConfig`, for example `mode="fixed_dp", num_rounds=50`.
    """
    folder = None
    if resume is not None:
        folder = RunFolder.open(resume)
        config = _resumed_config(folder, settings)
    else:
        place = {} if output_dir is None else {"output_dir": output_dir}
        config = build_config({"dataset": CUSTOM, "model": CUSTOM, **place, **settings})
    parts, ids = named_clients(clients, client_ids)
    config, problem = problem_from(config, model, train, test, parts, ids)
    return _run(config, problem, folder, output_dir, observer)


def run_config(config: RunConfig, observer: Observer | None = None) -> RunResult:
    """Run what a configuration describes, in a new folder under its output_dir."""
    config, problem = build_problem(config, progress=observer is not None)
    return _run(config, problem, None, config.output_dir, observer)


def run_in_memory(config: RunConfig, observer: Observer | None = None) -> RunResult:
    """Run what a configuration describes and write nothing."""
    config, problem = build_problem(config)
    return _run(config, problem, None, None, observer)


def resume_run(path: str | Path, observer: Observer | None = None) -> RunResult:
    """Continue a run that was stopped; a finished run returns its result."""
    folder = RunFolder.open(path)
    if folder.read_result() is not None:
        return load(path)
    config = folder.read_config()
    if config.model == CUSTOM or config.dataset == CUSTOM:
        raise RunFolderError(
            f"run folder {str(path)!r} was made from your own model or data: "
            "continue it from Python with fedquilt.run(model, train, test, clients, resume=...)"
        )
    config, problem = build_problem(config, progress=observer is not None)
    return _run(config, problem, folder, None, observer)


def _run(
    config: RunConfig,
    problem: Problem,
    folder: RunFolder | None,
    output_dir: str | None,
    observer: Observer | None,
) -> RunResult:
    """Open folder and ledger, pick up a checkpoint if there is one, and train."""
    with contextlib.ExitStack() as stack:
        resumed = folder is not None
        if folder is not None:
            folder.acquire()
            stack.callback(folder.close)
            if folder.read_result() is not None:
                return load(folder.path, problem.whole_model())
        engine = build_engine(config, problem)
        stack.callback(engine.close)
        federation, folder = _open(config, problem, engine, folder, output_dir, stack)
        if problem.condensing is not None:
            stack.enter_context(freed_memory_kept())
        if folder is not None:
            _notify(observer, "opened", config, folder.path)
        report_progress(problem, observer)
        lines = _restore(folder, federation, problem) if folder is not None and resumed else []
        try:
            stopped = train_rounds(config, problem, federation, lines, folder, observer)
            return _finish(config, problem, federation, lines, folder, stopped)
        except KeyboardInterrupt:
            raise RunInterrupted(None if folder is None else str(folder.path)) from None


def _notify(observer: Observer | None, what: str, *arguments: Any) -> None:
    """Call an observer's method if it has it."""
    method = getattr(observer, what, None)
    if method is not None:
        method(*arguments)


def _open(
    config: RunConfig,
    problem: Problem,
    engine: Engine,
    folder: RunFolder | None,
    output_dir: str | None,
    stack: contextlib.ExitStack,
) -> tuple[Federation, RunFolder | None]:
    """Open the run's account, where it has one, its folder, and build the federation.

    A ledger that outlives runs is asked first, and the federation is built: when
    either refuses, no folder is left behind.  The ledger of a run on its own lies
    in the run's folder, or in a temporary one when nothing is kept.
    """
    entered = folder.read_account() if folder is not None else None
    if entered is not None and folder is not None:
        check_same_clients(problem, entered, folder.path)
    run_id = entered["run_id"] if entered else f"{run_stem(config)}-{secrets.token_hex(4)}"
    own_ledger = config.ledger is None and needs_account(config, problem)
    account = None
    if config.ledger is not None:
        place = Path(entered["ledger"]) if entered else Path(config.ledger).expanduser().resolve()
        account = open_account(config, problem, place, run_id, resumed=entered is not None)
        stack.callback(account.close)
    federation = None if own_ledger else build_federation(config, problem, account, engine)
    if folder is None and output_dir is not None:
        folder = RunFolder.create(config, output_dir)
        stack.callback(folder.close)
    if own_ledger:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place = folder.path if folder is not None else place
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
    if account is not None and folder is not None and entered is None:
        name = "ledger.sqlite" if own_ledger else str(account.ledger.path.resolve())
        clients = problem.roster.digest
        folder.write_account({"run_id": run_id, "ledger": name, "clients": clients})
    return federation or build_federation(config, problem, account, engine), folder


def train_rounds(
    config: RunConfig,
    problem: Problem,
    federation: Federation,
    lines: list[dict[str, Any]],
    folder: RunFolder | None = None,
    observer: Observer | None = None,
) -> str | None:
    """Run the rounds that are left; `lines` grows by one a round.

    Returns why the run ended before its last round, None when it did not.
    """
    saved_at = time.monotonic()
    if not lines:
        keep_images(config, problem, folder, 0, observer)
    else:
        stopped = _reason_to_stop(config, federation, lines[-1])
        # It may have been killed between keeping a release and looking at the model.
        if "test_accuracy" not in lines[-1] and (stopped or _evaluates(config, len(lines))):
            lines[-1] |= _evaluate_and_keep(
                config, problem, federation, folder, observer, len(lines)
            )
            if folder is not None:
                folder.amend_round(lines[-1])
            stopped = _reason_to_stop(config, federation, lines[-1])
        elif "test_accuracy" in lines[-1]:
            train_if_stale(problem, federation)  # its checkpoint may be older than its line
        if stopped is not None:
            return stopped  # the run had ended when it was killed
    for round_index in range(len(lines), config.num_rounds):
        began = time.perf_counter()
        record = run_round(federation, round_index)
        line = as_line(record, time.perf_counter() - began)
        private = None
        if federation.mechanism.is_bounded:
            line, private = split_private(line)
        done = round_index + 1
        last = done == config.num_rounds
        stopped = None if last else _reason_to_stop(config, federation, line)
        evaluates = _evaluates(config, done) or stopped is not None
        kept = evaluates and _is_slow_and_paid(problem, federation)
        if kept and folder is not None:
            folder.append_round(line, private)
            _save(folder, problem, federation, done)
        if evaluates:
            line |= _evaluate_and_keep(config, problem, federation, folder, observer, done)
            stopped = None if last else _reason_to_stop(config, federation, line)
        lines.append(line)
        if folder is not None:
            if kept:
                folder.amend_round(line)
            else:
                folder.append_round(line, private)
            # With a ledger, a round that has to run again costs privacy: save every round.
            due = time.monotonic() - saved_at >= CHECKPOINT_SECONDS
            if due or federation.account is not None:
                _save(folder, problem, federation, len(lines))
                saved_at = time.monotonic()
        if observer is not None:
            observer(config, line)
        if stopped is not None:
            return stopped
    return None


def _evaluates(config: RunConfig, done: int) -> bool:
    """Tell whether the model is looked at after so many rounds."""
    return done % config.eval_every == 0 or done == config.num_rounds


def _is_slow_and_paid(problem: Problem, federation: Federation) -> bool:
    """Tell whether looking at the model takes long and the release before it was paid for."""
    return problem.condensing is not None and federation.account is not None


def _evaluate_and_keep(
    config: RunConfig,
    problem: Problem,
    federation: Federation,
    folder: RunFolder | None,
    observer: Observer | None,
    done: int,
) -> dict[str, Any]:
    """Measure the model and keep a condensation's images; return what was measured."""
    measured = measure(problem, federation)
    keep_images(config, problem, folder, done, observer)
    return split_private(measured)[0] if federation.mechanism.is_bounded else measured


def _reason_to_stop(config: RunConfig, federation: Federation, line: dict[str, Any]) -> str | None:
    """Return why no round should follow the one of this line, None when one should."""
    if _reached_target(config, line):
        return "the validation accuracy reached the target"
    account = federation.account
    if account is not None and account.is_bounded:
        remaining = account.remaining(line["round"] + 1)
        if not federation.mechanism.has_allowance(remaining).any():
            return "no client has allowance left for another round"
    return None


def measure(problem: Problem, federation: Federation) -> dict[str, Any]:
    """Step 9: evaluate the global model; test data are only ever looked at here."""
    measured: dict[str, Any] = dict(train_if_stale(problem, federation))
    problem.flat.write(federation.weights)
    accuracy, loss = evaluate(problem.flat.module, *problem.test)
    measured |= {
        "test_accuracy": accuracy,
        "test_loss": loss,
        "participation_stats": federation.tracker.get_statistics(),
    }
    if problem.validation is not None:
        measured["validation_accuracy"], _ = evaluate(problem.flat.module, *problem.validation)
    return measured


def _reached_target(config: RunConfig, line: dict[str, Any]) -> bool:
    """Tell whether early stopping is on and the validation accuracy is at the target."""
    accuracy = line.get("validation_accuracy")
    return (
        config.early_stopping
        and accuracy is not None
        and config.target_accuracy is not None
        and accuracy >= config.target_accuracy
    )


def _save(folder: RunFolder, problem: Problem, federation: Federation, rounds: int) -> None:
    problem.flat.write(federation.weights)
    state = federation.state()
    if problem.flat.is_lossy:
        state["weights"] = federation.weights.cpu().numpy()
    head = "" if federation.account is None else federation.account.run.head
    folder.save_checkpoint(rounds, problem.flat.module.state_dict(), state, head)


def _restore(folder: RunFolder, federation: Federation, problem: Problem) -> list[dict[str, Any]]:
    """Bring the federation to the last checkpoint and return the rounds before it."""
    saved = folder.load_checkpoint()
    folder.drop_images(0 if saved is None else saved.rounds)
    if saved is None:
        folder.read_rounds(0)
        return []
    if federation.account is not None:
        check_not_rolled_back(federation.account, saved.ledger_head)
    load_tensors(problem.flat.module, saved.model, folder.path)
    weights = saved.state.get("weights")
    try:
        federation.load_state(saved.state)
    except (KeyError, InvalidValueError) as error:
        raise RunFolderError(f"{folder.path}: the checkpoint does not fit: {error}") from error
    vector = problem.flat.read() if weights is None else torch.from_numpy(weights)
    federation.weights = vector.to(federation.weights.device).clone()
    return folder.read_rounds(saved.rounds)


def _finish(
    config: RunConfig,
    problem: Problem,
    federation: Federation,
    lines: list[dict[str, Any]],
    folder: RunFolder | None,
    stopped: str | None,
) -> RunResult:
    """Write the last checkpoint and the result, and return the run."""
    counts = federation.tracker.participation_count
    account = federation.account
    epsilons = None if account is None else account.epsilons()
    statement = federation.mechanism.statement(counts, epsilons)
    result = build_result(config, lines, statement, counts)
    result["stopped"] = stopped
    result["metadata"] |= {
        "input_shape": list(problem.input_shape),
        "num_classes": problem.num_classes,
        "model_width": problem.model_width,
    }
    if config.method not in ("full", "condense"):
        result["slices"] = problem.costs(config.method)
    synthetic = grown_set(config, problem)
    if synthetic is not None:
        result["condensation"] = condensation_record(config, problem, lines, synthetic)
        keep_images(config, problem, folder)
    problem.flat.write(federation.weights)
    module = problem.whole_model()
    if folder is not None:
        _save(folder, problem, federation, len(lines))
    if account is not None:
        account.finish(federation.weights if account.reproducible else None)
        result["ledger"] = account.summary()
        shared, resumed = config.ledger is not None, account.run.is_resumed
        resumed = resumed and statement.is_bounded
        notes = account_notes(result["ledger"], shared=shared, resumed=resumed)
        statement = dataclasses.replace(statement, notes=(*statement.notes, *notes))
        result["statement"] = statement.as_json()
    result = published(result) if federation.mechanism.is_bounded else result
    if folder is not None:
        folder.write_result(result)
    path = None if folder is None else folder.path
    return RunResult(result, statement, dict(module.state_dict()), module, path, synthetic)


def _resumed_config(folder: RunFolder, settings: dict[str, Any]) -> RunConfig:
    """Return the folder's configuration; other settings beside it must agree."""
    config = folder.read_config()
    if isinstance(config, CondenseConfig):
        settings = with_package_names(settings)
    check_keys(settings, "configuration", type(config))
    for key, value in settings.items():
        if getattr(config, key, None) != value:
            raise InvalidValueError(
                f"{key}={value!r} must be {getattr(config, key, None)!r}, as in the run "
                f"that is resumed ({folder.path})"
            )
    return config
