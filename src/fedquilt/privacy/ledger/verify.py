"""Checking a ledger from the first entry to the last, and copies that were checked so.

| what happened to the file                     | what finds it                     |
|-----------------------------------------------|-----------------------------------|
| an entry edited, exchanged or inserted        | its hash                          |
| an entry deleted                              | a gap, and the next entry's hash  |
| the newest entries deleted                    | the stored head, known heads      |
| a balance edited                              | the balances computed again       |
| an older copy put back, the chain rewritten   | known heads only                  |

Each run keeps the heads it has seen; give them as `known_heads`.

Copying the file alone is not enough.  While an entry is written, and after a kill in the
middle of that, the file `<ledger>-journal` beside it is part of the ledger: it holds what has
to be put back.  A ledger without its journal may be damaged; a ledger beside the journal of
another one will be.  SQLite's own backup reads through the journal, under a lock.

A copy is built under another name, checked from its first entry to its last, and appears under
its own name in one step.  What it replaces is locked meanwhile, so nothing can be entered
between the look at its entries and the exchange.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.common.errors import (
    InvalidValueError,
    LedgerBusyError,
    LedgerCorruptError,
    LedgerError,
    LedgerFileError,
)
from fedquilt.common.storage import sync_folder
from fedquilt.privacy.ledger import entries, files
from fedquilt.privacy.ledger.balances import Balances, spent_in_run
from fedquilt.privacy.ledger.entries import (
    COLUMNS,
    GENESIS,
    Entry,
    PopulationInfo,
    RunInfo,
    allowance_mu2,
)
from fedquilt.privacy.ledger.files import appear, drafting
from fedquilt.privacy.ledger.store import Store

_MOST_PROBLEMS = 20
_ROUND_KINDS = (
    *(entries.RESUME, entries.RESERVE, entries.SETTLE, entries.RELEASE),
    *(entries.UNBOUNDED, entries.FINISH),
)


@dataclass(frozen=True)
class VerifyReport:
    """What a check found; `problems` is empty when the ledger is whole."""

    entries: int
    populations: int
    runs: int
    head: str
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Return whether nothing was found."""
        return not self.problems


def verify_ledger(store: Store, known_heads: Iterable[str] = ()) -> VerifyReport:
    """Check the file, the chain, the rules, the balances and the known heads.

    Writers wait while it runs, so that it sees one state.
    """
    walk = _Walk(store)
    try:
        with store.reading():
            walk.problems += _structure(store)
            walk.entries()
            walk.runs()
            for head in missing_heads(store, known_heads):
                walk.problems.append(
                    f"head {head} was seen by a run and is not in the chain: the ledger was "
                    "rolled back, exchanged or rewritten"
                )
    except LedgerBusyError:
        raise
    except LedgerFileError as error:
        walk.problems.append(str(error))
    return walk.report()


def missing_heads(store: Store, heads: Iterable[str]) -> list[str]:
    """Return those of `heads` that are no entry's hash; call it inside a transaction."""
    wanted = [str(head) for head in heads]
    if not wanted:
        return []
    hashes = (row[0] for row in store.select("SELECT hash FROM entries"))
    known = {digest.hex() for digest in hashes if isinstance(digest, bytes)}
    return [head for head in wanted if head.lower() not in known]


def _structure(store: Store) -> list[str]:
    found = [str(row[0]) for row in store.select(f"PRAGMA integrity_check({_MOST_PROBLEMS})")]
    return [] if found == ["ok"] else [f"the file is damaged: {line}" for line in found]


class _Walk:
    """One pass over the entries, keeping fresh accounts of every population."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.problems: list[str] = []
        self.accounts: dict[int, Balances] = {}
        self.run_infos: dict[int, RunInfo] = {}
        self.count = 0
        self.head = GENESIS
        self._charged: set[tuple[int | None, int | None, str | None]] = set()

    def report(self) -> VerifyReport:
        found = tuple(self.problems[:_MOST_PROBLEMS])
        if len(self.problems) > _MOST_PROBLEMS:
            found += (f"and {len(self.problems) - _MOST_PROBLEMS} more",)
        counts = (self.count, len(self.accounts), len(self.run_infos))
        return VerifyReport(*counts, self.head.hex(), found)

    def entries(self) -> None:
        """Check every entry against the one before it, and the balances on the way."""
        snapshots: dict[int, list[int]] = defaultdict(list)
        for seq, population in self.store.select("SELECT seq, population FROM snapshots"):
            if type(seq) is int:
                snapshots[seq].append(population)
            else:
                self.problems.append(f"balances are of entry {seq!r:.80}, which is no number")
        query = f"SELECT {', '.join(COLUMNS)}, hash FROM entries ORDER BY seq"
        last = 0
        for row in self.store.select(query):
            self._check_entry(row, last)
            for population in snapshots.pop(row[0], ()):
                self._check_snapshot(population)
            last, self.head = row[0], row[-1] if isinstance(row[-1], bytes) else b""
            self.count += 1
        if self.store.head() != (last, self.head):
            self.problems.append("the newest entries are missing: the stored head is another")
        if snapshots:
            self.problems.append(f"balances are of entry {min(snapshots)}, which is not there")

    def _check_entry(self, row: tuple[Any, ...], last: int) -> None:
        """Check one row: its place, its types, its hash, and what it says."""
        entry, problems = entries.read_row(row, last, self.head)
        self.problems += problems
        if entry is not None and entry.kind in entries.KINDS:
            self._check_rules(entry)

    def _check_rules(self, entry: Entry) -> None:
        """Do what the entry says; an entry that the ledger would have refused is a problem."""
        try:
            if entry.kind == entries.POPULATION:
                self._add_population(entry)
            elif entry.kind == entries.MEMBERS:
                self._account(entry).apply(entry)
            elif entry.kind == entries.RUN:
                self._add_run(entry)
            elif entry.kind in _ROUND_KINDS:
                self._apply(entry)
            elif entry.kind != entries.LEDGER or entry.seq != 1:
                raise LedgerError(f"entry {entry.seq} has no place here: {entry.kind!r}")
        except LedgerError as error:
            self.problems.append(str(error))

    def _add_population(self, entry: Entry) -> None:
        info = PopulationInfo.of(entry)
        self.accounts[info.key] = Balances(info)
        _check_worth(entry, info.allowance_mu2, info.epsilon, info.delta)

    def _add_run(self, entry: Entry) -> None:
        account = self._account(entry)
        run = RunInfo.of(entry, account.info.num_clients)
        self.run_infos[run.key] = run
        if run.epsilon is not None:
            _check_worth(entry, run.budget_mu2, run.epsilon, account.info.delta)

    def _account(self, entry: Entry) -> Balances:
        account = self.accounts.get(entry.population or 0)
        if account is None:
            raise LedgerError(f"entry {entry.seq} belongs to no population")
        return account

    def _apply(self, entry: Entry) -> None:
        account = self._account(entry)
        run = self.run_infos.get(entry.run or 0)
        if run is None or run.population != account.info.key:
            raise LedgerError(f"entry {entry.seq} belongs to no run")
        if entry.kind in (entries.SETTLE, entries.UNBOUNDED):
            release = (entry.run, entry.round, entry.digest)
            if release in self._charged:
                raise LedgerError(f"entry {entry.seq} charges a release a second time")
            self._charged.add(release)
        account.apply(entry)
        if entry.kind == entries.RESERVE:
            reservation = account.open[entry.seq]
            clients, charged = reservation.clients, reservation.charges_mu2 > 0
            counted = account.spent[clients] + account.reserved[clients]
            if np.any(charged & (counted > account.info.allowance_mu2)):
                raise LedgerError(f"entry {entry.seq} takes a client above its allowance")

    def _check_snapshot(self, population: int) -> None:
        row = self.store.first(
            "SELECT spent, joins, last_entry, open FROM snapshots WHERE population = ?", population
        )
        account = self.accounts.get(population)
        if account is None or row is None or not account.agrees(row):
            self.problems.append(
                f"the balances of population {population} are not what its entries add up to"
            )

    def runs(self) -> None:
        """Check that no run went beyond its budget, and that who sat out did."""
        for run in self.run_infos.values():
            info = self.accounts[run.population].info
            spent = spent_in_run(self.store, info, run.key)
            over = np.isfinite(spent) & (spent > run.budget_mu2)
            absent = run.sits_out[run.sits_out < spent.size]
            over[absent] |= np.isfinite(spent[absent]) & (spent[absent] > 0)
            if np.any(over):
                who = int(np.flatnonzero(over)[0])
                self.problems.append(
                    f"run {run.name!r} spent more of client {who} than it was allowed"
                )


def _check_worth(entry: Entry, mu2: float, epsilon: float, delta: float) -> None:
    """Refuse an amount that is more than its (epsilon, delta) pays for."""
    try:
        worth = allowance_mu2(epsilon, delta)
    except InvalidValueError as error:
        raise LedgerError(f"entry {entry.seq}: {error}") from error
    if mu2 > worth * (1 + 1e-9):
        raise LedgerError(
            f"entry {entry.seq} allows mu²={mu2!r}, more than epsilon={epsilon!r}, "
            f"delta={delta!r} pay for"
        )


def copy_ledger(
    source: Store,
    target: Path,
    *,
    replace: bool,
    known_heads: Iterable[str] = (),
    timeout: float = 30.0,
) -> VerifyReport:
    """Copy an open ledger to `target`; return what the check of the copy found.

    Parameters
    ----------
    source
        The ledger.  Others may write to it meanwhile; the copy is one state of it.
    target
        The file; a link leads to the file that it names.
    replace
        Whether a ledger may be there.  It is replaced only when the copy has every one of
        its entries.
    known_heads
        Heads that the copy must have.
    timeout
        Seconds to wait for others who use the ledger at `target`.
    """
    target = target.resolve()
    if target.exists() and target.samefile(source.path):
        raise LedgerFileError(f"ledger {source.path} and {target} are one file")
    if target.exists() and not replace:
        raise LedgerFileError(f"{target} exists; name another file, or say that it is replaced")
    if not target.parent.is_dir():
        raise LedgerFileError(f"ledger {target}: the folder {target.parent} does not exist")
    with files.translated(target), drafting(target, timeout) as draft:
        source.copy_to(draft)
        report = _checked(draft, source.path, known_heads)
        _put(draft, target, timeout)
        sync_folder(target.parent)
    return report


def _checked(draft: Path, source: Path, known_heads: Iterable[str]) -> VerifyReport:
    with contextlib.closing(Store(draft, read_only=True, timeout=0.0)) as copy:
        report = verify_ledger(copy, known_heads)
    if not report.ok:
        raise LedgerCorruptError(
            f"ledger {source} is NOT WHOLE, and was not copied: {'; '.join(report.problems)}"
        )
    return report


def _put(draft: Path, target: Path, timeout: float) -> None:
    """Give the draft its name, over nothing or over a ledger that has no more than it has."""
    if not target.exists():
        _put_new(draft, target)
        return
    try:
        there = Store(target, read_only=False, timeout=timeout)
    except LedgerFileError as error:
        raise LedgerFileError(
            f"whether {target} is newer cannot be told, and it was left as it is: {error}. To go "
            "on without it, move it away, together with its -journal"
        ) from error
    with contextlib.closing(there), there.writing():
        lacking = _lacking(draft, there)
        if lacking:
            raise LedgerError(
                f"ledger {target} has {lacking} entries that the copy lacks; in its place the "
                "copy would forget what clients have spent. Nothing was changed"
            )
        os.replace(draft, target)


def _put_new(draft: Path, target: Path) -> None:
    journal = target.with_name(f"{target.name}-journal")
    if os.path.lexists(journal):
        raise LedgerFileError(
            f"{journal} belongs to a ledger that is no longer there and would damage the copy: "
            "put that ledger back, or remove the journal"
        )
    appear(draft, target)


def _lacking(draft: Path, there: Store) -> int:
    """Return how many entries of the ledger `there`, its head included, the draft lacks."""
    hashes = {
        row[0] for row in there.select("SELECT hash FROM entries UNION SELECT hash FROM head")
    }
    heads = [one.hex() if isinstance(one, bytes) else repr(one) for one in hashes]
    with contextlib.closing(Store(draft, read_only=True, timeout=0.0)) as copy, copy.reading():
        return len(missing_heads(copy, heads))
