"""A population's balances, folded from its entries.

An account is a cache in memory.  It changes in one way only, by reading committed
entries it has not seen yet, its own as well as those of other processes; so it
cannot hold what the file does not.  Reading starts from a snapshot in the file
where there is one, so that opening does not read the whole past.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from fedquilt.privacy.ledger import chain
from fedquilt.privacy.ledger.chain import Entry
from fedquilt.privacy.ledger.codec import decode_charges, decode_clients
from fedquilt.privacy.ledger.errors import LedgerCorruptError
from fedquilt.privacy.ledger.records import PopulationInfo, Reservation
from fedquilt.privacy.ledger.store import Store
from fedquilt.privacy.ledger.units import FloatArray, IntArray

_SNAPSHOT_FLOOR = 1 << 16  # bytes of charges below which a snapshot is not worth it


class Account:
    """What every client of one population has spent and reserved, as of entry `seq`."""

    def __init__(self, info: PopulationInfo) -> None:
        self.info = info
        self._clear()

    def _clear(self) -> None:
        self.seq = 0
        self.hash = b""
        self.spent = np.zeros(self.info.num_clients)
        self.reserved = np.zeros(self.info.num_clients)
        self.joins = np.zeros(self.info.num_clients, dtype=np.uint32)
        self.last_entry = np.zeros(self.info.num_clients, dtype=np.uint32)
        self.open: dict[int, Reservation] = {}
        self.run_spent: dict[int, FloatArray] = {}
        self.unsaved_bytes = 0

    def refresh(self, store: Store) -> None:
        """Read what was committed since the last time; call it first in a transaction."""
        head, digest = store.head()
        if self.seq and store.hash_of(self.seq) != self.hash:
            raise LedgerCorruptError(
                f"ledger {store.path} was rolled back or edited while it was open: entry "
                f"{self.seq} is not what it was"
            )
        try:
            if not self.seq:
                self._load_snapshot(store, head)
            for entry in store.entries("population = ? AND seq > ?", self.info.key, self.seq):
                self.apply(entry)
        except BaseException:
            self._clear()  # half of the entries would be worse than none
            raise
        self.seq, self.hash = head, digest

    def track(self, store: Store, run: int) -> FloatArray:
        """Return what each client has spent in one run; kept up to date from here on.

        Call it after `refresh` in the same transaction.
        """
        if run not in self.run_spent:
            self.run_spent[run] = spent_in_run(store, self.info, run)
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
        """Take one more entry of this population into the balances."""
        self.unsaved_bytes += len(entry.clients or b"") + len(entry.charges or b"") + 64
        if entry.kind == chain.RESERVE:
            self._drop(lambda r: (r.run, r.round_index) == (entry.run, entry.round))
            self._open(reservation_of(entry, self.info.num_clients))
        elif entry.kind == chain.SETTLE:
            reservation = self._take(entry)
            self._charge(entry, reservation.clients, reservation.charges_mu2)
        elif entry.kind == chain.RELEASE:
            self._take(entry)
        elif entry.kind in (chain.RESUME, chain.FINISH):
            self._drop(lambda r: r.run == entry.run)
        elif entry.kind == chain.UNBOUNDED:
            clients = decode_clients(entry.clients or b"", self.info.num_clients)
            self._charge(entry, clients, np.full(clients.size, np.inf))

    def _open(self, reservation: Reservation) -> None:
        self.open[reservation.entry] = reservation
        self.reserved[reservation.clients] += reservation.charges_mu2

    def _take(self, entry: Entry) -> Reservation:
        """Close the reservation that a settle or release entry names."""
        reservation = self.open.get(entry.reservation or 0)
        if reservation is None or reservation.run != entry.run:
            raise LedgerCorruptError(
                f"entry {entry.seq} closes reservation {entry.reservation}, which is not open"
            )
        del self.open[reservation.entry]
        self.reserved[reservation.clients] -= reservation.charges_mu2
        return reservation

    def _drop(self, which: Callable[[Reservation], bool]) -> None:
        for reservation in list(filter(which, self.open.values())):
            del self.open[reservation.entry]
            self.reserved[reservation.clients] -= reservation.charges_mu2

    def _charge(self, entry: Entry, clients: IntArray, charges: FloatArray) -> None:
        self.spent[clients] += charges
        self.joins[clients] += 1
        self.last_entry[clients] = entry.seq
        if entry.run in self.run_spent:
            self.run_spent[entry.run][clients] += charges

    def save_snapshot(self, store: Store) -> None:
        """Write the balances beside the entries when reading those again would take longer."""
        size = self.spent.nbytes + self.joins.nbytes + self.last_entry.nbytes
        if self.unsaved_bytes < max(2 * size, _SNAPSHOT_FLOOR):
            return
        store.execute(
            "REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?)",
            *(self.info.key, self.seq, *self.as_bytes()),
        )
        self.unsaved_bytes = 0

    def as_bytes(self) -> tuple[bytes, bytes, bytes, str]:
        """Return the snapshot of the balances and of the numbers of open reservations."""
        balances = (
            self.spent.astype("<f8").tobytes(),
            self.joins.astype("<u4").tobytes(),
            self.last_entry.astype("<u4").tobytes(),
        )
        return *balances, json.dumps(sorted(self.open))

    def _load_snapshot(self, store: Store, head: int) -> None:
        row = store.first(
            "SELECT seq, spent, joins, last_entry, open FROM snapshots WHERE population = ?",
            self.info.key,
        )
        if row is None:
            return
        if not 0 < row[0] <= head:
            raise LedgerCorruptError(f"ledger {store.path}: a snapshot is newer than the entries")
        try:
            self.spent[:] = np.frombuffer(row[1], dtype="<f8")
            self.joins[:] = np.frombuffer(row[2], dtype="<u4")
            self.last_entry[:] = np.frombuffer(row[3], dtype="<u4")
            numbers = [int(number) for number in json.loads(row[4])]
        except (ValueError, TypeError) as error:
            raise LedgerCorruptError(f"ledger {store.path}: a snapshot is damaged") from error
        for number in numbers:
            for entry in store.entries("seq = ?", number):
                self._open(reservation_of(entry, self.info.num_clients))
        self.seq = int(row[0])


def reservation_of(entry: Entry, num_clients: int) -> Reservation:
    """Read a "reserve" entry."""
    clients = decode_clients(entry.clients or b"", num_clients)
    charges = decode_charges(entry.charges or b"", clients.size)
    return Reservation(entry.seq, int(entry.run or 0), int(entry.round or 0), clients, charges)


def joins_in_run(store: Store, info: PopulationInfo, run: int) -> IntArray:
    """Return how many settled releases of one run each client was part of."""
    total = np.zeros(info.num_clients, dtype=np.int64)
    settled = "seq IN (SELECT reservation FROM entries WHERE run = ? AND kind = ?)"
    for entry in store.entries(settled, run, chain.SETTLE):
        total[reservation_of(entry, info.num_clients).clients] += 1
    return total


def spent_in_run(store: Store, info: PopulationInfo, run: int) -> FloatArray:
    """Return what each client has spent in one run, read from the run's own entries."""
    total = np.zeros(info.num_clients)
    settled = "seq IN (SELECT reservation FROM entries WHERE run = ? AND kind = ?)"
    for entry in store.entries(settled, run, chain.SETTLE):
        reservation = reservation_of(entry, info.num_clients)
        total[reservation.clients] += reservation.charges_mu2
    for entry in store.entries("run = ? AND kind = ?", run, chain.UNBOUNDED):
        total[decode_clients(entry.clients or b"", info.num_clients)] = np.inf
    return total
