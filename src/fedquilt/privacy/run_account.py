"""A run's account in the ledger, as the round uses it: reserve, settle, finish; and its witness.

A run without a shared ledger has one in its folder, which is copied with it.  Two copies
of a stopped run that are both resumed would each release results, and each would claim
what its own ledger says, while the clients gave away both.  So every such run writes its
ledger's newest head into a file outside the folder, the witness, after each settled
release, and holds that file locked while it runs.  Witnesses lie in the user's state
folder, `$XDG_STATE_HOME/fedquilt/runs` (by default below `~/.local/state`).  A folder
whose ledger does not contain the witnessed head is out of date: another copy has gone on.
A folder that was moved contains it.

The witness is of one user on one machine.  A copy resumed by somebody else, elsewhere, or
with another state folder is not seen, and where the state folder cannot be written there is
no witness at all; the statement of a resumed run says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.errors import RunFolderError
from fedquilt.common.storage import sync_folder
from fedquilt.common.untrusted import parse_json
from fedquilt.privacy.accounting import Adjacency
from fedquilt.privacy.ledger import Ledger, LedgerConflictError, Population, Reservation, Run

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True)
class EvaluationShare:
    """Which part of every client's budget pays for evaluations by clients.

    After the rounds `every`, 2 `every`, ... and after the last one there is an evaluation.
    """

    share: float = 0.0
    num_rounds: int = 1
    every: int = 1

    @property
    def count(self) -> int:
        """How many evaluations there are."""
        return self.left(0)

    def left(self, round_index: int) -> int:
        """Return how many evaluations come with this round or after it."""
        if round_index >= self.num_rounds:
            return 0
        return -(-self.num_rounds // self.every) - round_index // self.every

    def kept_back(self, round_index: int) -> float:
        """Return the share of the budget that rounds from this one on must leave."""
        return self.share * self.left(round_index) / self.count


class RunAccount:
    """One run's dealings with one population of a ledger.

    A run without a bound reserves nothing and records, before each release, that
    its clients stand at infinity.

    The round knows its clients by their number in the run, 0 to n - 1, and so do all
    arrays here; `run.places` is where each of them stands in the population.

    Parameters
    ----------
    seen : callable, optional
        Told the ledger's head after every settled release.
    reproducible : bool
        The run's noise is seeded.  A round that was settled before a crash then
        comes out the same again: it is planned from the balances before it
        (`rewind`) and not charged twice.  Secret noise never repeats, so a round
        that runs again is another release and is charged again.
    adjacency : Adjacency
        What the ledger's charges are about.  Mechanisms count under zero-out, where
        client i moves a sum by its clip c_i; where data are exchanged for others it
        moves by up to 2 c_i (and its quantile bit by 1 instead of 1/2), so every
        charge is four times as large.  `remaining`, `budget_mu2`, what is asked of
        `reserve` and what it grants are in the mechanisms' units, `spent` and
        `epsilons` in the ledger's.
    evaluations : EvaluationShare
        What `remaining` and `budget_mu2`, from which rounds are planned, leave for
        evaluations; `left` has it too.
    """

    def __init__(
        self,
        ledger: Ledger,
        population: Population,
        run: Run,
        *,
        reproducible: bool = False,
        adjacency: Adjacency = Adjacency.ZERO_OUT,
        seen: Callable[[str], None] | None = None,
        evaluations: EvaluationShare | None = None,
    ) -> None:
        self.ledger = ledger
        self.population = population
        self.run = run
        self.reproducible = reproducible
        self.adjacency = adjacency
        # A power of two: dividing by it and multiplying again changes no bit.
        self._per_charge = adjacency.sensitivity_factor**2
        self._seen = seen
        self.evaluations = evaluations or EvaluationShare()
        self._places = _unless_in_order(run.places)
        self._settled = run.settled() if reproducible else {}
        self._ahead: NDArray[np.float64] | None = None
        self._count = run.places.size
        self._joins = self._mine(run.joins())
        self._open: tuple[int, NDArray[np.int64], Reservation | None] | None = None
        self._deferred: torch.Tensor | None = None
        self.defers = False
        """Whether `settle` waits for `settle_deferred`: said by the loop for each round."""

    def _mine(self, everybody: NDArray[_Number]) -> NDArray[_Number]:
        """Return the run's clients, in its order, of an array over the population."""
        return everybody[: self._count] if self._places is None else everybody[self._places]

    def _numbers(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers in the population of some clients of the run."""
        return clients if self._places is None else self._places[clients]

    @property
    def is_bounded(self) -> bool:
        """Whether the run has a budget; a run without one can only record infinity."""
        return self.run.info.epsilon is not None

    @property
    def is_witnessed(self) -> bool:
        """Whether a witness outside the ledger records every settled release."""
        return self._seen is not None

    @property
    def budget_mu2(self) -> float:
        """What the run may charge each client for rounds, in squared GDP units of zero-out."""
        return self._whole_budget * (1.0 - self.evaluations.share)

    @property
    def _whole_budget(self) -> float:
        return self.run.budget_mu2 / self._per_charge

    @property
    def evaluation_cost(self) -> float:
        """What one evaluation costs each client that takes part, in the same units."""
        return self._whole_budget * self.evaluations.share / self.evaluations.count

    def remaining(self, round_index: int) -> NDArray[np.float64]:
        """Return what each client may still be charged from this round on (see `budget_mu2`)."""
        if not self.is_bounded:
            return np.full(self._count, np.inf)
        waiting = None if self._deferred is None or self._open is None else self._open[2]
        left = self._mine(
            self.run.remaining() if waiting is None else self.run.remaining_after(waiting)
        )
        if self._ahead is not None and round_index in self._settled:
            left += self._ahead
        if self._per_charge != 1:
            left /= self._per_charge
        if self.evaluations.share == 0:
            return left
        kept = self._whole_budget * self.evaluations.kept_back(round_index)
        return np.asarray(np.maximum(0.0, left - kept))

    def left(self) -> NDArray[np.float64]:
        """Return what each client may still be charged, for rounds and evaluations alike."""
        return np.asarray(self._mine(self.run.remaining()) / self._per_charge)

    def spent(self) -> NDArray[np.float64]:
        """Return what each client has spent in this run, in squared GDP units."""
        return self._mine(self.run.spent())

    def spent_elsewhere(self) -> NDArray[np.float64]:
        """Return what each client has spent in other runs, in squared GDP units."""
        return np.asarray(self._mine(self.population.spent()) - self.spent())

    def joins(self) -> NDArray[np.int64]:
        """Return how many releases of this run, crashed ones included, each client was in.

        One that waits for `settle_deferred` counts: the next cohort is selected before that.
        """
        if self._deferred is None or self._open is None or self._open[0] in self._settled:
            return self._joins
        joins = self._joins.copy()
        joins[self._open[1]] += 1
        return joins

    def rewind(self, spent: NDArray[np.float64]) -> None:
        """Note what the ledger is ahead of a checkpoint that had `spent` this much."""
        self._ahead = self.spent() - spent

    def reserve(
        self, round_index: int, clients: NDArray[np.int64], charges: NDArray[np.float64] | None
    ) -> NDArray[np.float64] | None:
        """Count the round's charges as spent before anybody trains (step 1).

        Returns what was granted, which at the very end of an allowance may be a
        millionth less than what was asked.
        """
        if self._deferred is not None:
            raise RuntimeError("a deferred release is settled before the next reservation")
        repeated = round_index in self._settled
        reservation = (
            None
            if charges is None or repeated
            else self.run.reserve(round_index, self._numbers(clients), charges * self._per_charge)
        )
        self._open = (round_index, clients, reservation)
        return charges if reservation is None else reservation.charges_mu2 / self._per_charge

    def reserve_again(
        self, round_index: int, clients: NDArray[np.int64], charges: NDArray[np.float64] | None
    ) -> None:
        """Put a smaller reservation in the place of the round's: some sent nothing.

        `charges` are those that were granted before.  Nobody left: it is dropped.
        """
        if self._open is None:
            raise RuntimeError("a reservation is made smaller before its release")
        reservation = self._open[2]
        if len(clients) == 0:
            self._open = None
            if reservation is not None:
                self.run.release(reservation)
            return
        granted = self.reserve(round_index, clients, charges)
        if granted is not None and charges is not None and np.any(granted < charges):
            raise LedgerConflictError(
                f"round {round_index} of run {self.run.info.name!r} was granted less the second "
                "time it was reserved, after its updates were clipped"
            )

    def settle(self, release: torch.Tensor) -> None:
        """Make the charge durable, before the release is used (step 8).

        Where the account `defers`, the release is kept for `settle_deferred`, which charges it
        before anything that follows from it is reserved, kept or shown: `reserve` refuses until
        then.  Its reservation is on disk; should the process end before, nobody has seen the
        release.
        """
        if self.defers:
            self._deferred = release.clone()  # the server's step may change it
            return
        head = self._settle(release)
        if self._seen is not None:
            self._seen(head)

    def settle_deferred(self) -> None:
        """Settle the release that waits for it, if there is one; what follows waits no more."""
        self.defers = False
        if self._deferred is not None:
            release, self._deferred = self._deferred, None
            self.settle(release)

    def _settle(self, release: torch.Tensor) -> str:
        if self._open is None:
            raise RuntimeError("a release is settled once, after its reservation")
        round_index, clients, reservation = self._open
        self._open = None
        digest = _digest(release)
        if digest in self._settled.get(round_index, ()):
            return self.run.head
        self._joins[clients] += 1
        if reservation is not None:
            return self.run.settle(reservation, digest)
        if self.is_bounded:
            raise LedgerConflictError(
                f"round {round_index} of run {self.run.info.name!r} was settled before and came "
                "out differently under the same noise seed: data, code or machine changed"
            )
        return self.run.record_unbounded(round_index, self._numbers(clients), digest)

    def epsilons(self) -> NDArray[np.float64] | None:
        """Return each client's epsilon in this run; None for a run without a bound."""
        return self._mine(self.run.epsilons()) if self.is_bounded else None

    def epsilon_at(self, levels: Sequence[float]) -> list[float] | None:
        """Return the epsilons of the clients at these quantiles; None without a bound.

        Epsilon grows with mu^2, so few have to be computed however many clients there are.
        """
        if not self.is_bounded:
            return None
        spent = self.spent()
        ranks = np.ceil(np.asarray(levels) * (spent.size - 1)).astype(np.int64)
        values: list[float] = self.run.epsilons_of(_ranked(spent, ranks)).tolist()
        return values

    def summary(self) -> dict[str, Any]:
        """Return where the account is and how it stands, for the run's record."""
        worst = float(self.population.epsilons().max())
        return {
            "ledger": str(self.ledger.path),
            "population": self.population.info.name,
            "allowance": self.population.info.epsilon,
            "delta": self.population.info.delta,
            "adjacency": self.population.info.adjacency,
            "created": self.run.began(),
            "enrolled": self.run.info.enrolled,
            "run_id": self.run.info.name,
            "lifetime_epsilon_max": worst if np.isfinite(worst) else "inf",
            "head": self.run.head,
        }

    def finish(self, unprotected: torch.Tensor | None = None) -> None:
        """Finish the run in the ledger.

        `unprotected` is a final model whose noise can be reproduced: whoever had a
        part in it stands at infinity, whatever was charged on the way.
        """
        joined = np.flatnonzero(self._joins)
        if unprotected is not None and joined.size:
            last = max(self.run.settled(), default=0)
            self.run.record_unbounded(last + 1, self._numbers(joined), _digest(unprotected))
        self.run.finish()

    def close(self) -> None:
        """Close the ledger; open reservations stay counted until the run resumes."""
        self.ledger.close()


def _unless_in_order(places: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the places of a run's clients; None where client k stands at place k."""
    return None if np.array_equal(places, np.arange(places.size)) else places


def _ranked(amounts: NDArray[np.float64], ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the amounts, none below zero, that stand at these ranks, the lowest at 0.

    Of a million clients most were never in a release: only the others are put in order.
    """
    paid = amounts[amounts > 0]
    above = ranks - (amounts.size - paid.size)
    values = np.zeros(ranks.shape)
    found = above >= 0
    if found.any():
        values[found] = np.partition(paid, np.unique(above[found]))[above[found]]
    return values


def _digest(release: torch.Tensor) -> str:
    return hashlib.sha256(release.cpu().contiguous().numpy().data).hexdigest()


def state_folder() -> Path:
    """Return the folder of this user's witnesses."""
    stated = os.environ.get("XDG_STATE_HOME")
    base = Path(stated) if stated else Path("~/.local/state").expanduser()
    return base / "fedquilt" / "runs"


class Witness:
    """The locked file with the newest head of one run's ledger; see `open_witness`."""

    def __init__(self, path: Path, folder: Path, handle: int) -> None:
        self.path = path
        self._folder = folder
        self._handle = handle
        self._is_durable = False

    def check(self, ledger: Ledger) -> None:
        """Refuse a ledger that does not contain the head that was written last."""
        try:
            noted = _read_note(self._handle)
        except ValueError as error:
            raise self._unreadable(error) from error
        if noted is None and os.fstat(self._handle).st_size > 0 and has_charges(ledger):
            raise self._unreadable("it is blank")
        if noted is not None and ledger.missing_heads([noted["head"]]):
            raise RunFolderError(
                f"run folder {str(self._folder)!r} is behind: the same run has gone on in "
                f"{noted['folder']!r} and its ledger there has entries that this one lacks "
                f"(noted in {self.path}). It is an older copy, or its ledger was rolled back or "
                "exchanged; resume the newest one, because what both release counts together"
            )

    def _unreadable(self, reason: object) -> RunFolderError:
        return RunFolderError(
            f"the note of how far the run in {str(self._folder)!r} has come cannot be read "
            f"({self.path}: {reason}): whether a copy of it has gone on is not known. When you "
            "know that this folder is the newest one, delete the note"
        )

    def note(self, head: str) -> None:
        """Write the newest head; a disk that cannot take it does not stop the run."""
        text = json.dumps({"head": head, "folder": str(self._folder.resolve())}).encode()
        if len(text) > _SECTOR:  # a power cut may tear what is longer than that
            text = json.dumps({"head": head, "folder": self._folder.name[:60]}).encode()
        with contextlib.suppress(OSError):
            # Blanks up to whole blocks, and over all that was there: a run killed at any
            # moment leaves no end of a longer note behind.
            size = max(len(text), os.fstat(self._handle).st_size)
            os.pwrite(self._handle, text.ljust(-(-size // _BLOCK) * _BLOCK), 0)
            if not self._is_durable:  # from here on a blank note is one that was lost
                os.fsync(self._handle)
                sync_folder(self.path.parent)
                self._is_durable = True

    def close(self) -> None:
        """Unlock the file; it stays, for copies that are resumed later."""
        os.close(self._handle)


def has_charges(ledger: Ledger) -> bool:
    return any(population.spent().any() for population in ledger.populations())


def open_witness(run_id: str, folder: Path) -> Witness | None:
    """Return the witness of a run, None where the state folder cannot be written or locked."""
    name = hashlib.sha256(run_id.encode()).hexdigest()[:32]
    try:
        import fcntl  # posix only

        place = state_folder()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        handle = os.open(place / name, flags, 0o600)
    except (ImportError, OSError, RuntimeError):  # no locks, no home, or a read-only one
        return None
    noted = None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        with contextlib.suppress(ValueError):
            noted = _read_note(handle)
        where = "another folder" if noted is None else repr(noted["folder"])
        os.close(handle)
        raise RunFolderError(
            f"run folder {str(folder)!r} is a copy of a run that is going on in {where}"
        ) from error
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return Witness(place / name, folder, handle)


_BLOCK = 4096
_SECTOR = 512
_LONGEST_NOTE = 1 << 16


def _read_note(handle: int) -> dict[str, str] | None:
    """Return the head and the folder of a witness, None of an empty one; or raise ValueError."""
    try:
        text = os.pread(handle, _LONGEST_NOTE, 0)
        text = text.replace(b"\0", b"").strip()  # a power cut may leave room without bytes
        noted = parse_json(text, "it") if text else None
    except (OSError, ValueError) as error:
        raise ValueError(str(error)) from error
    if noted is None and not text:
        return None
    if not isinstance(noted, dict) or not isinstance(noted.get("head"), str):
        raise ValueError("it names no entry of a ledger")
    return {"head": noted["head"], "folder": str(noted.get("folder"))}
