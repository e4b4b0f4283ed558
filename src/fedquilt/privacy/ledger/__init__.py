"""The privacy ledger: one file that says, for every client, what it has given away.

Allowances belong to clients, not to jobs, so the ledger outlives runs.  Its unit of
account is the squared GDP unit μ² (`entries`), in which releases add up exactly.

>>> import tempfile
>>> ledger = Ledger.open(tempfile.mkdtemp() + "/ledger.sqlite", create=True)
>>> population = ledger.population("digits", num_clients=100, epsilon=6.0, delta=1e-5)
>>> run = population.start_run("first", epsilon=3.0)
>>> reservation = run.reserve(0, clients=[4, 17], charges_mu2=0.01)
>>> head = run.settle(reservation, release_digest="5f2c")  # on disk; now use the release
>>> run.remaining([4, 5]).round(3).tolist()
[0.507, 0.517]
>>> ledger.verify(known_heads=[head]).ok
True

What a crash can do
-------------------
A round reserves before it trains and settles before the noised sum is used.  A
reservation counts as spent, for every run, from the moment it is on disk.

* Killed before `settle` returned: nothing was used.  The reservation stays counted
  until the same run resumes (`start_run` with its `run_id`), which drops it; the
  round is then reserved and computed again.  Nobody else can drop it; a run that
  will not go on is closed with `start_run(…).finish()`.
* Killed after `settle` returned, before the result was saved: the charge stands.
  The round computed again with fresh noise is another release and is charged
  again; the very same release (same digest) is not.
* Either way the ledger may report more than was released, and never less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from fedquilt.common import checks
from fedquilt.common.errors import (
    BudgetExceededError,
    InvalidValueError,
    LedgerBusyError,
    LedgerConflictError,
    LedgerCorruptError,
    LedgerError,
    LedgerFileError,
    ReservationError,
)
from fedquilt.common.formatting import printable
from fedquilt.config.choices import ADJACENCIES
from fedquilt.privacy.ledger import entries, files, verify
from fedquilt.privacy.ledger.balances import Balances
from fedquilt.privacy.ledger.entries import (
    MAX_CLIENTS,
    PopulationInfo,
    Reservation,
    RunInfo,
    check_ids,
    roster_name,
)
from fedquilt.privacy.ledger.files import SCHEMA_VERSION, is_ledger, remove_drafts
from fedquilt.privacy.ledger.population import (
    Population,
    check_name,
    check_named,
    create_population,
    population_name,
)
from fedquilt.privacy.ledger.rows import Charge, ClientRow, Summary
from fedquilt.privacy.ledger.run import Run
from fedquilt.privacy.ledger.store import Store, now
from fedquilt.privacy.ledger.verify import VerifyReport, copy_ledger

__all__ = [
    "BudgetExceededError",
    "Charge",
    "ClientRow",
    "Ledger",
    "LedgerBusyError",
    "LedgerConflictError",
    "LedgerCorruptError",
    "LedgerError",
    "LedgerFileError",
    "Population",
    "PopulationInfo",
    "Reservation",
    "ReservationError",
    "Run",
    "RunInfo",
    "Summary",
    "VerifyReport",
    "check_ids",
    "csv_rows",
    "is_ledger",
    "open_ledger",
    "population_name",
    "roster_name",
]


def export_ledger(
    store: Store, populations: Iterable[Population], *, clients: bool = True
) -> dict[str, Any]:
    """Return everything the ledger says that is not a cohort, ready for `json.dump`.

    Infinity is written as the text "inf", which every reader of JSON accepts.
    """
    with store.reading():
        store.check()
        return {
            "schema_version": SCHEMA_VERSION,
            "head": store.head()[1].hex(),
            "unit": "squared GDP units (mu^2), under each population's adjacency",
            "populations": [_population(population, clients) for population in populations],
            "entries": list(_history(store)),
        }


def csv_rows(population: Population) -> Iterator[list[str]]:
    """Yield a header, then one row for each client; None is an empty cell."""
    yield [field.name for field in dataclasses.fields(ClientRow)]
    for row in population.rows():
        values = dataclasses.astuple(row)
        yield ["" if value is None else printable(value) for value in values]


def _population(population: Population, clients: bool) -> dict[str, Any]:
    data = _plain(dataclasses.asdict(population.summary()))
    data["num_clients"] = population.info.num_clients
    data["allowance_mu2"] = population.info.allowance_mu2
    data["runs"] = [
        {"run": run.name, "epsilon": run.epsilon, "budget_mu2": run.budget_mu2}
        for run in population.runs()
    ]
    if clients:
        data["client_rows"] = [_plain(dataclasses.asdict(row)) for row in population.rows()]
    return data


def _history(store: Store) -> Iterator[dict[str, Any]]:
    columns = ("seq", "kind", "time", "population", "run", "round", "reservation", "name", "digest")
    for row in store.select(f"SELECT {', '.join(columns)}, hash FROM entries ORDER BY seq"):
        fields = {key: value for key, value in zip(columns, row, strict=False) if value is not None}
        yield {**fields, "hash": bytes(row[-1]).hex()}


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {key: "inf" if value == math.inf else value for key, value in record.items()}


class Ledger:
    """One SQLite file that says, for every client, what it has given away.

    Several processes may have it open; what one settles the others see in their
    next call.  A `Ledger` itself belongs to the process and thread that opened it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._populations: dict[int, Population] = {}

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        read_only: bool = False,
        timeout: float = 30.0,
    ) -> Self:
        """Open the ledger at `path`.

        Parameters
        ----------
        create
            Make an empty one when there is none.
        read_only
            Open without writing: for `verify`, `export` and archives without write access.
        timeout
            Seconds to wait for another process before refusing.
        """
        place = Path(path)
        timeout = checks.number("timeout", timeout, at_least=0)
        if create and read_only:
            raise InvalidValueError("create=True and read_only=True exclude each other")
        if create and not place.exists():
            files.create_file(place, now())
        elif not read_only:
            remove_drafts(place)
        return cls(Store(place, read_only=read_only, timeout=timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file.  Open reservations stay counted until their run resumes."""
        self._store.close()

    @property
    def path(self) -> Path:
        """Return where the file is."""
        return self._store.path

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Record all that the block does together, or nothing of it.

        Other processes wait while it lasts.  When anything in it is refused, nothing is
        recorded, and populations and runs that were made in it are void.
        """
        try:
            with self._store.writing():
                yield
        except BaseException:
            self._populations.clear()
            raise

    def population_of(self, run_id: str) -> Population | None:
        """Return the population that a run belongs to; None when there is no such run."""
        with self._store.reading():
            self._store.check()
            run = self._store.named(entries.RUN, run_id)
            if run is None:
                return None
            made = next(self._store.entries("seq = ?", run.population), None)
            if made is None or made.kind != entries.POPULATION:
                raise LedgerCorruptError(f"entry {run.seq} (run) belongs to no population")
        return self._handle(PopulationInfo.of(made))

    def population(
        self,
        name: str,
        *,
        num_clients: int | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        adjacency: str | None = None,
        client_ids: Iterable[str] | None = None,
    ) -> Population:
        """Return the population of that name, made when its clients, epsilon and delta are given.

        The allowance is fixed for good when the population is made.  Values that
        are given later must agree with it; None takes what is there.

        Parameters
        ----------
        num_clients
            So many clients, known by their number from then on.
        client_ids
            Instead: who the clients are.  Later on they are found by id, and others may
            join (`Population.enrol`, `start_run`).
        adjacency
            "zero_out", the default of a new population, or "replace_one": what its
            charges are counted under.
        """
        check_name("population", name)
        asked = _checked_values(num_clients, epsilon, delta, adjacency)
        ids = None if client_ids is None else check_ids(client_ids)
        with self._store.reading():
            self._store.check()
            found = self._store.named(entries.POPULATION, name)
        if found is None:
            made = {**asked, "adjacency": asked["adjacency"] or ADJACENCIES[0]}
            if ids is not None:
                made["num_clients"] = len(ids)
            absent = [key for key, value in made.items() if value is None]
            if absent:
                raise LedgerConflictError(
                    f"population {name!r} is not in ledger {self.path}; to make it, "
                    f"give {', '.join(absent)}"
                )
            with self._store.writing():
                found = self._store.named(entries.POPULATION, name) or create_population(
                    self._store, name, **made, client_ids=ids
                )
        population = self._handle(PopulationInfo.of(found))
        _check_agreement(population.info, asked, ids)
        return population

    def _handle(self, info: PopulationInfo) -> Population:
        if info.key not in self._populations:
            self._populations[info.key] = Population(self._store, Balances(info))
        population = self._populations[info.key]
        population.refresh()
        return population

    def populations(self) -> list[Population]:
        """Return all populations, oldest first."""
        with self._store.reading():
            self._store.check()
            infos = [
                PopulationInfo.of(entry)
                for entry in self._store.entries("kind = ?", entries.POPULATION)
            ]
        return [self._handle(info) for info in infos]

    def head(self) -> str:
        """Return the newest entry's hash, which stands for everything before it."""
        with self._store.reading():
            return self._store.head()[1].hex()

    def missing_heads(self, heads: Iterable[str]) -> list[str]:
        """Return those of `heads` that are not in the chain.

        A run asks this when it resumes: a head it has kept and the ledger has not
        means that the ledger was rolled back or exchanged.
        """
        with self._store.reading():
            return verify.missing_heads(self._store, heads)

    def backup(
        self,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        known_heads: Iterable[str] = (),
    ) -> verify.VerifyReport:
        """Copy the ledger to `path`, also while runs go on, and check the copy.

        Restoring is the same from the backup to the place of the ledger.

        Parameters
        ----------
        replace
            Whether a ledger may be at `path`.  One that has entries which this one lacks is
            never replaced.
        known_heads
            Heads that the copy must have, as in `verify`.
        """
        return copy_ledger(self._store, Path(path), replace=replace, known_heads=known_heads)

    def verify(self, known_heads: Iterable[str] = ()) -> verify.VerifyReport:
        """Recompute the chain and all balances; see `VerifyReport`."""
        return verify.verify_ledger(self._store, known_heads)

    def export(self, *, clients: bool = True) -> dict[str, Any]:
        """Return the ledger as plain data for JSON; `clients=False` leaves their rows out."""
        return export_ledger(self._store, self.populations(), clients=clients)


def _checked_values(
    num_clients: int | None, epsilon: float | None, delta: float | None, adjacency: str | None
) -> dict[str, Any]:
    if num_clients is not None:
        num_clients = checks.integer("num_clients", num_clients, at_least=1, at_most=MAX_CLIENTS)
    if epsilon is not None:
        epsilon = checks.number("epsilon", epsilon, above=0)
    if delta is not None:
        delta = checks.number("delta", delta, above=0, below=1)
    if adjacency is not None:
        checks.choice("adjacency", adjacency, ADJACENCIES)
    values = {"num_clients": num_clients, "epsilon": epsilon, "delta": delta}
    return {**values, "adjacency": adjacency}


_FIXED = {
    "num_clients": "a population that knows its clients by number keeps their number. To let "
    "clients join or leave, say once who they are, Ledger.open(...).population(...)."
    "adopt_ids([...]), then name them in every run (client_ids); under another name they "
    "would begin anew",
    "epsilon": "an allowance is fixed when it is made",
    "delta": "an allowance is fixed when it is made",
    "adjacency": "what two neighbouring worlds are is fixed when a population is made, because "
    "its charges are counted under it",
}


def _check_agreement(
    info: PopulationInfo, asked: dict[str, Any], ids: tuple[str, ...] | None
) -> None:
    if ids is not None:
        check_named(info)
    if info.named and asked["num_clients"] is not None and ids is None:
        raise LedgerConflictError(
            f"population {info.name!r} knows its {info.num_clients} clients by id: name them "
            "(client_ids) instead of their number"
        )
    for key, value in asked.items():
        if key == "num_clients" and info.named:
            continue
        if value is not None and value != getattr(info, key):
            raise LedgerConflictError(
                f"population {info.name!r} has {key}={getattr(info, key)!r}, not {value!r}: "
                f"{_FIXED[key]}"
            )


def open_ledger(path: Path) -> Ledger:
    """Open a ledger to look into it.

    After a kill SQLite has to roll an unfinished entry back, which needs write access.
    """
    writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return Ledger.open(path, read_only=not writable)
