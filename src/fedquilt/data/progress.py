"""A progress bar on standard error for one download."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.progress import Progress


class DownloadBar:
    """The small interface that pooch asks of a progress bar, drawn by rich."""

    def __init__(self, bars: Progress, description: str) -> None:
        self._bars = bars
        self._task = bars.add_task(description, total=None)

    @property
    def total(self) -> float | None:
        """Bytes to come, None while unknown."""
        return self._bars.tasks[0].total

    @total.setter
    def total(self, value: int) -> None:
        self._bars.update(self._task, total=value or None)

    def update(self, count: int) -> None:
        """Count `count` more bytes."""
        self._bars.update(self._task, advance=count)

    def reset(self) -> None:
        """Go back to the start; pooch does so before it fills the bar."""
        self._bars.update(self._task, completed=0)

    def close(self) -> None:
        """Do nothing: the bar closes with its context."""


@contextlib.contextmanager
def progress_bar(description: str, *, enabled: bool) -> Iterator[DownloadBar | Literal[False]]:
    """Give a bar for one download, or False where none is wanted."""
    if not enabled:
        yield False
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield DownloadBar(bars, description)
