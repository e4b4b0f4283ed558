"""What a submitted run says of itself to its operator, and what the operator asks of it.

OUTPUT/.submitted/NUMBER/      of the run with that number at the SuperLink; its owner's alone
  note.json       how it stands, its process and folder, and in one line why it ended
  words.log       what it has said: what it may expect, its rounds
  traceback.log   of an error that ended it
  stop            `round` or `now`, written by the operator

The SuperLink knows whether a process ended, not whether a run was finished, and it may be away
when it is asked.  These files are written by the run itself, so that exit codes and `status` rest
on them.  A stop is looked for before a round is reserved, `now` also while replies are awaited:
a round that is left so releases nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedquilt.common.errors import FedquiltError
from fedquilt.common.formatting import printable, printable_message
from fedquilt.common.schema import ANY_TEXT, TEXT, Object, Scalar, check
from fedquilt.common.storage import append_line, write_file
from fedquilt.common.untrusted import NOTE_BYTES, read_bytes, read_json

FOLDER = ".submitted"
RUNNING, FINISHED, FAILED, STOPPED = "running", "finished", "failed", "stopped"
AFTER_ROUND, NOW = "round", "now"
_PID = Scalar("the number of a process", frozenset({int}), least=1, most=2**22)
_NOTE = Object({"state": TEXT, "pid": _PID, "began": ANY_TEXT, "folder": ANY_TEXT, "why": ANY_TEXT})


class StoppedError(FedquiltError):
    """The operator has stopped the run; it can be resumed."""


class RunNotes:
    """The files of one submitted run.

    Parameters
    ----------
    output : path
        The operator's folder of runs.
    run_id : int
        The number of the run at the SuperLink.
    """

    def __init__(self, output: str | Path, run_id: int) -> None:
        self.run_id = int(run_id)
        self.path = Path(output) / FOLDER / str(self.run_id)
        self.names: dict[str, str] = {}
        """What people call clients, by the ids that an error may name."""

    # -- the run's side

    @contextlib.contextmanager
    def kept(self) -> Iterator[RunNotes]:
        """Note that the run goes on, and how it ended; an error of ours is one line elsewhere."""
        self.write(RUNNING)
        # Not taken off again: Flower tells of an error when it has left all of ours.
        logging.getLogger("flwr").addFilter(_shorten)
        try:
            yield self
        except BaseException as error:
            ours = isinstance(error, FedquiltError)
            why = str(error) if ours else f"{type(error).__name__}: {error}"
            for value, name in self.names.items():
                why = why.replace(value, name)
            with contextlib.suppress(FedquiltError):
                write_file(self.path / "traceback.log", _traceback(error), 0o600)
                state = STOPPED if isinstance(error, StoppedError) else FAILED
                self.write(state, why=printable_message(why))
            raise
        self.write(FINISHED)

    def write(self, state: str, *, folder: Path | None = None, why: str = "") -> None:
        """Write how the run stands; its folder stays once it is known."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        known = str(folder.resolve()) if folder is not None else (self.read() or {}).get("folder")
        me = os.getpid()
        note = {"state": state, "pid": me, "began": began_at(me), "folder": known or "", "why": why}
        write_file(self.path / "note.json", json.dumps(note).encode(), 0o600)

    def say(self, line: str) -> None:
        """Say something to whoever follows the run, and to the server's log."""
        print(line, flush=True)
        append_line(self.path / "words.log", printable(line), 0o600)

    def check_stop(self, *, in_round: bool = False) -> None:
        """Raise where the operator wants the run to stop here."""
        asked = self.asked()
        if asked == NOW or (asked == AFTER_ROUND and not in_round):
            when = "within a round, which releases nothing" if in_round else "between two rounds"
            raise StoppedError(f"stopped by its operator, {when}")

    # -- the operator's

    def read(self) -> dict[str, Any] | None:
        """Return how the run stands; None before it has said so."""
        path = self.path / "note.json"
        if not os.path.lexists(path):
            return None
        note = read_json(path, most=NOTE_BYTES)
        check(note, _NOTE, path, FedquiltError)
        return note

    def is_alive(self) -> bool:
        """Tell whether the run's process is there."""
        note = self.read()
        return note is not None and is_running(note["pid"], note["began"])

    def is_finished(self) -> bool:
        """Tell whether the run was finished, as its note and its folder say."""
        note = self.read() or {"state": "", "folder": ""}
        return note["state"] == FINISHED and (Path(note["folder"]) / "result.json").is_file()

    def words(self) -> list[str]:
        """Return what the run has said."""
        path = self.path / "words.log"
        if not path.exists():
            return []
        text = read_bytes(path, 1 << 26).decode(errors="replace")
        return [printable(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def traceback(self) -> str:
        """Return where an error came from; an empty text where there was none."""
        path = self.path / "traceback.log"
        if not path.exists():
            return ""
        lines = read_bytes(path, 1 << 22).decode(errors="replace").splitlines()
        return "\n".join(map(printable, lines))

    def ask_to_stop(self, when: str) -> None:
        """Ask the run to stop, after its round or now."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(self.path / "stop", when.encode(), 0o600)

    def asked(self) -> str:
        """Return when the operator wants the run to stop; an empty text: not at all."""
        path = self.path / "stop"
        return read_bytes(path, 64).decode(errors="replace") if path.exists() else ""


def submitted(output: str | Path) -> list[RunNotes]:
    """Return the runs that were submitted, the newest last."""
    found = [p for p in (Path(output) / FOLDER).glob("[0-9]*") if p.name.isdecimal()]
    found.sort(key=lambda path: path.stat().st_mtime)
    return [RunNotes(output, int(path.name)) for path in found]


def _traceback(error: BaseException) -> bytes:
    return "".join(traceback.format_exception(error)).encode(errors="replace")


def _shorten(record: logging.LogRecord) -> bool:
    """Let Flower's log have one line of an error that is meant for people."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FedquiltError):
        record.msg, record.args = "error: %s", (printable_message(error),)
        record.exc_info = record.exc_text = None
    return True


def began_at(pid: int | None) -> str | None:
    """Return when a process began, as the kernel says: the same number may be given again."""
    if pid is None:
        return None
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def is_running(pid: Any, began: Any) -> bool:
    """Tell whether a process that was written down is still the same one, and alive."""
    if not isinstance(pid, int):
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z" and began_at(pid) == began
