"""The loop over rounds: run one, evaluate, stop, record, checkpoint, restore, result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.aggregation import ServerOptimizer
from fedquilt.common.errors import RunFolderError
from fedquilt.common.observer import as_observer
from fedquilt.common.vectors import chunks_of
from fedquilt.config import RunConfig
from fedquilt.experiment.client_evaluation import ClientEvaluation
from fedquilt.experiment.preflight import tell_owner
from fedquilt.federation import Federation
from fedquilt.method import Method
from fedquilt.privacy.feasibility import NoiseSoFar
from fedquilt.privacy.run_account import RunAccount
from fedquilt.privacy.statement import Statement
from fedquilt.record.checkpoint import check_state, expected_state
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import (
    RunResult,
    as_line,
    build_result,
    load_tensors,
    published,
    split_private,
    was_evaluated,
)
from fedquilt.round import RoundRecord, begin_round, finish_round, run_round
from fedquilt.setup.account import account_notes, check_account_of
from fedquilt.training import FlatModel
from fedquilt.training.hardware import on_side_stream, record_event
from fedquilt.training.task import one_thread

# A checkpoint costs a flush to disk; once a second it costs nothing one would notice.
CHECKPOINT_SECONDS = 1.0

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


class _Pending(NamedTuple):
    """A round that has run and is not yet settled, kept and shown."""

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
        self._evaluated: tuple[str, ...] = ()  # what the last evaluation measured
        self._withheld: dict[str, Any] = {}  # and what of it is for the owner alone
        self._pending: _Pending | None = None
        self._unheard: set[int] = set()
        self._noise = NoiseSoFar(federation.weights.numel())
        federation.method.report_to(self.observer.working)

    @property
    def method(self) -> Method:
        """What clients do and what the server makes of it."""
        return self.federation.method

    def run(self) -> str | None:
        """Run the rounds that are left.

        Returns why the run ended before its last round, None when it did not.
        """
        with one_thread(self.method.engine.is_small):
            return self._run()

    def _run(self) -> str | None:
        self._saved_at = time.monotonic()
        stopped = self._begin()
        try:
            while stopped is None and self._rounds_run < self.config.num_releases:
                stopped = self._next_round()
        finally:
            self._finish_pending()  # where the round after it failed or was interrupted
        return stopped

    @property
    def _rounds_run(self) -> int:
        return len(self.lines) + (self._pending is not None)

    def _begin(self) -> str | None:
        """Finish what a killed run left open; return why no round should follow."""
        if not self.lines:
            self._save_artifacts(0)
            return None
        done, line = len(self.lines), self.lines[-1]
        last = done == self.config.num_releases
        stopped = None if last else self._reason_to_stop(line)
        # It may have been killed between keeping a release and evaluating the model.
        if not was_evaluated(line) and (stopped or self._evaluates(done)):
            line |= self._evaluate_and_save(done)
            if self.folder is not None:
                self.folder.amend_round(line)
            return None if last else self._reason_to_stop(line)
        if was_evaluated(line):
            self._update_model()  # its checkpoint may be older than its line
        return stopped

    def _next_round(self) -> str | None:
        """Run, evaluate and keep one round; return why none should follow.

        Where clients start early, on a device, the host has time meanwhile: it settles, keeps
        and shows the round before.  That is safe because all of it stays in this process: a
        round's charges are reserved on disk before its release is computed, and settled before
        anything that follows from the release is reserved, kept or shown.
        """
        began, index = time.perf_counter(), self._rounds_run
        if not self.method.engine.starts_early:
            record = self.run_round(index)
            return self._finish(record, time.perf_counter() - began)
        next_round = begin_round(self.federation, index)
        stopped = self._finish_pending()
        if stopped is not None:
            return stopped
        may_defer, account = self._may_defer(index), self.federation.account
        if account is not None:
            account.defers = may_defer
        record = finish_round(self.federation, next_round)
        seconds = time.perf_counter() - began
        if not may_defer:
            return self._finish(record, seconds)
        self._pending = _Pending(record, seconds, record_event(self.federation.weights.device))
        return None

    def _may_defer(self, index: int) -> bool:
        """Tell whether a round may be settled, kept and shown while the next one trains.

        Not where the model is evaluated, which takes the device, nor where a server of
        somebody's own uses the release: it may show it, so the charge has to be on disk before.
        """
        is_ours = type(self.method.server) is ServerOptimizer
        return self.method.engine.starts_early and is_ours and not self._evaluates(index + 1)

    def _finish_pending(self) -> str | None:
        """Settle, keep and show the round before, if that was deferred; the next one may train."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        with on_side_stream(pending.since, self.federation.weights.device):
            if self.federation.account is not None:
                self.federation.account.settle_deferred()
            return self._finish(pending.record, pending.seconds)

    def _finish(self, record: RoundRecord, seconds: float) -> str | None:
        """Evaluate, keep and show a round; return why none should follow."""
        line = as_line(record, seconds) | self._spent() | self._left_out(record)
        line |= self.federation.tracker.report()
        private = None
        if self.federation.mechanism.is_bounded:
            line, private = split_private(line)
        done = len(self.lines) + 1
        last = done == self.config.num_releases
        stopped = None if last else self._reason_to_stop(line)
        evaluates = self._evaluates(done) or stopped is not None
        # Where that takes long, what was paid for is on disk before.
        asks = self.clients is not None and self.clients.elsewhere is not None
        slow = self.method.evaluates_slowly or asks
        early = evaluates and slow and self.federation.account is not None
        if early and self.folder is not None:
            self.folder.append_round(line, private)
            self._save(done)
        if evaluates:
            line |= self._evaluate_and_save(done)
            private = private and private | self._withheld
            stopped = None if last else self._reason_to_stop(line)
        self.lines.append(line)
        self._record(line, private, amend=early)
        self.observer(self.config, line | self._standing())
        return stopped

    def _left_out(self, record: RoundRecord) -> dict[str, Any]:
        """Return who of the cohort trained on nothing, as the model cannot take their samples."""
        unfit: frozenset[int] = getattr(self.subject, "left_out", frozenset())
        left_out = [client for client in record.cohort if client in unfit]
        self._unheard.update(left_out, record.non_finite)
        return {"left_out": left_out} if left_out else {}

    def _spent(self) -> dict[str, Any]:
        """Return how the clients' epsilons of this run are spread, where it has a bound."""
        account = self.federation.account
        levels = (0.0, 0.25, 0.5, 0.75, 1.0)
        values = None if account is None else account.epsilon_at(levels)
        if values is None or not np.isfinite(values).all():
            return {}
        names = ("lowest", "lower_quartile", "median", "upper_quartile", "worst")
        return {"epsilon_spent": dict(zip(names, values, strict=True))}

    def _standing(self) -> dict[str, float]:
        """Return what an observer is told beside a round's line: how the noise of a bound stands.

        It is the figure of plans and pages: of all rounds so far.
        """
        if not (self.federation.mechanism.is_bounded and self.method.clients_train):
            return {}
        ratio = self._noise.after(self.lines[self._noise.rounds :])
        return {} if ratio is None else {"noise_to_signal": ratio}

    def run_round(self, round_index: int) -> RoundRecord:
        """Run one round; a subclass may guard it."""
        return run_round(self.federation, round_index)

    def _record(self, line: dict[str, Any], private: dict[str, Any] | None, *, amend: bool) -> None:
        """Write a round's line, and a checkpoint where one is due."""
        if self.folder is None:
            return
        if amend:
            self.folder.amend_round(line, private if self._withheld else None)
        else:
            self.folder.append_round(line, private)
        if self.saves_every_round or time.monotonic() - self._saved_at >= CHECKPOINT_SECONDS:
            self._save(len(self.lines))
            self._saved_at = time.monotonic()

    def _evaluates(self, done: int) -> bool:
        """Tell whether the model is evaluated after so many rounds."""
        config = self.config
        return done % config.releases_per_evaluation == 0 or done == config.num_releases

    def _evaluate_and_save(self, done: int) -> dict[str, Any]:
        """Evaluate the model and write the method's own files; return the measurements."""
        measured = self.measure()
        measured |= self.method.extra_metrics(self.federation.weights, done - 1, measured)
        if self.clients is not None:
            measured |= self.clients.measure(self.federation.weights, done - 1)
            measured |= self._spent()  # an evaluation may have been paid for
            if self.folder is not None:
                self.folder.append_client_metrics(done, self.clients.last)
        self._save_artifacts(done)
        if not self.federation.mechanism.is_bounded:
            return measured
        withheld = self.federation.withheld
        public, private = split_private(measured, self._evaluated, withheld)
        self._withheld = {key: private[key] for key in private if key.startswith(withheld)}
        return public

    def _update_model(self) -> dict[str, float]:
        self.federation.weights, measured = self.method.before_evaluation(self.federation.weights)
        return measured

    def measure(self) -> dict[str, Any]:
        """Step 9: evaluate the global model."""
        measured: dict[str, Any] = dict(self._update_model())
        self.subject.flat.write(self.federation.weights)
        evaluated = self.subject.evaluate()
        self._evaluated = tuple(evaluated)
        measured |= evaluated
        if "test_loss" in measured or self.clients is not None:
            measured["participation_stats"] = self.federation.tracker.get_statistics()
        return measured

    def _save_artifacts(self, rounds: int | None = None) -> None:
        """Let the method write its own files, and tell the observer where they are."""
        path = None if self.folder is None else self.method.save_artifacts(self.folder, rounds)
        if path is not None and rounds is not None:
            self.observer.on_artifact(path)

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
            bool(weights[chunk].isfinite().all()) for chunk in chunks_of(weights)
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
        run = None if federation.account is None else federation.account.run
        head, name = ("", "") if run is None else (run.head, run.info.name)
        tensors, kept = flat.module.state_dict(), federation.client_state()
        if kept:
            self.folder.save_vectors(rounds, kept)
        self.folder.save_checkpoint(rounds, tensors, state, head, run_id=name, whole=whole)
        if kept:
            self.folder.drop_vectors(rounds)

    def restore(self) -> None:
        """Restore the last checkpoint of the folder."""
        folder, federation, flat = self.folder, self.federation, self.subject.flat
        assert folder is not None
        like = federation.state() | self._kept_state
        size = federation.weights.numel()
        sizes = {"vector": size, "step": federation.method.step_size or size}
        saved = folder.load_checkpoint(partial(expected_state, like, sizes, folder.path))
        if saved is None:
            self.lines = folder.read_rounds(0)
            folder.drop_images(0)
            if federation.account is not None:  # a round may have been settled before a checkpoint
                federation.account.rewind(np.zeros_like(federation.account.spent()))
            return
        if federation.account is not None:
            check_account_of(saved, federation.account)
        self._check_kept(saved.state)
        check_state(saved.state, saved.rounds, folder.path)
        flat.restore()
        load_tensors(flat.module, saved.model, folder.path)
        flat.remember()  # frozen tensors were loaded, too
        weights = saved.state.get("weights")
        try:
            federation.load_state(saved.state)
            if federation.method.kept:
                federation.load_client_state(folder.load_vectors(saved.rounds))
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
        statement = federation.statement()
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
        self._save_artifacts()
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
        roster = getattr(self.subject, "roster", None)
        names = roster.ids if roster is not None and roster.given else None
        told = _unheard_words(sorted(self._unheard), names, path)
        for words in told:
            tell_owner(words)
        return RunResult(result, statement, tensors, module, path, synthetic, measured, told)

    def _close_account(
        self, account: RunAccount, result: dict[str, Any], statement: Statement
    ) -> Statement:
        """Finish the run in the ledger, and put the ledger's notes into the statement."""
        unprotected = account.reproducible or (account.is_bounded and not statement.is_bounded)
        account.finish(self.federation.weights if unprotected else None)
        result["ledger"] = account.summary()
        shared = self.config.ledger is not None
        resumed = account.run.is_resumed and statement.is_bounded
        notes = account_notes(
            result["ledger"], shared=shared, resumed=resumed, witnessed=account.is_witnessed
        )
        statement = dataclasses.replace(statement, notes=(*statement.notes, *notes))
        result["statement"] = statement.as_json()
        return statement


def _unheard_words(
    unheard: list[int], names: Sequence[str] | None, folder: Path | None
) -> tuple[str, ...]:
    """Say who counted for nothing: by name where the user gave names."""
    if not unheard:
        return ()
    some = ", ".join(str(names[one] if names else one) for one in unheard[:10])
    some += ", ..." if len(unheard) > 10 else ""
    many = "s" * (len(unheard) > 1)
    called = "" if names else f"number{many} "
    where = "" if folder is None else f"; rounds in {folder / 'private.jsonl'}"
    words = (
        f"{len(unheard)} client{many} counted for nothing in a round or in all, as the model "
        f"cannot take what they hold or their update was not finite: {called}{some}{where}"
    )
    return (words,)


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
    lost = sum(0 < len(line["cohort"]) == len(line.get("non_finite") or ()) for line in lines)
    if not lost:
        return []
    return [f"every update was NaN or infinity and left out in {lost} of {len(lines)} rounds"]
