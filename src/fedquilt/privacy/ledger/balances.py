"""What every client of a population has spent: balances folded from the entries, and rows.

`Balances` are a cache in memory.  They change in one way only, by reading committed
entries they do not contain yet, those of this process as well as of others; so they
cannot hold what the file does not.  What they read was hashed first (`Store.check`).
Reading starts from a snapshot in the file where there is one that was checked before,
so that opening a long ledger does not add up its whole past; any other snapshot is
compared with what the entries add up to.

A population may be said to have a hundred million clients by an entry of a hundred bytes.
Balances are as long as the largest client number that an entry names; whoever is beyond has
spent nothing.  They are as long as the population once somebody asks for everybody (`cover`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedquilt.common.errors import LedgerCorruptError
from fedquilt.common.schema import COUNT, ListOf, check
from fedquilt.common.untrusted import parse_json
from fedquilt.privacy.ledger import entries
from fedquilt.privacy.ledger.entries import (
    Entry,
    FloatArray,
    IntArray,
    PopulationInfo,
    Reservation,
    decode_charges,
    decode_clients,
    members_of,
)
from fedquilt.privacy.ledger.store import Store

_Number = TypeVar("_Number", bound=np.generic)
_SNAPSHOT_FLOOR = 1 << 16  # bytes of charges below which a snapshot is not worth it
_SNAPSHOT_BYTES = 16  # of a client
_OF_A_ROUND = (entries.RESERVE, entries.SETTLE, entries.RELEASE, entries.UNBOUNDED)


class Balances:
    """What every client of one population has spent and reserved, as of entry `seq`."""

    def __init__(self, info: PopulationInfo) -> None:
        self._made = info
        self._covers_all = False
        self._clear()

    def _clear(self) -> None:
        # A named population has the clients that its "members" entries name, in order.
        self.info = replace(self._made, num_clients=0) if self._made.named else self._made
        self.ids: list[str] = []
        self.numbers: dict[str, int] = {}
        self.seq = 0
        self.hash = b""
        size = self.info.num_clients if self._covers_all else 0
        self.spent, self.reserved = np.zeros(size), np.zeros(size)
        self.joins = np.zeros(size, dtype=np.uint32)
        self.last_entry = np.zeros(size, dtype=np.uint32)
        self.open: dict[int, Reservation] = {}
        self._open_rounds: dict[int, dict[int, int]] = {}  # run: {round: entry}
        self.run_spent: dict[int, FloatArray] = {}
        self.unsaved_bytes = 0

    def cover(self) -> None:
        """Make the balances as long as the population, now and from here on."""
        self._covers_all = True
        self._fit(self.info.num_clients)

    def _fit(self, count: int) -> None:
        """Make the balances long enough for the first `count` clients, and as long for them all."""
        size = self.spent.size
        if count <= size:
            return
        more = min(max(count, 2 * size), self.info.num_clients) - size
        self.spent, self.reserved = _longer(self.spent, more), _longer(self.reserved, more)
        self.joins, self.last_entry = _longer(self.joins, more), _longer(self.last_entry, more)
        self.run_spent = {run: _longer(spent, more) for run, spent in self.run_spent.items()}

    def touched(self) -> IntArray:
        """Return the clients that were in a release or hold a reservation, ascending."""
        parts = [reservation.clients for reservation in self.open.values()]
        joined = np.flatnonzero(self.joins)
        return np.unique(np.concatenate([joined, *parts])) if parts else joined

    def left_of(self, clients: IntArray) -> FloatArray:
        """Return the lifetime allowance of clients minus spent minus reserved, never below zero."""
        free = (
            self.info.allowance_mu2
            - balances_at(self.spent, clients)
            - balances_at(self.reserved, clients)
        )
        return np.maximum(free, 0.0)

    def refresh(self, store: Store) -> None:
        """Read what was committed since the last time; call it first in a transaction."""
        store.check()
        if self.seq and store.hash_of(self.seq) != self.hash:
            self._clear()  # read in a transaction that came to nothing
        head, digest = store.head()
        try:
            if not self.seq:
                self._begin(store, head)
            self._read(store, head)
        except BaseException:
            self._clear()  # half of the entries would be worse than none
            raise
        self.seq, self.hash = head, digest

    def _read(self, store: Store, upto: int) -> None:
        """Add the entries after `seq` and up to `upto` to the balances.

        The plus sign keeps SQLite from its index of populations: the hashes are of the
        entries, not of the index, so it is the entries that are looked through.
        """
        where = "+population = ? AND seq > ? AND seq <= ?"
        for entry in store.entries(where, self.info.key, self.seq, upto):
            self.apply(entry)

    def track(self, store: Store, run: int) -> FloatArray:
        """Return what each client has spent in one run; kept up to date from here on.

        Call it after `refresh` in the same transaction.
        """
        self.cover()
        if run not in self.run_spent:
            spent = spent_in_run(store, self.info, run)
            self.run_spent[run] = _longer(spent, self.spent.size - spent.size)
        return self.run_spent[run]

    def left(self) -> FloatArray:
        """Return the lifetime allowance minus spent minus reserved, never below zero."""
        free = self.info.allowance_mu2 - self.spent - self.reserved
        return np.maximum(free, 0.0)

    def held(self, clients: IntArray, which: Callable[[Reservation], bool]) -> FloatArray:
        """Return what the open reservations for which `which` is true hold of `clients`."""
        total = np.zeros(clients.size)
        for reservation in filter(which, self.open.values()):
            theirs = reservation.clients
            if theirs.size == 0:
                continue
            place = np.minimum(np.searchsorted(theirs, clients), theirs.size - 1)
            total += np.where(theirs[place] == clients, reservation.charges_mu2[place], 0.0)
        return total

    def apply(self, entry: Entry) -> None:
        """Add one more entry of this population to the balances."""
        self.unsaved_bytes += len(entry.clients or b"") + len(entry.charges or b"") + 64
        if entry.kind in _OF_A_ROUND and (entry.run is None or entry.round is None):
            raise LedgerCorruptError(f"entry {entry.seq} ({entry.kind}) names no round of a run")
        if entry.kind == entries.RESERVE:
            self._drop(entry.run, entry.round)
            self._open(reservation_of(entry, self.info.num_clients))
        elif entry.kind == entries.SETTLE:
            reservation = self._take(entry)
            self._charge(entry, reservation.clients, reservation.charges_mu2)
        elif entry.kind == entries.RELEASE:
            self._take(entry)
        elif entry.kind in (entries.RESUME, entries.FINISH):
            self._drop(entry.run)
        elif entry.kind == entries.UNBOUNDED:
            clients = decode_clients(entry.clients or b"", self.info.num_clients)
            self._charge(entry, clients, np.full(clients.size, np.inf))
        elif entry.kind == entries.MEMBERS:
            self._enrol(entry)
        elif entry.kind not in (entries.POPULATION, entries.RUN):
            raise LedgerCorruptError(f"entry {entry.seq} has no place here: {entry.kind!r}")

    def _enrol(self, entry: Entry) -> None:
        """Open an account for each client of a "members" entry.

        In a population that knew its clients by number so far, the first of these entries
        says who they are.
        """
        joining = members_of(entry)
        first = len(self.ids)
        if any(value in self.numbers for value in joining):
            raise LedgerCorruptError(f"entry {entry.seq} names a member a second time")
        if not self.info.named and len(joining) != self.info.num_clients:
            raise LedgerCorruptError(f"entry {entry.seq} names {len(joining)} of the clients only")
        self.ids += joining
        self.numbers |= {value: first + place for place, value in enumerate(joining)}
        self.info = replace(self.info, num_clients=len(self.ids), named=True)
        self._fit(len(self.ids))

    def _open(self, reservation: Reservation) -> None:
        self._fit(_end(reservation.clients))
        self.open[reservation.entry] = reservation
        rounds = self._open_rounds.setdefault(reservation.run, {})
        rounds[reservation.round_index] = reservation.entry
        self.reserved[reservation.clients] += reservation.charges_mu2

    def _take(self, entry: Entry) -> Reservation:
        """Close the reservation that a settle or release entry names."""
        reservation = self.open.get(entry.reservation or 0)
        if reservation is None or reservation.run != entry.run:
            raise LedgerCorruptError(
                f"entry {entry.seq} closes reservation {entry.reservation}, which is not open"
            )
        self._close(reservation)
        return reservation

    def _drop(self, run: int | None, round_index: int | None = None) -> None:
        """Close what a run holds open: of one round, or all of it."""
        rounds = self._open_rounds.get(run or 0, {})
        which = rounds.values() if round_index is None else [rounds.get(round_index, 0)]
        for number in [number for number in which if number in self.open]:
            self._close(self.open[number])

    def _close(self, reservation: Reservation) -> None:
        del self.open[reservation.entry]
        rounds = self._open_rounds[reservation.run]
        if rounds.get(reservation.round_index) == reservation.entry:
            del rounds[reservation.round_index]
        self.reserved[reservation.clients] -= reservation.charges_mu2

    def _charge(self, entry: Entry, clients: IntArray, charges: FloatArray) -> None:
        self._fit(_end(clients))
        self.spent[clients] += charges
        self.joins[clients] += 1
        self.last_entry[clients] = entry.seq
        if entry.run in self.run_spent:
            self.run_spent[entry.run][clients] += charges

    def save_snapshot(self, store: Store) -> None:
        """Write the balances beside the entries when reading those again would take longer."""
        size = _SNAPSHOT_BYTES * self.info.num_clients
        if self.unsaved_bytes < max(2 * size, _SNAPSHOT_FLOOR):
            return
        row = (self.seq, *self.as_bytes())
        store.execute("REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?)", self.info.key, *row)
        store.note_snapshot(self.info.key, row)
        self.unsaved_bytes = 0

    def as_bytes(self) -> tuple[bytes, bytes, bytes, str]:
        """Return the snapshot of the balances and of the numbers of open reservations."""
        beyond = self.info.num_clients - self.spent.size
        balances = (
            self.spent.astype("<f8").tobytes() + bytes(8 * beyond),
            self.joins.astype("<u4").tobytes() + bytes(4 * beyond),
            self.last_entry.astype("<u4").tobytes() + bytes(4 * beyond),
        )
        return *balances, json.dumps(sorted(self.open))

    def agrees(self, row: Sequence[Any]) -> bool:
        """Tell whether a snapshot from the file is that of these balances."""
        count = self.info.num_clients
        sizes = [len(blob) if isinstance(blob, bytes) else -1 for blob in row[:3]]
        # First, because the bytes of a population that is only said to be large are not made.
        return sizes == [8 * count, 4 * count, 4 * count] and tuple(row) == self.as_bytes()

    def _begin(self, store: Store, head: int) -> None:
        """Come to the snapshot: by believing it if it was checked before, else by adding up."""
        row = store.first(
            "SELECT seq, spent, joins, last_entry, open FROM snapshots WHERE population = ?",
            self.info.key,
        )
        if row is None:
            return
        if not isinstance(row[0], int) or not 0 < row[0] <= head:
            raise LedgerCorruptError(f"ledger {store.path}: a snapshot is newer than the entries")
        if store.knows_snapshot(self.info.key, row):
            self._load_snapshot(store, row)
            return
        self._read(store, row[0])
        self.seq, self.unsaved_bytes = row[0], 0
        if not self.agrees(row[1:]):
            raise store.refuse_snapshot(self.info.key)
        store.note_snapshot(self.info.key, row)

    def _load_snapshot(self, store: Store, row: tuple[Any, ...]) -> None:
        members = "population = ? AND kind = ? AND seq <= ?"
        for entry in store.entries(members, self.info.key, entries.MEMBERS, row[0]):
            self._enrol(entry)
        count = self.info.num_clients
        if [len(blob) for blob in row[1:4]] != [8 * count, 4 * count, 4 * count]:
            raise LedgerCorruptError(f"ledger {store.path}: a snapshot is damaged")
        self._fit(count)
        self.spent[:] = np.frombuffer(row[1], dtype="<f8")
        self.joins[:] = np.frombuffer(row[2], dtype="<u4")
        self.last_entry[:] = np.frombuffer(row[3], dtype="<u4")
        where = f"ledger {store.path}: the snapshot of population {self.info.key}"
        numbers = parse_json(row[4], where, LedgerCorruptError)
        check(numbers, ListOf(COUNT), where, LedgerCorruptError)
        for number in numbers:
            for entry in store.entries("seq = ?", number):
                self._open(reservation_of(entry, self.info.num_clients))
        self.seq = int(row[0])


def _end(clients: IntArray) -> int:
    """Return the number after the largest of ascending clients; 0 of nobody."""
    return int(clients[-1]) + 1 if clients.size else 0


def _longer(array: NDArray[_Number], more: int) -> NDArray[_Number]:
    """Return the array with `more` zeros at its end."""
    if not more:
        return array
    longer = np.zeros(array.size + more, dtype=array.dtype)  # zeros nobody wrote take no memory
    longer[: array.size] = array
    return longer


def reservation_of(entry: Entry, num_clients: int) -> Reservation:
    """Read a "reserve" entry."""
    clients = decode_clients(entry.clients or b"", num_clients)
    charges = decode_charges(entry.charges or b"", clients.size)
    return Reservation(entry.seq, int(entry.run or 0), int(entry.round or 0), clients, charges)


def joins_in_run(store: Store, info: PopulationInfo, run: int) -> IntArray:
    """Return how many settled releases of one run each client was part of."""
    total = np.zeros(info.num_clients, dtype=np.int64)
    for reservation in _settled(store, info, run):
        total[reservation.clients] += 1
    return total


def _settled(store: Store, info: PopulationInfo, run: int) -> Iterator[Reservation]:
    settled = "seq IN (SELECT reservation FROM entries WHERE run = ? AND kind = ?)"
    for entry in store.entries(settled, run, entries.SETTLE):
        yield reservation_of(entry, info.num_clients)


def spent_in_run(store: Store, info: PopulationInfo, run: int) -> FloatArray:
    """Return what each client has spent in one run, read from the run's own entries.

    The array is as long as the largest client number in them.
    """
    total = np.zeros(0)
    for reservation in _settled(store, info, run):
        total = _long_enough(total, _end(reservation.clients))
        total[reservation.clients] += reservation.charges_mu2
    for entry in store.entries("run = ? AND kind = ?", run, entries.UNBOUNDED):
        clients = decode_clients(entry.clients or b"", info.num_clients)
        total = _long_enough(total, _end(clients))
        total[clients] = np.inf
    return total


def _long_enough(total: FloatArray, count: int) -> FloatArray:
    return _longer(total, max(0, count - total.size))


def balances_at(balances: NDArray[_Number], clients: IntArray) -> NDArray[_Number]:
    """Return the balances of clients; those beyond their end are zero."""
    found = np.zeros(clients.size, dtype=balances.dtype)
    inside = clients < balances.size
    found[inside] = balances[clients[inside]]
    return found
