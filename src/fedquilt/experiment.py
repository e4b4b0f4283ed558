"""One run: build, rounds, evaluate, record, resume."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.aggregation import ServerOptimizer
from fedquilt.assemble import (
    BuildEngine,
    BuildMethod,
    Own,
    Problem,
    build_federation,
    build_method,
    build_problem,
    engine_of_before,
    named_clients,
    problem_from,
    settle_engine,
    tests_of,
)
from fedquilt.assemble_account import (
    account_notes,
    check_identity,
    check_not_rolled_back,
    check_same_clients,
    identity_of,
    needs_account,
    open_account,
    open_witness,
)
from fedquilt.assemble_mechanism import Build
from fedquilt.checkpoint_state import check_state, expected_state
from fedquilt.client_evaluation import ClientEvaluation, make_client_evaluation
from fedquilt.common.errors import (
    InvalidValueError,
    RunFolderError,
    RunInterrupted,
    StorageError,
    WorkerError,
)
from fedquilt.common.observer import Observers, as_observer
from fedquilt.common.pieces import pieces_of
from fedquilt.config import RunConfig, build_config, check_keys, package_names
from fedquilt.config.keywords import Settings, shows_settings
from fedquilt.learning import Engine, FlatModel
from fedquilt.learning.metrics import OwnMetric
from fedquilt.learning.objective import OwnLoss
from fedquilt.learning.optimizers import Factory
from fedquilt.learning.streams import aside, moment
from fedquilt.method import Method, RemoteEngine
from fedquilt.observe.progress import Expectations, Progress
from fedquilt.observe.tracked import tracked as _tracked
from fedquilt.outlook import expectations
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.ledger import LedgerBusyError, LedgerFileError
from fedquilt.privacy.run_account import RunAccount
from fedquilt.privacy.statement import Statement
from fedquilt.record import (
    CUSTOM,
    RunResult,
    as_line,
    build_result,
    load,
    load_tensors,
    published,
    split_private,
    was_evaluated,
)
from fedquilt.round import Federation, RoundRecord, run_round
from fedquilt.run_folder import RunFolder, run_stem

# A checkpoint costs a flush to disk; once a second it costs nothing one would notice.
CHECKPOINT_SECONDS = 1.0

Metrics = str | OwnMetric | Sequence[str | OwnMetric] | Mapping[str, str | OwnMetric]
"""What is measured on the test data, by names or by callables."""
OVERLAP = (
    "clients may hold the same samples (allow_overlap): the claim is about one client, and a "
    "sample that g of them hold is protected as a group of g"
)

Watching = Callable[[RunConfig, dict[str, Any]], None]
"""An `Observer`, or a function called with the configuration and each finished round's line."""


class Subject(Protocol):
    """What an experiment is about: the model, and how it is evaluated."""

    @property
    def flat(self) -> FlatModel: ...

    def whole_model(self) -> nn.Module:
        """Return a copy of the model as it stands, on the CPU."""

    def evaluate(self) -> dict[str, float]:
        """Measure the model as it stands: test_accuracy, test_loss and the like."""

    def metadata(self) -> dict[str, Any]:
        """Return what is needed to build the model again."""


class _NoMoreRoundsError(Exception):
    """No round should follow, found out while the next one was training."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Unbooked(NamedTuple):
    """A round that has run and is not yet charged, kept and shown."""

    record: RoundRecord
    seconds: float
    since: torch.cuda.Event | None


class Experiment:
    """Rounds, evaluation, stopping, checkpoints, result: one training loop for everybody.

    Parameters
    ----------
    config : RunConfig
        The run's settings.
    subject : Subject
        The model and its evaluation.
    federation : Federation
        What a round joins.
    folder : RunFolder, optional
        Where the run is kept; None keeps it in memory.
    observer : Observer, optional
        Told what happens.
    kept_state : mapping, optional
        Arrays that are written into every checkpoint beside the federation's.
    clients : ClientEvaluation, optional
        How clients evaluate the model on samples of their own.

    `lines` has one public dictionary a round.
    """

    def __init__(
        self,
        config: RunConfig,
        subject: Subject,
        federation: Federation,
        *,
        folder: RunFolder | None = None,
        observer: Watching | None = None,
        kept_state: Mapping[str, NDArray[Any]] | None = None,
        clients: ClientEvaluation | None = None,
    ) -> None:
        self.config = config
        self.subject = subject
        self.federation = federation
        self.folder = folder
        self.observer = as_observer(observer)
        self.clients = clients
        self.lines: list[dict[str, Any]] = []
        self._kept_state = dict(kept_state or {})
        # With a ledger a round that has to run again costs privacy: save every round.
        self.saves_every_round = federation.account is not None
        self._saved_at = time.monotonic()
        self._looked: tuple[str, ...] = ()  # what the last evaluation measured
        self._unbooked: _Unbooked | None = None
        federation.method.report_to(self.observer.working)

    @property
    def method(self) -> Method:
        """What clients do and what the server makes of it."""
        return self.federation.method

    def run(self) -> str | None:
        """Run the rounds that are left.

        Returns why the run ended before its last round, None when it did not.
        """
        self._saved_at = time.monotonic()
        stopped = self._begin()
        try:
            while stopped is None and self._rounds_run < self.config.num_rounds:
                stopped = self._next_round()
        except _NoMoreRoundsError as end:
            stopped = end.reason
        finally:
            if self._unbooked is not None:  # the round after it failed or was interrupted
                with contextlib.suppress(_NoMoreRoundsError):
                    self._catch_up()
        return stopped

    @property
    def _rounds_run(self) -> int:
        return len(self.lines) + (self._unbooked is not None)

    def _begin(self) -> str | None:
        """Finish what a killed run left open; return why no round should follow."""
        if not self.lines:
            self._keep(0)
            return None
        done, line = len(self.lines), self.lines[-1]
        last = done == self.config.num_rounds
        stopped = None if last else self._reason_to_stop(line)
        # It may have been killed between keeping a release and evaluating the model.
        if not was_evaluated(line) and (stopped or self._evaluates(done)):
            line |= self._evaluate_and_keep(done)
            if self.folder is not None:
                self.folder.amend_round(line)
            return None if last else self._reason_to_stop(line)
        if was_evaluated(line):
            self._bring_up_to_date()  # its checkpoint may be older than its line
        return stopped

    def _next_round(self) -> str | None:
        """Run, evaluate and keep one round; return why none should follow."""
        began, index = time.perf_counter(), self._rounds_run
        record = self.run_round(index)
        seconds = time.perf_counter() - began
        if not self._books_later(index):
            return self._book(record, seconds)
        self._unbooked = _Unbooked(record, seconds, moment(self.federation.weights.device))
        return None

    def _books_later(self, index: int) -> bool:
        """Tell whether a round is charged, kept and shown while the next one trains.

        Where that trains on a device, the host has the time; not where the model is evaluated,
        which takes the device, nor where a server of somebody's own uses the release: it may
        show it, so the charge has to be on disk before.
        """
        starts_early = getattr(self.method.engine, "starts_early", False)
        is_ours = type(self.method.server) is ServerOptimizer
        return starts_early and is_ours and not self._evaluates(index + 1)

    def _catch_up(self) -> None:
        """Book the round before, if that was put off; the next one may be training."""
        if self._unbooked is None:
            return
        unbooked, self._unbooked = self._unbooked, None
        with aside(unbooked.since, self.federation.weights.device):
            if self.federation.account is not None:
                self.federation.account.settle_held()
            stopped = self._book(unbooked.record, unbooked.seconds)
        if stopped is not None:
            raise _NoMoreRoundsError(stopped)

    def _book(self, record: RoundRecord, seconds: float) -> str | None:
        """Evaluate, keep and show a round; return why none should follow."""
        line = as_line(record, seconds) | self._spent()
        private = None
        if self.federation.mechanism.is_bounded:
            line, private = split_private(line)
        done = len(self.lines) + 1
        last = done == self.config.num_rounds
        stopped = None if last else self._reason_to_stop(line)
        evaluates = self._evaluates(done) or stopped is not None
        # Where that takes long, what was paid for is on disk before.
        early = evaluates and self.method.evaluates_slowly and self.federation.account is not None
        if early and self.folder is not None:
            self.folder.append_round(line, private)
            self._save(done)
        if evaluates:
            line |= self._evaluate_and_keep(done)
            stopped = None if last else self._reason_to_stop(line)
        self.lines.append(line)
        self._record(line, private, amend=early)
        self.observer(self.config, line | self._standing(line))
        return stopped

    def _spent(self) -> dict[str, Any]:
        """Return how the clients' epsilons of this run are spread, where it has a bound."""
        account = self.federation.account
        levels = (0.0, 0.25, 0.5, 0.75, 1.0)
        values = None if account is None else account.epsilon_at(levels)
        if values is None or not np.isfinite(values).all():
            return {}
        names = ("lowest", "lower_quartile", "median", "upper_quartile", "worst")
        return {"epsilon_spent": dict(zip(names, values, strict=True))}

    def _standing(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Return what an observer is told beside a round's line: how noise stands.

        `noise_to_signal` is measured where nothing is claimed; under a claim it is the noise
        over the longest mean update that the clip allows, √d · noise_std / clip.
        """
        told = {}
        noise, clip = line.get("noise_std"), line.get("clip_value")
        scale = line.get("agg_scale", 1.0)  # of noise and signal alike
        if line.get("noise_norm") is not None and line.get("signal_norm"):
            told["noise_to_signal"] = line["noise_norm"] / line["signal_norm"]
        elif noise and clip and self.federation.mechanism.is_bounded and self.method.clients_train:
            size = self.federation.weights.numel()
            told["noise_to_signal"] = math.sqrt(size) * noise / (clip * scale)
        return told

    def run_round(self, round_index: int) -> RoundRecord:
        """Run one round; a subclass may guard it."""
        if not getattr(self.method.engine, "starts_early", False):
            return run_round(self.federation, round_index)
        later = self._books_later(round_index)
        return run_round(self.federation, round_index, self._catch_up, settles_later=later)

    def _record(self, line: dict[str, Any], private: dict[str, Any] | None, *, amend: bool) -> None:
        """Write a round's line, and a checkpoint where one is due."""
        if self.folder is None:
            return
        if amend:
            self.folder.amend_round(line)
        else:
            self.folder.append_round(line, private)
        if self.saves_every_round or time.monotonic() - self._saved_at >= CHECKPOINT_SECONDS:
            self._save(len(self.lines))
            self._saved_at = time.monotonic()

    def _evaluates(self, done: int) -> bool:
        """Tell whether the model is evaluated after so many rounds."""
        return done % self.config.eval_every == 0 or done == self.config.num_rounds

    def _evaluate_and_keep(self, done: int) -> dict[str, Any]:
        """Evaluate the model and write the method's own files; return the measurements."""
        measured = self.measure()
        measured |= self.method.look(self.federation.weights, done - 1, measured)
        if self.clients is not None:
            measured |= self.clients.measure(self.federation.weights, done - 1)
            measured |= self._spent()  # an evaluation may have been paid for
            if self.folder is not None:
                self.folder.append_client_metrics(done, self.clients.last)
        self._keep(done)
        if not self.federation.mechanism.is_bounded:
            return measured
        return split_private(measured, looked=self._looked)[0]

    def _bring_up_to_date(self) -> dict[str, float]:
        self.federation.weights, measured = self.method.before_evaluation(self.federation.weights)
        return measured

    def measure(self) -> dict[str, Any]:
        """Step 9: evaluate the global model."""
        measured: dict[str, Any] = dict(self._bring_up_to_date())
        self.subject.flat.write(self.federation.weights)
        looked = self.subject.evaluate()
        self._looked = tuple(looked)
        measured |= looked
        if "test_loss" in measured or self.clients is not None:
            measured["participation_stats"] = self.federation.tracker.get_statistics()
        return measured

    def _keep(self, rounds: int | None = None) -> None:
        """Let the method write its own files, and tell the observer where they are."""
        path = None if self.folder is None else self.method.keep(self.folder, rounds)
        if path is not None and rounds is not None:
            self.observer.kept(path)

    def _reason_to_stop(self, line: dict[str, Any]) -> str | None:
        """Return why no round should follow the one of this line, None when one should."""
        if self._is_dead():
            return "the model is not finite any more"
        if self._reached_target(line):
            return "the validation accuracy reached the target"
        account = self.federation.account
        if account is not None and account.is_bounded:
            remaining = account.remaining(line["round"] + 1)
            if not self.federation.mechanism.has_allowance(remaining).any():
                return "no client has allowance left for another round"
        return None

    def _is_dead(self) -> bool:
        """Tell whether the released model is NaN or infinite: no round could mend it.

        The released model is public, so this costs no privacy; further rounds would.
        Where clients do not train the model, they do not depend on it either.
        """
        weights = self.federation.weights
        return self.method.clients_train and not all(
            bool(weights[piece].isfinite().all()) for piece in pieces_of(weights)
        )

    def _reached_target(self, line: dict[str, Any]) -> bool:
        """Tell whether early stopping is on and the validation accuracy is at the target."""
        accuracy, target = line.get("validation_accuracy"), self.config.target_accuracy
        if not self.config.early_stopping or accuracy is None or target is None:
            return False
        return bool(accuracy >= target)

    def _save(self, rounds: int, *, whole: bool = False) -> None:
        assert self.folder is not None
        flat, federation = self.subject.flat, self.federation
        flat.write(federation.weights)
        state = federation.state() | self._kept_state
        if flat.is_lossy:
            state["weights"] = federation.weights.cpu().numpy()
        head = "" if federation.account is None else federation.account.run.head
        self.folder.save_checkpoint(rounds, flat.module.state_dict(), state, head, whole=whole)

    def restore(self) -> None:
        """Restore the last checkpoint of the folder."""
        folder, federation, flat = self.folder, self.federation, self.subject.flat
        assert folder is not None
        like = federation.state() | self._kept_state
        saved = folder.load_checkpoint(partial(expected_state, like, federation, folder.path))
        if saved is None:
            self.lines = folder.read_rounds(0)
            folder.drop_images(0)
            if federation.account is not None:  # a round may have been settled before a checkpoint
                federation.account.rewind(np.zeros_like(federation.account.spent()))
            return
        if federation.account is not None:
            check_not_rolled_back(federation.account, saved.ledger_head)
        self._check_kept(saved.state)
        check_state(saved.state, saved.rounds, folder.path)
        load_tensors(flat.module, saved.model, folder.path)
        weights = saved.state.get("weights")
        try:
            federation.load_state(saved.state)
        except (LookupError, TypeError, ValueError) as error:
            raise RunFolderError(f"{folder.path}: the checkpoint does not fit: {error}") from error
        vector = flat.read() if weights is None else torch.from_numpy(weights)
        federation.weights = vector.to(federation.weights.device).clone()
        self.lines = folder.read_rounds(saved.rounds)
        folder.drop_images(saved.rounds)

    def _check_kept(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Refuse a checkpoint of another run; a subclass may compare its own state."""

    def finish(self, stopped: str | None = None) -> RunResult:
        """Write the last checkpoint and the result, and return the run."""
        federation, account = self.federation, self.federation.account
        counts = federation.tracker.participation_count
        epsilons = None if account is None else account.epsilons()
        statement = federation.mechanism.statement(counts, epsilons)
        if not federation.mechanism.is_bounded:
            notes = (*statement.notes, *_refusal_notes(self.lines))
            statement = dataclasses.replace(statement, notes=notes)
        elif self.config.allow_overlap:
            statement = dataclasses.replace(statement, notes=(*statement.notes, OVERLAP))
        limited = limit_notes(self.lines, self.config.max_agg_norm)
        statement = dataclasses.replace(statement, notes=(*statement.notes, *limited))
        result = build_result(self.config, self.lines, statement, counts)
        result["stopped"] = stopped
        result["metadata"] |= self.subject.metadata()
        result |= self.method.result(self.lines)
        self._keep()
        self.subject.flat.write(federation.weights)
        module = self.subject.whole_model().eval()
        if self.folder is not None:
            self._save(len(self.lines), whole=True)
        if account is not None:
            statement = self._close_account(account, result, statement)
        if federation.mechanism.is_bounded:
            result = published(result)
        if self.folder is not None:
            self.folder.write_result(result)
        path = None if self.folder is None else self.folder.path
        tensors, synthetic = dict(module.state_dict()), self.method.synthetic()
        measured = None if self.clients is None else self.clients.last or None
        return RunResult(result, statement, tensors, module, path, synthetic, measured)

    def _close_account(
        self, account: RunAccount, result: dict[str, Any], statement: Statement
    ) -> Statement:
        """Finish the run in the ledger, and put the ledger's notes into the statement."""
        account.finish(self.federation.weights if account.reproducible else None)
        result["ledger"] = account.summary()
        shared = self.config.ledger is not None
        resumed = account.run.is_resumed and statement.is_bounded
        notes = account_notes(
            result["ledger"], shared=shared, resumed=resumed, witnessed=account.is_witnessed
        )
        statement = dataclasses.replace(statement, notes=(*statement.notes, *notes))
        result["statement"] = statement.as_json()
        return statement


def limit_notes(lines: Sequence[Mapping[str, Any]], max_agg_norm: float) -> list[str]:
    """Say in how many rounds max_agg_norm shortened the noised update, and by how much."""
    scales = [line["agg_scale"] for line in lines if line.get("agg_scale") is not None]
    if not scales:
        return []
    return [
        f"max_agg_norm {max_agg_norm:g} shortened the noised update in {len(scales)} of "
        f"{len(lines)} rounds, to {min(scales):.2g} of its length at the least: noise and signal "
        "are recorded as they were applied"
    ]


def _refusal_notes(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say in how many rounds every client was left out; for modes that claim nothing.

    Who sent what is no secret there.
    """
    lost = sum(0 < len(line["cohort"]) == len(line.get("non_finite", ())) for line in lines)
    if not lost:
        return []
    return [f"every update was NaN or infinity and left out in {lost} of {len(lines)} rounds"]


def run(
    model: nn.Module,
    train: object,
    test: object,
    clients: Sequence[Sequence[int] | NDArray[Any]]
    | Mapping[str, Sequence[int] | NDArray[Any]]
    | None = None,
    *,
    client_ids: Iterable[str] | None = None,
    client_tests: Sequence[Any] | Mapping[str, Any] | None = None,
    validation: object = None,
    output_dir: str | None = "./results",
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
    clients : sequence of index lists, or mapping from client ids to them
        The samples of `train` that each client holds.  Left out where `train` is a list of
        data sets, one a client, or a mapping from client ids to data sets.
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
    output_dir : str or None
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
        or "mlflow" (files), in the run's folder; several joined by commas.
    **settings
        Options, for example `epsilon=3.0, num_rounds=50`.  One that would do nothing in the
        run's mode is refused.

    Returns
    -------
    RunResult
        Record, statement, trained model and folder of the run.
    """
    as_observer(observer)  # a mistake here must not cost a round
    own, names = _own_parts(method, mechanism, engine, loss, optimizer, metrics)
    given: dict[str, Any] = {**settings, **names}
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
        usual |= {} if output_dir is None else {"output_dir": output_dir}
        brought = own.method is not None or own.mechanism is not None
        config = build_config({**usual, **given}, preset=preset, own=True, brought=brought)
    tests = tests_of(client_tests, clients)
    config, problem = problem_from(config, model, train, test, parts, ids, own, tests, validation)
    # Copied, and maybe nobody else's.
    del model, train, test, clients, client_ids, client_tests, parts, ids, tests, validation
    if tracker != "none" and folder is None and output_dir is None:
        raise InvalidValueError(f"tracker={tracker!r} needs an output_dir: it writes to the folder")
    with (
        _tracked(tracker, observer) as tracked,
        _shown(config, tracked, progress and not quiet, quiet) as watching,
    ):
        return _run(config, problem, folder, output_dir, watching)


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


shows_settings(run)


Prepare = Callable[[RunConfig, Problem], Problem]
"""Exchanges parts of a problem before its run: who trains its clients, and where."""


def run_config(
    config: RunConfig,
    observer: Watching | None = None,
    prepare: Prepare | None = None,
    *,
    tracker: str = "none",
) -> RunResult:
    """Run what a configuration describes, in a new folder under its output_dir."""
    config, problem = build_problem(config, progress=observer is not None)
    problem = problem if prepare is None else prepare(config, problem)
    with _tracked(tracker, observer) as watching:
        return _run(config, problem, None, config.output_dir, watching)


def run_in_memory(
    config: RunConfig, observer: Watching | None = None, prepare: Prepare | None = None
) -> RunResult:
    """Run what a configuration describes and write nothing."""
    config, problem = build_problem(config)
    problem = problem if prepare is None else prepare(config, problem)
    return _run(config, problem, None, None, observer)


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
        return load(path)
    config = folder.read_config()
    folder.checkpoint_head()  # of another run, or none: found before data are loaded
    if config.model == CUSTOM or config.dataset == CUSTOM:
        raise RunFolderError(
            f"run folder {str(path)!r} was made from your own model or data: "
            "continue it from Python with fedquilt.run(model, train, test, clients, resume=...)"
        )
    config, problem = build_problem(config, progress=observer is not None)
    problem = problem if prepare is None else prepare(config, problem)
    with _tracked(tracker, observer) as watching:
        return _run(config, problem, folder, None, watching)


def run_problem(
    config: RunConfig,
    problem: Problem,
    *,
    output_dir: str | None,
    resume: str | Path | None = None,
    observer: Watching | None = None,
) -> RunResult:
    """Run a problem that was put together elsewhere, in a new folder or in one to continue."""
    folder = None if resume is None else RunFolder.open(resume)
    return _run(config, problem, folder, output_dir, observer)


def _run(
    config: RunConfig,
    problem: Problem,
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
        if resumed:
            config = engine_of_before(config, problem)
        else:
            config, problem = settle_engine(config, problem)
        identity = _identity_soon(problem) if folder is None and output_dir is not None else None
        method = build_method(config, problem)
        stack.callback(method.close)
        if observer is not None:
            watching.expects(config, expectations(config, problem))
        federation, folder = _open(config, problem, method, folder, output_dir, identity, stack)
        stack.enter_context(method.running())
        clients = make_client_evaluation(
            config,
            problem.flat,
            problem.task,
            problem.client_tests,
            problem.roster.ids,
            method,
            federation.account,
            problem.selector.available,
            problem.metrics,
            is_bounded=federation.mechanism.is_bounded,
        )
        experiment = Experiment(
            config, problem, federation, folder=folder, observer=watching, clients=clients
        )
        if folder is not None:
            experiment.observer.opened(config, folder.path)
        if resumed:
            experiment.restore()
        try:
            return experiment.finish(experiment.run())
        except KeyboardInterrupt:
            raise RunInterrupted(None if folder is None else str(folder.path)) from None
        except (WorkerError, StorageError, LedgerFileError, LedgerBusyError) as error:
            error.folder = None if folder is None else str(folder.path)
            raise


def _own_parts(
    method: str | BuildMethod | None,
    mechanism: Build | type[Certified] | None,
    engine: str | Engine | RemoteEngine | BuildEngine | None,
    loss: str | OwnLoss | None = None,
    optimizer: str | Factory | None = None,
    metrics: Metrics | None = None,
) -> tuple[Own, dict[str, str]]:
    """Part what a user brought from what was named; the configuration says `custom`."""
    if isinstance(metrics, list | tuple) and all(isinstance(one, str) for one in metrics):
        metrics = ",".join(str(one) for one in metrics)
    given = {
        "method": method,
        "engine": engine,
        "loss": loss,
        "optimizer": optimizer,
        "metrics": metrics,
    }
    names = {
        key: value if isinstance(value, str) else CUSTOM
        for key, value in given.items()
        if value is not None
    }
    elsewhere = hasattr(engine, "serve")
    own = Own(
        method=None if isinstance(method, str) else method,
        mechanism=mechanism,
        engine=None if isinstance(engine, str) or elsewhere else cast(Engine, engine),
        remote=cast(RemoteEngine, engine) if elsewhere else None,
        loss=None if isinstance(loss, str) else loss,
        optimizer=None if isinstance(optimizer, str) else optimizer,
        metrics=None if isinstance(metrics, str) else metrics,
    )
    return own, names


def _open(
    config: RunConfig,
    problem: Problem,
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
    if entered is not None and folder is not None:
        check_same_clients(problem, entered, folder.path)
    if folder is not None:
        check_identity(problem, folder)
    run_id = entered["run_id"] if entered else f"{run_stem(config)}-{secrets.token_hex(4)}"
    own_ledger = config.ledger is None and needs_account(config, problem)
    account = None
    if config.ledger is not None:
        place = Path(entered["ledger"]) if entered else Path(config.ledger).expanduser().resolve()
        account = open_account(config, problem, place, run_id, resumed=entered is not None)
        stack.callback(account.close)
    federation = None if own_ledger else build_federation(config, problem, account, method)
    if folder is None and output_dir is not None:
        folder = RunFolder.create(config, output_dir, problem.engine_choice)
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
    if account is not None and folder is not None and entered is None:
        name = "ledger.sqlite" if own_ledger else str(account.ledger.path.resolve())
        clients = problem.roster.digest
        folder.write_account({"run_id": run_id, "ledger": name, "clients": clients})
    return federation or build_federation(config, problem, account, method), folder


def _identity_soon(problem: Problem) -> Future[dict[str, str]] | None:
    """Begin to digest the data while kernels for a GPU are found or compiled.

    Without a GPU there is nothing to wait for, and engines may fork: then it is done later.
    """
    if problem.task.device.type != "cuda":
        return None
    pool = ThreadPoolExecutor(1)
    identity = pool.submit(identity_of, problem, secrets.token_bytes(32))
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
