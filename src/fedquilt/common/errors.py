"""The exceptions a user can catch.

Every error raised for something the user can mend derives from `FedquiltError`
and says what is wrong, the value that was given, what is allowed, and where it
came from.  Each also derives from the built-in class that a caller would
expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class FedquiltError(Exception):
    """Base of every error that fedquilt raises on purpose.

    `folder` is the folder of a run that the error has stopped and that can be resumed.
    """

    folder: str | None = None


class InvalidValueError(FedquiltError, ValueError):
    """A parameter, option or argument has a value that is not allowed."""


class NotReadyError(FedquiltError, RuntimeError):
    """A method was called before what it needs had happened."""


class MissingPackageError(FedquiltError, ImportError):
    """A package that only some features need is not installed; says what to install."""


class DataError(FedquiltError, ValueError):
    """A data file is torn, foreign or does not hold what its name promises."""


class DataNotFoundError(DataError, FileNotFoundError):
    """A data set is nowhere in the data folders and may not be downloaded."""


class RunFolderError(FedquiltError, ValueError):
    """A folder is not a run of fedquilt, or its files cannot be used."""


class StorageError(FedquiltError, OSError):
    """A file could not be written: full disk, missing rights, gone folder."""


class IrregularFileError(StorageError, RunFolderError):
    """A link, pipe, folder or device lies where a regular file must be."""


class WorkerError(FedquiltError, RuntimeError):
    """A worker process died, or what it ran raised an error."""


class RunInterrupted(KeyboardInterrupt):
    """A run was stopped by Ctrl-C; `folder` can be resumed (None: nothing was kept)."""

    def __init__(self, folder: str | None) -> None:
        super().__init__(folder)
        self.folder = folder


class LedgerError(FedquiltError):
    """Base of every refusal of a privacy ledger, which leaves the ledger as it was."""


class LedgerFileError(LedgerError, OSError):
    """The file cannot be used: missing, foreign, newer, read-only, full disk."""


class LedgerCorruptError(LedgerFileError):
    """The file is damaged, or is not the ledger it was a moment ago."""


class LedgerBusyError(LedgerError, TimeoutError):
    """Another process held the file for longer than the stated time."""


class LedgerConflictError(LedgerError, ValueError):
    """A population or run of that name exists and says something else."""


class ReservationError(LedgerError, RuntimeError):
    """A reservation, or the run that holds it, is no longer in force."""


class BudgetExceededError(LedgerError, ValueError):
    """Some client would give away more than it is allowed to.

    Attributes
    ----------
    clients
        The clients that would exceed.
    asked_mu2, left_mu2
        What was asked of each of them and what each had left, in squared GDP units.
    """

    def __init__(
        self,
        message: str,
        clients: NDArray[np.int64],
        asked_mu2: NDArray[np.float64],
        left_mu2: NDArray[np.float64],
    ) -> None:
        super().__init__(message)
        self.clients = clients
        self.asked_mu2 = asked_mu2
        self.left_mu2 = left_mu2

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (str(self), self.clients, self.asked_mu2, self.left_mu2)
        return type(self), fields
