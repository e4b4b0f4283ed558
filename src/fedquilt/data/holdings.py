"""Who holds which samples, for a million clients: one array, cut where each client begins.

Also: who holds which rows of a table, whether two sets of samples are the same, and whether
clients share any.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray

from fedquilt.common.errors import InvalidValueError

IndexArray = npt.NDArray[np.int64]

_AT_ONCE = 1 << 14


class Holdings(Sequence[IndexArray]):
    """The sample numbers of each client, as a sequence of arrays.

    A list of a million small arrays takes some 150 MB; this takes 8 bytes a sample and 8 a
    client, and makes a client's array, a view, when it is asked for.

    Parameters
    ----------
    lists : iterable
        Flat lists or arrays of whole numbers, one a client; they are copied.
    size : int, optional
        How many samples there are; None: numbers are not compared with it.
    what : str
        What the lists are called where one of them is wrong.
    """

    def __init__(
        self, lists: Iterable[object], size: int | None = None, what: str = "clients"
    ) -> None:
        given = iter(lists)
        numbers, lengths, first = [], [], 0
        while batch := [_as_array(held) for held in itertools.islice(given, _AT_ONCE)]:
            numbers.append(_joined(batch, first, size, what))
            lengths.append(np.fromiter(map(len, batch), dtype=np.int64, count=len(batch)))
            first += len(batch)
        nothing = [np.zeros(0, dtype=np.int64)]
        self._numbers = np.concatenate(numbers or nothing)
        self._ends = np.cumsum(np.concatenate(lengths or nothing))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, client: int) -> IndexArray: ...
    @overload
    def __getitem__(self, client: slice) -> list[IndexArray]: ...
    def __getitem__(self, client: int | slice) -> IndexArray | list[IndexArray]:
        if isinstance(client, slice):
            return [self[k] for k in range(*client.indices(len(self)))]
        place = range(len(self))[client]
        begin = self._ends[place - 1] if place else 0
        return self._numbers[begin : self._ends[place]]

    def __iter__(self) -> Iterator[IndexArray]:
        begin = 0
        for end in self._ends.tolist():
            yield self._numbers[begin:end]
            begin = end

    def numbers_and_owners(self) -> tuple[IndexArray, IndexArray]:
        """Return all sample numbers, client after client, and whose each one is."""
        sizes = np.diff(self._ends, prepend=0)
        return self._numbers, np.repeat(np.arange(len(self), dtype=np.int64), sizes)

    def as_bytes(self) -> Iterator[bytes]:
        """Yield, for one client after the other, its count in 8 bytes and its numbers.

        Counts are big-endian and numbers little-endian, as digests of older runs have them.
        """
        for first in range(0, len(self), _AT_ONCE):
            ends = self._ends[first : first + _AT_ONCE]
            begin = int(self._ends[first - 1]) if first else 0
            starts = np.concatenate([[begin], ends[:-1]])
            counts = starts - begin + np.arange(len(ends))  # where each count goes
            words = np.empty(int(ends[-1]) - begin + len(ends), dtype="<i8")
            words[counts] = (ends - starts).astype(">i8").view("<i8")
            is_number = np.ones(len(words), dtype=np.bool_)
            is_number[counts] = False
            words[is_number] = self._numbers[begin : ends[-1]]
            yield words.tobytes()


def _as_array(held: object) -> npt.NDArray[np.generic]:
    """Return what one client was given as an array, a wrong one for data of uneven shapes."""
    try:
        return np.asarray(held)
    except ValueError:
        return np.empty((0, 0))


def _joined(
    batch: list[npt.NDArray[np.generic]], first: int, size: int | None, what: str
) -> IndexArray:
    """Return the numbers of some clients as one array; what is no list of them is an error."""
    for place, held in enumerate(batch):
        if held.ndim != 1 or (held.size and held.dtype.kind not in "iu"):
            raise InvalidValueError(
                f"{what}[{first + place}] must be a list of sample numbers; data sets, one a "
                "client, are given as train, and clients is left out"
            )
    # A client without data is a client: it joins and sends zero.
    some = [held for held in batch if held.size] or [np.zeros(0, dtype=np.int64)]
    joined: IndexArray = np.concatenate(some, dtype=np.int64, casting="unsafe")
    if size is not None and joined.size and (joined.min() < 0 or joined.max() >= size):
        place = next(k for k, h in enumerate(batch) if h.size and (h.min() < 0 or h.max() >= size))
        held = batch[place]
        raise InvalidValueError(
            f"{what}[{first + place}] must hold numbers >= 0 and < {size}, the size of the data; "
            f"it holds {int(held.min())} to {int(held.max())}"
        )
    return joined


def by_column(
    train: object, column: str, *others: object
) -> tuple[dict[str, Any], dict[str, IndexArray], tuple[Any, ...]]:
    """Return a table's other columns, the rows of each client, and other tables likewise.

    Parameters
    ----------
    train : datasets.Dataset, pandas.DataFrame or mapping
        A table, one sample a row; a mapping has columns under their names.
    column : str
        Whose each sample is: its values, as texts, are the clients' ids.
    *others
        Data whose columns have these names too, such as test data; the column is left out.
        What is no table, or lacks the column, stays as it is.
    """
    table = _table(train)
    if table is None or column not in table:
        names = "no columns" if table is None else ", ".join(map(repr, table))
        raise InvalidValueError(f"clients={column!r} must be a column of train, which has {names}")
    owners = np.asarray(table.pop(column))
    unknown = [k for k, owner in enumerate(owners.tolist()) if owner is None or owner != owner]
    if owners.ndim != 1 or unknown:
        where = f"; row {unknown[0]} has none" if unknown else ""
        raise InvalidValueError(f"column {column!r} of train must name one client a row{where}")
    names_of_rows = np.array([str(owner) for owner in owners.tolist()])
    ids, whose = np.unique(names_of_rows, return_inverse=True)
    rows = np.split(np.argsort(whose, kind="stable"), np.cumsum(np.bincount(whose))[:-1])
    parts = {str(name): held for name, held in zip(ids, rows, strict=True)}
    return table, parts, tuple(_without(other, column) for other in others)


def _without(data: object, column: str) -> Any:
    table = _table(data)
    if table is None or column not in table:
        return data
    return {name: values for name, values in table.items() if name != column}


def _table(data: Any) -> dict[str, Any] | None:
    """Return the columns of a table by their names; None for what is none."""
    if isinstance(data, Mapping):
        return {n: np.asarray(v) if isinstance(v, list) else v for n, v in data.items()}
    if hasattr(data, "column_names") and hasattr(data, "with_format"):  # datasets
        return dict(data.with_format("numpy")[:])
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):  # pandas
        return {str(name): _cells(data[name]) for name in data.columns}
    return None


def _cells(series: Any) -> Any:
    """Return a column's values; lists of one length, such as token ids, as one array."""
    values = series.to_numpy()
    lists = values.dtype == object and len(values) and isinstance(values[0], list | np.ndarray)
    return np.stack([np.asarray(value) for value in values]) if lists else values


_DIGEST_BYTES = 1 << 24


def salted_digest(samples: Any, salt: bytes) -> str:
    """Return a digest of what samples hold: tensors, or lists and mappings of them.

    Shape, type and every bit count.  The salt (at most 64 bytes) keys the digest: somebody
    who sees it without the salt cannot test a guess of the data against it.
    """
    digest = hashlib.blake2b(key=salt, digest_size=32)
    for place, tensor in _leaves(samples, ""):
        digest.update(f"{place}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        flat = tensor.detach().contiguous().view(-1)
        if flat.numel():
            for chunk in torch.split(flat.view(torch.uint8), _DIGEST_BYTES):
                digest.update(chunk.cpu().numpy().data)
    return digest.hexdigest()


def _leaves(samples: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a tree with where they hang, in an order of its own."""
    if isinstance(samples, Mapping):
        for key in sorted(samples, key=str):
            yield from _leaves(samples[key], f"{place}/{key}")
    elif isinstance(samples, (list, tuple)):
        for number, item in enumerate(samples):
            yield from _leaves(item, f"{place}/{number}")
    else:
        yield place, torch.as_tensor(samples)


def shared_sample(clients: Sequence[NDArray[np.int64]]) -> tuple[int, int, int] | None:
    """Return a sample that two clients hold, and these two; None when there is none."""
    held = clients if isinstance(clients, Holdings) else Holdings(clients)
    samples, owners = held.numbers_and_owners()
    if np.unique(samples).size == samples.size:
        return None
    order = np.argsort(samples, kind="stable")
    samples, owners = samples[order], owners[order]
    # A sample that one client holds twice is not shared with another.
    twice = np.flatnonzero((np.diff(samples) == 0) & (np.diff(owners) != 0))
    if not twice.size:
        return None
    place = int(twice[0])
    return int(samples[place]), int(owners[place]), int(owners[place + 1])
