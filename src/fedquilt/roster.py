"""Who the clients of a run are: an id for each, by which a ledger knows it again.

| where clients come from | a client's id | the population's own name |
|---|---|---|
| a split by people (`writer`) | `writer:` and the writer's number | one for all the people |
| any other split | a digest of its list of sample numbers | a digest of all the ids |
| your own lists, with ids | the id you gave | none: you name it |
| your own lists, without | none: its place in the list | none: you name it |

Options do not enter: two configurations that deal the samples alike make the same clients,
and one that deals them otherwise makes others.  Nor does the content of a sample: only
sample numbers and the numbers of people.  (`dirichlet` and `shards` deal by label, so
their lists follow from everybody's labels, as the clients themselves do.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.errors import InvalidValueError
from fedquilt.privacy.ledger import check_ids, roster_name

Parts = Sequence[NDArray[np.int64]]


@dataclass(frozen=True)
class Roster:
    """The clients of a run, in its order.

    Attributes
    ----------
    ids
        One for each client; None where clients are known by their place only.
    name
        What their population is called unless somebody names it; None: it must be named.
    given
        Whether a user said the ids.
    digest
        Stands for who holds which samples, in order.  It depends on what clients hold, so
        it is kept for the owner only.
    """

    ids: tuple[str, ...] | None
    name: str | None
    given: bool
    digest: str


def roster_of_split(dataset: str, parts: Parts, people: Sequence[int] | None = None) -> Roster:
    """Return the roster of a split of a named data set; `people`: whose samples each part is."""
    if people is not None:
        ids = tuple(f"writer:{person}" for person in people)
        # Whoever is drawn, it is one of these people: all draws share their accounts.
        return Roster(ids, f"{dataset}-writers", False, _digest(ids, parts))
    ids = tuple(f"{dataset}:{_part_digest(dataset, part)}" for part in parts)
    return Roster(ids, roster_name(dataset, ids), False, _digest(ids, parts))


def roster_of_own(parts: Parts, client_ids: Iterable[str] | None) -> Roster:
    """Return the roster of a user's own index lists."""
    ids = None if client_ids is None else check_ids(client_ids)
    if ids is not None and len(ids) != len(parts):
        raise InvalidValueError(
            f"client_ids must hold one id for each of {len(parts)} clients; it holds {len(ids)}"
        )
    return Roster(ids, None, ids is not None, _digest(ids, parts))


def named_clients(
    clients: Sequence[Any] | Mapping[str, Any], client_ids: Iterable[str] | None
) -> tuple[Sequence[Any], Iterable[str] | None]:
    """Return index lists and ids, where `clients` may be a mapping from one to the other."""
    if not isinstance(clients, Mapping):
        return clients, client_ids
    if client_ids is not None:
        raise InvalidValueError(
            "client_ids must be left out when clients is a mapping: it has them"
        )
    return list(clients.values()), list(clients)


def _part_digest(dataset: str, part: NDArray[np.int64]) -> str:
    numbers = np.sort(part).astype("<i8").tobytes()
    return hashlib.sha256(dataset.encode() + b"\0" + numbers).hexdigest()[:16]


def _digest(ids: tuple[str, ...] | None, parts: Parts) -> str:
    digest = hashlib.sha256()
    for value in ids or ():
        digest.update(len(value.encode()).to_bytes(8, "big") + value.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part.astype("<i8").tobytes())
    return digest.hexdigest()
