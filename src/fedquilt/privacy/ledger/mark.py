"""How far a ledger was checked the last time, so that a long past is hashed once.

Whoever opens a ledger for its balances hashes every entry first.  That takes about half
a second for ten thousand entries and is always done up to there.  A longer ledger gets a
mark when it is closed: the newest entry that was checked, digests of the snapshots that
were found to be what the entries add up to, and what the file looked like then (inode,
size, times of change).  The next one who opens it believes the mark only while the file
looks exactly so; any write by anybody else, through SQLite or around it, is a reason to
hash everything again.  Entries after the mark are hashed in any case.

The mark lies beside the ledger (`ledger.sqlite.verified`, for its owner only), not in the
user's own folder.  A mark elsewhere would be safer against somebody who may write where
the ledger lies and not in the home of its owner; but the chain carries no secret, so such
a person can rewrite the ledger itself, and only heads kept elsewhere tell.  The mark is
there to save time and not to add protection, and beside the file it is seen, moved and
deleted together with it.  What it cannot see is a bit that the disk turned by itself in an
entry that is read no more; `ledger verify` never uses it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MARK_FROM = 10_000
"""Entries from which on a mark is kept."""

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Mark:
    """A ledger's newest checked entry, its checked snapshots, and its file at that time."""

    seq: int
    hash: str
    file: tuple[int, ...]
    snapshots: dict[int, str]


def mark_path(ledger: Path) -> Path:
    """Return where the mark of a ledger is."""
    return ledger.with_name(f"{ledger.name}.verified")


def looks(ledger: Path) -> tuple[int, ...]:
    """Return what changes whenever anybody writes the file."""
    found = ledger.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def snapshot_digest(row: Sequence[Any]) -> str:
    """Return what stands for a row of the snapshots: its entry, balances and open numbers."""
    digest = hashlib.sha256()
    for value in row:
        blob = value if isinstance(value, bytes) else str(value).encode()
        digest.update(len(blob).to_bytes(8, "big") + blob)
    return digest.hexdigest()


def read_mark(ledger: Path) -> Mark | None:
    """Return the mark if there is one and the file still looks as it did then."""
    try:
        said = json.loads(mark_path(ledger).read_text(encoding="utf-8"))
        if said.pop("schema_version") != SCHEMA_VERSION:
            return None
        snapshots = {int(key): str(value) for key, value in said["snapshots"].items()}
        mark = Mark(int(said["seq"]), str(said["hash"]), tuple(said["file"]), snapshots)
        fits = mark.file == looks(ledger)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # a mark that cannot be read saves no time, and that is all it is for
    return mark if fits else None


def write_mark(ledger: Path, mark: Mark) -> None:
    """Replace the mark; where it cannot be written the next check starts from the beginning."""
    path = mark_path(ledger)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(mark)})
    with contextlib.suppress(OSError):
        try:
            with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as stream:
                stream.write(text)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
