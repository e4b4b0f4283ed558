"""A population: clients that share one lifetime allowance, and what they have left."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.privacy.ledger import chain, codec
from fedquilt.privacy.ledger.account import Account
from fedquilt.privacy.ledger.chain import Entry, make_body
from fedquilt.privacy.ledger.errors import BudgetExceededError, LedgerConflictError
from fedquilt.privacy.ledger.records import PopulationInfo, RunInfo
from fedquilt.privacy.ledger.rows import (
    ClientRow,
    Summary,
    bounded_epsilons,
    client_rows,
    summarise,
)
from fedquilt.privacy.ledger.run import Run
from fedquilt.privacy.ledger.store import Store, now
from fedquilt.privacy.ledger.units import (
    FloatArray,
    IntArray,
    allowance_mu2,
    epsilon_left,
    falls_short,
    grid_unit,
    round_down,
)


def population_name(
    dataset: str, partition: str | Mapping[str, object], seed: int, num_clients: int
) -> str:
    """Return the name of the population that a split of a data set makes.

    The same data set, partition, seed and number of clients are the same clients,
    so their runs share an allowance without anybody having to name it.

    >>> population_name("mnist", {"kind": "dirichlet", "alpha": 0.5}, 42, 100)
    'mnist-100-051df6bca7383d51'
    """
    numbers = [validate.integer("seed", seed), validate.integer("num_clients", num_clients)]
    try:
        told = json.dumps([dataset, partition, *numbers], sort_keys=True)
    except TypeError as error:
        # A text that changes from run to run would give every run a fresh allowance.
        raise InvalidValueError(f"partition={partition!r} must be plain data: {error}") from error
    return f"{dataset}-{num_clients}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def check_name(what: str, name: object) -> str:
    """Return `name` when it is a text that can name something, or raise."""
    if not isinstance(name, str) or not name.strip() or len(name) > 200 or not name.isprintable():
        raise InvalidValueError(f"{what}={name!r} must be a text of 1 to 200 printable characters")
    return name


class Population:
    """Clients 0 … num_clients − 1 and their accounts; made by `Ledger.population`."""

    def __init__(self, store: Store, account: Account) -> None:
        self._store = store
        self._account = account

    @property
    def info(self) -> PopulationInfo:
        """Return the name, the number of clients and the allowance."""
        return self._account.info

    def start_run(self, run_id: str, *, epsilon: float | None, on_short: str = "refuse") -> Run:
        """Start a run that may spend `epsilon` of each client's allowance, or resume it.

        The run's budget is gaussian_mu(epsilon, delta)² at the population's delta.
        With `on_short="refuse"` the run is refused when any client has less left;
        with "sit_out" those clients take no part in it.  `epsilon=None` is a run
        that bounds nothing: it can only `record_unbounded`.

        Calling it again with the same `run_id` and `epsilon` resumes the run.  What
        it had reserved and not settled is dropped then: a release is settled before
        it is used, so nothing of those rounds has left.  An older handle of the run
        is refused from then on.
        """
        name = check_name("run_id", run_id)
        validate.choice("on_short", on_short, ("refuse", "sit_out"))
        if epsilon is not None:
            epsilon = validate.number("epsilon", epsilon, above=0)
        budget = self._budget(epsilon)
        with self._store.writing():
            self._account.refresh(self._store)
            self._account.save_snapshot(self._store)
            found = self._store.named(chain.RUN, name)
            if found is not None:
                return self._resume(found, epsilon)
            sits_out = np.empty(0, dtype=np.int64)
            if epsilon is not None:
                sits_out = self._short_of(budget, epsilon, on_short)
            body = make_body(epsilon=epsilon, budget_mu2=budget, on_short=on_short)
            blob = codec.encode_clients(sits_out)
            entry = Entry(0, chain.RUN, now(), self.info.key, name=name, body=body, clients=blob)
            seq, _ = self._store.append(entry)
        info = RunInfo(seq, name, self.info.key, epsilon, budget, sits_out)
        return Run(self._store, self._account, info, session=seq)

    def _budget(self, epsilon: float | None) -> float:
        if epsilon is None:
            return 0.0
        if epsilon > self.info.epsilon:
            raise InvalidValueError(
                f"epsilon={epsilon!r} of a run must be <= {self.info.epsilon!r}, the lifetime "
                f"allowance of population {self.info.name!r}"
            )
        asked = min(allowance_mu2(epsilon, self.info.delta), self.info.allowance_mu2)
        return round_down(asked, grid_unit(self.info.allowance_mu2))

    def _resume(self, found: Entry, epsilon: float | None) -> Run:
        info = RunInfo.of(found, self.info.num_clients)
        if info.population != self.info.key:
            raise LedgerConflictError(f"run {info.name!r} belongs to another population")
        if info.epsilon != epsilon:
            raise LedgerConflictError(
                f"run {info.name!r} was started with epsilon={info.epsilon!r} and cannot go on "
                f"with epsilon={epsilon!r}; use that epsilon or another run_id"
            )
        entry = Entry(0, chain.RESUME, now(), self.info.key, info.key)
        seq, _ = self._store.append(entry)
        return Run(self._store, self._account, info, session=seq)

    def _short_of(self, budget: float, epsilon: float, on_short: str) -> IntArray:
        """Return who has less than `budget` left, or refuse."""
        left = self._account.left()
        short = np.flatnonzero(falls_short(budget, left, self.info.allowance_mu2))
        if short.size == 0 or (on_short == "sit_out" and short.size < left.size):
            return short
        payable = float(epsilon_left(left.min(keepdims=True), self.info.delta)[0])
        nobody = short.size == left.size
        who = "any client" if nobody else f"{short.size} of {left.size} clients"
        hint = "" if on_short == "sit_out" else ', or on_short="sit_out" to leave them out'
        raise BudgetExceededError(
            f"a run at epsilon={epsilon!r} asks more than {who} of population "
            f"{self.info.name!r} {'has' if nobody else 'have'} left (client {short[0]} has "
            f"mu²={left[short[0]]:.6g} of {budget:.6g} asked). The largest epsilon that everybody "
            f"can still pay is {payable:.6g}{hint}",
            *(short, np.full(short.size, budget), left[short]),
        )

    def runs(self) -> list[RunInfo]:
        """Return the population's runs, oldest first."""
        condition = "population = ? AND kind = ?"
        with self._store.reading():
            found = self._store.entries(condition, self.info.key, chain.RUN)
            return [RunInfo.of(entry, self.info.num_clients) for entry in found]

    def _fresh(self) -> Account:
        with self._store.reading():
            self._account.refresh(self._store)
        return self._account

    def spent(self) -> FloatArray:
        """Return the squared GDP units each client has given away; inf where unbounded."""
        return self._fresh().spent.copy()

    def reserved(self) -> FloatArray:
        """Return the squared GDP units each client has in open reservations."""
        return self._fresh().reserved.copy()

    def left(self) -> FloatArray:
        """Return allowance − spent − reserved of each client, in squared GDP units."""
        return self._fresh().left()

    def joins(self) -> IntArray:
        """Return how many releases each client was part of."""
        return self._fresh().joins.astype(np.int64)

    def epsilons(self) -> FloatArray:
        """Return each client's epsilon at the population's delta, never below the exact one.

        It is at most the allowance for every client whose charges were bounded.
        """
        spent = self._fresh().spent
        return bounded_epsilons(spent, self.info)

    def epsilon_left(self) -> FloatArray:
        """Return the largest epsilon that a new run may ask of each client."""
        return epsilon_left(self.left(), self.info.delta)

    def largest_run_epsilon(self) -> float:
        """Return the largest epsilon that a new run may ask of everybody; 0 when nothing is left.

        This is gaussian_epsilon(√(smallest allowance left), delta), which is more
        than the difference of epsilons: see the module `units`.
        """
        return float(epsilon_left(self.left().min(keepdims=True), self.info.delta)[0])

    def rows(self) -> Iterator[ClientRow]:
        """Return what `show` prints of each client, one after the other."""
        query = (
            "SELECT e.seq, e.round, r.name FROM entries e JOIN entries r ON r.seq = e.run "
            "WHERE e.population = ? AND e.kind IN (?, ?)"
        )
        with self._store.reading():
            account = self._fresh()
            found = self._store.select(query, self.info.key, chain.SETTLE, chain.UNBOUNDED)
            places = {seq: (name, index) for seq, index, name in found}
        return client_rows(account, places)

    def summary(self) -> Summary:
        """Return the population's figures in one record."""
        return summarise(self._fresh())


def create_population(
    store: Store, name: str, num_clients: int, epsilon: float, delta: float
) -> Entry:
    """Append a "population" entry, inside a transaction, and return it."""
    body = make_body(
        num_clients=num_clients,
        epsilon=epsilon,
        delta=delta,
        allowance_mu2=allowance_mu2(epsilon, delta),
    )
    entry = Entry(0, chain.POPULATION, now(), name=name, body=body)
    seq, _ = store.append(entry)
    return replace(entry, seq=seq, population=seq)
