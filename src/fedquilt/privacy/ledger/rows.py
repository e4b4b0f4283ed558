"""What an account shows: a row for each client, a summary, and the settled releases."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedquilt.privacy.ledger import entries
from fedquilt.privacy.ledger.balances import Balances, balances_at, reservation_of
from fedquilt.privacy.ledger.entries import (
    Entry,
    FloatArray,
    IntArray,
    PopulationInfo,
    decode_clients,
    epsilon_left,
    epsilon_spent,
)
from fedquilt.privacy.ledger.store import Store

_ROUNDING = 1e-6  # charges are rounded up to a grid, and a hair less may be granted


@dataclass(frozen=True, eq=False)
class Charge:
    """One settled release: who was part of it, and what each of them paid (squared GDP units).

    A release without a bound costs infinity.  `digest` is the SHA-256 of what was released.
    """

    run: int
    round_index: int
    time: str
    clients: IntArray
    charges_mu2: FloatArray
    digest: str = ""


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
    facts = (int(entry.run or 0), int(entry.round or 0), entry.time)
    return Charge(*facts, clients, charges, entry.digest or "")


NEAR_END = 0.9
"""A client that has spent more than this share of its allowance is near the end."""


_NOTHING = 1e-6  # share of the allowance that is too little for another round


@dataclass(frozen=True)
class Paid:
    """What a client paid for one release, in which run (None: nobody has said) and round.

    `is_last`: the run, as its own account knows it, had no later one.
    """

    run: str | None
    round_index: int
    mu2: float
    is_last: bool = False


@dataclass(frozen=True)
class Short:
    """What was sent and not charged at as much.

    `charged` is None where there is no charge, and `is_released` tells whether the round was
    released all the same.
    """

    sent: Paid
    charged: float | None
    is_released: bool

    @property
    def may_be_a_crash(self) -> bool:
        """Whether a server that ended before its release, and after no other, explains it."""
        return self.charged is None and not self.is_released and self.sent.is_last

    @property
    def facts(self) -> tuple[str | None, int, float, float | None, bool]:
        """Run, round, what was sent and charged, and whether the round was released."""
        sent = self.sent
        return sent.run, sent.round_index, sent.mu2, self.charged, self.is_released

    @property
    def words(self) -> str:
        """What is said of it in one line."""
        if self.charged is not None:
            held = f"charged {self.charged:.6g}"
        elif self.is_released:
            held = "released without a charge (late replies and evaluations have none)"
        elif self.sent.is_last:
            held = "no release of this round: of a server that ended before it, or a forgotten one"
        else:
            held = "no release of this round, though its run went on"
        run = f" of {self.sent.run}" if self.sent.run else ""
        return f"round {self.sent.round_index + 1}{run}: sent at mu^2 {self.sent.mu2:.6g}, {held}"


def paid_by(
    charges: Iterable[Charge], client: int, run_of: Callable[[Charge], str | None]
) -> list[Paid]:
    """Return what a client paid for every release that it was part of."""
    mine = [charge for charge in charges if client in charge.clients]
    last = {charge.run: place for place, charge in enumerate(mine)}
    return [
        Paid(run_of(charge), charge.round_index, float(paid), last[charge.run] == place)
        for place, charge in enumerate(mine)
        for paid in charge.charges_mu2[charge.clients == client]
    ]


def short_of(
    sent: Iterable[Paid], charged: Iterable[Paid], released: Collection[tuple[str | None, int]] = ()
) -> list[Short]:
    """Return what was sent and charged at less.

    Releases are paired by run and round; where a site's entry names no run, by round.  Of several
    that fit first those are paired that are equal, then the dearest with the dearest that is left.
    `released` are runs and rounds of which the ledger has a release, whoever was part of it.
    """
    here: dict[int, list[Paid]] = {}
    for paid in charged:
        here.setdefault(paid.round_index, []).append(paid)

    def fitting(one: Paid) -> list[Paid]:
        left = here.get(one.round_index, [])
        return [paid for paid in left if one.run is None or paid.run == one.run]

    unpaired = []
    for one in sorted(sent, key=lambda one: one.run is None):
        same = [p for p in fitting(one) if math.isclose(p.mu2, one.mu2, rel_tol=_ROUNDING)]
        here[one.round_index].remove(same[0]) if same else unpaired.append(one)
    found = []
    for one in sorted(unpaired, key=lambda one: (one.round_index, -one.mu2)):
        best = max(fitting(one), key=lambda paid: paid.mu2, default=None)
        if best is not None:
            here[one.round_index].remove(best)
        if best is None or best.mu2 < one.mu2:
            known = {run for run, index in released if index == one.round_index}
            is_released = best is not None or (one.run in known if one.run else bool(known))
            found.append(Short(one, None if best is None else best.mu2, is_released))
    return found


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
