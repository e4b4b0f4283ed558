"""What was charged when: the settled releases of a run, and those a client was part of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedquilt.privacy.ledger import entries
from fedquilt.privacy.ledger.balances import reservation_of
from fedquilt.privacy.ledger.entries import Entry, PopulationInfo, decode_clients
from fedquilt.privacy.ledger.store import Store
from fedquilt.privacy.ledger.units import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Charge:
    """One settled release: who was part of it, and what each of them paid (squared GDP units).

    A release without a bound costs infinity.
    """

    run: int
    round_index: int
    time: str
    clients: IntArray
    charges_mu2: FloatArray


def charges_of_run(store: Store, info: PopulationInfo, run: int) -> Iterator[Charge]:
    """Yield the releases of one run in the order in which they were settled."""
    yield from _charges(store, info, "run = ?", run)


def charges_of_population(store: Store, info: PopulationInfo) -> Iterator[Charge]:
    """Yield all releases of a population in the order in which they were settled."""
    yield from _charges(store, info, "population = ?", info.key)


def _charges(store: Store, info: PopulationInfo, where: str, value: int) -> Iterator[Charge]:
    kinds = f"{where} AND kind IN (?, ?)"
    for entry in store.entries(kinds, value, entries.SETTLE, entries.UNBOUNDED):
        if entry.kind == entries.UNBOUNDED:
            clients = decode_clients(entry.clients or b"", info.num_clients)
            yield _charge(entry, clients, np.full(clients.size, np.inf))
            continue
        (reserved,) = store.entries("seq = ?", entry.reservation)
        reservation = reservation_of(reserved, info.num_clients)
        yield _charge(entry, reservation.clients, reservation.charges_mu2)


def _charge(entry: Entry, clients: IntArray, charges: FloatArray) -> Charge:
    return Charge(int(entry.run or 0), int(entry.round or 0), entry.time, clients, charges)
