"""One run's dealings with the ledger: reserve, grant, settle, finish."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fedquilt.common import checks, errors
from fedquilt.privacy.ledger import entries
from fedquilt.privacy.ledger.balances import Balances, joins_in_run, reservation_of
from fedquilt.privacy.ledger.entries import (
    Entry,
    FloatArray,
    IntArray,
    Reservation,
    RunInfo,
    epsilon_spent,
    granted,
)
from fedquilt.privacy.ledger.store import Store, now

_CHUNK = 1 << 16  # clients whose numbers stay in the processor's cache


def remaining(
    account: Balances, run: RunInfo, in_run: FloatArray, ids: IntArray | None
) -> FloatArray:
    """Return min(budget − spent in the run, allowance − spent − reserved by other runs).

    `in_run` is what each client of the population has spent in this run.  None for `ids`
    is everybody.
    """
    if ids is None:
        return _left_of_all(account, run, in_run)
    own = account.held(ids, lambda r: r.run == run.key)
    return _left(account, run, in_run, ids, uncounted=own, counted=np.zeros(ids.size))


def _left_of_all(
    account: Balances, run: RunInfo, in_run: FloatArray, settled: Reservation | None = None
) -> FloatArray:
    """Return what `remaining` says of every client, in one pass, chunk after chunk.

    `settled` counts as if it were.
    """
    reserved, spent = account.reserved, account.spent
    if settled is not None:
        spent, in_run = spent.copy(), in_run.copy()
        spent[settled.clients] += settled.charges_mu2
        in_run[settled.clients] += settled.charges_mu2
    own = [r for r in account.open.values() if r.run == run.key]
    if own:
        reserved = reserved.copy()
        for reservation in own:
            reserved[reservation.clients] -= reservation.charges_mu2
    left = np.empty(spent.size)
    for first in range(0, left.size, _CHUNK):
        chunk = slice(first, first + _CHUNK)
        part = np.subtract(account.info.allowance_mu2, spent[chunk], out=left[chunk])
        part -= reserved[chunk]
        np.minimum(part, run.budget_mu2 - in_run[chunk], out=part)
        np.maximum(part, 0.0, out=part)
    left[run.sits_out] = 0.0
    return left


def grant(
    account: Balances,
    run: RunInfo,
    in_run: FloatArray,
    round_index: int,
    ids: IntArray,
    asked: FloatArray,
) -> FloatArray:
    """Return the charges to reserve for a round, or refuse all of them.

    The run's reservation of the same round is about to be replaced and does not
    count; its reservations of other rounds do.
    """
    same = account.held(ids, lambda r: r.run == run.key and r.round_index == round_index)
    other = account.held(ids, lambda r: r.run == run.key and r.round_index != round_index)
    left = _left(account, run, in_run, ids, uncounted=same, counted=other)
    charges = granted(asked, left, account.info.allowance_mu2)
    short = np.isnan(charges)
    if np.any(short):
        raise _refusal(run, round_index, ids[short], asked[short], left[short])
    return charges


def _left(
    account: Balances,
    run: RunInfo,
    in_run: FloatArray,
    ids: IntArray,
    *,
    uncounted: FloatArray,
    counted: FloatArray,
) -> FloatArray:
    """Return what the run may take of `ids`, never below zero.

    Of the run's own reservations, `uncounted` are not held against the lifetime
    allowance and `counted` are held against the run's budget.
    """
    reserved = account.reserved[ids] - uncounted
    lifetime = account.info.allowance_mu2 - account.spent[ids] - reserved
    left = np.maximum(np.minimum(run.budget_mu2 - in_run[ids] - counted, lifetime), 0.0)
    if run.sits_out.size:
        left[np.isin(ids, run.sits_out)] = 0.0
    return left


def _refusal(
    run: RunInfo, round_index: int, ids: IntArray, asked: FloatArray, left: FloatArray
) -> errors.BudgetExceededError:
    worst = int(np.argmax(asked - left))
    have = "1 client has" if ids.size == 1 else f"{ids.size} clients have"
    return errors.BudgetExceededError(
        f"round {round_index} of run {run.name!r}: {have} less left than charged; client "
        f"{ids[worst]} is charged mu²={asked[worst]:.6g} and has {left[worst]:.6g} left. "
        "Leave them out or lower their bound (see run.remaining)",
        *(ids, asked, left),
    )


_LAST_ROUND = 2**31 - 1


class Run:
    """A run that may spend part of a population's allowance; made by `start_run`.

    The handle is good until the run is finished, or resumed by somebody else: then
    every call that would change something is refused, so two processes that hold
    the same run cannot both go on.
    """

    def __init__(
        self,
        store: Store,
        account: Balances,
        info: RunInfo,
        session: int,
        places: IntArray | None = None,
    ) -> None:
        self.info = info
        self._store = store
        self._account = account
        self._session = session
        self._places = places
        self._is_mine = np.zeros(0, dtype=np.bool_)

    @property
    def places(self) -> IntArray:
        """Return the numbers of the run's clients in the population, in the run's own order."""
        if self._places is not None:
            return self._places
        return np.arange(self._account.info.num_clients)

    @property
    def is_resumed(self) -> bool:
        """Whether this handle goes on with a run that was begun before."""
        return self._session != self.info.key

    def began(self) -> str | None:
        """Return what began with this run: the "ledger", its "population", or None.

        They begin with a run when nobody was charged before it: what their clients gave
        away earlier, elsewhere, is not in them.
        """
        query = "SELECT seq FROM entries WHERE seq < ? AND kind IN (?, ?)"
        values = (self.info.key, entries.SETTLE, entries.UNBOUNDED)
        theirs = f"{query} AND population = ? LIMIT 1"
        with self._store.reading():
            if self._store.first(theirs, *values, self._account.info.key) is not None:
                return None
            anybody = self._store.first(f"{query} LIMIT 1", *values)
        return "ledger" if anybody is None else "population"

    @property
    def budget_mu2(self) -> float:
        """Return what this run may spend of each client, in squared GDP units."""
        return self.info.budget_mu2

    @property
    def head(self) -> str:
        """Return the ledger's newest hash, to be kept with the run's files."""
        with self._store.reading():
            return self._store.head()[1].hex()

    def remaining_after(self, settled: Reservation) -> FloatArray:
        """Return what `remaining` will say of everybody once a reservation is settled."""
        with self._store.reading():
            self._account.refresh(self._store)
            in_run = self._account.track(self._store, self.info.key)
            left = _left_of_all(self._account, self.info, in_run, settled)
            if self._places is not None:
                left[self._outside(self._ids(None))] = 0.0
            return left

    def remaining(self, clients: npt.ArrayLike | None = None) -> FloatArray:
        """Return the squared GDP units this run may still spend of each client.

        That is min(budget − spent in this run, allowance − spent − reserved by
        other runs), never negative; zero for clients that sit out or are not the run's.
        """
        with self._store.reading():
            self._account.refresh(self._store)
            in_run = self._account.track(self._store, self.info.key)
            ids = None if clients is None else self._ids(clients)
            left = remaining(self._account, self.info, in_run, ids)
            if self._places is not None:
                left[self._outside(self._ids(clients))] = 0.0
            return left

    def spent(self, clients: npt.ArrayLike | None = None) -> FloatArray:
        """Return the squared GDP units spent in this run alone."""
        with self._store.reading():
            self._account.refresh(self._store)
            spent = self._account.track(self._store, self.info.key)
            return spent.copy() if clients is None else spent[self._ids(clients)]

    def epsilons(self, clients: npt.ArrayLike | None = None) -> FloatArray:
        """Return the epsilon, at the population's delta, spent in this run alone."""
        return self.epsilons_of(self.spent(clients))

    def epsilons_of(self, spent: FloatArray) -> FloatArray:
        """Return the epsilons of clients that have spent so much in this run."""
        epsilons = epsilon_spent(spent, self._account.info.delta)
        stated = 0.0 if self.info.epsilon is None else self.info.epsilon
        return np.where(spent <= self.budget_mu2, np.minimum(epsilons, stated), epsilons)

    def joins(self) -> IntArray:
        """Return how many settled releases of this run each client was part of."""
        with self._store.reading():
            return joins_in_run(self._store, self._account.info, self.info.key)

    def settled(self) -> dict[int, list[str]]:
        """Return the digests of the releases charged so far, by round."""
        rounds: dict[int, list[str]] = {}
        query = (
            "SELECT round, digest FROM entries WHERE run = ? AND kind IN (?, ?) ORDER BY round, seq"
        )
        with self._store.reading():
            for index, digest in self._store.select(
                query, self.info.key, entries.SETTLE, entries.UNBOUNDED
            ):
                rounds.setdefault(index, []).append(digest)
        return rounds

    def reserve(
        self, round_index: int, clients: npt.ArrayLike, charges_mu2: npt.ArrayLike
    ) -> Reservation:
        """Count a round's charges as spent before anything is computed.

        Refused, with nothing changed, when any client would exceed what it may
        spend.  An open reservation of the same round is replaced: it was not
        settled, so nothing of it has left.

        Parameters
        ----------
        charges_mu2
            (c_i / noise_std)² for each client, or one number for all.
        """
        round_index = checks.integer("round_index", round_index, at_least=0, at_most=_LAST_ROUND)
        ids = entries.check_clients(clients, self._account.info.num_clients)
        asked = entries.check_charges(charges_mu2, ids.size)
        outside = ids[self._outside(ids)]
        if outside.size:
            raise errors.InvalidValueError(
                f"client={int(outside[0])} must be one of the clients that run {self.info.name!r} "
                "named when it started"
            )
        order = np.argsort(ids)
        with self._store.writing():
            self._require_session()
            self._account.refresh(self._store)
            in_run = self._account.track(self._store, self.info.key)
            charges = grant(self._account, self.info, in_run, round_index, ids, asked)
            entry = replace(
                self._entry(entries.RESERVE),
                round=round_index,
                clients=entries.encode_clients(ids[order]),
                charges=entries.encode_charges(charges[order]),
            )
            seq, _ = self._store.append(entry)
        return Reservation(seq, self.info.key, round_index, ids, charges)

    def settle(self, reservation: Reservation, release_digest: str) -> str:
        """Charge a release, durable on disk, before it is used; return the ledger's head.

        The same release of the same round is never charged twice: settling it
        again only drops the reservation.  A different one is charged again.
        """
        digest = _check_digest(release_digest)
        with self._store.writing():
            self._require_session()
            self._account.refresh(self._store)
            known = self._known_release(reservation.round_index, digest)
            if known is None:
                return self._close(entries.SETTLE, reservation, digest)
            if known.kind == entries.SETTLE:
                self._check_same(known, reservation)
            if reservation.entry in self._account.open:
                return self._close(entries.RELEASE, reservation)
            return self._store.head()[1].hex()

    def release(self, reservation: Reservation) -> None:
        """Drop a reservation because nothing was released; a settled one stays."""
        with self._store.writing():
            self._require_session()
            self._account.refresh(self._store)
            if reservation.entry in self._account.open:
                self._close(entries.RELEASE, reservation)
            elif self._was_settled(reservation):
                raise errors.ReservationError(
                    f"round {reservation.round_index} of run {self.info.name!r} is settled: "
                    "what was released cannot be taken back"
                )

    def record_unbounded(self, round_index: int, clients: npt.ArrayLike, digest: str) -> str:
        """Record a release that bounds nothing, before it is used; return the head.

        Its clients stand at infinity from then on, in every run.
        """
        round_index = checks.integer("round_index", round_index, at_least=0, at_most=_LAST_ROUND)
        ids = np.sort(entries.check_clients(clients, self._account.info.num_clients))
        digest = _check_digest(digest)
        with self._store.writing():
            self._require_session()
            if self._known_release(round_index, digest) is not None:
                return self._store.head()[1].hex()
            entry = replace(
                self._entry(entries.UNBOUNDED),
                round=round_index,
                digest=digest,
                clients=entries.encode_clients(ids),
            )
            return self._store.append(entry)[1]

    def finish(self) -> str:
        """Finish the run and drop what it still reserves; return the head."""
        with self._store.writing():
            self._require_session()
            self._account.refresh(self._store)
            self._account.save_snapshot(self._store)
            return self._store.append(self._entry(entries.FINISH))[1]

    def _entry(self, kind: str) -> Entry:
        """Return a bare entry of this run; the store gives it its number."""
        return Entry(0, kind, now(), self._account.info.key, self.info.key)

    def _ids(self, clients: npt.ArrayLike | None) -> IntArray:
        if clients is None:
            return np.arange(self._account.info.num_clients)
        return entries.check_clients(clients, self._account.info.num_clients)

    def _outside(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        """Tell which of `ids` are members that this run did not name, where it named any."""
        if self._places is None:
            return np.zeros(ids.size, dtype=np.bool_)
        if self._is_mine.size < self._account.info.num_clients:  # who joins later is not the run's
            self._is_mine = np.zeros(self._account.info.num_clients, dtype=np.bool_)
            self._is_mine[self._places] = True
        return ~self._is_mine[ids]

    def _require_session(self) -> None:
        newest = self._store.session(self.info.key)
        if newest.kind == entries.FINISH:
            raise errors.ReservationError(
                f"run {self.info.name!r} is finished; start_run opens it again"
            )
        if newest.seq != self._session:
            raise errors.ReservationError(
                f"run {self.info.name!r} was resumed by another process; this one must stop"
            )

    def _close(self, kind: str, reservation: Reservation, digest: str | None = None) -> str:
        if reservation.run != self.info.key:
            raise errors.ReservationError(
                f"reservation {reservation.entry} belongs to another run than {self.info.name!r}"
            )
        if reservation.entry not in self._account.open:
            raise errors.ReservationError(
                f"the reservation of round {reservation.round_index} of run {self.info.name!r} "
                "was released or replaced; reserve again, with a fresh release"
            )
        entry = replace(
            self._entry(kind),
            round=reservation.round_index,
            reservation=reservation.entry,
            digest=digest,
        )
        return self._store.append(entry)[1]

    def _known_release(self, round_index: int, digest: str) -> Entry | None:
        condition = "run = ? AND round = ? AND kind IN (?, ?) AND digest = ?"
        values = (self.info.key, round_index, entries.SETTLE, entries.UNBOUNDED, digest)
        return next(self._store.entries(condition, *values), None)

    def _was_settled(self, reservation: Reservation) -> bool:
        condition = "run = ? AND kind = ? AND reservation = ?"
        values = (self.info.key, entries.SETTLE, reservation.entry)
        return next(self._store.entries(condition, *values), None) is not None

    def _check_same(self, settled: Entry, reservation: Reservation) -> None:
        """Refuse a digest that was charged before for another cohort or other charges."""
        before = next(self._store.entries("seq = ?", settled.reservation), None)
        if before is None:
            raise errors.LedgerCorruptError(f"entry {settled.seq} settles what was never reserved")
        charged = reservation_of(before, self._account.info.num_clients)
        order = np.argsort(reservation.clients)
        same = np.array_equal(charged.clients, reservation.clients[order]) and np.array_equal(
            charged.charges_mu2, reservation.charges_mu2[order]
        )
        if not same:
            raise errors.LedgerConflictError(
                f"release {settled.digest!r} of round {settled.round} of run {self.info.name!r} "
                "was charged before to other clients or at other charges; one digest is one release"
            )


def _check_digest(digest: object) -> str:
    if not isinstance(digest, str) or not 0 < len(digest) <= 256 or not digest.isprintable():
        raise errors.InvalidValueError(
            f"release digest={digest!r} must be a text of 1 to 256 printable characters"
        )
    return digest
