"""Watching a run: a progress bar on the error stream, trackers, pictures on the way."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fedquilt.common.observer import Observer
from fedquilt.config import RunConfig


@dataclass
class RunPointer:
    """What is on disk by now."""

    folder: Path | None = None


@contextmanager
def interruptible(command: str = "run") -> Iterator[RunPointer]:
    """End a command that Ctrl-C stops with one line that says how to go on.

    A command notes the folder of a run that is finished in what it gets: whatever
    follows can be stopped and taken up again too.
    """
    kept = RunPointer()
    try:
        yield kept
    except KeyboardInterrupt as stopped:
        folder = getattr(stopped, "folder", None) or kept.folder
        again = f"fedquilt {command} --resume {shlex.quote(str(folder))}"
        advice = f"continue with  {again}" if folder else "nothing was kept"
        print(f"interrupted: {advice}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def drawing(what: str) -> Iterator[None]:
    """Let a command go on without a figure that cannot be written, and say why.

    The run is finished and paid for: what may be claimed is worth more than a picture.
    """
    try:
        yield
    except OSError as error:  # StorageError is one
        print(f"warning: {what} could not be drawn: {error}", file=sys.stderr)


class Watcher(Observer):
    """An observer of one run.

    Parameters
    ----------
    trackers : str
        Names of trackers, joined by commas; they are opened with the run's folder.
    on_opened : callable, optional
        Called with the run's folder before its first round.
    on_kept : callable, optional
        Called with the file of a condensation's images, whenever one was written.
    """

    def __init__(
        self,
        trackers: str = "none",
        on_kept: Callable[[Path], None] | None = None,
        on_opened: Callable[[Path], None] | None = None,
    ) -> None:
        self._names = trackers
        self._on_kept = on_kept
        self._on_opened = on_opened
        self._stack = contextlib.ExitStack()
        self._trackers: Any = None
        self._bar: Any = None
        self._task: Any = None
        self._done = 0

    def show(self, label: str) -> None:
        """Draw a progress bar from now on."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TextColumn("{task.fields[doing]}"),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar = self._stack.enter_context(bar)
        self._task = bar.add_task(label, total=None, accuracy="", doing="")

    def opened(self, config: RunConfig, folder: Path) -> None:
        """Open the trackers in the run's folder."""
        if self._on_opened is not None:
            self._on_opened(folder)
        if self._names == "none":
            return
        from fedquilt.observe.tracked import Tracked

        self._trackers = self._stack.enter_context(Tracked(self._names))
        self._trackers.opened(config, folder)

    def __call__(self, config: RunConfig, line: dict[str, Any]) -> None:
        """Show a finished round; its line holds public values only."""
        self._done = line["round"] + 1
        if self._bar is not None:
            if line.get("seconds") is None:
                self._hide_time()
            self._bar.update(self._task, total=config.num_rounds, completed=self._done, doing="")
            if line.get("test_accuracy") is not None:
                self._bar.update(self._task, accuracy=f"accuracy {line['test_accuracy']:.4f}")
        if self._trackers is not None:
            self._trackers(config, line)

    def _hide_time(self) -> None:
        """Show no time left: a run that withholds its seconds would tell them by it."""
        from rich.progress import TimeRemainingColumn

        columns = self._bar.columns
        self._bar.columns = tuple(c for c in columns if not isinstance(c, TimeRemainingColumn))

    def working(self, what: str, share: float) -> None:
        """Show what happens within a round."""
        if self._bar is not None:
            doing = f"{what} {share:4.0%}"
            self._bar.update(self._task, doing=doing)

    def kept(self, path: Path) -> None:
        """Pass on the file of a condensation's images."""
        if self._on_kept is not None:
            self._on_kept(path)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


@contextmanager
def watch(
    label: str,
    shown: bool,
    trackers: str = "none",
    on_kept: Callable[[Path], None] | None = None,
    on_opened: Callable[[Path], None] | None = None,
) -> Iterator[Watcher | None]:
    """Yield an observer of a run, None when there is nothing to do for it."""
    if trackers != "none":
        from fedquilt.observe.trackers import check_trackers

        check_trackers(trackers)
    if not shown and trackers == "none" and on_kept is None:
        yield None
        return
    with Watcher(trackers, on_kept, on_opened) as watcher:
        if shown:
            watcher.show(label)
        yield watcher
