"""Who the clients of a run are: their ids, their order, their population; what they hold back.

Clients get ids here, so that a ledger recognises them in every run (`Roster`):

| where clients come from | a client's id | the population's own name |
|---|---|---|
| a split by people (`writer`) | `writer:` and their number or name | one for all the people |
| any other split | a digest of its list of sample numbers | a digest of all the ids |
| your own lists, with ids | the id you gave | none: you name it |
| your own lists, without | none: its place in the list | none: you name it |

Options do not enter an id: two configurations that deal the samples alike make the same
clients, and one that deals them otherwise makes others.  Nor does the content of a sample: only
sample numbers and the numbers of people.  (`dirichlet` and `shards` deal by label, so
their lists follow from everybody's labels, as the clients themselves do.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator
from fedquilt.data.holdings import Holdings, shared_sample
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
        Whether the user gave the ids.
    digest
        Stands for who holds which samples, in order.  It depends on what clients hold, so
        it is kept for the owner only.
    """

    ids: tuple[str, ...] | None
    name: str | None
    given: bool
    digest: str


def roster_of_split(dataset: str, parts: Parts, people: Sequence[str] | None = None) -> Roster:
    """Return the roster of a split of a named data set; `people`: whose samples each part is."""
    if people is not None:
        ids = check_ids(f"writer:{person}" for person in people)
        # Whoever is drawn, it is one of these people: all draws share their accounts.
        return Roster(ids, f"{dataset}-writers", False, roster_digest(ids, parts))
    ids = tuple(f"{dataset}:{_part_digest(dataset, part)}" for part in parts)
    return Roster(ids, roster_name(dataset, ids), False, roster_digest(ids, parts))


def roster_of_own(parts: Parts, client_ids: Iterable[str] | None) -> Roster:
    """Return the roster of a user's own index lists."""
    ids = None if client_ids is None else check_ids(client_ids)
    if ids is not None and len(ids) != len(parts):
        raise InvalidValueError(
            f"client_ids must hold one id for each of {len(parts)} clients; it holds {len(ids)}"
        )
    return Roster(ids, None, ids is not None, roster_digest(ids, parts))


def _part_digest(dataset: str, part: NDArray[np.int64]) -> str:
    numbers = np.sort(part).astype("<i8").tobytes()
    return hashlib.sha256(dataset.encode() + b"\0" + numbers).hexdigest()[:16]


def roster_digest(ids: tuple[str, ...] | None, parts: Parts) -> str:
    """Return what stands for who holds which samples, in order."""
    digest = hashlib.sha256()
    for value in ids or ():
        digest.update(len(value.encode()).to_bytes(8, "big") + value.encode())
    held = parts if isinstance(parts, Holdings) else Holdings(parts)
    for content in held.as_bytes():
        digest.update(content)
    return digest.hexdigest()


def hold_back(
    clients: Parts, fraction: float, seed: int
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Return what each client trains on, and the share of its samples that it holds back.

    At least one sample is left for training; a client with one sample holds back none.
    """
    train, held = [], []
    for client, part in enumerate(clients):
        count = min(max(0, len(part) - 1), round(fraction * len(part)))
        order = generator(seed, "client test", client).permutation(len(part))
        held.append(np.sort(part[order[:count]]))
        train.append(part[np.sort(order[count:])])
    return train, held


def check_client_tests(
    clients: Parts, tests: Parts, *, allow_overlap: bool
) -> list[NDArray[np.int64]]:
    """Return the samples that clients were given to evaluate on, or raise."""
    if len(tests) != len(clients):
        raise InvalidValueError(
            f"client_tests must hold one list for each of {len(clients)} clients; it holds "
            f"{len(tests)}"
        )
    for client, (part, test) in enumerate(zip(clients, tests, strict=True)):
        both = np.intersect1d(part, test)
        if both.size:
            raise InvalidValueError(
                f"client_tests[{client}] must hold samples that the client does not train on; "
                f"it holds sample {int(both[0])}, which it does"
            )
    everything = [np.concatenate(pair) for pair in zip(clients, tests, strict=True)]
    found = None if allow_overlap else shared_sample(everything)
    if found is not None:
        raise InvalidValueError(
            f"clients {found[1]} and {found[2]} must not both hold sample {found[0]}, to train or "
            "to evaluate on; if they do share samples, say allow_overlap=True (--allow-overlap)"
        )
    return list(tests)
