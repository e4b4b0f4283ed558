"""What a ledger refuses, and why.

Every refusal leaves the ledger as it was.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedquilt.common.errors import FedquiltError


class LedgerError(FedquiltError):
    """Base of every refusal of a privacy ledger."""


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
        clients: npt.NDArray[np.int64],
        asked_mu2: npt.NDArray[np.float64],
        left_mu2: npt.NDArray[np.float64],
    ) -> None:
        super().__init__(message)
        self.clients = clients
        self.asked_mu2 = asked_mu2
        self.left_mu2 = left_mu2

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (str(self), self.clients, self.asked_mu2, self.left_mu2)
        return type(self), fields
