"""What the entries that make a population or a run say, as frozen records."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fedquilt.privacy.ledger.chain import Entry
from fedquilt.privacy.ledger.codec import decode_clients
from fedquilt.privacy.ledger.errors import LedgerCorruptError
from fedquilt.privacy.ledger.units import FloatArray, IntArray

MAX_CLIENTS = 100_000_000
"""More clients than this would not fit one SQLite value."""

ADJACENCIES = ("zero_out", "replace_one")
"""What two neighbouring worlds differ in: a client's data against nothing, or other data."""


@dataclass(frozen=True)
class PopulationInfo:
    """Clients 0 … num_clients − 1, each with the same lifetime allowance.

    `allowance_mu2` is gaussian_mu(epsilon, delta)² on the safe side, fixed when the
    population is made, as is the adjacency its charges are counted under.  A `named`
    population knows its clients by id and may grow; any other knows them by number.
    """

    key: int
    name: str
    num_clients: int
    epsilon: float
    delta: float
    allowance_mu2: float
    adjacency: str = ADJACENCIES[0]
    named: bool = False

    @classmethod
    def of(cls, entry: Entry) -> PopulationInfo:
        """Read a "population" entry."""
        try:
            body = json.loads(entry.body or "")
            info = cls(
                key=entry.seq,
                name=str(entry.name),
                num_clients=int(body["num_clients"]),
                epsilon=float(body["epsilon"]),
                delta=float(body["delta"]),
                allowance_mu2=float(body["allowance_mu2"]),
                adjacency=body.get("adjacency", ADJACENCIES[0]),
                named=bool(body.get("named", False)),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerCorruptError(f"entry {entry.seq} is not a population: {error}") from error
        wrong = not 0 < info.num_clients <= MAX_CLIENTS or not info.allowance_mu2 > 0
        if wrong or info.adjacency not in ADJACENCIES:
            raise LedgerCorruptError(f"entry {entry.seq} is not a population: {entry.body}")
        return info


@dataclass(frozen=True, eq=False)
class RunInfo:
    """What a run may spend of each client's allowance; None: it has no bound to state.

    `roster` is the digest of the ids of its clients, in the run's order, where it named
    them; `enrolled` of them were new to the population.
    """

    key: int
    name: str
    population: int
    epsilon: float | None
    budget_mu2: float
    sits_out: IntArray
    roster: str | None = None
    enrolled: int = 0

    @classmethod
    def of(cls, entry: Entry, num_clients: int) -> RunInfo:
        """Read a "run" entry."""
        try:
            body = json.loads(entry.body or "")
            epsilon = None if body["epsilon"] is None else float(body["epsilon"])
            budget = float(body["budget_mu2"])
            roster, enrolled = body.get("roster"), int(body.get("enrolled", 0))
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerCorruptError(f"entry {entry.seq} is not a run: {error}") from error
        sits_out = decode_clients(entry.clients or b"", num_clients)
        name, population = str(entry.name), int(entry.population or 0)
        return cls(entry.seq, name, population, epsilon, budget, sits_out, roster, enrolled)


@dataclass(frozen=True, eq=False)
class Reservation:
    """A round's charges, counted as spent until they are settled or released.

    `charges_mu2` is what was granted to `clients`, in the order they were given.
    It is what was asked, rounded up to the ledger's grid, except that a client at
    the very end of its allowance may be granted up to a millionth less.  A release
    whose bounds are c_i = noise_std·√charges_mu2 keeps the allowance exactly.
    """

    entry: int
    run: int
    round_index: int
    clients: IntArray
    charges_mu2: FloatArray
