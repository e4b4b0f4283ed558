"""A cohort and its charges as bytes.

Clients are sorted and stored as differences in the narrowest unsigned width that
holds them all (one byte says which); charges are one float64 when they are all
the same, else one for each client.  A cohort of 10,000 out of 1,000,000 takes
20 kB, and 80 kB more when the charges differ.  Everything is little-endian, and
equal cohorts have equal bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.privacy.ledger.errors import LedgerCorruptError
from fedquilt.privacy.ledger.units import FloatArray, IntArray

_WIDTHS = (1, 2, 4)


def encode_clients(clients: IntArray) -> bytes:
    """Return the bytes of strictly increasing client numbers."""
    if clients.size == 0:
        return b""
    steps = np.diff(clients, prepend=0)
    width = next(w for w in _WIDTHS if int(steps.max()) < 256**w)
    return bytes([width]) + steps.astype(f"<u{width}").tobytes()


def decode_clients(blob: bytes, num_clients: int) -> IntArray:
    """Return the client numbers in `blob`; they increase and stay below `num_clients`."""
    if not blob:
        return np.empty(0, dtype=np.int64)
    width = blob[0]
    if width not in _WIDTHS or (len(blob) - 1) % width or len(blob) == 1:
        raise LedgerCorruptError("an entry's list of clients cannot be read")
    clients = np.cumsum(np.frombuffer(blob, dtype=f"<u{width}", offset=1), dtype=np.int64)
    if clients[-1] >= num_clients or not np.all(np.diff(clients) > 0):
        raise LedgerCorruptError("an entry's list of clients is out of order or out of range")
    return clients


def encode_charges(charges: FloatArray) -> bytes:
    """Return the bytes of one charge for each client."""
    same = charges.size > 0 and np.all(charges == charges[0])
    return (charges[:1] if same else charges).astype("<f8").tobytes()


def decode_charges(blob: bytes, count: int) -> FloatArray:
    """Return `count` charges; every one is a number >= 0, or infinity."""
    if len(blob) not in (8 * min(count, 1), 8 * count):
        raise LedgerCorruptError("an entry's charges do not match its clients")
    charges = np.frombuffer(blob, dtype="<f8").astype(np.float64)
    if not np.all(charges >= 0):
        raise LedgerCorruptError("an entry holds a charge that is not a number >= 0")
    return charges if charges.size == count else np.full(count, charges[0])


def check_clients(clients: npt.ArrayLike, num_clients: int) -> IntArray:
    """Return `clients` as whole numbers, each once, all in the population; or raise."""
    array = np.asarray(clients)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidValueError(
            f"clients of type {array.dtype} and shape {array.shape} must be a flat list "
            "of whole numbers"
        )
    outside = (array < 0) | (array >= num_clients)
    if np.any(outside):
        raise InvalidValueError(
            f"client={int(array[outside][0])} must be >= 0 and < {num_clients}, "
            "the number of clients in the population"
        )
    numbers, counts = np.unique(array, return_counts=True)
    if numbers.size < array.size:
        twice = int(numbers[counts > 1][0])
        raise InvalidValueError(f"client={twice} must be named only once in a cohort")
    return array.astype(np.int64)


def check_charges(charges_mu2: npt.ArrayLike, count: int) -> FloatArray:
    """Return one finite charge >= 0 for each of `count` clients, or raise."""
    array = np.asarray(charges_mu2)
    if array.ndim == 0:
        return np.full(count, validate.number("charges_mu2", array.item(), at_least=0))
    if array.shape != (count,) or array.dtype.kind not in "iuf":
        raise InvalidValueError(
            f"charges_mu2 of type {array.dtype} and shape {array.shape} must be one number "
            f"for each of the {count} clients, or one for all"
        )
    array = array.astype(np.float64)
    wrong = ~(np.isfinite(array) & (array >= 0))
    if np.any(wrong):
        raise InvalidValueError(f"charges_mu2={float(array[wrong][0])!r} must be finite and >= 0")
    return array
