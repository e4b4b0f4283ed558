"""Watching a run: progress on the error stream, trackers, pictures on the way."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from fedquilt.common.errors import FedquiltError
from fedquilt.common.formatting import printable, printable_message
from fedquilt.common.observer import Observer, Observers, as_observer
from fedquilt.observe.progress import Progress


@dataclass
class RunPointer:
    """What is on disk by now."""

    folder: Path | None = None


@contextmanager
def interruptible(command: str | None = "run") -> Iterator[RunPointer]:
    """End a command that Ctrl-C or SIGTERM stops with one line that says how to go on.

    A command notes the folder of a run that is finished in what it gets: whatever
    follows can be stopped and taken up again too.  So can a run that its disk, its ledger or
    a worker process has stopped: there it ends the error.  None is a command that
    keeps nothing.
    """
    kept = RunPointer()
    with _terminable() as terminated:
        try:
            yield kept
        except KeyboardInterrupt as stopped:
            folder = getattr(stopped, "folder", None) or kept.folder
            print(f"interrupted: {printable(_advice(command, folder))}", file=sys.stderr)
            raise typer.Exit(143 if terminated else 130) from None
        except FedquiltError as error:
            if error.folder is None or command is None:
                raise
            advice = printable(_advice(command, error.folder))
            print(f"error: {printable_message(error)}; {advice}", file=sys.stderr)
            raise typer.Exit(2) from None


def _advice(command: str | None, folder: object) -> str:
    if command is None or not folder:
        return "nothing was kept"
    return f"continue with  {resume_command(command, folder)}"


def resume_command(command: str, folder: object) -> str:
    """Return the command line that goes on with a run."""
    return f"fedquilt {command} --resume {shlex.quote(str(folder))}"


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """Answer SIGTERM, by which schedulers and containers stop a program, like Ctrl-C.

    The list that it yields is not empty when that has happened.
    """
    terminated: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield terminated  # only there signals can be answered
        return

    def stop(number: int, frame: object) -> None:
        terminated.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextmanager
def optional_drawing(what: str) -> Iterator[None]:
    """Let a command go on without a figure that cannot be made, and say why.

    The run is finished and paid for: what may be claimed is worth more than a picture, whatever
    kept it from being drawn (the disk, a font, a package).
    """
    try:
        yield
    except Exception as error:
        known = isinstance(error, FedquiltError | OSError)
        cause = str(error) if known else f"{type(error).__name__}: {error}"
        reason = printable_message(f"{what} could not be drawn: {cause}")
        print(f"warning: {reason}", file=sys.stderr)


@contextmanager
def run_observer(
    label: str, shown: bool, trackers: str = "none", *others: Observer
) -> Iterator[Observer | None]:
    """Yield an observer of a run, None when there is nothing to do for it.

    `trackers` are names joined by commas; they are opened with the run's folder.
    """
    from fedquilt.observe.trackers import tracked

    watching = None if not others else Observers(*others)
    with tracked(trackers, watching) as observer:
        if not shown:
            yield None if observer is None else as_observer(observer)
            return
        with Progress(label) as progress:
            yield Observers(progress, as_observer(observer))
