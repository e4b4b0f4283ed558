"""Who the clients of a population are: ids, in the order of their numbers.

An id is a text that stands for one client in every run: the name of a hospital, the
number of a writer.  It says nothing about what the client holds.  The ledger keeps ids
in entries of their own ("members"), appended when a population is made and when clients
join it later; balances are kept by number, so a client's account is found by its id
wherever it stands in a run's list.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping

import numpy as np

from fedquilt.common.errors import InvalidValueError, LedgerCorruptError
from fedquilt.common.schema import TEXT, ListOf, Object
from fedquilt.privacy.ledger.entries import Entry, make_body, read_body
from fedquilt.privacy.ledger.units import IntArray

UNKNOWN = -1
"""Stands for the number of a client that is not in the population."""

_LONGEST = 200

# What Unicode calls default-ignorable and Python printable, and the blank Braille pattern.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U000e0000-\U000e0fff]"
)


def check_ids(client_ids: Iterable[str]) -> tuple[str, ...]:
    """Return the ids when each is a short text that reads one way, and no two read alike.

    Reading one way: in Unicode's composed form (NFC), without characters that print
    nothing and without blanks around it.  Reading alike: see `alike`.
    """
    ids = _as_texts(client_ids)
    for value in ids:
        if not unicodedata.is_normalized("NFC", value):
            raise InvalidValueError(
                f"client id {value!a} must be in Unicode's composed form (NFC): "
                f"{unicodedata.normalize('NFC', value)!a}"
            )
        if unseen := _UNSEEN.search(value):
            raise InvalidValueError(
                f"client id {value!a} must not hold {unseen[0]!a}, which prints nothing"
            )
    firsts: dict[str, str] = {}
    for value in ids:
        first = firsts.setdefault(alike(value), value)
        if first != value:
            raise InvalidValueError(
                f"client ids {first!r} and {value!r} must differ in more than letter case, width "
                "of letters or blanks"
            )
    return ids


def alike(client_id: str) -> str:
    """Return what ids have in common that people take for one another.

    That is the id under compatibility forms (NFKC) and case folding, without blanks.

    >>> alike("Ward 7") == alike("ward７")
    True
    >>> alike("07") == alike("7")
    False
    """
    folded = unicodedata.normalize("NFKC", client_id).casefold()
    return "".join(unicodedata.normalize("NFKC", folded).split())


def _as_texts(client_ids: Iterable[str]) -> tuple[str, ...]:
    """Return the ids when each is a short text without blanks around it, and all differ."""
    if isinstance(client_ids, str):
        raise InvalidValueError(f"client_ids={client_ids!r} must be a list of texts, not a text")
    ids = tuple(client_ids)
    if not ids:
        raise InvalidValueError("client_ids=[] must name at least one client")
    for value in ids:
        if (
            not isinstance(value, str)
            or not 0 < len(value) <= _LONGEST
            or value != value.strip()
            or not value.isprintable()
        ):
            raise InvalidValueError(
                f"client id {value!r} must be a text of 1 to {_LONGEST} printable characters "
                "without blanks around it"
            )
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        twice = next(value for value in ids if value in seen or seen.add(value))  # type: ignore[func-returns-value]
        raise InvalidValueError(f"client id {twice!r} must be given only once")
    return ids


def ids_digest(ids: Iterable[str]) -> str:
    """Return what stands for these ids in this order."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def roster_name(dataset: str, ids: Iterable[str]) -> str:
    """Return the name of the population of these clients, in whatever order.

    >>> roster_name("digits", ["b", "a"]) == roster_name("digits", ["a", "b"])
    True
    >>> roster_name("digits", ["a", "b"])
    'digits-2-f30a0f21996fa08f'
    """
    ordered = sorted(ids)
    return f"{dataset}-{len(ordered)}-{ids_digest([dataset, *ordered])[:16]}"


def members_body(ids: Iterable[str]) -> str:
    """Return the body of a "members" entry."""
    return make_body(ids=list(ids))


def members_of(entry: Entry) -> list[str]:
    """Read a "members" entry."""
    try:
        ids = read_body(entry, "a list of members", Object({"ids": ListOf(TEXT)}))["ids"]
        return list(_as_texts(ids))  # an older fedquilt let more ids pass
    except InvalidValueError as error:
        raise LedgerCorruptError(f"entry {entry.seq} is not a list of members: {error}") from error


def numbers_of(ids: Iterable[str], known: Mapping[str, int]) -> IntArray:
    """Return the number of each id, `UNKNOWN` for those that have none."""
    return np.fromiter((known.get(value, UNKNOWN) for value in ids), dtype=np.int64)
