"""Ledgers are built under another name and appear under their own in one step.

A crash or a full disk must leave no half a ledger behind, and of several processes that make
one ledger at once exactly one must win.  Whoever builds holds a lock beside the ledger,

    .ledger.sqlite.new-lock     held while somebody builds
    .ledger.sqlite.new          what is built, with SQLite's journal

so the next one knows that a draft without a holder was left by a kill, and removes it.

A hard link gives the draft its name and never replaces a file.  FAT, exFAT, SMB and many
FUSE mounts have no hard links: there it is renamed, which would replace a ledger that has
just appeared, and the lock keeps everybody else from making one.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fedquilt.common.storage import NO_LOCKS, NoLocksError, lock_file, sync_folder
from fedquilt.privacy.ledger.errors import LedgerBusyError, LedgerFileError

_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_FOREIGN_SECONDS = 24 * 3600.0  # older versions named drafts at random and held no lock


def no_locks(path: Path) -> LedgerFileError:
    """Return the error about a ledger where files cannot be locked."""
    return LedgerFileError(
        f"ledger {path}: {NO_LOCKS}; without locks two runs could spend the same allowance. Put "
        "the ledger where there are some: ledger=... (--ledger FILE), or output_dir=... "
        "(--output-dir FOLDER) for a run with a ledger of its own"
    )


@contextlib.contextmanager
def drafting(path: Path, timeout: float = 30.0) -> Iterator[Path]:
    """Yield an empty file in which to build the ledger of `path`, for its owner only.

    Nobody else builds there meanwhile; nothing of the draft is left afterwards.
    """
    with _alone(path, timeout):
        _remove_drafts(path)
        draft = path.with_name(f".{path.name}.new")
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        try:
            yield draft
        finally:
            _remove_drafts(path)


def appear(draft: Path, path: Path) -> None:
    """Give a draft its name, durably; `FileExistsError` when the name is taken."""
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS or os.path.lexists(path):
            raise
        os.rename(draft, path)
    sync_folder(path.parent)


def remove_drafts(path: Path) -> None:
    """Remove what a killed process left of building `path`, unless somebody builds it now."""
    if not _beside(path):
        return
    # In nobody's way: a ledger can be used beside it.
    with contextlib.suppress(OSError, LedgerBusyError, LedgerFileError), _alone(path, 0.0):
        _remove_drafts(path)


def _beside(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f".{glob.escape(path.name)}*.new*"))


def _remove_drafts(path: Path) -> None:
    ours = f".{path.name}.new"
    for file in _beside(path):
        if file.name in (ours, f"{ours}-journal") or _is_foreign(file, f"{ours}-lock"):
            file.unlink(missing_ok=True)


def _is_foreign(file: Path, lock: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return file.name != lock and time.time() - file.stat().st_mtime > _FOREIGN_SECONDS
    return False


@contextlib.contextmanager
def _alone(path: Path, timeout: float) -> Iterator[None]:
    """Hold the right to build `path`; the lock's file is removed by its holder only."""
    lock = path.with_name(f".{path.name}.new-lock")
    held = _hold(path, lock, time.monotonic() + timeout)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
        held.close()


def _hold(path: Path, lock: Path, deadline: float) -> io.FileIO:
    while True:
        try:
            held = lock_file(lock, 0o600)
        except NoLocksError as error:
            lock.unlink(missing_ok=True)  # nobody can hold it
            raise no_locks(path) from error
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise LedgerBusyError(
                    f"ledger {path} is being made by another process for too long. Try again"
                ) from None
            time.sleep(0.01)
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(held.fileno()), lock.lstat()):
                return held
        held.close()  # its last holder has removed it in between
