"""Two files beside a ledger, for its owner alone: names of clients, and notes on its entries.

A client's account is its id, which stands in the ledger's chain: for a Flower node the fingerprint
of its first key, or a seat.  A name is how it is shown and asked for.  So names are no part of the
chain: a new name, or a new key, changes no entry, and an old ledger gets names by the next run on a
roster.  `LEDGER.names.json`: {id: name}.

`LEDGER.notes.jsonl` is what an account's owner was told with each entry.  The SHA-256 of a line is
the digest of its entry, so the chain of the account holds the lines as well: one that is changed
belongs to no entry.  A site writes down so in which of the server's runs a reply was sent, and the
hash of the model that it had received.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.common.errors import LedgerFileError
from fedquilt.common.schema import ANY_TEXT, COUNT, TEXT, MapOf, Object, check
from fedquilt.common.storage import append_line, sync_file, write_file
from fedquilt.common.untrusted import parse_json, read_json, read_lines

_NAMES = MapOf(TEXT)
_MOST_BYTES = 1 << 26


def names_path(ledger: str | Path) -> Path:
    """Return where the names of a ledger's clients are."""
    return Path(f"{ledger}.names.json")


def read_names(ledger: str | Path) -> dict[str, str]:
    """Return the names of clients by their ids; nothing where nobody has a name."""
    path = names_path(ledger)
    if not path.exists():
        return {}
    record: dict[str, str] = read_json(path, LedgerFileError, _MOST_BYTES)
    check(record, _NAMES, path, LedgerFileError)
    return record


def write_names(ledger: str | Path, names: Mapping[str, str]) -> None:
    """Keep the names of clients; of those who are not named here, the earlier ones."""
    known = read_names(ledger)
    merged = {**known, **names}
    if merged != known:
        text = json.dumps(merged, indent=1, sort_keys=True) + "\n"
        write_file(names_path(ledger), text.encode(), 0o600)


def id_of(names: Mapping[str, str], client: str) -> str:
    """Return the id of a client that is given by its name, or by its id; an id comes first.

    A name that two ids have is nobody's.
    """
    found = [value for value, name in names.items() if name == client]
    return client if client in names or len(found) != 1 else found[0]


_NOTE = Object({"run": ANY_TEXT, "round": COUNT, "received": ANY_TEXT, "reply": ANY_TEXT})


def notes_path(ledger: Path) -> Path:
    """Return where the notes of a ledger are."""
    return ledger.with_name(ledger.name + ".notes.jsonl")


def add_note(ledger: Path, note: Mapping[str, Any]) -> str:
    """Write down what belongs to an entry that is to come, durable; return its digest."""
    line = json.dumps(note, sort_keys=True)
    append_line(notes_path(ledger), line, 0o600)
    sync_file(notes_path(ledger))
    return hashlib.sha256(line.encode()).hexdigest()


def read_notes(ledger: Path) -> dict[str, dict[str, Any]]:
    """Return the notes of a ledger by the digests of their entries."""
    return notes_in(notes_path(ledger))


def notes_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return the notes in a file."""
    found = {}
    for line in read_lines(path, LedgerFileError):
        plain = line.rstrip(b"\n")
        note = parse_json(plain, path, LedgerFileError)
        check(note, _NOTE, path, LedgerFileError)
        found[hashlib.sha256(plain).hexdigest()] = note
    return found
