"""Watching a run: progress on the error stream, trackers, pictures on the way."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fedquilt.common.errors import FedquiltError
from fedquilt.common.formatting import printable, printable_message
from fedquilt.common.observer import Observer
from fedquilt.config import RunConfig
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


class Watcher(Observer):
    """An observer of one run.

    Parameters
    ----------
    trackers : str
        Names of trackers, joined by commas; they are opened with the run's folder.
    on_kept : callable, optional
        Called with the file of a condensation's images, whenever one was written.
    """

    def __init__(
        self,
        trackers: str = "none",
        on_kept: Callable[[Path], None] | None = None,
    ) -> None:
        self._names = trackers
        self._on_kept = on_kept
        self._stack = contextlib.ExitStack()
        self._trackers: Any = None
        self._progress: Progress | None = None

    def show(self, label: str) -> None:
        """Show progress from now on."""
        self._progress = self._stack.enter_context(Progress(label))

    def expects(self, config: RunConfig, lines: Sequence[str]) -> None:
        """Show what the run may expect."""
        if self._progress is not None:
            self._progress.expects(config, lines)

    def opened(self, config: RunConfig, folder: Path) -> None:
        """Open the trackers in the run's folder."""
        if self._names == "none":
            return
        from fedquilt.observe.trackers import Tracked

        self._trackers = self._stack.enter_context(Tracked(self._names))
        self._trackers.opened(config, folder)

    def __call__(self, config: RunConfig, line: dict[str, Any]) -> None:
        """Show a finished round; its line holds public values only."""
        if self._progress is not None:
            self._progress(config, line)
        if self._trackers is not None:
            self._trackers(config, line)

    def working(self, what: str, share: float) -> None:
        """Show what happens within a round."""
        if self._progress is not None:
            self._progress.working(what, share)

    def on_artifact(self, path: Path) -> None:
        """Pass on the file of a condensation's images."""
        if self._on_kept is not None:
            self._on_kept(path)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


@contextmanager
def run_observer(
    label: str,
    shown: bool,
    trackers: str = "none",
    on_kept: Callable[[Path], None] | None = None,
) -> Iterator[Watcher | None]:
    """Yield an observer of a run, None when there is nothing to do for it."""
    if trackers != "none":
        from fedquilt.observe.trackers import check_trackers

        check_trackers(trackers)
    if not shown and trackers == "none" and on_kept is None:
        yield None
        return
    with Watcher(trackers, on_kept) as watcher:
        if shown:
            watcher.show(label)
        yield watcher
