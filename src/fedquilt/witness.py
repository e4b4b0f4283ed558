"""A witness outside the run's folder: how far a run with a ledger of its own has come.

A ledger that lies in the run's folder is copied with it.  Two copies of a stopped run that
are both resumed would each release results, and each would claim what its own ledger
says, while the clients gave away both.  So every such run notes its ledger's newest head in
the user's state folder, `$XDG_STATE_HOME/fedquilt/runs` (by default below
`~/.local/state`), after each settled release, and holds that file locked while it runs.  A
folder whose ledger does not contain the noted head is behind: another copy has gone on.
A folder that was moved contains it.

The witness is of one user on one machine.  A copy resumed by somebody else, elsewhere, or
with another state folder is not seen, and where the state folder cannot be written there is
no witness at all; the statement of a resumed run says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fedquilt.errors import RunFolderError
from fedquilt.privacy.ledger import Ledger


def state_folder() -> Path:
    """Return where this user's runs are noted."""
    stated = os.environ.get("XDG_STATE_HOME")
    base = Path(stated) if stated else Path("~/.local/state").expanduser()
    return base / "fedquilt" / "runs"


class Witness:
    """The locked note of one run; made by `open_witness`."""

    def __init__(self, path: Path, folder: Path, handle: int) -> None:
        self.path = path
        self._folder = folder
        self._handle = handle

    def check(self, ledger: Ledger) -> None:
        """Refuse to go on with a ledger that lacks what was noted last."""
        said = self._read()
        head = said.get("head")
        if isinstance(head, str) and head and ledger.missing_heads([head]):
            raise RunFolderError(
                f"run folder {str(self._folder)!r} is behind: the same run has gone on in "
                f"{said.get('folder')!r} and its ledger there has entries that this one lacks "
                f"(noted in {self.path}). It is an older copy, or its ledger was rolled back or "
                "exchanged; resume the newest one, because what both release counts together"
            )

    def note(self, head: str) -> None:
        """Write down the newest head; a disk that cannot take it does not stop the run."""
        text = json.dumps({"head": head, "folder": str(self._folder.resolve())}).encode()
        with contextlib.suppress(OSError):
            os.pwrite(self._handle, text, 0)
            os.ftruncate(self._handle, len(text))

    def close(self) -> None:
        """Unlock the note; it stays, for copies that are resumed later."""
        os.close(self._handle)

    def _read(self) -> dict[str, Any]:
        return _said(self._handle)


def open_witness(run_id: str, folder: Path) -> Witness | None:
    """Return the witness of a run, None where this user's notes cannot be kept."""
    name = hashlib.sha256(run_id.encode()).hexdigest()[:32]
    try:
        place = state_folder()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        handle = os.open(place / name, flags, 0o600)
    except (OSError, RuntimeError):  # no home, or a read-only one
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        where = _said(handle).get("folder")
        os.close(handle)
        raise RunFolderError(
            f"run folder {str(folder)!r} is a copy of a run that is going on in {where!r}"
        ) from error
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return Witness(place / name, folder, handle)


def _said(handle: int) -> dict[str, Any]:
    try:
        said = json.loads(os.pread(handle, 1 << 16, 0) or b"{}")
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
