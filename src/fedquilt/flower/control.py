"""The operator's side of runs: submit one, follow it to its end, stop it.

How a run ended is read from its own notes and its folder (`fedquilt.flower.run_notes`).  The
SuperLink is asked where the run itself has not said anything yet; while it is away nothing is
concluded from that.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from fedquilt.common.errors import InvalidValueError, NotReadyError
from fedquilt.common.formatting import printable_message
from fedquilt.common.untrusted import NOTE_BYTES, read_named
from fedquilt.flower import journal
from fedquilt.flower.run_notes import AFTER_ROUND, NOW, STOPPED, RunNotes, submitted
from fedquilt.flower.settings import PREFIX

_LOOK_SECONDS = 0.2
_ASK_SECONDS = 2.0
_PATIENCE_SECONDS = 20.0
_NO_SIGN_SECONDS = 120.0


@contextlib.contextmanager
def control_client(port: int, certificate: Path) -> Iterator[Any]:
    """Yield a client of the Control API of a SuperLink on this machine."""
    from flwr.supercore.control import ControlHttpClient

    client = ControlHttpClient.from_server_address(
        server_address=f"127.0.0.1:{port}",
        insecure=False,
        root_certificates=certificate.read_bytes(),
        interceptors=[],
    )
    try:
        yield client
    finally:
        client.close()


def check_overrides(app: str, overrides: Mapping[str, Any], *, resumes: bool = False) -> None:
    """Refuse options without an effect: unknown ones, and those that a resumed run has already."""
    if resumes:
        fixed = [key for key in overrides if not key.replace("-", "_").startswith(PREFIX)]
        if fixed:
            raise InvalidValueError(
                f"{fixed[0]} must be left out: a run that is resumed has the options of its folder "
                f"(only {PREFIX}... may differ; `fedquilt flower run -c ...` begins another run)"
            )
    known = app_options(app)
    unknown = [key for key in overrides if key not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        meant = f"; is {near[0]!r} meant?" if near else ""
        raise InvalidValueError(
            f"run_config key {unknown[0]!r} must stand under [tool.flwr.app.config] of the app's "
            f"pyproject.toml, and does not{meant}"
        )


def app_options(app: str) -> dict[str, Any]:
    """Return the run configuration of an app, as its pyproject.toml has it."""
    project = tomllib.loads(read_named(Path(app) / "pyproject.toml", NOTE_BYTES).decode())
    options: dict[str, Any] = (
        project.get("tool", {}).get("flwr", {}).get("app", {}).get("config", {})
    )
    return options


class Control:
    """Submits and follows runs.

    Parameters
    ----------
    port : int
        Of the SuperLink, on loopback.
    certificate : Path
        Of the authority that the SuperLink's certificate is signed by.
    output : Path
        The operator's folder of runs.
    resume : str
        The command that continues a run which ended before it was finished.
    """

    def __init__(self, port: int, certificate: Path, output: Path, resume: str = "") -> None:
        self._where = (port, certificate)
        self._output, self._resume = output, resume
        self._ask_at, self._seen_at = 0.0, time.monotonic()

    def submit(self, app: str, overrides: Mapping[str, Any]) -> RunNotes:
        """Submit an app as a run; return its notes."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        from fedquilt.flower.template import fab_hash

        fab = Fab(fab_hash(app), build_fab_from_disk(Path(app)), {})
        given = user_config_to_proto(dict(overrides))
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=given)
        try:
            with control_client(*self._where) as client:
                answer = client.StartRun(request)
        except httpx.HTTPStatusError as error:
            raise InvalidValueError(f"the SuperLink refuses the run: {error}") from error
        except (httpx.HTTPError, ConnectionError) as error:
            raise NotReadyError(
                f"the SuperLink cannot be reached ({type(error).__name__}); nothing was submitted"
            ) from error
        if not answer.HasField("run_id"):
            raise NotReadyError("the SuperLink did not take the run; see its log")
        journal.note(self._output, "submitted", run=answer.run_id, app=fab_hash(app))
        return RunNotes(self._output, answer.run_id)

    def flower_says(self, run_id: int) -> tuple[str, str, str] | None:
        """Return a run's status, its kind and details; None while the SuperLink is away."""
        from flwr.proto.control_pb2 import ListRunsRequest

        try:
            with control_client(*self._where) as client:
                runs = client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict
        except (httpx.HTTPError, ConnectionError, OSError):
            return None
        status = runs[run_id].status
        return status.status, status.sub_status, status.details

    def follow(self, notes: RunNotes, say: Callable[[str], object] = print) -> int:
        """Say what a run says until it ends; return 0 if it was finished, otherwise 1."""
        said, ended = 0, None
        while ended is None:
            ended = self._ending(notes)
            for line in notes.words()[said:]:
                said += 1
                say(line)
            if ended is None:
                time.sleep(_LOOK_SECONDS)
        return self._tell_end(notes, ended, say)

    def _ending(self, notes: RunNotes) -> tuple[bool, str] | None:
        """Return whether a run that has ended was finished, and why not; None: it goes on."""
        note = notes.read()
        if note is not None:
            if notes.is_alive():
                return None
            return notes.is_finished(), note["why"] or "its process was killed"
        says = self._asked_now_and_then(notes)
        if says is not None and says[0] == "finished":
            if notes.read() is not None:  # it said so just now
                return None
            return says[1] == "completed", printable_message(says[2])
        return None

    def _asked_now_and_then(self, notes: RunNotes) -> tuple[str, str, str] | None:
        now = time.monotonic()
        if now < self._ask_at:
            return None
        self._ask_at = now + _ASK_SECONDS
        says = self.flower_says(notes.run_id)
        if says is not None:
            self._seen_at = now
        if now - self._seen_at > _NO_SIGN_SECONDS:
            raise NotReadyError(
                f"neither run {notes.run_id} nor the SuperLink has said anything for "
                f"{_NO_SIGN_SECONDS:g} s: `fedquilt flower status`"
            )
        return says

    def _tell_end(
        self, notes: RunNotes, ended: tuple[bool, str], say: Callable[[str], object]
    ) -> int:
        finished, why = ended
        note = notes.read() or {"folder": "", "state": ""}
        folder = note["folder"]
        if finished:
            if folder:
                say(f"finished: {folder}")
                say(f"statement: fedquilt statement {folder}")
                say(f"next: fedquilt report {folder}")
            return 0
        say(why if note["state"] == STOPPED else f"error: {why}")
        if folder:
            say(f"the run's folder: {folder}\ncontinue with: {self._resume}")
        return 1


def going_on(output: str | Path) -> RunNotes:
    """Return the run that goes on; refuse where none does."""
    alive = [notes for notes in submitted(output) if notes.is_alive()]
    if not alive:
        raise InvalidValueError(f"no run of {str(output)!r} goes on: there is nothing to stop")
    return alive[-1]


def stop(notes: RunNotes, *, now: bool, wait: float | None = None) -> bool:
    """Stop a run, after its round or now; return whether it has ended.

    A process that does not look for the request within `now`'s patience is terminated: what it
    had released is charged, and the rest is as after any crash.
    """
    notes.ask_to_stop(NOW if now else AFTER_ROUND)
    journal.note(notes.path.parent.parent, "stop", run=notes.run_id, now=now)
    until = time.monotonic() + (_PATIENCE_SECONDS if now else 1e9 if wait is None else wait)
    while notes.is_alive() and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    note = notes.read()
    if now and note is not None and notes.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(note["pid"], signal.SIGTERM)
        until = time.monotonic() + _PATIENCE_SECONDS
        while notes.is_alive() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
    return not notes.is_alive()
