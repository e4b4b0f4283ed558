"""The privacy ledger: one file that says, for every client, what it has given away.

Allowances belong to clients, not to jobs, so the ledger outlives runs.  Its unit of
account is the squared GDP unit μ² (`units`), in which releases add up exactly.

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

from fedquilt.common.errors import (
    BudgetExceededError,
    LedgerBusyError,
    LedgerConflictError,
    LedgerCorruptError,
    LedgerError,
    LedgerFileError,
    ReservationError,
)
from fedquilt.privacy.ledger.entries import PopulationInfo, Reservation, RunInfo
from fedquilt.privacy.ledger.files import is_ledger
from fedquilt.privacy.ledger.ledger import Ledger, csv_rows
from fedquilt.privacy.ledger.members import check_ids, roster_name
from fedquilt.privacy.ledger.population import Population, population_name
from fedquilt.privacy.ledger.rows import Charge, ClientRow, Summary
from fedquilt.privacy.ledger.run import Run
from fedquilt.privacy.ledger.verify import VerifyReport

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
    "population_name",
    "roster_name",
]
