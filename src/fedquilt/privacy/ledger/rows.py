"""What a person looks at: one row for each client, and a summary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedquilt.privacy.ledger.account import Account
from fedquilt.privacy.ledger.records import PopulationInfo
from fedquilt.privacy.ledger.units import FloatArray, epsilon_left, epsilon_spent

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


def client_rows(account: Account, places: Mapping[int, tuple[str, int]]) -> Iterator[ClientRow]:
    """Return the row of each client; `places` maps an entry to its run and round.

    The figures are those of the moment of the call, however late they are looked at.
    """
    info = account.info
    left = account.left()
    columns = zip(
        range(info.num_clients),
        list(account.ids) if info.named else [None] * info.num_clients,
        account.joins.tolist(),
        account.spent.tolist(),
        bounded_epsilons(account.spent, info).tolist(),
        account.reserved.tolist(),
        left.tolist(),
        epsilon_left(left, info.delta).tolist(),
        account.last_entry.tolist(),
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


def summarise(account: Account) -> Summary:
    """Return the summary of a population's account."""
    info = account.info
    left = account.left()
    epsilons = bounded_epsilons(account.spent, info)
    exhausted = left <= _NOTHING * info.allowance_mu2
    near_end = (account.spent > NEAR_END * info.allowance_mu2) & ~exhausted
    return Summary(
        population=info.name,
        clients=info.num_clients,
        joined=int(np.count_nonzero(account.joins)),
        epsilon_allowance=info.epsilon,
        delta=info.delta,
        epsilon_max=float(epsilons.max()),
        epsilon_median=_median(epsilons),
        exhausted=int(np.count_nonzero(exhausted)),
        near_end=int(np.count_nonzero(near_end)),
        unbounded=int(np.count_nonzero(np.isinf(account.spent))),
        reserved=int(np.count_nonzero(account.reserved)),
        open_reservations=len(account.open),
        largest_run_epsilon=float(epsilon_left(left.min(keepdims=True), info.delta)[0]),
        adjacency=info.adjacency,
        named=info.named,
    )


def _median(epsilons: FloatArray) -> float:
    """Return the median; of two middle values the larger, so that infinity needs no sum."""
    middle = epsilons.size // 2
    value = float(np.partition(epsilons, middle)[middle])
    return value if not math.isnan(value) else math.inf
