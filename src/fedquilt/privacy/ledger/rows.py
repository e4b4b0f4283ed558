"""What an account shows: a row for each client, a summary, and the settled releases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedquilt.privacy.ledger import entries
from fedquilt.privacy.ledger.balances import Balances, balances_at, reservation_of
from fedquilt.privacy.ledger.entries import (
    Entry,
    PopulationInfo,
    decode_clients,
)
from fedquilt.privacy.ledger.store import Store
from fedquilt.privacy.ledger.units import FloatArray, IntArray, epsilon_left, epsilon_spent


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


NEAR_END = 0.9
"""A client that has spent more than this share of its allowance is near the end."""


_NOTHING = 1e-6  # share of the allowance that is too little for another round


@dataclass(frozen=True)
class ClientRow:
    """What one client has given away and what it has left.

    `client_id` is None in a population that knows its clients by number.
    `mu2_…` are squared GDP units, which add up; epsilons are what they mean at the
    population's delta, and do not add up.  `epsilon_left` is the largest epsilon a
    new run may ask of this client.
    """

    client: int
    client_id: str | None
    joins: int
    mu2_spent: float
    epsilon_spent: float
    mu2_reserved: float
    mu2_left: float
    epsilon_left: float
    epsilon_allowance: float
    delta: float
    last_run: str | None
    last_round: int | None


@dataclass(frozen=True)
class Summary:
    """A population at a glance.

    `exhausted` clients have less than a millionth of their allowance left;
    `near_end` have spent over 90 % of it (in squared GDP units) and are not
    exhausted; `unbounded` took part in a release without a bound and are counted
    as exhausted too.
    """

    population: str
    clients: int
    joined: int
    epsilon_allowance: float
    delta: float
    epsilon_max: float
    epsilon_median: float
    exhausted: int
    near_end: int
    unbounded: int
    reserved: int
    open_reservations: int
    largest_run_epsilon: float
    adjacency: str
    named: bool


def bounded_epsilons(spent: FloatArray, info: PopulationInfo) -> FloatArray:
    """Return epsilons that are at most the allowance wherever the spending is.

    Epsilon grows with μ², so spending at most the allowance costs at most its
    epsilon; the minimum only takes off what rounding up has added.
    """
    epsilons = epsilon_spent(spent, info.delta)
    within = spent <= info.allowance_mu2
    return np.where(within, np.minimum(epsilons, info.epsilon), epsilons)


def payable_epsilons(left: FloatArray, info: PopulationInfo) -> FloatArray:
    """Return the largest epsilon that a new run may ask of who has `left`.

    Who has the whole allowance can pay all of it, to the last digit.
    """
    whole = left >= info.allowance_mu2
    return np.where(whole, info.epsilon, epsilon_left(left, info.delta))


LISTED = 1_000_000
"""In a larger population those who were in no release and hold nothing are not listed."""


def listed_clients(account: Balances, most: int | None = None) -> IntArray:
    """Return who has a row: everybody, or the `most` who have spent most, dearest first."""
    count = account.info.num_clients
    if most is None:
        return np.arange(count) if count <= LISTED else account.touched()
    few = np.arange(min(max(most, 0), count))  # in case nobody has spent anything
    clients = np.union1d(account.touched(), few)
    return clients[np.lexsort((clients, -balances_at(account.spent, clients)))][: few.size]


def client_rows(
    account: Balances, places: Mapping[int, tuple[str, int]], clients: IntArray
) -> Iterator[ClientRow]:
    """Return the row of each of `clients`; `places` maps an entry to its run and round.

    The figures are those of the moment of the call, however late they are looked at.
    """
    info = account.info
    spent, reserved = balances_at(account.spent, clients), balances_at(account.reserved, clients)
    left = account.left_of(clients)
    columns = zip(
        clients.tolist(),
        [account.ids[client] if info.named else None for client in clients.tolist()],
        balances_at(account.joins, clients).tolist(),
        spent.tolist(),
        bounded_epsilons(spent, info).tolist(),
        reserved.tolist(),
        left.tolist(),
        payable_epsilons(left, info).tolist(),
        balances_at(account.last_entry, clients).tolist(),
        strict=True,
    )
    return (_row(info, places, *values) for values in columns)


def _row(
    info: PopulationInfo,
    places: Mapping[int, tuple[str, int]],
    client: int,
    client_id: str | None,
    joins: int,
    *amounts_and_last: Any,
) -> ClientRow:
    spent, epsilon, reserved, left, payable, last = amounts_and_last
    amounts = (spent, epsilon, reserved, left, payable, info.epsilon, info.delta)
    return ClientRow(client, client_id, joins, *amounts, *places.get(last, (None, None)))


def payable_by_all(account: Balances) -> float:
    """Return the largest epsilon that a new run may ask of everybody."""
    whole = account.info.allowance_mu2
    least = account.left_of(account.touched()).min(initial=whole)  # the others have all of it
    return float(payable_epsilons(np.array([least]), account.info)[0])


def summary_of(account: Balances) -> Summary:
    """Return the summary of a population's account."""
    info, touched = account.info, account.touched()
    others = info.num_clients - touched.size  # they have all of their allowance
    spent, reserved = account.spent[touched], account.reserved[touched]
    left = account.left_of(touched)
    epsilons = bounded_epsilons(spent, info)
    exhausted = left <= _NOTHING * info.allowance_mu2
    near_end = (spent > NEAR_END * info.allowance_mu2) & ~exhausted
    return Summary(
        population=info.name,
        clients=info.num_clients,
        joined=int(np.count_nonzero(account.joins[touched])),
        epsilon_allowance=info.epsilon,
        delta=info.delta,
        epsilon_max=float(epsilons.max(initial=0.0)),
        epsilon_median=_median(epsilons, others),
        exhausted=int(np.count_nonzero(exhausted)),
        near_end=int(np.count_nonzero(near_end)),
        unbounded=int(np.count_nonzero(np.isinf(spent))),
        reserved=int(np.count_nonzero(reserved)),
        open_reservations=len(account.open),
        largest_run_epsilon=payable_by_all(account),
        adjacency=info.adjacency,
        named=info.named,
    )


def _median(epsilons: FloatArray, zeros: int) -> float:
    """Return the median of these and so many zeros.

    Of two middle values it is the larger, so that infinity needs no sum.
    """
    middle = (epsilons.size + zeros) // 2 - zeros
    if not 0 <= middle < epsilons.size:  # a zero, or nobody
        return 0.0
    value = float(np.partition(epsilons, middle)[middle])
    return value if not math.isnan(value) else math.inf
