"""Checking a ledger from the first entry to the last.

| what happened to the file                     | what finds it                     |
|-----------------------------------------------|-----------------------------------|
| an entry edited, exchanged or inserted        | its hash                          |
| an entry deleted                              | a gap, and the next entry's hash  |
| the newest entries deleted                    | the stored head, known heads      |
| a balance edited                              | the balances computed again       |
| an older copy put back, the chain rewritten   | known heads only                  |

Each run keeps the heads it has seen; give them as `known_heads`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fedquilt.privacy.ledger import chain
from fedquilt.privacy.ledger.account import Account, spent_in_run
from fedquilt.privacy.ledger.chain import COLUMNS, GENESIS, Entry
from fedquilt.privacy.ledger.errors import LedgerBusyError, LedgerError, LedgerFileError
from fedquilt.privacy.ledger.records import PopulationInfo, RunInfo
from fedquilt.privacy.ledger.store import Store
from fedquilt.privacy.ledger.units import allowance_mu2

_MOST_PROBLEMS = 20


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


def verify(store: Store, known_heads: Iterable[str] = ()) -> VerifyReport:
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
    known = {bytes(row[0]).hex() for row in store.select("SELECT hash FROM entries")}
    return [head for head in wanted if head.lower() not in known]


def _structure(store: Store) -> list[str]:
    found = [str(row[0]) for row in store.select(f"PRAGMA integrity_check({_MOST_PROBLEMS})")]
    return [] if found == ["ok"] else [f"the file is damaged: {line}" for line in found]


class _Walk:
    """One pass over the entries, keeping fresh accounts of every population."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.problems: list[str] = []
        self.accounts: dict[int, Account] = {}
        self.run_infos: dict[int, RunInfo] = {}
        self.count = 0
        self.head = GENESIS
        self._charged: set[tuple[int | None, int | None, str | None]] = set()

    def report(self) -> VerifyReport:
        found = tuple(self.problems[:_MOST_PROBLEMS])
        if len(self.problems) > _MOST_PROBLEMS:
            found += (f"and {len(self.problems) - _MOST_PROBLEMS} more",)
        return VerifyReport(
            self.count, len(self.accounts), len(self.run_infos), self.head.hex(), found
        )

    def entries(self) -> None:
        snapshots = dict(self.store.select("SELECT seq, population FROM snapshots"))
        expected = 0
        for entry, digest in self._read():
            expected += 1
            if entry.seq != expected:
                self.problems.append(f"entry {expected} is missing")
                expected = entry.seq
            if entry.chained(self.head) != digest:
                self.problems.append(f"entry {entry.seq} ({entry.kind}) was edited or does "
                                     "not follow the entry before it")
            self.head = digest
            self.count += 1
            self._take(entry)
        self._check_head(expected)

    def _read(self) -> Iterator[tuple[Entry, bytes]]:
        query = f"SELECT {', '.join(COLUMNS)}, hash FROM entries ORDER BY seq"
        for row in self.store.select(query):
            yield Entry(*row[:-1]), bytes(row[-1])
