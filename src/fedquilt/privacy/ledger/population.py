"""A population: clients that share one lifetime allowance, and what they have left."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from fedquilt.common import checks
from fedquilt.common.errors import BudgetExceededError, InvalidValueError, LedgerConflictError
from fedquilt.common.formatting import format_left
from fedquilt.config.choices import IF_EXHAUSTED
from fedquilt.privacy.ledger import entries
from fedquilt.privacy.ledger.balances import Balances
from fedquilt.privacy.ledger.rows import (
    Charge,
    ClientRow,
    Summary,
    bounded_epsilons,
    charges_of_population,
    charges_of_run,
    client_rows,
    listed_clients,
    payable_by_all,
    payable_epsilons,
    summary_of,
)
from fedquilt.privacy.ledger.run import Run
from fedquilt.privacy.ledger.store import Store, now


def population_name(
    dataset: str, partition: str | Mapping[str, object], seed: int, num_clients: int
) -> str:
    """Return the name that ledgers of schema 1 gave the clients of a split.

    It names options and not clients: options that a split ignores change it, and some
    that change who holds what do not.  New populations are named after who their
    clients are (`roster_name`); this one is kept to find the older ones again.

    >>> population_name("mnist", {"kind": "dirichlet", "alpha": 0.5}, 42, 100)
    'mnist-100-051df6bca7383d51'
    """
    numbers = [checks.integer("seed", seed), checks.integer("num_clients", num_clients)]
    try:
        facts = json.dumps([dataset, partition, *numbers], sort_keys=True)
    except TypeError as error:
        # A text that changes from run to run would give every run a fresh allowance.
        raise InvalidValueError(f"partition={partition!r} must be plain data: {error}") from error
    return f"{dataset}-{num_clients}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def check_name(what: str, name: object) -> str:
    """Return `name` when it is a text that can name something, or raise."""
    if not isinstance(name, str) or not name.strip() or len(name) > 200 or not name.isprintable():
        raise InvalidValueError(f"{what}={name!r} must be a text of 1 to 200 printable characters")
    return name


def check_new_name(what: str, name: str) -> str:
    """Return `name` unless there are blanks around it, which nobody sees."""
    if name != name.strip():
        raise InvalidValueError(f"{what}={name!r} must not begin or end with blanks")
    return name


def check_named(info: entries.PopulationInfo) -> None:
    """Refuse ids for a population that knows its clients by number."""
    if not info.named:
        raise LedgerConflictError(
            f"population {info.name!r} was made without client ids and knows its clients by "
            "number; it is not mixed with ids. Leave client_ids out, or say once who its clients "
            "are: Ledger.open(...).population(...).adopt_ids([...])"
        )


class Population:
    """Clients 0 … num_clients − 1 and their accounts; made by `Ledger.population`.

    A named population also knows each client's id, and finds its number by it.
    """

    def __init__(self, store: Store, account: Balances) -> None:
        self._store = store
        self._account = account

    @property
    def info(self) -> entries.PopulationInfo:
        """Return the name, the number of clients and the allowance."""
        return self._account.info

    def ids(self) -> list[str]:
        """Return the clients' ids in the order of their numbers; empty when they have none."""
        return list(self._fresh().ids)

    def numbers(self, client_ids: Iterable[str]) -> entries.IntArray:
        """Return the number of each id; -1 for one that is not in the population."""
        return entries.numbers_of(entries.check_ids(client_ids), self._fresh().numbers)

    def enrol(self, client_ids: Iterable[str], *, allow_alike: bool = False) -> entries.IntArray:
        """Return the numbers of these clients; those who are new get an untouched account.

        One whose id reads like a member's (letter case, width of letters, blanks) is taken
        for a slip and refused, unless `allow_alike`.
        """
        ids = entries.check_ids(client_ids)
        with self._store.writing():
            self._account.refresh(self._store)
            numbers = self._enrol(ids, allow_alike)
        self.refresh()
        return numbers

    def adopt_ids(self, client_ids: Iterable[str]) -> None:
        """Say who the clients of a population are that knew them by number so far.

        It is your word that client number k was `client_ids[k]` in every run so far; from
        now on they are known by these ids, and others may join.
        """
        ids = entries.check_ids(client_ids)
        with self._store.writing():
            self._account.refresh(self._store)
            if self.info.named:
                raise LedgerConflictError(f"population {self.info.name!r} has ids already")
            if len(ids) != self.info.num_clients:
                raise LedgerConflictError(
                    f"population {self.info.name!r} has {self.info.num_clients} clients, and "
                    f"{len(ids)} ids were given: each needs one"
                )
            append_members(self._store, self.info.key, ids)
        self.refresh()

    def _enrol(self, ids: tuple[str, ...], allow_alike: bool) -> entries.IntArray:
        """Append those of `ids` that are new; return the numbers of all.

        The account in memory learns of them when the transaction is over.
        """
        check_named(self.info)
        numbers = entries.numbers_of(ids, self._account.numbers)
        new = np.flatnonzero(numbers == entries.UNKNOWN)
        if new.size:
            joining = [ids[place] for place in new]
            if not allow_alike:
                self._check_unlike(joining)
            append_members(self._store, self.info.key, joining)
            numbers[new] = self.info.num_clients + np.arange(new.size)
        return numbers

    def _check_unlike(self, joining: Iterable[str]) -> None:
        """Refuse ids that read like a member's: a fresh allowance for the same client."""
        members = {entries.alike(value): value for value in self._account.ids}
        for value in joining:
            if entries.alike(value) in members:
                raise LedgerConflictError(
                    f"client id {value!r} is not in population {self.info.name!r}, and "
                    f"{members[entries.alike(value)]!r} is, which differs in letter case, width "
                    "of letters or blanks only: a new client would have a fresh allowance. If it "
                    "is another client, say allow_alike=True (in a run: new_population=True, "
                    "--new-population)"
                )

    def start_run(
        self,
        run_id: str,
        *,
        epsilon: float | None,
        if_exhausted: str = "refuse",
        client_ids: Iterable[str] | None = None,
        allow_alike: bool = False,
    ) -> Run:
        """Start a run that may spend `epsilon` of each client's allowance, or resume it.

        The run's budget is gaussian_mu(epsilon, delta)² at the population's delta.
        With `if_exhausted="refuse"` the run is refused when any client has less left;
        with "sit_out" those clients take no part in it.  `epsilon=None` is a run
        that bounds nothing: it can only `record_unbounded`.

        `client_ids` names the clients of the run in its own order (`Run.places` has their
        numbers).  Those who are new join the population; members who are not named sit
        out.  Without it everybody takes part.  `allow_alike` is as in `enrol`.

        Calling it again with the same `run_id`, `epsilon` and ids resumes the run.  What
        it had reserved and not settled is dropped then: a release is settled before
        it is used, so nothing of those rounds has left.  An older handle of the run
        is refused from then on.
        """
        name = check_name("run_id", run_id)
        checks.choice("if_exhausted", if_exhausted, IF_EXHAUSTED)
        if epsilon is not None:
            epsilon = checks.number("epsilon", epsilon, above=0)
        budget = self._budget(epsilon)
        ids = None if client_ids is None else entries.check_ids(client_ids)
        roster = None if ids is None else entries.ids_digest(ids)
        with self._store.writing():
            self._account.refresh(self._store)
            self._account.cover()
            self._account.save_snapshot(self._store)
            found = self._store.named(entries.RUN, name)
            if found is not None:
                return self._resume(found, epsilon, ids)
            places = None if ids is None else self._enrol(ids, allow_alike)
            enrolled = 0 if places is None else self._untouched(places)
            absent = self._absent(places)
            if epsilon is not None:
                short = self._short_of(budget, epsilon, if_exhausted, places)
                absent = np.union1d(absent, short)
            members = {} if ids is None else {"roster": roster, "enrolled": enrolled}
            # The key is that of all entries before: it is under the hash of every ledger.
            body = entries.make_body(
                epsilon=epsilon, budget_mu2=budget, on_short=if_exhausted, **members
            )
            blob = entries.encode_clients(absent)
            entry = entries.Entry(
                0, entries.RUN, now(), self.info.key, name=name, body=body, clients=blob
            )
            seq, _ = self._store.append(entry)
        self.refresh()  # who has just joined is in the account from here on
        info = entries.RunInfo(seq, name, self.info.key, epsilon, budget, absent, roster, enrolled)
        return Run(self._store, self._account, info, session=seq, places=places)

    def _untouched(self, places: entries.IntArray) -> int:
        """Return how many clients at these numbers were in no release so far."""
        known = places[places < self._account.joins.size]  # the others join just now
        return int(places.size - np.count_nonzero(self._account.joins[known]))

    def _absent(self, places: entries.IntArray | None) -> entries.IntArray:
        """Return the members that a run at these numbers does not name."""
        if places is None:
            return np.empty(0, dtype=np.int64)
        return np.setdiff1d(np.arange(self.info.num_clients), places)

    def _budget(self, epsilon: float | None) -> float:
        if epsilon is None:
            return 0.0
        if epsilon > self.info.epsilon:
            raise InvalidValueError(
                f"epsilon={epsilon!r} of a run must be <= {self.info.epsilon!r}, the lifetime "
                f"allowance of population {self.info.name!r}"
            )
        asked = min(entries.allowance_mu2(epsilon, self.info.delta), self.info.allowance_mu2)
        budget = entries.round_down(asked, entries.grid_unit(self.info.allowance_mu2))
        if not budget > 0:
            raise InvalidValueError(
                f"epsilon={epsilon!r} of a run must be an amount that can be counted beside "
                f"{self.info.epsilon!r}, the allowance of population {self.info.name!r}"
            )
        return budget

    def _resume(
        self, found: entries.Entry, epsilon: float | None, ids: tuple[str, ...] | None
    ) -> Run:
        info = entries.RunInfo.of(found, self.info.num_clients)
        if info.population != self.info.key:
            raise LedgerConflictError(f"run {info.name!r} belongs to another population")
        if info.epsilon != epsilon:
            raise LedgerConflictError(
                f"run {info.name!r} was started with epsilon={info.epsilon!r} and cannot go on "
                f"with epsilon={epsilon!r}; use that epsilon or another run_id"
            )
        places = None if ids is None else entries.numbers_of(ids, self._account.numbers)
        if info.roster is None and places is not None:
            # It was begun when clients were known by number; these got their ids later.
            same = np.array_equal(places, np.arange(places.size))
        else:
            same = info.roster == (None if ids is None else entries.ids_digest(ids))
        if not same:
            raise LedgerConflictError(
                f"run {info.name!r} was started with other clients, or with the same in another "
                "order, and cannot go on with these"
            )
        entry = entries.Entry(0, entries.RESUME, now(), self.info.key, info.key)
        seq, _ = self._store.append(entry)
        return Run(self._store, self._account, info, session=seq, places=places)

    def _short_of(
        self, budget: float, epsilon: float, if_exhausted: str, places: entries.IntArray | None
    ) -> entries.IntArray:
        """Return which clients of the run have less than `budget` left, or refuse."""
        left, who = self._account.left(), np.arange(self.info.num_clients)
        if places is not None:
            known = places < left.size  # the others join just now, with all of their allowance
            left, who = left[places[known]], places[known]
        wanting = entries.falls_short(budget, left, self.info.allowance_mu2)
        short, left_of_short = who[wanting], left[wanting]
        size = who.size if places is None else places.size
        if short.size == 0 or (if_exhausted == "sit_out" and short.size < size):
            return short
        payable = float(payable_epsilons(left.min(keepdims=True), self.info)[0])
        nobody = short.size == size
        whose = "any client" if nobody else f"{short.size} of {size} clients"
        hint = "" if if_exhausted == "sit_out" else ', or if_exhausted="sit_out" to leave them out'
        raise BudgetExceededError(
            f"a run at epsilon={epsilon!r} asks more than {whose} of population "
            f"{self.info.name!r} {'has' if nobody else 'have'} left (client "
            f"{self._label(int(short[0]))} has mu²={left_of_short[0]:.6g} of {budget:.6g} asked). "
            f"The largest epsilon that everybody can still pay is {format_left(payable, 6)}{hint}",
            *(short, np.full(short.size, budget), left_of_short),
        )

    def _label(self, number: int) -> str:
        return repr(self._account.ids[number]) if self.info.named else str(number)

    def runs(self) -> list[entries.RunInfo]:
        """Return the population's runs, oldest first."""
        condition = "population = ? AND kind = ?"
        with self._store.reading():
            found = self._store.entries(condition, self.info.key, entries.RUN)
            return [entries.RunInfo.of(entry, self.info.num_clients) for entry in found]

    def refresh(self) -> None:
        """Read what was appended since the last time, after checking it."""
        with self._store.reading():
            self._account.refresh(self._store)

    def _fresh(self) -> Balances:
        self.refresh()
        return self._account

    def _everybody(self) -> Balances:
        """Return the account with a balance for each client."""
        account = self._fresh()
        account.cover()
        return account

    def spent(self) -> entries.FloatArray:
        """Return the squared GDP units each client has given away; inf where unbounded."""
        return self._everybody().spent.copy()

    def reserved(self) -> entries.FloatArray:
        """Return the squared GDP units each client has in open reservations."""
        return self._everybody().reserved.copy()

    def left(self) -> entries.FloatArray:
        """Return allowance − spent − reserved of each client, in squared GDP units."""
        return self._everybody().left()

    def touched(self) -> tuple[entries.IntArray, entries.FloatArray]:
        """Return who was in a release or holds a reservation, and what each has left.

        All others have the whole allowance; they may be a hundred million.
        """
        account = self._fresh()
        clients = account.touched()
        return clients, account.left_of(clients)

    def joins(self) -> entries.IntArray:
        """Return how many releases each client was part of."""
        return self._everybody().joins.astype(np.int64)

    def epsilons(self) -> entries.FloatArray:
        """Return each client's epsilon at the population's delta, never below the exact one.

        It is at most the allowance for every client whose charges were bounded.
        """
        spent = self._everybody().spent
        return bounded_epsilons(spent, self.info)

    def epsilon_left(self) -> entries.FloatArray:
        """Return the largest epsilon that a new run may ask of each client."""
        return payable_epsilons(self.left(), self.info)

    def largest_run_epsilon(self) -> float:
        """Return the largest epsilon that a new run may ask of everybody; 0 when nothing is left.

        This is gaussian_epsilon(√(smallest allowance left), delta), which is more
        than the difference of epsilons: see `entries`.
        """
        return payable_by_all(self._fresh())

    def rows(self, most: int | None = None) -> Iterator[ClientRow]:
        """Return what `show` prints of each client, one after the other.

        With `most` those so many who have spent most, dearest first.  In a population of
        more than a million, clients that were in no release are left out.
        """
        query = (
            "SELECT e.seq, e.round, r.name FROM entries e JOIN entries r ON r.seq = e.run "
            "WHERE e.population = ? AND e.kind IN (?, ?)"
        )
        with self._store.reading():
            account = self._fresh()
            found = self._store.select(query, self.info.key, entries.SETTLE, entries.UNBOUNDED)
            places = {seq: (name, index) for seq, index, name in found}
        return client_rows(account, places, listed_clients(account, most))

    def charges(self, run: entries.RunInfo | None = None) -> list[Charge]:
        """Return every settled release, or those of one run, oldest first."""
        with self._store.reading():
            info = self._fresh().info
            found = (
                charges_of_population(self._store, info)
                if run is None
                else charges_of_run(self._store, info, run.key)
            )
            return list(found)

    def summary(self) -> Summary:
        """Return the population's figures in one record."""
        return summary_of(self._fresh())


def create_population(
    store: Store,
    name: str,
    *,
    num_clients: int,
    epsilon: float,
    delta: float,
    adjacency: str,
    client_ids: tuple[str, ...] | None = None,
) -> entries.Entry:
    """Append a "population" entry and its members, inside a transaction; return the first."""
    check_new_name("population", name)
    body = entries.make_body(
        num_clients=num_clients,
        epsilon=epsilon,
        delta=delta,
        allowance_mu2=entries.allowance_mu2(epsilon, delta),
        adjacency=adjacency,
        named=client_ids is not None,
    )
    entry = entries.Entry(0, entries.POPULATION, now(), name=name, body=body)
    seq, _ = store.append(entry)
    if client_ids is not None:
        append_members(store, seq, client_ids)
    return replace(entry, seq=seq, population=seq)


def append_members(store: Store, population: int, ids: Iterable[str]) -> None:
    """Append a "members" entry, inside a transaction."""
    store.append(
        entries.Entry(0, entries.MEMBERS, now(), population, body=entries.members_body(ids))
    )
