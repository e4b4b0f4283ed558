"""Entries, and the hash that chains them.

An entry is what happened, never what it adds up to; balances are folds over the
entries.  Its hash is SHA-256 over the hash of the entry before it and everything
it says:

    hash_n = SHA-256(tag ‖ hash_{n−1} ‖ length ‖ JSON of the fields ‖ clients ‖ charges)

where the JSON is one array in a fixed order, without spaces and in ASCII, that also
holds the lengths of the two byte strings, so that no two entries share an encoding.
The hash carries no secret.  It finds damage and edits; somebody who rewrites every
later entry too is found only by a head kept outside, which is why each run keeps
its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from fedquilt.privacy.ledger.errors import LedgerCorruptError

LEDGER = "ledger"
POPULATION = "population"
MEMBERS = "members"
RUN = "run"
RESUME = "resume"
RESERVE = "reserve"
SETTLE = "settle"
RELEASE = "release"
UNBOUNDED = "unbounded"
FINISH = "finish"
KINDS = (
    *(LEDGER, POPULATION, MEMBERS, RUN, RESUME, RESERVE, SETTLE, RELEASE, UNBOUNDED),
    FINISH,
)

_TAG = b"fedquilt ledger 1\n"
GENESIS = bytes(32)
"""The hash before the first entry."""


@dataclass(frozen=True)
class Entry:
    """One line of the ledger.

    ========== ==================================================================
    kind       what it says
    ========== ==================================================================
    ledger     the file was made; `digest` is its random identity
    population clients share an allowance; `body` has their number, epsilon, delta
    members    clients joined the population; `body` has their ids, in the order of
               their numbers, which go on from those before them
    run        a run may spend so much of it; `clients` sit out
    resume     the run goes on; its open reservations are dropped, nothing had left
    reserve    `charges` of `clients` count as spent, replacing the same round's
    settle     a release is about to be used; `reservation` becomes spent
    release    nothing left in that round; `reservation` is dropped
    unbounded  a release without a bound; `clients` are at infinity from now on
    finish     the run is over; its open reservations are dropped
    ========== ==================================================================

    `population` and `run` are the `seq` of the entry that made them.
    """

    seq: int
    kind: str
    time: str
    population: int | None = None
    run: int | None = None
    round: int | None = None
    reservation: int | None = None
    name: str | None = None
    digest: str | None = None
    body: str | None = None
    clients: bytes | None = None
    charges: bytes | None = None

    @classmethod
    def of(cls, row: Sequence[Any]) -> Entry:
        """Read the columns of a row; SQLite keeps any type in any column, this does not."""
        for column, value in zip(COLUMNS, row, strict=True):
            allowed = _TYPES[column]
            if not isinstance(value, allowed) or isinstance(value, bool):
                raise LedgerCorruptError(f"entry {row[0]!r} is damaged: {column}={value!r:.80}")
        return cls(*row)

    def values(self) -> tuple[Any, ...]:
        """Return the fields in the order of `COLUMNS`."""
        return tuple(getattr(self, column) for column in COLUMNS)

    def chained(self, previous: bytes) -> bytes:
        """Return this entry's hash, given the hash of the entry before it."""
        fields: list[Any] = [*self.values()[:-2]]
        fields += [None if blob is None else len(blob) for blob in (self.clients, self.charges)]
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=True).encode("ascii")
        digest = hashlib.sha256(_TAG + previous + len(text).to_bytes(8, "big") + text)
        digest.update(self.clients or b"")
        digest.update(self.charges or b"")
        return digest.digest()


COLUMNS = tuple(Entry.__dataclass_fields__)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(COLUMNS, (str, NoneType)),
    **dict.fromkeys(("kind", "time"), (str,)),
    **dict.fromkeys(("population", "run", "round", "reservation"), (int, NoneType)),
    **dict.fromkeys(("clients", "charges"), (bytes, NoneType)),
    "seq": (int,),
}


def read_row(row: Sequence[Any], last: int, previous: bytes) -> tuple[Entry | None, list[str]]:
    """Read the columns of an entry and its hash; return it and what is wrong with it.

    `last` and `previous` are the number and the hash of the entry before it.
    """
    problems = [] if row[0] == last + 1 else [f"entry {last + 1} is missing"]
    try:
        entry = Entry.of(row[:-1])
    except LedgerCorruptError as error:
        return None, [*problems, str(error)]
    if entry.chained(previous) != row[-1]:
        problems.append(
            f"entry {entry.seq} ({entry.kind}) was edited, or does not follow the entry before it"
        )
    if entry.kind not in KINDS:
        problems.append(f"entry {entry.seq} has no place here: {entry.kind!r}")
    return entry, problems


def make_body(**values: object) -> str:
    """Return the canonical JSON of an entry's further values; floats survive exactly."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
