"""Copies of a ledger: made whole, checked, and never put in the place of a newer one.

Copying the file alone is not enough.  While an entry is written, and after a kill in the
middle of that, the file `<ledger>-journal` beside it is part of the ledger: it holds what has
to be put back.  A ledger without its journal may be damaged; a ledger beside the journal of
another one will be.  SQLite's own backup reads through the journal, under a lock.

A copy is built under another name, checked from its first entry to its last, and appears under
its own name in one step.  What it replaces is locked meanwhile, so nothing can be entered
between the look at its entries and the exchange.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from fedquilt.common.storage import sync_folder
from fedquilt.privacy.ledger import files
from fedquilt.privacy.ledger.drafts import appear, drafting
from fedquilt.privacy.ledger.errors import LedgerCorruptError, LedgerError, LedgerFileError
from fedquilt.privacy.ledger.store import Store
from fedquilt.privacy.ledger.verify import VerifyReport, missing_heads, verify


def copy_ledger(
    source: Store,
    target: Path,
    *,
    replace: bool,
    known_heads: Iterable[str] = (),
    timeout: float = 30.0,
) -> VerifyReport:
    """Copy an open ledger to `target`; return what the check of the copy found.

    Parameters
    ----------
    source
        The ledger.  Others may write to it meanwhile; the copy is one state of it.
    target
        The file; a link leads to the file that it names.
    replace
        Whether a ledger may be there.  It is replaced only when the copy has every one of
        its entries.
    known_heads
        Heads that the copy must have.
    timeout
        Seconds to wait for others who use the ledger at `target`.
    """
    target = target.resolve()
    if target.exists() and target.samefile(source.path):
        raise LedgerFileError(f"ledger {source.path} and {target} are one file")
    if target.exists() and not replace:
        raise LedgerFileError(f"{target} exists; name another file, or say that it is replaced")
    if not target.parent.is_dir():
        raise LedgerFileError(f"ledger {target}: the folder {target.parent} does not exist")
    with files.translated(target), drafting(target, timeout) as draft:
        source.copy_to(draft)
        report = _checked(draft, source.path, known_heads)
        _put(draft, target, timeout)
        sync_folder(target.parent)
    return report


def _checked(draft: Path, source: Path, known_heads: Iterable[str]) -> VerifyReport:
    with contextlib.closing(Store(draft, read_only=True, timeout=0.0)) as copy:
        report = verify(copy, known_heads)
    if not report.ok:
        raise LedgerCorruptError(
            f"ledger {source} is NOT WHOLE, and was not copied: {'; '.join(report.problems)}"
        )
    return report


def _put(draft: Path, target: Path, timeout: float) -> None:
    """Give the draft its name, over nothing or over a ledger that has no more than it has."""
    if not target.exists():
        _put_new(draft, target)
        return
    try:
        there = Store(target, read_only=False, timeout=timeout)
    except LedgerFileError as error:
        raise LedgerFileError(
            f"whether {target} is newer cannot be told, and it was left as it is: {error}. To go "
            "on without it, move it away, together with its -journal"
        ) from error
    with contextlib.closing(there), there.writing():
        lacking = _lacking(draft, there)
        if lacking:
            raise LedgerError(
                f"ledger {target} has {lacking} entries that the copy lacks; in its place the "
                "copy would forget what clients have spent. Nothing was changed"
            )
        os.replace(draft, target)


def _put_new(draft: Path, target: Path) -> None:
    journal = target.with_name(f"{target.name}-journal")
    if os.path.lexists(journal):
        raise LedgerFileError(
            f"{journal} belongs to a ledger that is no longer there and would damage the copy: "
            "put that ledger back, or remove the journal"
        )
    appear(draft, target)


def _lacking(draft: Path, there: Store) -> int:
    """Return how many entries of the ledger `there`, its head included, the draft lacks."""
    hashes = {
        row[0] for row in there.select("SELECT hash FROM entries UNION SELECT hash FROM head")
    }
    heads = [one.hex() if isinstance(one, bytes) else repr(one) for one in hashes]
    with contextlib.closing(Store(draft, read_only=True, timeout=0.0)) as copy, copy.reading():
        return len(missing_heads(copy, heads))
